"""Validation of names and paths that may come from clients, so that nothing outside the repository is read."""
from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from infer_server.errors import ModelConfigError

CONFIG = "config.pbtxt"             # this and the following are in a model's folder
CONFIGS = "configs"                 # folder of custom configurations, each NAME.pbtxt
WARMUP = "warmup"                   # folder of the files of model_warmup
INITIAL_STATE = "initial_state"     # folder of the files of initial states


def inside(bounds: Path, folder: Path, path: str, what: str) -> Path:
    """Resolve a path relative to a folder and check that it stays within bounds.

    Links are followed: only those who may write to the repository can create them.

    Parameters
    ----------
    bounds : Path
        Folder that the result must be in.
    folder : Path
        Folder that the path is relative to.
    path : str
        Path to resolve.
    what : str
        Field that contains the path, for the error.

    Raises
    ------
    ModelConfigError
        The path is outside `bounds`.
    """
    normalised = Path(os.path.normpath(os.path.join(folder, path)))
    if not normalised.is_relative_to(os.path.normpath(bounds)) or "\0" in path:
        raise ModelConfigError(f"{what}: '{path}' is not in {bounds.name}")
    return normalised


def is_name(name: str) -> bool:
    """Return True if a model can have this name, which must be a plain folder name."""
    return PurePosixPath(name).parts == (name,) and name != ".." and not name.startswith(".") and "\0" not in name


def check_name(name: str, folder: str) -> None:
    """Raise ModelConfigError if a configuration's name differs from that of its folder."""
    if name not in ("", folder):
        raise ModelConfigError(f"name: expected '{folder}', the name of its folder, got '{name}'")
