"""Find strings that a program takes: the categories of the encoders that read them.

An encoder may refuse strings that it does not know, as OneHotEncoder of scikit-learn with handle_unknown="error". So
whatever runs a program without data (a warm-up, a measurement, a verification) feeds it categories of its own.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.errors import EngineError
from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.ir.serialize import node_from_json
from infer_server.engines.plan.program import Region
from infer_server.engines.runtime.host import evaluator
from infer_server.engines.runtime.host.encoders import categories_of

# Operators that hand strings on: the elements of their results are those of their inputs.
MOVES = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Slice", "Gather", "Split",
                   "GatherElements", "Concat", "Expand", "Cast", "ArrayFeatureExtractor", "StringNormalizer"})
USUAL = "1"         # where no encoder says what it takes: a number, too


def strings_for(region: Region, constants: Mapping[str, Array],
                shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """Choose a string for each element of a program's inputs.

    Parameters
    ----------
    region : the program's main region
    constants : {name: array}
    shapes : {input: shape}
        Of the inputs that are strings.

    Returns
    -------
    dict
        {input: object array of str}, for each of `shapes`.
    """
    tokens: list[tuple[str, int]] = [(name, i) for name, shape in shapes.items()
                                     for i in range(int(np.prod(shape, dtype=np.int64)))]
    numbers = {f"\0{number}": number for number in range(len(tokens))}
    values: dict[str, Any] = {}
    for name, shape in shapes.items():
        own = [token for token, number in numbers.items() if tokens[number][0] == name]
        values[name] = np.array(own, object).reshape(tuple(shape))
    taken: dict[int, list[Sequence[str]]] = {}
    for node, array in _encoded(region, {**constants, **values}, values):
        categories = categories_of(node)
        for token in np.asarray(array, object).reshape(-1).tolist():
            if categories and token in numbers:
                taken.setdefault(numbers[token], []).append(categories)
    strings = [_common(taken.get(number, ())) for number in range(len(tokens))]
    return {name: np.array([strings[number] for number, (owner, _) in enumerate(tokens) if owner == name],
                           object).reshape(tuple(shape)) for name, shape in shapes.items()}


def _common(categories: Sequence[Sequence[str]]) -> str:
    """Return a string that all encoders of an element know, or one that the first knows."""
    if not categories:
        return USUAL
    first, *others = categories
    return next((word for word in first if all(word in other for other in others)), first[0])


def _encoded(region: Region, known: dict[str, Any], strings: Mapping[str, Any]) -> Iterator[tuple[Node, Any]]:
    """Yield the encoders that read the inputs, and what each reads; `known` grows by what is handed on to them."""
    traced = set(strings)
    for instruction in region.instructions:
        reads = [name for name in instruction.inputs if name]
        if not instruction.by_host or traced.isdisjoint(reads) or any(name not in known for name in reads):
            continue
        node = node_from_json(instruction.node)
        if node.attrs.get("onnx_domain") == "ai.onnx.ml" and node.op != "ArrayFeatureExtractor":
            yield node, known[instruction.inputs[0]]
        elif node.op.removeprefix("onnx.") in MOVES:
            try:
                made = evaluator(node)(*(known[name] if name else None for name in instruction.inputs))
            except EngineError:
                continue
            known.update(zip(instruction.outputs, made, strict=False))
            traced.update(instruction.outputs)
