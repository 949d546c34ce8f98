"""The folders of a model repository, as Triton lays them out.

    <repository>/<model>/config.pbtxt           optional
    <repository>/<model>/configs/<name>.pbtxt   another configuration, where one of that name is asked for
    <repository>/<model>/<version>/model.plan   or model.onnx, which is built when it is loaded
"""
from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from infer_server.backend import Gpu, gpus_for, gpus_to_build_for
from infer_server.config.config import ModelConfig, TensorSpec, from_message
from infer_server.config.kinds import Kind
from infer_server.config.paths import CONFIG, CONFIGS, inside
from infer_server.config.pbtxt import read_config
from infer_server.errors import RepositoryError, ServeError
from protos import model_config

log = logging.getLogger(__name__)
T = TypeVar("T")
Fingerprint = Mapping[str, Hashable]                    # what differs when one of the files is another, by path
FILENAMES = ("model.plan", "model.onnx", "model.py")    # the first that is there is served


@dataclass(frozen=True)
class Source:
    """What a version of a model is loaded from."""
    name: str
    version: int
    file: Path
    message: model_config.ModelConfig           # as given, not completed
    config: ModelConfig                         # the same, read
    is_of_request: bool = False                 # its files came with the request to load it

    @property
    def folder(self) -> Path:
        return self.file.parents[1 + self.config.default_filename.count("/")]

    @property
    def is_onnx(self) -> bool:
        """Whether an engine is built from the file; else it is a plan, or a Python model."""
        return self.config.kind is Kind.ENGINE and self.file.suffix == ".onnx"

    @property
    def may_be_for_gpus(self) -> bool:
        """Whether the file is a plan, as far as its name says."""
        return self.config.kind is Kind.ENGINE and not self.is_onnx

    def gpus(self) -> list[Gpu]:
        """Those of this machine that may run the model, each with why it does not: of a plan, if it is for GPUs; of a
        model.onnx, those that it is built for."""
        if self.is_onnx:
            return gpus_to_build_for()
        return gpus_for(self.file) if self.may_be_for_gpus else []

    def path(self, given: str, parameter: str) -> Path:
        """What a parameter names from the model's folder: a file or folder of the repository. Raises
        ModelConfigError."""
        return inside(self.folder.parent, self.folder, given, f"parameter {parameter}")


def labels_file(folder: Path, spec: TensorSpec) -> Path:
    """The label_filename of an output of the model in this folder. Raises ModelConfigError."""
    return inside(folder, folder, spec.labels, f"output '{spec.name}': label_filename")


def read_labels(source: Source) -> dict[str, tuple[str, ...]]:
    """The names of classes, by output, of those that have a label_filename. Raises RepositoryError."""
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
    """The versions of a model that its policy chooses, highest first. `message` overrides config.pbtxt, and so does
    configs/<config_name>.pbtxt, where the model has that.

    Raises RepositoryError or ModelConfigError.
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
        message.backend = Kind.PYTHON.value
    config = from_message(message, is_complete=False)
    numbers = _versions(folder)
    if config.kind is Kind.ENSEMBLE and not config.default_filename:
        return [Source(name, number, folder / str(number) / CONFIG, message, config)
                for number in config.versions.choose(numbers or [1])]       # there is nothing in its folders
    if not numbers:
        raise RepositoryError(f"{folder} has no version: expected a folder named by a number, such as 1, with "
                              f"{' or '.join(FILENAMES)}")
    chosen = config.versions.choose(numbers)
    if missing := sorted(set(config.versions.specific) - set(chosen)):
        log.warning("%s: version_policy asks for versions %s, too, which are not there", name, missing)
    return [Source(name, number, folder / str(number) / _filename(folder / str(number), config, message), message,
                   config) for number in chosen]


def _versions(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.is_dir() and _is_version(path.name)]


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdecimal() and not name.startswith("0")


def _filename(folder: Path, config: ModelConfig, message: model_config.ModelConfig) -> str:
    if config.default_filename:
        return config.default_filename
    if config.kind is Kind.PYTHON:
        return "model.py"
    # Where none is there, loading this version fails by the name that is looked for, and its siblings are not harmed.
    plan, onnx, _ = FILENAMES
    return next((name for name in (plan, onnx) if (folder / name).exists()),
                onnx if "onnx" in message.backend + message.platform else plan)


def fingerprints(sources: Sequence[Source]) -> dict[int, Fingerprint]:
    """Return what each version is loaded from: its files, those of the model that belong to no version, and the
    configuration but for its version_policy. Blocks. Raises OSError.

    A file is told by size, times and inode; one that came with the request, by its contents.
    """
    if not sources:
        return {}
    folder, config = sources[0].folder, sources[0].config
    told_by = _content if sources[0].is_of_request else _status
    common: dict[str, Hashable] = {"": (str(folder) if told_by is _status else "", _message_of(sources[0]))}
    versions: dict[str, dict[str, Hashable]] = {str(source.version): {} for source in sources}
    for path in _files(folder):
        first, _, rest = os.path.relpath(path, folder).partition(os.sep)
        if rest and first in versions:
            versions[first][path[len(str(folder)):]] = told_by(path)
        elif first not in (CONFIG, CONFIGS) and not (rest and _is_version(first)):
            common[path[len(str(folder)):]] = told_by(path)
    for given in (config.build.calib, config.build.preprocess):
        outside = os.path.normpath(folder / given.partition(":")[0]) if given else str(folder)
        if not Path(outside).is_relative_to(folder):
            common |= {path: told_by(path) for path in _files(outside)}
    return {source.version: {**common, **versions[str(source.version)]} for source in sources}


def after_load(source: Source, before: Fingerprint) -> Fingerprint:
    """Return the fingerprint of a version that was loaded, whose build may have written the calib_cache."""
    path = str(source.folder / source.config.build.calib_cache)
    if not source.config.build.calib_cache or not os.path.isfile(path):
        return before
    return {**before, path[len(str(source.folder)):]: (_content if source.is_of_request else _status)(path)}


def told_of(path: Path) -> list[tuple[str, Hashable]]:
    """Return what differs when a file, or one in a folder, is another: its name, size and time. Blocks."""
    return sorted((os.path.relpath(file, path), (status.st_size, status.st_mtime_ns))
                  for file in _files(path) for status in [os.stat(file)])


def _message_of(source: Source) -> bytes:
    message = model_config.ModelConfig()
    message.CopyFrom(source.message)
    message.ClearField("version_policy")
    return message.SerializeToString(deterministic=True)


def _files(path: str | Path) -> Iterator[str]:
    """Yield the files in a folder and in those below it, or the file itself; none that Python compiles."""
    if os.path.isfile(path):
        yield str(path)
    seen = set[tuple[int, int]]()               # folders: a link may lead back
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
    except OSError:                             # it is gone meanwhile, or a link to nothing
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _content(path: str) -> Hashable:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def no_such_file(source: Source, file: Path) -> str:
    """What is said of the file of a model that is not there, and of one that may be meant. file: as it is called."""
    folder = source.file.parent
    other = ""
    if source.config.kind is Kind.ENGINE and (folder / "model.py").exists():
        other = '; there is a model.py: write backend: "python" if that is the model'
    elif source.config.kind is Kind.ENGINE and len(found := list(folder.glob("*.onnx"))) == 1:
        other = f'; there is {found[0].name}: write default_model_filename: "{found[0].name}" if that is the model'
    return f"{file}: no such file{other}"


def told(read: Callable[[], T]) -> T:
    """What `read` returns. Raises RepositoryError for the errors of the disk, and of what is on it, as well: one model
    must not keep the others from being served."""
    try:
        return read()
    except ServeError:
        raise
    except Exception as error:
        if not isinstance(error, (OSError, ValueError)):
            log.exception("reading a model failed")             # our bug, which the index and the readiness tell of
        raise RepositoryError(f"{type(error).__name__}: {error}") from error
