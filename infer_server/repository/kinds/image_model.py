"""Engine models that accept encoded images, JPEG and PNG.

A request's image input is its tensor, or a BYTES tensor with a file for each item. Files are decoded on threads beside
the event loop and the instances (Pillow releases the interpreter lock), then resized, cropped and normalised with the
preprocessing that the plan records from its calibration, and queued.
"""
from __future__ import annotations

import asyncio
import io
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.backend import Engine, Shapes
from infer_server.batching.request import Arrays, Request
from infer_server.batching.statistics import Failure
from infer_server.config.config import ModelConfig
from infer_server.config.signature import Fit, Items, ModelSignature
from infer_server.engines.errors import CalibrationError, ConfigError
from infer_server.engines.preprocess import Preprocess, load_preprocess, opened
from infer_server.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelConfigError,
    QueueFullError,
    ServeError,
    UnavailableError,
)
from infer_server.protocol.codec import FROM_ENGINE, InputTensor
from infer_server.rate_limiter import RateLimiter
from infer_server.repository.cores import CpuDealer
from infer_server.repository.folders import Source
from infer_server.repository.kinds.engine_model import EngineModel, Engines
from infer_server.workers import post

_FORMATS = ("JPEG", "PNG")
_MAX_PIXELS = 1 << 26           # limit of the decoded size: a file of a few bytes may declare any size
_DECODERS = 4                   # maximum number of decoder threads of a model


@dataclass(frozen=True)
class ImageInput:
    """Model input that accepts encoded images."""
    name: str
    dtype: str                                  # dtype of the tensor, as engines name it
    preprocess: Preprocess                      # preprocessing to the size and layout of the input

    @property
    def item(self) -> tuple[int, ...]:
        """Shape of the tensor of one decoded image, without a batch axis."""
        assert self.preprocess.size is not None
        channels = len(self.preprocess.pixels.scale)
        return (channels, *self.preprocess.size) if self.preprocess.layout == "NCHW" else (
            *self.preprocess.size, channels)

    def decoded(self, files: NDArray[Any]) -> NDArray[Any]:
        """Decode files into one tensor of shape [N, *item]. Raises InvalidRequestError for an invalid file."""
        return np.concatenate([self._decoded(file, at) for at, file in enumerate(files.flat)])

    def _decoded(self, file: bytes, at: int) -> NDArray[Any]:
        try:
            pixels = self.preprocess.pixels_of(opened(io.BytesIO(file), _FORMATS, _MAX_PIXELS))
        except (ValueError, CalibrationError) as error:
            reason = str(error).partition(" <_io.BytesIO")[0]
            raise InvalidRequestError(f"input '{self.name}': item {at} of {len(file)} bytes is not a readable JPEG or "
                                      f"PNG file: {reason}") from error
        return pixels[None] if self.dtype == "uint8" else self.preprocess.normalised(pixels).astype(self.dtype)


def image_input(source: Source, engine: Engine) -> ImageInput:
    """Return the input that parameter image_input names.

    Its preprocessing is that of parameter preprocess, or else the one that the plan records.

    Raises
    ------
    ModelConfigError
        There is no such input, it cannot take images, or no preprocessing is known.
    """
    options = source.config.build
    name = options.image_input
    if name not in (tensors := {tensor.name: tensor for tensor in engine.inputs}):
        raise ModelConfigError(f"parameter image_input: the model has no input '{name}', but {', '.join(tensors)}")
    if source.config.sequences:
        raise ModelConfigError("parameter image_input: the requests of a sequence are not decoded side by side; remove "
                               "it, or sequence_batching")
    if any(spec.reshape is not None for spec in source.config.inputs if spec.name == name):
        raise ModelConfigError(f"parameter image_input: '{name}' has a reshape; remove one of them")
    tensor = tensors[name]
    file = source.path(options.preprocess, "preprocess")
    recorded = engine.metadata.get("preprocess")
    try:
        if options.preprocess:
            declared = load_preprocess(file if file.is_file() else options.preprocess)
        elif recorded:
            declared = Preprocess.from_json(recorded)
        else:
            raise ModelConfigError("parameter image_input: the plan does not say how pictures become its input; give "
                                   'parameters { key: "preprocess" value { string_value: "imagenet" } }, or a file')
        settled = (declared.of_pixels if tensor.dtype == "uint8" else declared).fit(("batch", *tensor.shape[1:]))
    except ConfigError as error:
        raise ModelConfigError(f"parameter image_input: {error}") from error
    if tensor.dtype not in ("uint8", "float32", "float16"):
        raise ModelConfigError(f"parameter image_input: '{name}' is of {tensor.dtype}; pictures become float32, "
                               "float16 or uint8")
    return ImageInput(name, tensor.dtype, settled)


class ImageSignature(ModelSignature):
    """Signature that counts an encoded image as the tensor that it is decoded to."""

    def __init__(self, image: ImageInput, config: ModelConfig, items: Items,
                 check: Callable[[Shapes], None] | None, defaults: Arrays) -> None:
        super().__init__(config, items, check, defaults)
        self._image = image

    def fit(self, declared: Iterable[InputTensor]) -> Fit:
        inputs = list(declared)
        tensors = [self._as_tensor(tensor) for tensor in inputs]
        decoded = (tensor for tensor, sent in zip(tensors, inputs, strict=True) if tensor is not sent)
        item_bytes = math.prod(self._image.item) * np.dtype(self._image.dtype).itemsize
        return replace(super().fit(tensors), decoded_bytes=sum(tensor.shape[0] for tensor in decoded) * item_bytes)

    def _as_tensor(self, tensor: InputTensor) -> InputTensor:
        image = self._image
        if tensor.name != image.name or tensor.datatype.name != "BYTES":
            return tensor
        if tensor.shape[1:] not in ((), (1,)):
            raise InvalidRequestError(f"{tensor}: files are of shape [N] or [N, 1]")
        return replace(tensor, datatype=FROM_ENGINE[image.dtype], shape=(math.prod(tensor.shape), *image.item))


class ImageModel(EngineModel):
    """Engine model whose images are decoded before they are queued. Only the decoding leaves the event loop."""

    def __init__(self, source: Source, engines: Engines, loop: asyncio.AbstractEventLoop, dealer: CpuDealer,
                 limiter: RateLimiter | None) -> None:
        """Create a model. Raises ModelConfigError if the input cannot take images or no preprocessing is known."""
        self._image = image_input(source, engines.first)
        self._decoding: dict[Request, None] = {}
        self._decoders = ThreadPoolExecutor(_DECODERS, f"{source.name} decoder")
        self._closed = False
        self._accepting = threading.Lock()          # held by drain() while it closes the decoders' queue
        super().__init__(source, engines, loop, dealer, limiter, partial(ImageSignature, self._image))
        self._most = max(policy.max_queue_size for policy in self.config.queueing.policies)

    @property
    def pending(self) -> int:
        return super().pending + len(self._decoding)

    def submit(self, request: Request) -> None:
        if request.inputs[self._image.name].dtype != object:
            super().submit(request)
            return
        if self._most and self.pending >= self._most:
            self.failed(request, Failure.REJECTED)
            raise QueueFullError(f"Exceeds maximum queue size: {self._most} requests wait for model '{self.name}' "
                                 "already; retry later, or raise max_queue_size")
        with self._accepting:
            if not self._closed:
                self._decoding[request] = None
                self._decoders.submit(self._decode, request)
                return
        self.failed(request, Failure.OTHER)
        raise UnavailableError.closed(self.name)

    def cancel(self, request: Request) -> None:
        if request in self._decoding:
            del self._decoding[request]
            self.failed(request, Failure.CANCELED)
        else:
            super().cancel(request)

    def drain(self) -> None:
        with self._accepting:
            self._closed = True
        while self._decoding:           # decoded arrays are queued on the event loop
            time.sleep(0.01)
        super().drain()
        self._decoders.shutdown()

    def _decode(self, request: Request) -> None:
        """Decode the files of a request, on a decoder thread."""
        if request not in self._decoding:
            return
        result: NDArray[Any] | Exception
        try:
            if 0 < request.deadline_ns < time.monotonic_ns():
                raise DeadlineExceededError("Deadline Exceeded: it passed before the picture was decoded")
            result = self._image.decoded(request.inputs[self._image.name])
        except Exception as error:
            result = error
        post(self._loop, self._decoded, request, result)

    def _decoded(self, request: Request, result: NDArray[Any] | Exception) -> None:
        if request not in self._decoding:
            return
        try:
            if isinstance(result, Exception):
                late = isinstance(result, DeadlineExceededError)
                self.failed(request, Failure.REJECTED if late else Failure.OTHER)
                request.finish(result)
            else:
                request.inputs = {**request.inputs, self._image.name: result}
                super().submit(request)
        except ServeError as error:
            request.finish(error)
        finally:
            self._decoding.pop(request, None)       # last: drain() closes the queue when this becomes empty
