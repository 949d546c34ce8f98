"""infer-server --check: all that can be said of a repository without loading a model."""
from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infer_server.config.groups import NOT_BUILT, NOT_KNOWN, ON_CPU, REFUSED, devices, placed
from infer_server.config.kinds import Kind
from infer_server.config.pbtxt import nearest
from infer_server.config.sequences import sequences_of
from infer_server.errors import ModelConfigError, RepositoryError, ServeError
from infer_server.repository.folders import Source, labels_file, read_model
from infer_server.repository.kinds.warmup import inputs_of
from infer_server.repository.places import Place

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remark:
    model: str                  # or the place that cannot be read
    text: str
    is_error: bool = False      # it will not be served

    def __str__(self) -> str:
        return f"{self.model}: {'error: ' if self.is_error else ''}{self.text}"


def check(places: Sequence[Place], kind_gpu: str) -> Iterator[Remark]:
    """A remark for all that is wrong with each model, and for each setting that means something else here; of a model
    without any, that it is well."""
    found: dict[Place, list[str]] = {}
    for place in places:
        try:
            found[place] = place.names()
        except RepositoryError as error:
            yield Remark(str(place), str(error), True)
    names = sorted({name for each in found.values() for name in each})
    owner: dict[str, Place] = {}
    for place, models in found.items():
        for name in models:
            remarks = _remarks(place, name, names, kind_gpu)
            if name in owner:
                remarks.append(Remark(name, f"is in {owner[name]} as well; rename one of them", True))
            owner[name] = place
            yield from remarks or [Remark(name, "ok")]


def _remarks(place: Place, name: str, names: Sequence[str], kind_gpu: str) -> list[Remark]:
    try:
        with place.outline(name) as folder:
            return list(_check_model(folder, name, names, kind_gpu, place.outlines_models))
    except (ServeError, OSError) as error:
        return [Remark(name, str(error), True)]
    except Exception as error:          # files are bad in ways that nobody foresaw; the other models are checked, too
        log.debug("checking %s failed", name, exc_info=error)
        return [Remark(name, f"{type(error).__name__}: {error}", True)]


def _check_model(repository: Path, name: str, names: Sequence[str], kind_gpu: str, has_models: bool
                 ) -> Iterator[Remark]:
    try:
        sources = read_model(repository, name)
    except RepositoryError as error:
        for reason in error.args:
            yield Remark(name, reason, True)
        return
    config = sources[0].config
    for notice in config.notices:
        yield Remark(name, notice)
    if config.asks_for_gpu:
        yield from _of_gpus(sources[0], name, kind_gpu, has_models)
    for source in sources:
        if config.kind is not Kind.ENSEMBLE and not source.file.exists():
            yield Remark(name, f"{source.file.relative_to(repository)}: no such file", True)
    yield from _missing_files(sources[0], repository / name)
    for number, step in enumerate(config.steps):
        if step.model not in names:
            yield Remark(name, f"ensemble_scheduling: step {number}: there is no model '{step.model}'."
                               f"{nearest(step.model, names)}", True)


def _of_gpus(source: Source, name: str, kind_gpu: str, has_models: bool) -> Iterator[Remark]:
    if source.may_be_for_gpus and not has_models:
        yield Remark(name, NOT_KNOWN)
        return
    try:
        used = set(devices(placed(source.message, source.gpus())))
    except ModelConfigError as error:
        yield Remark(name, str(error), True)
        return
    if used == {None}:
        yield Remark(name, REFUSED, True) if kind_gpu == "refuse" else Remark(name, ON_CPU)
    elif source.is_onnx and kind_gpu == "refuse":
        yield Remark(name, NOT_BUILT)


def _missing_files(source: Source, folder: Path) -> Iterator[Remark]:
    try:
        for spec in source.config.outputs:
            if spec.labels and not labels_file(folder, spec).is_file():
                yield Remark(source.name, f"output '{spec.name}': label_filename: {spec.labels}: no such file", True)
        sequences_of(source.message, folder)
        for sample in source.message.model_warmup:
            inputs_of(sample, source.config.batched, folder)
    except ServeError as error:
        yield Remark(source.name, str(error), True)
