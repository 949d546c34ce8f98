"""Schemas of operators on strings, which the host evaluates (engines/runtime/host/text.py)."""
from __future__ import annotations

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.extension import contrib
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Node


@contrib("Tokenizer", "X:S", "mark:int! mincharnum:int! pad_value:string! separators:strings tokenexp:string")
def _tokenizer(call: OperatorCall) -> list[Node]:
    raise GraphError("string tensors are not supported here")
