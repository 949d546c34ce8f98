"""Read the folders of a model repository in Triton's layout.

    <repository>/<model>/config.pbtxt           optional
    <repository>/<model>/configs/<name>.pbtxt   custom configuration, selected by --model-config-name
    <repository>/<model>/<version>/model.plan   or model.onnx, which is built when it is loaded, or model.py
"""
from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from infer_server.backend import GpuDevice, gpus_for, gpus_to_build_for
from infer_server.config.config import ModelConfig, TensorSpec, from_message
from infer_server.config.kinds import ModelKind
from infer_server.config.paths import CONFIG, CONFIGS, inside
from infer_server.config.pbtxt import read_config
from infer_server.errors import RepositoryError, ServeError
from infer_server.protos import model_config

log = logging.getLogger(__name__)
T = TypeVar("T")
Fingerprint = Mapping[str, Hashable]                    # identity of each file that a version depends on, by path
FILENAMES = ("model.plan", "model.onnx", "model.py")    # default file names, in the order of precedence


@dataclass(frozen=True)
class Source:
    """Files and configuration that one version of a model is loaded from."""
    name: str
    version: int
    file: Path
    message: model_config.ModelConfig           # as in config.pbtxt, before auto-completion
    config: ModelConfig                         # parsed from `message`
    is_of_request: bool = False                 # True if the files were sent in the load request

    @property
    def folder(self) -> Path:
        return self.file.parents[1 + self.config.default_filename.count("/")]

    @property
    def is_onnx(self) -> bool:
        """True if the file is an ONNX model from which an engine is built."""
        return self.config.kind is ModelKind.ENGINE and self.file.suffix == ".onnx"

    @property
    def may_be_for_gpus(self) -> bool:
        """True if the file is a plan by its name, so that its target may be a GPU."""
        return self.config.kind is ModelKind.ENGINE and not self.is_onnx

    def gpus(self) -> list[GpuDevice]:
        """Return the GPUs that may run the model, each with the reason if it cannot.

        For a plan these are the GPUs that match its target; for a model.onnx, those that it can be built for.
        """
        if self.is_onnx:
            return gpus_to_build_for()
        return gpus_for(self.file) if self.may_be_for_gpus else []

    def path(self, value: str, parameter: str) -> Path:
        """Resolve a path that a parameter names against the model's folder.

        Raises
        ------
        ModelConfigError
            The path is outside the repository.
        """
        return inside(self.folder.parent, self.folder, value, f"parameter {parameter}")


def labels_file(folder: Path, spec: TensorSpec) -> Path:
    """Return the path of an output's label_filename. Raises ModelConfigError if it is outside the model's folder."""
    return inside(folder, folder, spec.labels, f"output '{spec.name}': label_filename")


def read_labels(source: Source) -> dict[str, tuple[str, ...]]:
    """Return the class labels of each output that has a label_filename.

    Raises
    ------
    RepositoryError
        A file cannot be read.
    """
    labels = {}
    for spec in source.config.outputs:
        if spec.labels:
            file = labels_file(source.folder, spec)
            try:
                labels[spec.name] = tuple(file.read_text(encoding="utf-8").splitlines())
            except (OSError, UnicodeDecodeError) as error:
                raise RepositoryError(f"output '{spec.name}': label_filename: {file}: {error}") from error
    return labels


def read_model(repository: Path, name: str, message: model_config.ModelConfig | None = None,
               config_name: str = "") -> list[Source]:
    """Read the configuration of a model and return the versions that its version_policy selects, highest first.

    Parameters
    ----------
    repository : Path
        Folder that contains the model's folder.
    name : str
        Name of the model.
    message : ModelConfig, optional
        Configuration that replaces config.pbtxt.
    config_name : str
        Name of a file in configs/ that replaces config.pbtxt where it exists.

    Raises
    ------
    RepositoryError
        The model has no version, or a file cannot be read.
    ModelConfigError
        The configuration is not valid.
    """
    folder = repository / name
    if message is None:
        path = folder / CONFIGS / f"{config_name}.pbtxt"
        if config_name and path.exists():
            log.info("%s: configured by %s/%s", name, CONFIGS, path.name)
        else:
            path = folder / CONFIG
        message = read_config(path) if path.exists() else model_config.ModelConfig()
    if not message.backend and not message.platform and not message.HasField("ensemble_scheduling") and any(
            folder.glob("[1-9]*/model.py")):
        message.backend = ModelKind.PYTHON.value
    config = from_message(message, is_complete=False)
    numbers = _versions(folder)
    if config.kind is ModelKind.ENSEMBLE and not config.default_filename:
        return [Source(name, number, folder / str(number) / CONFIG, message, config)
                for number in config.versions.choose(numbers or [1])]       # version folders of an ensemble are empty
    if not numbers:
        raise RepositoryError(f"{folder} has no version: expected a folder named by a number, such as 1, with "
                              f"{' or '.join(FILENAMES)}")
    chosen = config.versions.choose(numbers)
    if missing := sorted(set(config.versions.specific) - set(chosen)):
        log.warning("%s: version_policy: versions %s do not exist and are not served", name, missing)
    return [Source(name, number, folder / str(number) / _filename(folder / str(number), config, message), message,
                   config) for number in chosen]


def _versions(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.is_dir() and _is_version(path.name)]


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdecimal() and not name.startswith("0")


def _filename(folder: Path, config: ModelConfig, message: model_config.ModelConfig) -> str:
    if config.default_filename:
        return config.default_filename
    if config.kind is ModelKind.PYTHON:
        return "model.py"
    # If neither exists, loading this version fails with the expected name; other versions are not affected.
    plan, onnx, _ = FILENAMES
    return next((name for name in (plan, onnx) if (folder / name).exists()),
                onnx if "onnx" in message.backend + message.platform else plan)


def fingerprints(sources: Sequence[Source]) -> dict[int, Fingerprint]:
    """Return a fingerprint of each version, which changes when loading the version again would give another model.

    It covers the version's files, the model's files outside version folders, and the configuration except its
    version_policy. A file is identified by size, times and inode, or by a digest if it came with the request. Blocks.

    Raises
    ------
    OSError
        A folder cannot be read.
    """
    if not sources:
        return {}
    folder, config = sources[0].folder, sources[0].config
    identity_of = _content if sources[0].is_of_request else _status
    common: dict[str, Hashable] = {"": (str(folder) if identity_of is _status else "", _message_of(sources[0]))}
    versions: dict[str, dict[str, Hashable]] = {str(source.version): {} for source in sources}
    for path in _files(folder):
        first, _, rest = os.path.relpath(path, folder).partition(os.sep)
        if rest and first in versions:
            versions[first][path[len(str(folder)):]] = identity_of(path)
        elif first not in (CONFIG, CONFIGS) and not (rest and _is_version(first)):
            common[path[len(str(folder)):]] = identity_of(path)
    for file in (config.build.calib, config.build.preprocess):
        outside = os.path.normpath(folder / file.partition(":")[0]) if file else str(folder)
        if not Path(outside).is_relative_to(folder):
            common |= {path: identity_of(path) for path in _files(outside)}
    return {source.version: {**common, **versions[str(source.version)]} for source in sources}


def after_load(source: Source, before: Fingerprint) -> Fingerprint:
    """Return the fingerprint of a loaded version, updated for the calib_cache that its build may have written."""
    path = str(source.folder / source.config.build.calib_cache)
    if not source.config.build.calib_cache or not os.path.isfile(path):
        return before
    return {**before, path[len(str(source.folder)):]: (_content if source.is_of_request else _status)(path)}


def file_stats(path: Path) -> list[tuple[str, Hashable]]:
    """Return relative path, size and modification time of a file, or of all files in a folder. Blocks."""
    return sorted((os.path.relpath(file, path), (status.st_size, status.st_mtime_ns))
                  for file in _files(path) for status in [os.stat(file)])


def _message_of(source: Source) -> bytes:
    message = model_config.ModelConfig()
    message.CopyFrom(source.message)
    message.ClearField("version_policy")
    return message.SerializeToString(deterministic=True)


def _files(path: str | Path) -> Iterator[str]:
    """Yield the files in a folder and its subfolders except __pycache__, or the file itself."""
    if os.path.isfile(path):
        yield str(path)
    seen = set[tuple[int, int]]()               # visited folders: symbolic links may form a cycle
    for folder, folders, files in os.walk(path, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (os.path.join(folder, name) for name in files)


def _status(path: str) -> Hashable:
    try:
        status = os.stat(path)
    except OSError:                             # removed in the meantime, or a broken link
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _content(path: str) -> Hashable:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def no_such_file(source: Source, file: Path) -> str:
    """Return the error message for a missing model file, with a hint if another file may be meant."""
    folder = source.file.parent
    other = ""
    if source.config.kind is ModelKind.ENGINE and (folder / "model.py").exists():
        other = '; there is a model.py: write backend: "python" if that is the model'
    elif source.config.kind is ModelKind.ENGINE and len(files := list(folder.glob("*.onnx"))) == 1:
        other = f'; there is {files[0].name}: write default_model_filename: "{files[0].name}" if that is the model'
    return f"{file}: no such file{other}"


def checked_read(read: Callable[[], T]) -> T:
    """Call `read` and raise its errors as RepositoryError, so that a bad model does not stop the others."""
    try:
        return read()
    except ServeError:
        raise
    except Exception as error:
        if not isinstance(error, (OSError, ValueError)):
            log.exception("reading a model failed")             # an internal error; index and readiness report it, too
        raise RepositoryError(f"{type(error).__name__}: {error}") from error
