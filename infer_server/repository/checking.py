"""Check a model repository without loading its models (infer-server --check)."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infer_server.backend import Described, describe_plan
from infer_server.config.config import ModelConfig
from infer_server.config.fields import check_threads
from infer_server.config.groups import NOT_BUILT, NOT_KNOWN, ON_CPU, REFUSED, devices, with_devices
from infer_server.config.kinds import ModelKind
from infer_server.config.paths import check_name
from infer_server.config.pbtxt import nearest
from infer_server.config.sequences import sequences_of
from infer_server.config.steps import EnsembleCycleError, called_models
from infer_server.engines.errors import EngineError
from infer_server.errors import ModelConfigError, RepositoryError, ServeError
from infer_server.repository.folders import Source, labels_file, no_such_file, read_model
from infer_server.repository.kinds.described import complete_source
from infer_server.repository.kinds.ensemble_check import check_maps, check_tensors
from infer_server.repository.kinds.warmup import inputs_of
from infer_server.repository.roots import RepositoryRoot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remark:
    """Finding about one model or one repository path."""
    model: str                  # name of the model, or the repository path that cannot be read
    text: str
    is_error: bool = False      # True if the model will not be served

    def __str__(self) -> str:
        return f"{self.model}: {'error: ' if self.is_error else ''}{self.text}"


class _Version(NamedTuple):
    """Version of a model that the version policy selects."""
    source: Source
    is_completed: bool = False          # True if the configuration was completed from the model file


def check(roots: Sequence[RepositoryRoot], kind_gpu: str, config_name: str = "",
          describe: Callable[[Path], Described] = describe_plan, threads: int = 1) -> Iterator[Remark]:
    """Yield errors and warnings about every model, or a remark "ok" for a model without any.

    Warnings name settings that mean something else here than in Triton.

    Parameters
    ----------
    roots : sequence of RepositoryRoot
        Repositories to check.
    kind_gpu : str
        Value of --kind-gpu: "cpu" or "refuse".
    config_name : str
        Value of --model-config-name; see `read_model`.
    describe : callable
        Function that reads the inputs and outputs of a plan file.
    threads : int
        Threads of an instance whose model does not set them.
    """
    names_of: dict[RepositoryRoot, list[str]] = {}
    for root in roots:
        try:
            names_of[root] = root.names()
        except RepositoryError as error:
            yield Remark(str(root), str(error), True)
    owner: dict[str, RepositoryRoot] = {}
    served: dict[str, list[_Version]] = {}
    remarks: dict[tuple[RepositoryRoot, str], list[Remark]] = {}
    for root, models in names_of.items():
        for name in models:
            of_model = remarks[root, name] = _remarks(root, name, served, kind_gpu, config_name, describe)
            if name in owner:
                of_model.append(Remark(name, f"is in {owner[name]} as well; rename one of them", True))
            of_model += _check_threads(served.get(name, ()), threads)
            owner[name] = root
    of_steps = _check_ensembles(served, {
        remark.model for each in remarks.values() for remark in each if remark.is_error})
    for (_, name), of_model in remarks.items():
        yield from [*of_model, *of_steps.get(name, ())] or [Remark(name, "ok")]


def _remarks(root: RepositoryRoot, name: str, served: dict[str, list[_Version]], kind_gpu: str, config_name: str,
             describe: Callable[[Path], Described]) -> list[Remark]:
    """Check one model and enter its versions into `served`, unless its folder cannot be read."""
    try:
        with root.outline(name) as folder:
            return list(_check_model(folder, name, served, kind_gpu, describe if root.outlines_models else None,
                                     config_name))
    except (ServeError, OSError) as error:
        return [Remark(name, str(error), True)]
    except Exception as error:          # an unforeseen defect of a file; the other models are still checked
        log.debug("checking %s failed", name, exc_info=error)
        return [Remark(name, f"{type(error).__name__}: {error}", True)]


def _check_model(repository: Path, name: str, served: dict[str, list[_Version]], kind_gpu: str,
                 describe: Callable[[Path], Described] | None, config_name: str) -> Iterator[Remark]:
    """Check one model's folder; `describe` is None for an outline, whose model files have no contents."""
    try:
        sources = read_model(repository, name, config_name=config_name)
        check_name(sources[0].config.name, name)
    except RepositoryError as error:
        for reason in error.args:
            yield Remark(name, reason, True)
        return
    served[name] = [_Version(source) for source in sources]
    config = sources[0].config
    for notice in config.notices:
        yield Remark(name, notice)
    if config.requests_gpu:
        yield from _check_gpus(sources[0], name, kind_gpu, describe is not None)
    for number, source in enumerate(sources):
        if config.kind is not ModelKind.ENSEMBLE and not source.file.exists():
            yield Remark(name, no_such_file(source, source.file.relative_to(repository)), True)
        elif describe and config.kind is ModelKind.ENGINE:
            try:
                if whole := complete_source(source, describe):
                    served[name][number] = _Version(whole, True)
            except (ModelConfigError, EngineError) as error:
                yield Remark(name, f"version {source.version}: {error}" if len(sources) > 1 else str(error), True)
    yield from _missing_files(sources[0], repository / name)


def _check_ensembles(served: Mapping[str, Sequence[_Version]], unserved: set[str]) -> dict[str, list[Remark]]:
    """Check ensembles until no more fail; `unserved` holds the models that already have an error."""
    while True:
        remarks_of = {name: list(_check_steps(name, served, unserved)) for name in served}
        more = {name for name, remarks in remarks_of.items() if any(remark.is_error for remark in remarks)} - unserved
        if not more:
            return remarks_of
        unserved = unserved | more


def _check_steps(name: str, served: Mapping[str, Sequence[_Version]], unserved: Set[str]) -> Iterator[Remark]:
    """Check that the models of an ensemble's steps exist, are served, and agree about their tensors."""
    try:
        called_models(name, lambda model: served[model][0].source.config.steps if model in served else ())
    except EnsembleCycleError as error:
        if f" {name} " in str(error):       # report the cycle at its own members, not at ensembles that call them
            yield Remark(name, str(error), True)
            return
    except ModelConfigError as error:
        yield Remark(name, str(error), True)
        return
    known: list[ModelConfig | None] = []
    for number, step in enumerate(served[name][0].source.config.steps):
        known.append(None)
        where = f"ensemble_scheduling: step {number}"
        if step.model in unserved:
            yield Remark(name, f"{where}: model '{step.model}' will not be served, see there", True)
            continue
        if step.model not in served:
            yield Remark(name, f"{where}: there is no model '{step.model}'.{nearest(step.model, list(served))}", True)
            continue
        versions = [str(each.source.version) for each in served[step.model]]
        if step.version and step.version not in versions:
            yield Remark(name, f"{where}: model_version: version {step.version} of model '{step.model}' is not served, "
                               f"but {', '.join(versions)}; write one of these, model_version: -1 for the highest, or "
                               f"another version_policy for '{step.model}'", True)
            continue
        source, is_completed = served[step.model][versions.index(step.version) if step.version else 0]
        config = source.config
        try:
            check_maps(number, step, config, is_completed)
        except ModelConfigError as error:       # only a warning if the model file may still complete the configuration
            yield Remark(name, str(error), is_completed or config.kind is not ModelKind.ENGINE)
        if config.kind is ModelKind.ENSEMBLE or source.message.HasField("max_batch_size"):
            known[-1] = config
    try:
        check_tensors(served[name][0].source.config, known)
    except ModelConfigError as error:
        yield Remark(name, str(error), True)


def _check_gpus(source: Source, name: str, kind_gpu: str, has_models: bool) -> Iterator[Remark]:
    if source.may_be_for_gpus and not has_models:
        yield Remark(name, NOT_KNOWN)
        return
    try:
        used = set(devices(with_devices(source.message, source.gpus())))
    except ModelConfigError as error:
        yield Remark(name, str(error), True)
        return
    if used == {None}:
        yield Remark(name, REFUSED, True) if kind_gpu == "refuse" else Remark(name, ON_CPU)
    elif source.is_onnx and kind_gpu == "refuse":
        yield Remark(name, NOT_BUILT)


def _check_threads(versions: Sequence[_Version], threads: int) -> Iterator[Remark]:
    for config in [version.source.config for version in versions[:1] if version.source.config.kind is ModelKind.ENGINE]:
        try:
            check_threads(config.instances, int(config.build.threads or threads))
        except ModelConfigError as error:
            yield Remark(config.name or versions[0].source.name, str(error), True)


def _missing_files(source: Source, folder: Path) -> Iterator[Remark]:
    try:
        for spec in source.config.outputs:
            if spec.labels and not labels_file(folder, spec).is_file():
                yield Remark(source.name, f"output '{spec.name}': label_filename: {spec.labels}: no such file", True)
        sequences_of(source.message, folder)
        for sample in source.message.model_warmup:
            inputs_of(sample, source.config, folder)
    except ServeError as error:
        yield Remark(source.name, str(error), True)
