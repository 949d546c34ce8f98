"""The folders of a model repository, as Triton lays them out.

    <repository>/<model>/config.pbtxt           optional
    <repository>/<model>/configs/<name>.pbtxt   another configuration, where one of that name is asked for
    <repository>/<model>/<version>/model.plan   or model.onnx, which is built when it is loaded
"""
from __future__ import annotations

import logging
from collections.abc import Callable
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
FILENAMES = ("model.plan", "model.onnx", "model.py")    # the first that is there is served


@dataclass(frozen=True)
class Source:
    """What a version of a model is loaded from."""
    name: str
    version: int
    file: Path
    message: model_config.ModelConfig           # as given, not completed
    config: ModelConfig                         # the same, read

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
