"""What a request asks of its tensors beside their names: that they lie in shared memory, or that an output comes as the
best classes of it.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infer_server.config.config import TensorSpec
from infer_server.endpoints.shared_memory import Place, Regions
from infer_server.errors import InvalidRequestError
from infer_server.gpu_tensors import GpuRoom, GpuTensor
from infer_server.protocol.codec import DATATYPES, Datatype, InputTensor, check_bytes, encode_raw, object_array
from infer_server.protocol.parameters import NONE, Parameters, natural, typed
from infer_server.serving import Served

_REGION, _BYTES, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_MOST_CLASSES = 1_000_000               # elements of an item that are sorted


class Asked(NamedTuple):
    """A tensor as a request has it, in whatever protocol."""
    name: str
    parameters: Parameters


def places(inputs: Iterable[Asked], regions: Regions) -> dict[int, Place]:
    """Which inputs lie in shared memory, by their positions. Raises ServeErrors."""
    found = {i: place_of(*tensor, regions) for i, tensor in enumerate(inputs) if tensor.parameters}
    return {i: place for i, place in found.items() if place}


def read(found: Mapping[int, Place], tensors: Sequence[InputTensor], hold: Callable[[int], None],
         gpus: Set[int]) -> dict[int, memoryview | GpuTensor]:
    """What lies in those places: a copy, or on these GPUs the very tensor, but of texts and of truths, whose bytes are
    looked at. hold: takes the bytes of the copies. Raises ServeErrors."""
    there: dict[int, memoryview | GpuTensor] = {}
    for i, place in found.items():
        check_bytes(tensors[i], place.byte_size)
        datatype = tensors[i].datatype
        if gpus and datatype.name not in ("BYTES", "BOOL") and (
                tensor := place.region.on_gpu(place.offset, tensors[i].shape, datatype.array, gpus)):
            there[i] = tensor
    hold(sum(place.byte_size for i, place in found.items() if i not in there))
    return {i: there[i] if i in there else place.read() for i, place in found.items()}


def rooms(outputs: Iterable[Output]) -> dict[str, GpuRoom]:
    """The outputs that are to lie on GPUs as they are computed."""
    found = {output.spec.name: output.place.region.room(
        output.place.offset, output.place.byte_size, output.datatype.array)
        for output in outputs if output.place and not output.classes}
    return {name: room for name, room in found.items() if room}


def place_of(name: str, parameters: Parameters, regions: Regions) -> Place | None:
    """Where a tensor lies in shared memory; None: in the message. Raises ServeErrors."""
    what = f"'{name}': "
    region = typed(parameters, _REGION, str, None, what)
    if region is None:
        return None
    if _BYTES not in parameters:
        raise InvalidRequestError(f"{what}parameter '{_BYTES}' is missing beside '{_REGION}'")
    return regions.place(region, natural(parameters, _OFFSET, 0, what), natural(parameters, _BYTES, 0, what))


@dataclass(frozen=True, slots=True)
class Output:
    """An output as its request wants it."""
    spec: TensorSpec
    classes: int = 0                    # the best so many of each item; 0: the tensor itself
    place: Place | None = None
    batched: bool = False               # the tensor has a leading batch axis
    labels: Sequence[str] = ()          # of the classes

    @property
    def datatype(self) -> Datatype:
        return DATATYPES["BYTES"] if self.classes else self.spec.datatype

    def array(self, computed: Any) -> Any:
        """What is answered instead of the computed tensor."""
        return (classified(computed, self.spec, self.classes, self.batched, self.labels) if self.classes else
                computed)

    def place_raw(self, array: NDArray[Any] | GpuTensor) -> memoryview | None:
        """The raw contents of the answer; None: they are where it is to lie. Raises InvalidRequestError,
        ExecutionError."""
        if isinstance(array, GpuTensor):
            return None
        raw = encode_raw(array, self.datatype)
        if self.place is None:
            return raw
        self.place.write(raw, self.spec.name)
        return None


def wanted(served: Served, asked: Sequence[Asked], regions: Regions) -> tuple[Output, ...]:
    """The outputs of a response. Raises ServeErrors: what the request asks of one cannot be."""
    by_name = {tensor.name: tensor.parameters for tensor in asked}
    return tuple(_output(spec, by_name.get(spec.name, NONE), regions, served) for spec in served.outputs)


def _output(spec: TensorSpec, parameters: Parameters, regions: Regions, served: Served) -> Output:
    if not parameters:
        return Output(spec)
    classes = natural(parameters, "classification", 0, f"'{spec.name}': ")
    if classes and (spec.datatype.array.kind not in "iuf" or spec.datatype.name in ("FP16", "BF16")):
        raise InvalidRequestError(f"'{spec.name}': class result not available for output due to unsupported type "
                                  f"'{spec.datatype.name}'")
    return Output(spec, classes, place_of(spec.name, parameters, regions), served.batched,
                  served.labels.get(spec.name, ()))


def classified(array: NDArray[Any], spec: TensorSpec, count: int, batched: bool,
               labels: Sequence[str]) -> NDArray[Any]:
    """The `count` largest elements of each item, the best first, as "value:index" or "value:index:label"."""
    items = array.reshape(array.shape[0] if batched else 1, -1)
    if items.shape[1] > _MOST_CLASSES:
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
