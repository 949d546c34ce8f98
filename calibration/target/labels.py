"""Labels of evaluation items: class numbers in the order of the items."""
from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from infer_server.calibration.data.sources.images import is_image
from infer_server.engines.errors import CalibrationError

FOLDERS = "folders"


def read_labels(labels: str | Path | Sequence[int], data: object) -> list[int]:
    """Return a class number for each item.

    Parameters
    ----------
    labels : str, path or sequence of int
        The numbers; an .npy or .txt file with one number an item; a .csv file with lines `path,number`, paths relative
        to the data's folder; or "folders": the numbers of the sorted names of the images' folders.
    data : object
        The evaluation data: a folder of images for .csv files and "folders".

    Raises
    ------
    CalibrationError
        A file cannot be read, or an item has no label.
    """
    if not isinstance(labels, str | Path):
        return [int(label) for label in labels]
    if str(labels) == FOLDERS:
        names = [file.parent.name for file in _images(data)]
        classes = sorted(set(names))
        return [classes.index(name) for name in names]
    path = Path(labels)
    try:
        if path.suffix == ".npy":
            return [int(label) for label in np.load(path).reshape(-1)]
        if path.suffix == ".csv":
            with path.open(newline="") as lines:
                known = {row[0]: int(row[1]) for row in csv.reader(lines) if len(row) >= 2 and row[1].strip().isdigit()}
            return [_known(known, file, Path(str(data)), path) for file in _images(data)]
        return [int(line) for line in path.read_text().split()]
    except (OSError, ValueError) as error:
        raise CalibrationError(f"labels {path} cannot be read: {error}; give an .npy or .txt file with one number an "
                               "item, a .csv file with lines path,number, or 'folders'") from error


def _images(data: object) -> list[Path]:
    """Return the images of a folder in the order in which they are read."""
    if not isinstance(data, str | Path) or not Path(data).is_dir():
        raise CalibrationError("labels by folder or path need evaluation data that are a folder of images")
    return sorted(file for file in Path(data).rglob("*")
                  if file.is_file() and not file.name.startswith(".") and is_image(file))


def _known(known: dict[str, int], file: Path, folder: Path, labels: Path) -> int:
    for name in (str(file.relative_to(folder)), file.name):
        if name in known:
            return known[name]
    raise CalibrationError(f"labels {labels} have no line for {file.relative_to(folder)}")
