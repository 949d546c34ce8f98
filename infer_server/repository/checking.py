"""infer-server --check: all that can be said of a repository without loading a model."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infer_server.config.kinds import Kind
from infer_server.errors import RepositoryError
from infer_server.repository.folders import model_names, read_model


@dataclass(frozen=True)
class Remark:
    model: str
    text: str
    is_error: bool = False      # it will not be served

    def __str__(self) -> str:
        return f"{self.model}: {'error: ' if self.is_error else ''}{self.text}"


def check(repositories: Sequence[Path], kind_gpu: str) -> Iterator[Remark]:
    """A remark for all that is wrong with each model, and for each setting that means something else here; of a model
    without any, that it is well."""
    owner: dict[str, Path] = {}
    for repository in repositories:
        for name in model_names(repository):
            remarks = list(_check_model(repository, name, kind_gpu))
            if name in owner:
                remarks.append(Remark(name, f"is in {owner[name]} as well; rename one of them", True))
            owner[name] = repository
            yield from remarks or [Remark(name, "ok")]


def _check_model(repository: Path, name: str, kind_gpu: str) -> Iterator[Remark]:
    try:
        sources = read_model(repository, name)
    except RepositoryError as error:
        for line in str(error).split("; "):
            yield Remark(name, line, True)
        return
    config = sources[0].config
    for notice in config.notices:
        yield Remark(name, notice)
    if config.asks_for_gpu and kind_gpu == "refuse":
        yield Remark(name, "instance_group: KIND_GPU is refused by --kind-gpu=refuse; write kind: KIND_CPU", True)
    for source in sources:
        if config.kind is not Kind.ENSEMBLE and not source.file.exists():
            yield Remark(name, f"{source.file}: no such file", True)
    for spec in config.outputs:
        if spec.labels and not (repository / name / spec.labels).is_file():
            yield Remark(name, f"output '{spec.name}': label_filename: {repository / name / spec.labels}: no such file",
                         True)
