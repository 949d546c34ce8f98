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

from engines.plan.arena import ChangingArray
from infer_server.batching.request import Arrays
from infer_server.config.config import TensorSpec
from infer_server.endpoints.shared_memory import Place, Regions
from infer_server.errors import InvalidRequestError
from infer_server.gpu_tensors import GpuRoom, GpuTensor
from infer_server.protocol.codec import DATATYPES, Datatype, InputTensor, check_bytes, encode_raw, object_array
from infer_server.protocol.parameters import NONE, MemoryReference, Parameters, natural, reference_of
from infer_server.serving import Served

_MOST_CLASSES = 1_000_000               # elements of an item that are sorted


class Asked(NamedTuple):
    """A tensor as a request has it, in whatever protocol."""
    name: str
    parameters: Parameters


class Elsewhere(NamedTuple):
    """Inputs that lie in shared memory."""
    arrays: dict[int, memoryview | GpuTensor | ChangingArray]       # by their positions
    lent: list[Place]                   # that are read while the request is executed


def read(references: Mapping[int, MemoryReference], tensors: Sequence[InputTensor], regions: Regions,
         hold: Callable[[int], None], devices: Set[int | None]) -> Elsewhere:
    """What lies there: a copy, or in the memory of Model.zero_copy_devices the very tensor, but of texts and

    of truths, whose bytes are looked at, and of what has none. hold: takes the bytes of the copies. Raises
    ServeErrors."""
    found = Elsewhere({}, [])
    copied: dict[int, Place] = {}
    for i, reference in references.items():
        place, datatype = regions.place(reference), tensors[i].datatype
        check_bytes(tensors[i], place.byte_size)
        tensor = None
        if devices and place.byte_size and datatype.name not in ("BYTES", "BOOL"):
            tensor = place.region.there(place.offset, tensors[i].shape, datatype.array, devices)
        if tensor is None:
            copied[i] = place
            continue
        found.arrays[i] = tensor
        if isinstance(tensor, ChangingArray):
            found.lent.append(place)
    if copied:
        hold(sum(place.byte_size for place in copied.values()))
        found.arrays.update({i: place.read() for i, place in copied.items()})
    return found


def if_whole(lent: Sequence[Place], encode: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
    """`encode`, for a response to tensors that were read in these places: the ServeError that they were not all
    there."""
    if not lent:
        return encode

    def checked(computed: Arrays) -> Any:
        for place in lent:
            if error := place.lack():
                return error
        return encode(computed)
    return checked


def rooms(outputs: Iterable[Output]) -> dict[str, GpuRoom]:
    """The outputs that are to lie on GPUs as they are computed."""
    found = {output.spec.name: output.place.region.room(
        output.place.offset, output.place.byte_size, output.datatype.array)
        for output in outputs if output.place and not output.classes}
    return {name: room for name, room in found.items() if room}


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
    reference = reference_of(spec.name, parameters)
    return Output(spec, classes, regions.place(reference) if reference else None, served.batched,
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
