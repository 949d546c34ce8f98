"""Requests that models make of each other, inside the server: steps of ensembles, calls of Python models."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from infer_server.batching.request import Arrays, InSequence, Reply, Request
from infer_server.errors import InvalidRequestError
from infer_server.protocol.codec import DATATYPES, Datatype, InputTensor
from infer_server.protocol.parameters import Parameters
from infer_server.repository.model import Model

Find = Callable[[str, str], Model]      # a ready model, by name and version. Raises ServeErrors


class TensorMemory(NamedTuple):
    """The memory of the tensors that pass from step to step of an ensemble.

    Attributes
    ----------
    hold : callable
        Counts bytes until the function that it returns is called. Raises MemoryLimitError. On the event loop.
    window_bytes : int
        Of the responses of a decoupled step that the steps behind it have not done with; then it is held back.
    """
    hold: Callable[[int], Callable[[], None]]
    window_bytes: int


UNCOUNTED = TensorMemory(lambda size: lambda: None, 64 << 20)


class Control(Protocol):
    """Loads and unloads models as clients ask for it, with the parameters that they give; on the event loop. Raises
    ServeErrors.
    """

    def waiting(self, name: str, other: str) -> AbstractContextManager[None]:
        """See Repository."""

    async def load(self, name: str, parameters: Parameters, at_once: bool = False) -> None:
        """at_once: it does not wait for other loads to end, one of which may wait for it."""

    async def unload(self, name: str, parameters: Parameters) -> None: ...


def request_of(model: Model, arrays: Mapping[str, NDArray[Any]], outputs: Sequence[str],
               encode: Callable[[Arrays], Any], reply: Reply, *, deadline_ns: int = 0, timeout_us: int = 0,
               priority: int = 0, sequence: InSequence | None = None, request_id: str = "",
               parameters: Mapping[str, Any] | None = None) -> Request:
    """A request for a model. Raises InvalidRequestError: it does not fit."""
    known = {spec.name: spec.datatype for spec in model.config.inputs}
    fit = model.signature.fit([InputTensor(name, _datatype(name, array, known.get(name)), array.shape, model.name)
                               for name, array in arrays.items()])
    chosen = model.signature.choose_outputs(outputs)
    return Request(
        inputs=model.signature.to_model(arrays, fit.items), items=fit.items, shape_key=fit.shape_key,
        encode=model.signature.to_client(encode), reply=reply, timeout_us=timeout_us, priority=priority,
        sequence=sequence, id=request_id, parameters=parameters or {}, outputs=tuple(spec.name for spec in chosen),
        received_ns=time.monotonic_ns(), deadline_ns=deadline_ns)


def _datatype(name: str, array: NDArray[Any], wanted: Datatype | None) -> Datatype:
    """The type of an array, which is the wanted one if that has such elements: bits of BF16 are integers, too."""
    if wanted is not None and wanted.array == array.dtype:
        return wanted
    for datatype in DATATYPES.values():
        if datatype.array == array.dtype:
            return datatype
    raise InvalidRequestError(f"input '{name}': the protocol has no datatype for arrays of {array.dtype}")
