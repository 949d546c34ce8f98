"""Calibration data from picture files, one item each, with a declared preprocessing."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from infer_server.calibration.data.corrupt import CorruptFiles
from infer_server.calibration.data.items import CalibrationData, Feed, batched_inputs, holds_items, kind_of
from infer_server.engines.errors import CalibrationError, ConfigError
from infer_server.engines.ir.graph import Array, Dim
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.preprocess import PIXEL, PRESETS, Preprocess, read_picture, scale_of_floats, shape_text

LOOKED_AT = 32      # number of pictures whose bit depth is checked in advance


def is_image(path: Path) -> bool:
    """Return True if the file has the suffix of a format that Pillow reads."""
    return Image.registered_extensions().get(path.suffix.lower()) in Image.OPEN


@dataclass(frozen=True)
class PictureReader:
    """Reader of pictures as items of a model's only input; picklable.

    preprocess      preprocessing with the size and layout that the input takes
    float_scale     factor for pictures of floats; 0: chosen for each picture
    note            default that was chosen, to be shown to the user; "" if none
    warnings        warnings about the files
    """
    target: IoTensor
    preprocess: Preprocess
    float_scale: float = 0.0
    note: str = ""
    warnings: tuple[str, ...] = ()

    def read(self, file: Path) -> Array:
        """Return the item of a file, with leading extent 1. Raises CalibrationError, naming the file."""
        return self.item(read_picture(file), str(file))

    def item(self, picture: Image.Image, origin: str) -> Array:
        """Return the item of a picture, with leading extent 1. Raises CalibrationError, naming the origin."""
        pixels = self.preprocess.pixels_of(picture, origin, self.float_scale)
        return _as_dtype(self.preprocess.normalised(pixels), np.dtype(self.target.dtype))


def picture_reader(source: str, files: Sequence[Path], inputs: Sequence[IoTensor], preprocess: Preprocess | None,
                   usual: Mapping[str, Any] = {}) -> PictureReader:      # noqa: B006
    """Return the reader of pictures for a model.

    Parameters
    ----------
    source : str
        Name of the pictures in errors.
    files : sequence of Path
        Pictures, of which some are looked at for their bit depth.
    inputs : sequence of IoTensor
        Inputs of the model.
    preprocess : Preprocess, optional
        Declared preprocessing; None chooses a preset by the input's channels.
    usual : mapping
        Numbers of open extents, for the size of pictures if neither the model nor the preprocessing declares it.

    Raises
    ------
    CalibrationError
        The model has several inputs or a fixed batch above 1.
    ConfigError
        The preprocessing does not fit the input.
    """
    if len(inputs) != 1:
        raise CalibrationError(f"{source} holds images, but the model has {len(inputs)} inputs "
                               f"({', '.join(tensor.name for tensor in inputs)}); give .npz files "
                               "with an array for each")
    target, = inputs
    if not (holds_items(target) or isinstance(target.shape[0] if target.shape else 0, str)):
        raise CalibrationError(f"{source} holds images, and '{target.name}' {shape_text(target.shape)} does "
                               "not take them one by one; give .npz files, or a model with a symbolic batch")
    notes = []
    if preprocess is None:
        preset, preprocess = default_preset(target)
        notes.append(f"no preprocessing given: images for '{target.name}' go through the '{preset}' preset")
    shape: Sequence[Dim] = target.shape
    if preprocess.size is None and any(isinstance(extent, str) for extent in shape[1:]):
        shape = [usual.get(extent, extent) if isinstance(extent, str) else extent for extent in shape]
        height, width = preprocess.fit(shape).size or (0, 0)
        notes.append(f"'{target.name}' takes any height and width: images are resized to {height}x{width}; give "
                     "--opt-shapes, or a size in --preprocess, for another size")
    depth = _Depth.of(files)
    return PictureReader(target, preprocess.fit(shape), depth.float_scale, "; ".join(notes), depth.warnings)


def from_images(source: str, files: Sequence[Path], inputs: Sequence[IoTensor],
                preprocess: Preprocess | None, usual: Mapping[str, Any] = {},       # noqa: B006
                allow_corrupt: bool = False) -> CalibrationData:
    """Return the pictures in order, each as one item. Parameters and errors are those of `picture_reader`.

    Reading the items raises CalibrationError with the number and the names of the files that are no pictures, unless
    these are allowed.
    """
    reader = picture_reader(source, files, inputs, preprocess, usual)
    corrupt = CorruptFiles(allow_corrupt)

    def read() -> Iterator[Feed]:
        for file, picture in corrupt.readable(files, read_picture):
            yield {reader.target.name: reader.item(picture, str(file))}

    return CalibrationData(source, read, len(files), batched_inputs(inputs), reader.preprocess, reader.note,
                           reader.warnings, corrupt)


def default_preset(target: IoTensor) -> tuple[str, Preprocess]:
    """Choose a preset by the channels of an input.

    3 get ImageNet's normalised RGB, 4 get RGBA of 0 to 1, 1 gets gray of 0 to 1; an integer input gets pixels as they
    are.
    """
    channels = {target.shape[1], target.shape[3]} if len(target.shape) == 4 else set()
    floating = kind_of(np.dtype(target.dtype)) == "f"
    for count, preset, color in ((3, "imagenet", "RGB"), (1, "gray", "GRAY"), (4, "rgba", "RGBA")):
        if count in channels and (floating or count == 1):
            return preset, PRESETS[preset]
        if count in channels:
            return "raw", replace(PRESETS["raw"], color=color)
    raise ConfigError(f"'{target.name}' {shape_text(target.shape)} has neither 3 channels nor 1, nor 4: "
                      "there is no default preprocessing for it; give one, or .npz files")


@dataclass(frozen=True)
class _Depth:
    """Conversion of pictures of more than 8 bits to 8-bit pixels.

    float_scale     factor for all pictures of floats
    warnings        warnings for the user
    """
    float_scale: float = 0.0
    warnings: tuple[str, ...] = ()

    @staticmethod
    def of(files: Sequence[Path]) -> _Depth:
        """Check a sample of the files. Raises CalibrationError for floats that are not pixels."""
        step = max(len(files) // LOOKED_AT, 1)
        modes = {file: _mode(file) for file in files[::step][:LOOKED_AT]}
        floats = [file for file, mode in modes.items() if mode == "F"]
        wide = [file for file, mode in modes.items() if mode.startswith("I")]
        warnings, scale = [], 0.0
        if floats:
            ends = np.array([end for file in floats for end in read_picture(file).getextrema()])
            scale = scale_of_floats(ends, f"{floats[0]} and others like it" if len(floats) > 1 else str(floats[0]))
            warnings.append(f"pictures of floats ({floats[0].name}, ...) are read as {ends.min():g} to "
                            f"{ends.max():g} of {PIXEL / scale:g}")
        if wide:
            warnings.append(f"pictures of 16 bits ({wide[0].name}, ...) are read as 8 bits, their values divided "
                            "by 256; give .npz files of what the model takes where it needs more")
        if turned := [file for file in files[::step][:LOOKED_AT] if _orientation(file) > 1]:
            warnings.append(f"pictures with an EXIF orientation ({turned[0].name}, ...) are read as they are stored, "
                            "as Pillow, torchvision and the server read them; turn them if the model's training did")
        return _Depth(scale, tuple(warnings))


def _mode(file: Path) -> str:
    """Return Pillow's mode of a picture from its header; "" if it is unreadable, which is reported when it is read."""
    try:
        with Image.open(file) as image:
            return image.mode
    except (OSError, SyntaxError, Image.DecompressionBombError):
        return ""


def _orientation(file: Path) -> int:
    """Return the EXIF orientation of a picture from its header, 1 for none; Pillow turns TIFF files itself."""
    try:
        with Image.open(file) as image:
            exif = Image.Exif()
            exif.load(image.info.get("exif", b""))
            return int(exif.get(ExifTags.Base.Orientation, 1)) if image.format != "TIFF" else 1
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError):
        return 1


def _as_dtype(values: Array, dtype: np.dtype[Any]) -> Array:
    if dtype.kind in "ui":
        limits = np.iinfo(dtype)
        values = np.clip(np.rint(values), limits.min, limits.max)
    return values.astype(dtype, copy=False)
