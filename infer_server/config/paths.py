"""Names and paths that may come from a client: nothing outside of the repository is read by one."""
from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from infer_server.errors import ModelConfigError

CONFIG = "config.pbtxt"             # in a model's folder, as the next three
CONFIGS = "configs"                 # of its other configurations, each NAME.pbtxt
WARMUP = "warmup"                   # of the files of its model_warmup
INITIAL_STATE = "initial_state"     # likewise, of its sequences'


def inside(bounds: Path, folder: Path, path: str, what: str) -> Path:
    """The file or folder that a path from `folder` names. Raises ModelConfigError: it is not in `bounds`.

    Links are followed: only who may write to the repository can lay them.
    """
    found = Path(os.path.normpath(os.path.join(folder, path)))
    if not found.is_relative_to(os.path.normpath(bounds)) or "\0" in path:
        raise ModelConfigError(f"{what}: '{path}' is not in {bounds.name}")
    return found


def is_name(name: str) -> bool:
    """Whether a model can be called so: its name is that of a folder."""
    return PurePosixPath(name).parts == (name,) and name != ".." and not name.startswith(".") and "\0" not in name


def check_name(given: str, folder: str) -> None:
    """Raises ModelConfigError: a configuration calls its model other than the folder that it lies in."""
    if given not in ("", folder):
        raise ModelConfigError(f"name: expected '{folder}', the name of its folder, got '{given}'")
