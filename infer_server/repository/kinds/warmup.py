"""model_warmup: requests that are executed before a model is ready, so that no client's is the first of its kind."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.request import Arrays, Request
from infer_server.config.config import ModelConfig
from infer_server.config.fields import MOST_ARRAY_BYTES
from infer_server.config.paths import WARMUP, inside
from infer_server.errors import InvalidRequestError, ModelConfigError
from infer_server.protocol.codec import FROM_CONFIG, Datatype, InputTensor, from_raw
from infer_server.repository.kinds.local import request_of
from infer_server.repository.model import Model
from protos import model_config


class _Nobody:
    """The client of such a request."""
    gone = True

    def send(self, response: Any) -> None:
        """Nobody waits."""

    def fail(self, error: Exception) -> None:
        """Who executes it sees the error."""


def warmup_requests(model: Model, message: model_config.ModelConfig, folder: Path) -> Iterator[Request]:
    """The requests, each as often as it is to be executed. Raises ModelConfigError: one is none for this model.

    None for a model with sequences: a sample has what no request has, its controls, and lacks its place in a sequence.
    """
    for sample in message.model_warmup if not model.config.sequences else ():
        try:
            arrays = inputs_of(sample, model.config, folder)
            for _ in range(sample.count or 1):
                yield request_of(model, arrays, (), _nothing, _Nobody())
        except InvalidRequestError as error:
            raise ModelConfigError(f"model_warmup '{sample.name}': {error}") from error


def inputs_of(sample: model_config.ModelWarmup, config: ModelConfig, folder: Path) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of a sample, by input. Raises ModelConfigError, InvalidRequestError."""
    batched, most = config.batched, config.batching.max_batch_size
    if sample.batch_size > 1 and not batched:
        raise ModelConfigError(f"model_warmup '{sample.name}': batch_size {sample.batch_size}, but the model has no "
                               "max_batch_size; write batch_size: 1")
    if batched and sample.batch_size > most and config.build.split_requests != "true":
        raise ModelConfigError(f"model_warmup '{sample.name}': batch_size {sample.batch_size} must be <= {most}, the "
                               "max_batch_size")
    lead = (sample.batch_size or 1,) if batched else ()
    size = sum(math.prod((*lead, *given.dims)) * FROM_CONFIG[given.data_type].array.itemsize
               for given in sample.inputs.values() if given.data_type in FROM_CONFIG)
    if size > MOST_ARRAY_BYTES:
        raise ModelConfigError(f"model_warmup '{sample.name}': its inputs take {size} bytes, more than the limit of "
                               f"{MOST_ARRAY_BYTES}; write smaller dims or a smaller batch_size")
    return {name: _array(f"model_warmup '{sample.name}': input '{name}'", name, given, lead, folder)
            for name, given in sample.inputs.items()}


def _array(where: str, name: str, given: model_config.ModelWarmup.Input, lead: tuple[int, ...],
           folder: Path) -> NDArray[Any]:
    datatype = FROM_CONFIG.get(given.data_type)
    item = tuple(given.dims)
    if datatype is None or any(extent < 1 for extent in item):
        raise ModelConfigError(f"{where}: give a data_type, and dims that are numbers")
    if given.WhichOneof("input_data_type") == "input_data_file":
        file = inside(folder, folder / WARMUP, given.input_data_file, where)
        try:
            if file.stat().st_size > MOST_ARRAY_BYTES:
                raise ModelConfigError(f"{where}: {file} is larger than the limit of {MOST_ARRAY_BYTES} bytes")
            raw = file.read_bytes()
        except OSError as error:
            raise ModelConfigError(f"{where}: {file}: {error.strerror}") from error
        return np.broadcast_to(from_raw(InputTensor(name, datatype, item), memoryview(raw)), (*lead, *item))
    try:
        return _made(given, (*lead, *item), datatype)
    except (MemoryError, ValueError) as error:      # too many extents, or too large ones
        raise ModelConfigError(f"{where}: there is no array of the dims {[*lead, *item]}: {error}") from error


def _made(given: model_config.ModelWarmup.Input, shape: tuple[int, ...], datatype: Datatype) -> NDArray[Any]:
    if datatype.array.hasobject:
        return np.full(shape, b"", np.object_)
    if given.random_data:
        numbers = np.random.default_rng(0).random(shape)
        return (numbers if datatype.array.kind == "f" else 100 * numbers).astype(datatype.array)
    return np.zeros(shape, datatype.array)


def _nothing(computed: Arrays) -> None:
    """A response that nobody reads."""
