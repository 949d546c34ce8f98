"""Parameters with which the process of a Python model is started."""
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
class LaunchParameters:
    """Start parameters of one instance of a Python model."""
    name: str                               # instance name for logs and errors
    file: Path                              # path of model.py
    arguments: Mapping[str, str]            # arguments of the model's initialize()
    inputs: Mapping[str, Datatype]
    outputs: Mapping[str, Datatype]
    is_decoupled: bool
    is_iterative: bool
    start_secs: float
    execute_secs: float

    def as_declared(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Convert an output to its configured datatype, because NumPy often yields a wider one.

        Raises
        ------
        ExecutionError
            The kind of the datatype differs, or a number does not fit.
        """
        datatype = self.outputs[name]
        if array.dtype == datatype.array:
            return array
        if array.dtype.kind == datatype.array.kind and array.dtype.kind in "iuf" and datatype.name != "BF16":
            with np.errstate(over="ignore"):
                converted = array.astype(datatype.array)
            as_large = np.isinf if array.dtype.kind == "f" else np.asarray     # floats may be rounded, integers not
            if np.array_equal(as_large(converted), as_large(array)):
                return converted
            raise ExecutionError(f"{self.name}: output '{name}' is of {array.dtype}, and has numbers that are "
                                 f"too large for {datatype.name}, its data_type in the configuration")
        raise ExecutionError(f"{self.name}: output '{name}' is of {array.dtype}, but its configuration says "
                             f"{datatype.name}; return that dtype, or change data_type")
