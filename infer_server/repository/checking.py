"""infer-server --check: all that can be said of a repository without loading a model."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infer_server.config.kinds import Kind
from infer_server.config.pbtxt import nearest
from infer_server.config.sequences import sequences_of
from infer_server.errors import RepositoryError, ServeError
from infer_server.repository.folders import Source, read_model
from infer_server.repository.kinds.warmup import inputs_of
from infer_server.repository.places import Place, names_in


@dataclass(frozen=True)
class Remark:
    model: str
    text: str
    is_error: bool = False      # it will not be served

    def __str__(self) -> str:
        return f"{self.model}: {'error: ' if self.is_error else ''}{self.text}"


def check(places: Sequence[Place], kind_gpu: str) -> Iterator[Remark]:
    """A remark for all that is wrong with each model, and for each setting that means something else here; of a model
    without any, that it is well."""
    owner: dict[str, Place] = {}
    names = names_in(places)
    for place in places:
        for name in place.names():
            try:
                place.fetch(name)
                remarks = list(_check_model(place.path, name, names, kind_gpu))
            except RepositoryError as error:
                remarks = [Remark(name, str(error), True)]
            finally:
                place.release(name)
            if name in owner:
                remarks.append(Remark(name, f"is in {owner[name]} as well; rename one of them", True))
            owner[name] = place
            yield from remarks or [Remark(name, "ok")]


def _check_model(repository: Path, name: str, names: Sequence[str], kind_gpu: str) -> Iterator[Remark]:
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
    yield from _missing_files(sources[0], repository / name)
    for number, step in enumerate(config.steps):
        if step.model not in names:
            yield Remark(name, f"ensemble_scheduling: step {number}: there is no model '{step.model}'."
                               f"{nearest(step.model, names)}", True)


def _missing_files(source: Source, folder: Path) -> Iterator[Remark]:
    for spec in source.config.outputs:
        labels = folder / spec.labels
        if spec.labels and not labels.is_file():
            yield Remark(source.name, f"output '{spec.name}': label_filename: {labels}: no such file", True)
    try:
        sequences_of(source.message, folder)
        for sample in source.message.model_warmup:
            inputs_of(sample, source.config.batched, folder)
    except ServeError as error:
        yield Remark(source.name, str(error), True)
