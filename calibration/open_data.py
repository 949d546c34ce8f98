"""Open calibration data: a finite stream of items, each a feed of all the model's inputs, to be run through repeatedly.

    a folder of images          one item each, through a declared preprocessing
    a folder of .npz files      an array per model input in each; of .npy files where the model has one input
    one .npz or .npy file       the same, usually with many items on the leading axis
    script.py:function          called without arguments; yields feeds {input: array}
    a function of the program   the same

Folders are searched in depth and read in the order of the paths. An array may hold one item without the batch axis
[C, H, W], or any number of items [N, C, H, W].
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infer_server.calibration.data.items import CalibrationData, Feed
from infer_server.calibration.data.sources.arrays import SUFFIXES, from_arrays
from infer_server.calibration.data.sources.feeds import Feeds, digest_of, from_feeds
from infer_server.calibration.data.sources.images import from_images, is_image
from infer_server.calibration.data.sources.script import feeds_of_script, is_script
from infer_server.engines.errors import CalibrationError
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.preprocess import Preprocess

__all__ = ["CalibrationData", "Feed", "open_calibration_data"]


FEEDS = "the calibration data"          # name in errors of data that a program passes
Source = str | Path | Feeds


def open_calibration_data(source: Source, inputs: Sequence[IoTensor], preprocess: Preprocess | None = None,
                          usual: Mapping[str, Any] = {}, allow_corrupt: bool = False      # noqa: B006
                          ) -> CalibrationData:
    """Open calibration data, and check it against the model's inputs as far as possible without reading it all.

    Parameters
    ----------
    source : path or callable
        See the module's docstring.
    inputs : sequence of IoTensor
        Inputs of the model.
    preprocess : Preprocess, optional
        For images. None chooses a preset by the input's channels, which the result's `note` names.
    usual : mapping
        Numbers of open extents for which the model is built first: the size of images unless preprocess has one.
    allow_corrupt : bool
        Leave out files that cannot be read, and count them in the result's `corrupt`.

    Raises
    ------
    CalibrationError
        There is no data, a file cannot be read, or names, dtypes or shapes are not the model's.
    ConfigError
        The preprocessing does not fit the model.
    """
    if not isinstance(source, str | Path):
        return from_feeds(FEEDS, source, inputs)
    text, path = str(source), Path(source)
    if is_script(text):
        return from_feeds(text, feeds_of_script(text), inputs)
    if not path.exists():
        raise CalibrationError(f"calibration data {path} does not exist; give a folder of images or .npz files, "
                               "an .npz file, or script.py:function")
    if path.suffix == ".py":
        raise CalibrationError(f"calibration script {path}: say which function, {path}:FUNCTION")
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise CalibrationError(f"calibration data {path} is neither a folder nor an .npz or .npy file")
        return from_arrays(text, [path], inputs, allow_corrupt)
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    arrays = [file for file in files if file.suffix in SUFFIXES]
    images = [file for file in files if is_image(file)]
    _check_folder(path, len(files), images, arrays)
    if arrays:
        return from_arrays(text, arrays, inputs, allow_corrupt)
    return from_images(text, images, inputs, preprocess, usual, allow_corrupt)


def _check_folder(path: Path, count: int, images: Sequence[Path], arrays: Sequence[Path]) -> None:
    """Raise CalibrationError if a folder of so many files holds no data, or both images and arrays."""
    if arrays and images:
        raise CalibrationError(f"calibration data {path} holds both images ({images[0].name}, ...) and arrays "
                               f"({arrays[0].name}, ...); keep them in different folders")
    if not arrays and not images:
        raise CalibrationError(f"calibration data {path} holds neither images nor .npz or .npy files "
                               f"({count} other files)")


def digest_of_data(source: Source) -> object:
    """Return a JSON value that changes with the data: names, sizes and times of files, or the digest of all feeds."""
    if not isinstance(source, str | Path):
        return digest_of(FEEDS, source)
    text, path = str(source), Path(source)
    if is_script(text):
        return digest_of(text, feeds_of_script(text))
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
