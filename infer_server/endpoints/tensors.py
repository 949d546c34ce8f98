"""Parameters of a request's tensors: location in shared memory, and classification of outputs.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.request import Arrays
from infer_server.config.config import TensorSpec
from infer_server.endpoints.shared_memory import Regions, TensorLocation
from infer_server.engines.plan.arena import ChangingArray
from infer_server.errors import InvalidRequestError
from infer_server.gpu_tensors import GpuBuffer, GpuTensor
from infer_server.protocol.codec import DATATYPES, Datatype, InputTensor, check_bytes, encode_raw, object_array
from infer_server.protocol.parameters import NONE, MemoryReference, Parameters, natural, reference_of
from infer_server.serving import Served

_MAX_CLASSES = 1_000_000                # maximum elements of an item that classification sorts


class RequestedTensor(NamedTuple):
    """Tensor that a request names, with its parameters, of either protocol."""
    name: str
    parameters: Parameters


class SharedInputs(NamedTuple):
    """Inputs in shared memory."""
    arrays: dict[int, memoryview | GpuTensor | ChangingArray]       # by the input's position
    in_place: list[TensorLocation]      # locations that are read in place during execution


def read(references: Mapping[int, MemoryReference], tensors: Sequence[InputTensor], regions: Regions,
         hold: Callable[[int], None], devices: Set[int | None]) -> SharedInputs:
    """Read the inputs that a request passes in shared memory. Raises ServeErrors.

    Parameters
    ----------
    references : mapping of int to MemoryReference
        Reference of each such input, by its position.
    tensors : sequence of InputTensor
        All inputs.
    regions : Regions
    hold : callable
        Called with the bytes of all copies before they are made.
    devices : set of int or None
        Devices whose memory the model reads in place (Model.zero_copy_devices). BYTES, whose contents are decoded, BOOL
        and empty tensors are always copied.
    """
    shared = SharedInputs({}, [])
    copied: dict[int, TensorLocation] = {}
    for i, reference in references.items():
        location, datatype = regions.locate(reference), tensors[i].datatype
        check_bytes(tensors[i], location.byte_size)
        tensor = None
        if devices and location.byte_size and datatype.name not in ("BYTES", "BOOL"):
            tensor = location.region.in_place(location.offset, tensors[i].shape, datatype.array, devices)
        if tensor is None:
            copied[i] = location
            continue
        shared.arrays[i] = tensor
        if isinstance(tensor, ChangingArray):
            shared.in_place.append(location)
    if copied:
        hold(sum(location.byte_size for location in copied.values()))
        shared.arrays.update({i: location.read() for i, location in copied.items()})
    return shared


def checking_inputs(in_place: Sequence[TensorLocation], encode: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
    """Wrap `encode` to return a ServeError if inputs that were read in place (`in_place`) were not complete."""
    if not in_place:
        return encode

    def checked(computed: Arrays) -> Any:
        for location in in_place:
            if error := location.truncation_error():
                return error
        return encode(computed)
    return checked


def gpu_buffers(outputs: Iterable[Output]) -> dict[str, GpuBuffer]:
    """Return the buffers on GPUs of outputs that are written there as computed, by name."""
    buffers = {output.spec.name: output.location.region.gpu_buffer(
        output.location.offset, output.location.byte_size, output.datatype.array)
        for output in outputs if output.location and not output.classes}
    return {name: buffer for name, buffer in buffers.items() if buffer}


@dataclass(frozen=True, slots=True)
class Output:
    """Requested output: the tensor or its classification, in the response or in shared memory."""
    spec: TensorSpec
    classes: int = 0                    # number of top classes of each item to return; 0: the tensor itself
    location: TensorLocation | None = None  # location in shared memory; None: in the response
    batched: bool = False               # the tensor has a leading batch axis
    labels: Sequence[str] = ()          # names of the classes

    @property
    def datatype(self) -> Datatype:
        return DATATYPES["BYTES"] if self.classes else self.spec.datatype

    def array(self, computed: Any) -> Any:
        """Return the computed tensor, or its classification if requested."""
        return (classified(computed, self.spec, self.classes, self.batched, self.labels) if self.classes else
                computed)

    def write_raw(self, array: NDArray[Any] | GpuTensor) -> memoryview | None:
        """Return the raw contents of an output, or write them to its shared memory and return None.

        Raises InvalidRequestError, ExecutionError.
        """
        if isinstance(array, GpuTensor):
            return None
        raw = encode_raw(array, self.datatype)
        if self.location is None:
            return raw
        self.location.write(raw, self.spec.name)
        return None


def requested_outputs(served: Served, requested: Sequence[RequestedTensor], regions: Regions) -> tuple[Output, ...]:
    """Return the outputs of a response. Raises ServeErrors if parameters of the request are invalid."""
    by_name = {tensor.name: tensor.parameters for tensor in requested}
    return tuple(_output(spec, by_name.get(spec.name, NONE), regions, served) for spec in served.outputs)


def _output(spec: TensorSpec, parameters: Parameters, regions: Regions, served: Served) -> Output:
    if not parameters:
        return Output(spec)
    classes = natural(parameters, "classification", 0, f"'{spec.name}': ")
    if classes and (spec.datatype.array.kind not in "iuf" or spec.datatype.name in ("FP16", "BF16")):
        raise InvalidRequestError(f"'{spec.name}': class result not available for output due to unsupported type "
                                  f"'{spec.datatype.name}'")
    reference = reference_of(spec.name, parameters)
    return Output(spec, classes, regions.locate(reference) if reference else None, served.batched,
                  served.labels.get(spec.name, ()))


def classified(array: NDArray[Any], spec: TensorSpec, count: int, batched: bool,
               labels: Sequence[str]) -> NDArray[Any]:
    """Return the `count` largest elements of each item, the largest first, as "value:index" or "value:index:label"."""
    items = array.reshape(array.shape[0] if batched else 1, -1)
    if items.shape[1] > _MAX_CLASSES:
        raise InvalidRequestError(f"output '{spec.name}': classification output tensor too large")
    count = min(count, items.shape[1])
    values: list[bytes] = []
    for item in items:
        best = np.argsort(-item.astype(np.float64) if item.dtype.kind == "f" else ~item, kind="stable")[:count]
        values += [_class(item[index], int(index), labels) for index in best]
    return object_array(values).reshape((len(items), count) if batched else (count,))


def _class(value: Any, index: int, labels: Sequence[str]) -> bytes:
    number = f"{value:f}" if isinstance(value, np.floating) else str(value)
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{number}:{index}{label}".encode()
