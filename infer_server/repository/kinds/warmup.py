"""Warm-up requests (model_warmup), executed before a model is ready."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.request import Arrays, Request
from infer_server.config.config import ModelConfig
from infer_server.config.fields import MAX_ARRAY_BYTES
from infer_server.config.paths import WARMUP, inside
from infer_server.errors import InvalidRequestError, ModelConfigError
from infer_server.protocol.codec import FROM_CONFIG, Datatype, InputTensor, from_raw
from infer_server.protos import model_config
from infer_server.repository.kinds.local import request_of
from infer_server.repository.model import Model


class _NoReply:
    """Reply of a warm-up request, which discards responses."""
    gone = True

    def send(self, response: Any) -> None:
        """Discard the response."""

    def fail(self, error: Exception) -> None:
        """Discard the error, which the executor reports."""


def warmup_requests(model: Model, message: model_config.ModelConfig, folder: Path) -> Iterator[Request]:
    """Yield the warm-up requests of a model, each `count` times.

    Models with sequences have none: a sample contains control inputs, which requests lack, but no sequence parameters.

    Raises
    ------
    ModelConfigError
        A sample is not a valid request for the model.
    """
    for sample in message.model_warmup if not model.config.sequences else ():
        try:
            arrays = inputs_of(sample, model.config, folder)
            for _ in range(sample.count or 1):
                yield request_of(model, arrays, (), _nothing, _NoReply())
        except InvalidRequestError as error:
            raise ModelConfigError(f"model_warmup '{sample.name}': {error}") from error


def inputs_of(sample: model_config.ModelWarmup, config: ModelConfig, folder: Path) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of a sample by input. Raises ModelConfigError or InvalidRequestError if it is not valid."""
    batched, most = config.batched, config.batching.max_batch_size
    if sample.batch_size > 1 and not batched:
        raise ModelConfigError(f"model_warmup '{sample.name}': batch_size {sample.batch_size}, but the model has no "
                               "max_batch_size; write batch_size: 1")
    if batched and sample.batch_size > most and config.build.split_requests != "true":
        raise ModelConfigError(f"model_warmup '{sample.name}': batch_size {sample.batch_size} must be <= {most}, the "
                               "max_batch_size")
    lead = (sample.batch_size or 1,) if batched else ()
    size = sum(math.prod((*lead, *tensor.dims)) * FROM_CONFIG[tensor.data_type].array.itemsize
               for tensor in sample.inputs.values() if tensor.data_type in FROM_CONFIG)
    if size > MAX_ARRAY_BYTES:
        raise ModelConfigError(f"model_warmup '{sample.name}': its inputs take {size} bytes, more than the limit of "
                               f"{MAX_ARRAY_BYTES}; write smaller dims or a smaller batch_size")
    return {name: _array(f"model_warmup '{sample.name}': input '{name}'", name, tensor, lead, folder)
            for name, tensor in sample.inputs.items()}


def _array(where: str, name: str, spec: model_config.ModelWarmup.Input, lead: tuple[int, ...],
           folder: Path) -> NDArray[Any]:
    datatype = FROM_CONFIG.get(spec.data_type)
    item = tuple(spec.dims)
    if datatype is None or any(extent < 1 for extent in item):
        raise ModelConfigError(f"{where}: write a data_type, and dims that are all at least 1")
    if spec.WhichOneof("input_data_type") == "input_data_file":
        file = inside(folder, folder / WARMUP, spec.input_data_file, where)
        try:
            if file.stat().st_size > MAX_ARRAY_BYTES:
                raise ModelConfigError(f"{where}: {file} is larger than the limit of {MAX_ARRAY_BYTES} bytes")
            raw = file.read_bytes()
        except OSError as error:
            raise ModelConfigError(f"{where}: {file}: {error.strerror}") from error
        return np.broadcast_to(from_raw(InputTensor(name, datatype, item), memoryview(raw)), (*lead, *item))
    try:
        return _generated(spec, (*lead, *item), datatype)
    except (MemoryError, ValueError) as error:      # too many dims, or too large ones
        raise ModelConfigError(f"{where}: an array of dims {[*lead, *item]} cannot be made: {error}; write smaller "
                               "dims") from error


def _generated(spec: model_config.ModelWarmup.Input, shape: tuple[int, ...], datatype: Datatype) -> NDArray[Any]:
    if datatype.array.hasobject:
        return np.full(shape, b"", np.object_)
    if spec.random_data:
        numbers = np.random.default_rng(0).random(shape)
        return (numbers if datatype.array.kind == "f" else 100 * numbers).astype(datatype.array)
    return np.zeros(shape, datatype.array)


def _nothing(computed: Arrays) -> None:
    """Encode nothing: the response is discarded."""
