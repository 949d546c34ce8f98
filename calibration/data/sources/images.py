"""Pictures: one item each, through a declared preprocessing."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from calibration.data.items import CalibrationData, Feed, batched_inputs, holds_items, kind_of
from engines.errors import CalibrationError, ConfigError
from engines.ir.graph import Array
from engines.plan.plan import IoTensor
from engines.preprocess import PRESETS, Preprocess, shape_text


def is_image(path: Path) -> bool:
    """Whether the file's ending is one of a picture that Pillow reads."""
    return Image.registered_extensions().get(path.suffix.lower()) in Image.OPEN


def from_images(source: str, files: Sequence[Path], inputs: Sequence[IoTensor],
                preprocess: Preprocess | None) -> CalibrationData:
    """The pictures in order, each a run of one item where the batch is an open extent like others. preprocess None
    takes a preset by the input's channels; `note` says which.

    Raises CalibrationError: several inputs, or a fixed batch above 1; ConfigError: a preprocessing that does not fit.
    Reading the items raises CalibrationError that names the file which is no picture.
    """
    if len(inputs) != 1:
        raise CalibrationError(f"{source} holds images, but the model has {len(inputs)} inputs "
                               f"({', '.join(tensor.name for tensor in inputs)}); give .npz files "
                               "with an array for each")
    target, = inputs
    if not (holds_items(target) or isinstance(target.shape[0] if target.shape else 0, str)):
        raise CalibrationError(f"{source} holds images, and '{target.name}' {shape_text(target.shape)} does "
                               "not take them one by one; give .npz files, or a model with a symbolic batch")
    note = ""
    if preprocess is None:
        preset = default_preset(target)
        preprocess = PRESETS[preset]
        note = f"no preprocessing given: images for '{target.name}' go through the '{preset}' preset"
    settled = preprocess.fit(target.shape)

    def read() -> Iterator[Feed]:
        for file in files:
            yield {target.name: _as_dtype(settled.apply(file, target.shape), np.dtype(target.dtype))}

    return CalibrationData(source, read, len(files), batched_inputs(inputs), settled, note)


def default_preset(target: IoTensor) -> str:
    """By channels: 3 get ImageNet's normalised RGB (bytes as they are, for an integer input), 1 gets gray in 0..1."""
    channels = {target.shape[1], target.shape[3]} if len(target.shape) == 4 else set()
    if 3 in channels:
        return "imagenet" if kind_of(np.dtype(target.dtype)) == "f" else "raw"
    if 1 in channels:
        return "gray"
    raise ConfigError(f"'{target.name}' {shape_text(target.shape)} has neither 3 channels nor 1: "
                      "there is no default preprocessing for it; give one, or .npz files")


def _as_dtype(values: Array, dtype: np.dtype[Any]) -> Array:
    if dtype.kind in "ui":
        limits = np.iinfo(dtype)
        values = np.clip(np.rint(values), limits.min, limits.max)
    return values.astype(dtype, copy=False)
