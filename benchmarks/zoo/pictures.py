"""Inputs of random networks: noise pictures with the spectrum of natural ones, integers, and normal numbers."""
from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray


@cache
def images(count: int, channels: int = 3, size: int = 224, seed: int = 0) -> NDArray[np.float32]:
    """Return normalised noise with the 1/f spectrum of pictures, float32 [count, channels, size, size], read-only.

    Brightness, contrast and dominant scale vary, so that the outputs of a network differ from picture to picture.
    """
    random = np.random.default_rng(seed + 1_000_003)
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)) + 1 / size
    slope = random.uniform(0.6, 1.6, (count, 1, 1, 1))
    noise = np.fft.rfft2(random.standard_normal((count, channels, size, size)))
    pictures = np.fft.irfft2(noise / frequency ** slope, s=(size, size))
    pictures /= pictures.std((1, 2, 3), keepdims=True)
    pictures = pictures * random.uniform(0.4, 1.3, (count, 1, 1, 1)) + random.normal(0, 0.5, (count, channels, 1, 1))
    result = np.clip(pictures, -2.2, 2.6).astype(np.float32)
    result.flags.writeable = False
    return result


def probe_items(size: int) -> int:
    """Return the number of pictures on which batch normalisation statistics are measured."""
    return 64 if size <= 96 else 8 if size <= 512 else 1


def images_for(model: onnx.ModelProto, count: int = 8, seed: int = 0) -> NDArray[np.float32]:
    """Return `images` with the channels and size of a zoo model's input; a fixed batch overrides `count`."""
    batch, channels, size, _ = (d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim)
    return images(batch or count, channels, size, seed)


def feeds_for(model: onnx.ModelProto, count: int = 1, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return an array for each input; a fixed batch overrides `count`.

    Square inputs of three channels get pictures, those with a bound in the model's metadata integers below it, and all
    others normal numbers.
    """
    below = {entry.key: int(entry.value) for entry in model.metadata_props}
    feeds: dict[str, NDArray[Any]] = {}
    for index, value in enumerate(model.graph.input):
        random = np.random.default_rng([seed, index])
        shape = tuple(d.dim_value or count for d in value.type.tensor_type.shape.dim)
        if value.name in below:
            feeds[value.name] = random.integers(0, below[value.name], shape)
        elif len(shape) == 4 and shape[1] == 3 and shape[2] == shape[3]:
            feeds[value.name] = images(shape[0], 3, shape[2], seed).copy()      # runtimes require a writable array
        else:
            feeds[value.name] = random.standard_normal(shape, np.float32)
    return feeds
