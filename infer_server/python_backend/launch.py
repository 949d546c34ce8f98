"""What the process of a Python model is started with."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infer_server.protocol.codec import Datatype


@dataclass(frozen=True)
class Launch:
    name: str                               # in logs and errors: of the model, and which instance
    file: Path                              # model.py
    arguments: Mapping[str, str]            # of initialize
    inputs: Mapping[str, Datatype]
    outputs: Mapping[str, Datatype]
    is_decoupled: bool
    is_iterative: bool
    start_secs: float
    execute_secs: float
