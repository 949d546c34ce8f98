"""What the process of a Python model is started with."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.errors import ExecutionError
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

    def as_declared(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """An output, as its configuration has it: what NumPy makes of a model's numbers is often of more bits. Raises
        ExecutionError: it is of another kind, or a number does not fit."""
        datatype = self.outputs[name]
        if array.dtype == datatype.array:
            return array
        if array.dtype.kind == datatype.array.kind and array.dtype.kind in "iuf" and datatype.name != "BF16":
            with np.errstate(over="ignore"):
                converted = array.astype(datatype.array)
            as_large = np.isinf if array.dtype.kind == "f" else np.asarray     # floats are rounded, integers exact
            if np.array_equal(as_large(converted), as_large(array)):
                return converted
            raise ExecutionError(f"{self.name}: output '{name}' is of {array.dtype}, and has numbers that are "
                                 f"too large for {datatype.name}, which its configuration says")
        raise ExecutionError(f"{self.name}: output '{name}' is of {array.dtype}, but its configuration says "
                             f"{datatype.name}")
