"""The inputs that a load test sends: from a file, or random in the shapes of the model."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.clients.codec import DATATYPES, Array, encode
from infer_server.clients.errors import ClientError
from infer_server.protos import inference as pb

MAX_REQUESTS = 64               # different ones, sent in turn
MAX_BYTES = 256 << 20
VARIES = -1
INTEGERS_BELOW = 128            # small enough to be a valid index or token in most models


class PayloadError(ClientError):
    """Input data do not match the model."""


def prepare(metadata: pb.ModelMetadataResponse, batch: int, *, data: Mapping[str, Array] | None = None,
            shapes: Mapping[str, tuple[int, ...]] | None = None, seed: int = 0) -> list[dict[str, Array]]:
    """Return the inputs by name of one or more requests of `batch` items each.

    `data` holds an array per input, items on the leading axis; requests take consecutive items and wrap around. Without
    it there is one request of random items. `shapes` gives the item's shape of inputs with dynamic extents.
    A leading extent of -1 in the metadata is the batch axis (KServe v2); without one, a request is one input.
    """
    known = {tensor.name for tensor in metadata.inputs}
    for name in [*(data or {}), *(shapes or {})]:
        if name not in known:
            raise PayloadError(f"model '{metadata.name}' has no input '{name}'; it has {', '.join(sorted(known))}")
    if data is None:
        random = np.random.default_rng(seed)
        feeds = [{tensor.name: _random(random, tensor, _request_shape(metadata.name, tensor, batch, shapes or {}))
                  for tensor in metadata.inputs}]
    else:
        feeds = _slices(metadata, batch, data)
    return feeds[:max(1, MAX_BYTES // request_bytes(feeds))]


def request_bytes(feeds: Sequence[Mapping[str, Array]]) -> int:
    """Return the bytes of the tensors of one request; all requests have equal size."""
    return sum(len(encode(array)) for array in feeds[0].values()) or 1


def _batched(tensor: pb.ModelMetadataResponse.TensorMetadata) -> bool:
    return bool(tensor.shape) and tensor.shape[0] == VARIES


def _request_shape(model: str, tensor: pb.ModelMetadataResponse.TensorMetadata, batch: int,
                   shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    declared = tuple(tensor.shape[1:] if _batched(tensor) else tensor.shape)
    if not _batched(tensor) and batch != 1:
        raise PayloadError(f"model '{model}' does not batch: '{tensor.name}' is {list(tensor.shape)}; use --batch 1")
    item = shapes.get(tensor.name, declared)
    if len(item) != len(declared) or any(d not in (VARIES, extent) for d, extent in zip(declared, item, strict=True)):
        raise PayloadError(f"an item of input '{tensor.name}' is {list(declared)}, not {list(item)}")
    if VARIES in item:
        example = "x".join("8" if extent == VARIES else str(extent) for extent in item)
        raise PayloadError(f"input '{tensor.name}' has extents that vary, {list(declared)}: "
                           f"say which to send, for instance --shape {tensor.name}:{example}")
    return (batch, *item) if _batched(tensor) else item


def _random(random: np.random.Generator, tensor: pb.ModelMetadataResponse.TensorMetadata,
            shape: tuple[int, ...]) -> Array:
    """Return random values: standard normal floats, small integers, booleans, or short strings."""
    if tensor.datatype == "BYTES":
        return np.array([f"item {n}" for n in random.integers(0, 10 ** 6, int(np.prod(shape)))], object).reshape(shape)
    dtype = DATATYPES.get(tensor.datatype)
    if dtype is None:
        raise PayloadError(f"no random data for input '{tensor.name}' of {tensor.datatype}")
    if dtype.kind == "f":
        return random.standard_normal(shape).astype(dtype)
    return random.integers(0, 2 if dtype.kind == "b" else INTEGERS_BELOW, shape).astype(dtype)


def _slices(metadata: pb.ModelMetadataResponse, batch: int, data: Mapping[str, Array]) -> list[dict[str, Array]]:
    counts: dict[str, int] = {}
    for tensor in metadata.inputs:
        if tensor.name not in data:
            raise PayloadError(f"no data for input '{tensor.name}'; the file has {', '.join(sorted(data))}")
        array = data[tensor.name]
        expected = tensor.shape[1:] if _batched(tensor) else tensor.shape
        if not array.ndim or not len(array) or len(expected) != array.ndim - 1 or any(
                d not in (VARIES, extent) for d, extent in zip(expected, array.shape[1:], strict=True)):
            raise PayloadError(f"data of input '{tensor.name}' is {list(array.shape)}, not [items, "
                               f"{', '.join(map(str, expected))}]")
        counts[tensor.name] = len(array)
    if len(set(counts.values())) > 1:
        raise PayloadError(f"the inputs differ in their number of items: {counts}")
    items = next(iter(counts.values()))

    def part(tensor: pb.ModelMetadataResponse.TensorMetadata, first: int) -> Any:
        dtype = DATATYPES.get(tensor.datatype, np.dtype(object))
        rows = data[tensor.name].take(np.arange(first, first + batch), axis=0, mode="wrap").astype(dtype, copy=False)
        if _batched(tensor):
            return rows
        if batch != 1:
            raise PayloadError(f"model '{metadata.name}' does not batch; use --batch 1")
        return rows[0]

    firsts = range(0, max(batch, items // batch * batch), batch)[:MAX_REQUESTS]
    return [{tensor.name: part(tensor, first) for tensor in metadata.inputs} for first in firsts]
