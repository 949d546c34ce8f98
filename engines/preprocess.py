"""Declarative image preprocessing: from a picture to the input array of a model.

    decode in `color` order -> resize and centre-crop to the model's size -> (pixel * scale - mean) / std -> layout

The declaration is recorded in the plan, so that clients can apply it. On the command line it is the name of a preset or
a TOML file, in which every key is optional:

    preset = "imagenet"             # defaults of the other keys; default "unit"
    resize = "shorter-side"         # or "exact" (stretched), or "none": pictures have the model's size already
    size = [224, 224]               # height, width; default: the model's
    crop = 0.875                    # the part of the resized picture, in each direction, that is kept
    interpolation = "bicubic"       # or "bilinear", "nearest", "lanczos", "box"
    color = "RGB"                   # or "BGR", "GRAY", "RGBA"
    layout = "auto"                 # or "NCHW", "NHWC"
    scale = 0.00392156862745098
    mean = [0.485, 0.456, 0.406]    # in the order of `color`, after `scale`; one number serves all channels
    std = [0.229, 0.224, 0.225]
"""
from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from infer_server.engines.errors import CalibrationError, ConfigError, did_you_mean
from infer_server.engines.ir.graph import Dim
from infer_server.engines.ir.recipe import Pixels

if TYPE_CHECKING:           # imported where pictures are read: most servers read none
    from PIL import Image

USUAL_SIZE = (224, 224)         # height and width if both the model and the declaration leave them open
_MOST_RESIZED = 1 << 24         # pixels up to which the whole picture is resized, and cropped afterwards
CHANNELS = MappingProxyType({"RGB": 3, "BGR": 3, "GRAY": 1, "RGBA": 4})
_MODES = MappingProxyType({"GRAY": "L", "RGBA": "RGBA"})        # Pillow's modes; "RGB" for the other colors
PIXEL = 255.0                  # maximum value of a pixel
INTERPOLATIONS = ("nearest", "box", "bilinear", "bicubic", "lanczos")
CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "resize": ("shorter-side", "exact", "none"), "interpolation": INTERPOLATIONS, "color": tuple(CHANNELS),
    "layout": ("auto", "NCHW", "NHWC")})


@dataclass(frozen=True)
class Preprocess:
    """Declaration of a preprocessing. Raises ConfigError, naming the field, if a value is invalid.

    `fit` takes `size` (height, width) from the model's input if it is None, and `layout` if it is "auto".
    """
    resize: str = "shorter-side"
    size: tuple[int, int] | None = None
    crop: float = 0.875
    interpolation: str = "bicubic"
    color: str = "RGB"
    layout: str = "auto"
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"preprocessing: {name} = {value!r} is not known{did_you_mean(str(value), choices)}")
        channels = CHANNELS[self.color]
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, channels):
                raise ConfigError(f"preprocessing: {name} has {len(getattr(self, name))} numbers; "
                                  f"{self.color} has {channels} channels, or give one number for all")
        if not 0 < self.crop <= 1:
            raise ConfigError(f"preprocessing: crop = {self.crop} must be above 0 and at most 1")
        if 0 in self.std or self.scale == 0:
            raise ConfigError("preprocessing: scale and std must not be zero")
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise ConfigError(f"preprocessing: size = {list(self.size)} must be two positive numbers, height and width")

    def fit(self, shape: Sequence[Dim]) -> Preprocess:
        """Return the declaration with size and layout resolved for a model input.

        Parameters
        ----------
        shape : sequence of int or str
            [N, C, H, W] or [N, H, W, C]. If both leave height and width open, USUAL_SIZE is used.

        Raises
        ------
        ConfigError
            The input does not accept pictures of this color, layout or size.
        """
        channels = CHANNELS[self.color]
        fitting = [name for name, axis in (("NCHW", 1), ("NHWC", 3)) if len(shape) == 4 and shape[axis] == channels]
        layouts = [name for name in fitting if self.layout in ("auto", name)]
        if not layouts:
            raise ConfigError(f"preprocessing: {self.color} pictures in layout {self.layout} don't fit "
                              f"an input of shape {shape_text(shape)}")
        layout = layouts[0]
        extents = shape[2:4] if layout == "NCHW" else shape[1:3]
        height, width = (extent if isinstance(extent, int) else (self.size or USUAL_SIZE)[axis]
                         for axis, extent in enumerate(extents))
        if self.size not in (None, (height, width)) or not height or not width:
            raise ConfigError(f"preprocessing: size = {list(self.size or ())}, but the input's shape is "
                              f"{shape_text(shape)}")
        return replace(self, layout=layout, size=(height, width))

    @property
    def pixels(self) -> Pixels:
        """Normalisation of each channel in the order of `color`: build_engine's option for engines that take pixels."""
        channels = CHANNELS[self.color]
        mean, std = (values * (channels // len(values)) for values in (self.mean, self.std))
        return Pixels(tuple(self.scale / s for s in std), tuple(-m / s for m, s in zip(mean, std, strict=True)))

    @property
    def of_pixels(self) -> Preprocess:
        """Copy without the normalisation: it returns pixels from 0 to 255, channels last."""
        return replace(self, scale=1.0, mean=(0.0,), std=(1.0,), layout="NHWC")

    def apply(self, image: Image.Image | str | Path, shape: Sequence[Dim]) -> NDArray[np.float32]:
        """Preprocess one picture for a model input of `shape`.

        Returns float32 [1, C, H, W] or [1, H, W, C]. Raises CalibrationError, naming the file, if it cannot be read as
        a picture or has the wrong size for resize = "none".
        """
        settled = self.fit(shape)
        if isinstance(image, str | Path):
            return settled.normalised(settled.pixels_of(read_picture(image), str(image)))
        return settled.normalised(settled.pixels_of(image))

    def pixels_of(self, picture: Image.Image, origin: str = "the picture", float_scale: float = 0.0) -> NDArray[Any]:
        """Resize and crop a picture to pixels of 0 to 255, before the normalisation.

        Parameters
        ----------
        picture : PIL.Image.Image
        origin : str
            Name of the picture, for messages.
        float_scale : float
            Factor for the values of a picture of floats; 0: chosen by `scale_of_floats`.

        Returns
        -------
        ndarray
            uint8 [H, W, C], or float32 for a picture of floats.

        Raises
        ------
        CalibrationError
            The picture has the wrong size for resize = "none", or its floats are not pixels.
        """
        assert self.size is not None
        height, width = self.size
        if self.resize == "none" and (picture.height, picture.width) != (height, width):
            raise CalibrationError(f"{origin} is {picture.width}x{picture.height} and the model takes "
                                   f"{width}x{height}; set resize to 'shorter-side' or 'exact'")
        if picture.mode == "F":
            gray = np.asarray(self._resized(_of_floats(picture, origin, float_scale)), np.float32).clip(0, PIXEL)
            return np.repeat(gray.reshape(height, width, 1), CHANNELS[self.color], axis=2)
        pixels = np.asarray(self._resized(picture.convert(_MODES.get(self.color, "RGB"))))
        if self.color == "BGR":
            pixels = pixels[..., ::-1]
        return pixels.reshape(height, width, CHANNELS[self.color])

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest normalised value of pixels from 0 to 255."""
        ends = [(pixel * self.scale - mean) / std for pixel in (0.0, PIXEL)
                for mean, std in zip(*np.broadcast_arrays(self.mean, self.std), strict=True)]
        return float(min(ends)), float(max(ends))

    def normalised(self, pixels: NDArray[Any]) -> NDArray[np.float32]:
        """Normalise pixels [H, W, C] of 0 to 255 to the model's float32 [1, C, H, W] or [1, H, W, C]."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        values = (pixels.astype(np.float32) * np.float32(self.scale) - mean) / std
        if self.layout == "NCHW":
            values = values.transpose(2, 0, 1)
        return np.ascontiguousarray(values[None], np.float32)

    def _resized(self, picture: Image.Image) -> Image.Image:
        """Resize and centre-crop a picture to the size."""
        from PIL.Image import Resampling
        assert self.size is not None
        height, width = self.size
        if self.resize == "none":
            return picture
        whole_height, whole_width = round(height / self.crop), round(width / self.crop)
        if self.resize == "shorter-side":
            factor = max(whole_height / picture.height, whole_width / picture.width)
            whole_height, whole_width = round(picture.height * factor), round(picture.width * factor)
        interpolation = Resampling[self.interpolation.upper()]
        left, top = (whole_width - width) // 2, (whole_height - height) // 2
        kept = (left, top, left + width, top + height)
        if whole_width * whole_height > _MOST_RESIZED:
            box = (left * picture.width / whole_width, top * picture.height / whole_height,
                   (left + width) * picture.width / whole_width, (top + height) * picture.height / whole_height)
            return picture.resize((width, height), interpolation, box)
        return picture.resize((whole_width, whole_height), interpolation).crop(kept)

    # ---- as data
    @staticmethod
    def from_json(recorded: Mapping[str, Any]) -> Preprocess:
        """Read a declaration that to_json wrote. Raises ConfigError."""
        return Preprocess()._changed(recorded)

    def to_json(self) -> dict[str, Any]:
        """Return the declaration as JSON values, for a plan's metadata."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def _changed(self, document: Mapping[str, Any]) -> Preprocess:
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        changes = {}
        for key, value in document.items():
            if key not in known:
                raise ConfigError(f"preprocessing: unknown option '{key}'{did_you_mean(key, [*known, 'preset'])}")
            changes[key] = _typed(key, value)
        return replace(self, **changes)


def _typed(key: str, value: Any) -> Any:
    """Convert a TOML or JSON value to the type of the field `key`. Raises ConfigError for a wrong type."""
    def is_number(x: Any) -> bool:
        return isinstance(x, (int, float)) and not isinstance(x, bool)

    if key in CHOICES and isinstance(value, str):
        return value
    if key in ("crop", "scale") and is_number(value):
        return float(value)
    if key in ("mean", "std") and is_number(value):
        return (float(value),)
    if key in ("mean", "std") and isinstance(value, list) and value and all(map(is_number, value)):
        return tuple(map(float, value))
    if key == "size" and value is None:
        return None
    if key == "size" and isinstance(value, list) and all(isinstance(x, int) and is_number(x) for x in value):
        return tuple(value)
    kind = ("one of " + ", ".join(CHOICES[key]) if key in CHOICES else
            {"size": "[HEIGHT, WIDTH]", "mean": "a number or a list of numbers",
             "std": "a number or a list of numbers"}.get(key, "a number"))
    raise ConfigError(f"preprocessing: {key} = {value!r} must be {kind}")


IMAGENET = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
MINUS_ONE_TO_ONE = Preprocess(interpolation="bilinear", scale=1 / 127.5, mean=(1.0,))

PRESETS: Mapping[str, Preprocess] = MappingProxyType({
    "imagenet": IMAGENET,                                                               # torchvision, timm, ONNX zoo
    "inception": MINUS_ONE_TO_ONE,
    "imagenet-tf": MINUS_ONE_TO_ONE,                                                    # TensorFlow's, Keras' "tf" mode
    "caffe": Preprocess(interpolation="bilinear", color="BGR", scale=1.0, mean=(103.939, 116.779, 123.68)),
    "unit": Preprocess(resize="exact", crop=1.0, interpolation="bilinear"),             # 0 to 1
    "gray": Preprocess(resize="exact", crop=1.0, interpolation="bilinear", color="GRAY"),
    "rgba": Preprocess(resize="exact", crop=1.0, interpolation="bilinear", color="RGBA"),
    "raw": Preprocess(resize="exact", crop=1.0, interpolation="bilinear", scale=1.0),   # 0 to 255
})


def load_preprocess(source: str | Path) -> Preprocess:
    """Return the preprocessing of a preset's name or of a TOML file.

    Raises
    ------
    ConfigError
        The source is neither a preset nor a file, the TOML is broken, or an option is unknown.
    """
    if str(source) in PRESETS:
        return PRESETS[str(source)]
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"preprocessing '{source}' is neither a file nor a preset"
                          f"{did_you_mean(str(source), PRESETS)}")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        preset = document.pop("preset", "unit")
        if preset not in PRESETS:
            raise ConfigError(f"preprocessing: no preset {preset!r}{did_you_mean(str(preset), PRESETS)}")
        return PRESETS[preset]._changed(document)
    except (ConfigError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def opened(file: str | Path | BinaryIO, formats: tuple[str, ...] | None = None, most_pixels: int = 0) -> Image.Image:
    """Decode a picture.

    Parameters
    ----------
    file : path or binary file
    formats : tuple of str, optional
        Accepted formats by Pillow's names; None accepts any.
    most_pixels : int
        Maximum number of pixels; 0 uses Pillow's limit.

    Raises
    ------
    ValueError
        The file is not such a picture.
    """
    from PIL import Image
    try:
        with Image.open(file, formats=formats) as image:
            if most_pixels and image.width * image.height > most_pixels:
                raise ValueError(f"{image.width}x{image.height} are more than {most_pixels} pixels")
            image.load()
            if image.mode.startswith("I"):      # 16 bits: Pillow's conversion clips values above 255
                values = np.asarray(image)
                if values.size and (values.min() < 0 or values.max() >= 1 << 16):
                    raise ValueError(f"its pixels are integers of {values.min()} to {values.max()}, and more than 16 "
                                     "bits are no picture")
                return Image.fromarray((values >> 8).astype(np.uint8))
            # Pillow converts a palette with transparency to RGB only by way of RGBA.
            return image.convert("RGBA") if "transparency" in image.info else image.copy()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from error


def scale_of_floats(values: NDArray[Any], origin: str) -> float:
    """Return the factor that converts the values of pictures of floats to pixels of 0 to 255.

    It is 255 if all values are in [0, 1], and 1 if all are in [0, 255]. Raises CalibrationError otherwise.
    """
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not (low >= 0.0 and high <= PIXEL):
        raise CalibrationError(f"{origin} holds floats of {low:g} to {high:g}; pixels of 0 to 1 or of 0 to 255 can be "
                               "read, give others as .npz files of what the model takes")
    return PIXEL if high <= 1.0 else 1.0


def _of_floats(picture: Image.Image, origin: str, scale: float) -> Image.Image:
    from PIL import Image
    values = np.asarray(picture, np.float32)
    scale = scale or scale_of_floats(values, origin)
    scale_of_floats(values * np.float32(scale), origin)
    return Image.fromarray(values * np.float32(scale))


def read_picture(path: str | Path) -> Image.Image:
    """Decode a picture file. Raises CalibrationError, naming the file."""
    try:
        return opened(path)
    except ValueError as error:
        raise CalibrationError(f"{path} cannot be read as an image: {error}; "
                               "repair it or take it out of the folder") from error


def shape_text(shape: Sequence[Dim]) -> str:
    """Return a shape as text: [N, 3, 224, 224]."""
    return f"[{', '.join(map(str, shape))}]"
