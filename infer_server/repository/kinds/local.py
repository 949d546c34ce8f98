"""Requests between models inside the server: steps of ensembles and BLS calls of Python models."""
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

Find = Callable[[str, str], Model]      # returns the ready model of a name and version; raises ServeError


class TensorMemory(NamedTuple):
    """Memory accounting of the tensors between the steps of an ensemble.

    Attributes
    ----------
    hold : callable
        Accounts for bytes until the returned function is called. Raises MemoryLimitError. Called on the event loop.
    window_bytes : int
        Limit of the unconsumed responses of a decoupled step in bytes; the step is paused at the limit.
    """
    hold: Callable[[int], Callable[[], None]]
    window_bytes: int


UNCOUNTED = TensorMemory(lambda size: lambda: None, 64 << 20)


class ModelControl(Protocol):
    """Interface to load and unload models with the parameters of a client's request, on the event loop.

    Its methods raise ServeError.
    """

    def waiting(self, name: str, other: str) -> AbstractContextManager[None]:
        """See Repository.waiting."""

    async def load(self, name: str, parameters: Parameters, at_once: bool = False) -> None:
        """Load a model; `at_once`: do not wait for other loads, one of which may wait for this one."""

    async def unload(self, name: str, parameters: Parameters) -> None: ...


def request_of(model: Model, arrays: Mapping[str, NDArray[Any]], outputs: Sequence[str],
               encode: Callable[[Arrays], Any], reply: Reply, *, deadline_ns: int = 0, timeout_us: int = 0,
               priority: int = 0, sequence: InSequence | None = None, request_id: str = "",
               parameters: Mapping[str, Any] | None = None) -> Request:
    """Create a request for a model from arrays.

    Parameters
    ----------
    model : Model
        Model to send the request to.
    arrays : mapping of str to array
        Inputs by name.
    outputs : sequence of str
        Requested outputs; all if empty.
    encode : callable
        Function that converts the outputs to a response on the executing thread.
    reply : Reply
        Receiver of the response.

    Raises
    ------
    InvalidRequestError
        The inputs or outputs do not match the model.
    """
    known = {spec.name: spec.datatype for spec in model.config.inputs}
    fit = model.signature.fit([InputTensor(name, _datatype(name, array, known.get(name)), array.shape, model.name)
                               for name, array in arrays.items()])
    chosen = model.signature.choose_outputs(outputs)
    return Request(
        inputs=model.signature.to_model(arrays, fit.items), items=fit.items, shape_key=fit.shape_key,
        encode=model.signature.to_client(encode), reply=reply, timeout_us=timeout_us, priority=priority,
        sequence=sequence, id=request_id, parameters=parameters or {}, outputs=tuple(spec.name for spec in chosen),
        received_ns=time.monotonic_ns(), deadline_ns=deadline_ns)


def _datatype(name: str, array: NDArray[Any], expected: Datatype | None) -> Datatype:
    """Return the datatype of an array, preferring the expected one: BF16 and UINT16 share a dtype."""
    if expected is not None and expected.array == array.dtype:
        return expected
    for datatype in DATATYPES.values():
        if datatype.array == array.dtype:
            return datatype
    raise InvalidRequestError(f"input '{name}': the protocol has no datatype for arrays of {array.dtype}")
