"""Check that the composing models of an ensemble agree on tensor names, datatypes, shapes and batch sizes.

A mismatch would fail every request, so it is refused when the ensemble is loaded.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infer_server.config.config import ModelConfig, TensorSpec
from infer_server.config.pbtxt import nearest
from infer_server.config.steps import EnsembleStep
from infer_server.errors import ModelConfigError


@dataclass(frozen=True)
class _End:
    """Producer's or consumer's view of a tensor of the ensemble."""
    who: str
    spec: TensorSpec
    batched: bool
    takes_files: bool = False           # True if the consumer also accepts encoded images (BYTES)

    def __str__(self) -> str:
        return f"{self.spec.datatype.name} {list(self.spec.full_shape(self.batched))} for {self.who}"


def check_ensemble(config: ModelConfig, models: Sequence[ModelConfig]) -> None:
    """Check an ensemble against the completed configurations of its steps' models. Raises ModelConfigError."""
    for number, (step, model) in enumerate(zip(config.steps, models, strict=True)):
        check_maps(number, step, model)
    check_tensors(config, models)


def check_maps(number: int, step: EnsembleStep, config: ModelConfig, is_whole: bool = True) -> None:
    """Check the names in a step's input_map and output_map against its model's configuration.

    Parameters
    ----------
    number : int
        Index of the step.
    step : Step
        Step of the ensemble.
    config : ModelConfig
        Configuration of the step's model.
    is_whole : bool
        False if the configuration may lack inputs or outputs that the model has.

    Raises
    ------
    ModelConfigError
        The model has no such tensor, or a required input is missing.
    """
    for kind, names, specs in (("input_map", step.inputs, config.inputs), ("output_map", step.outputs, config.outputs)):
        known = [spec.name for spec in specs]
        for name in names:
            if name not in known and (known or is_whole):
                raise ModelConfigError(f"ensemble_scheduling: step {number}: {kind}: model '{step.model}' has no "
                                       f"'{name}', but {', '.join(known)}.{nearest(name, known)}")
    missing = {spec.name for spec in config.inputs if not spec.is_optional} - step.inputs.keys()
    if missing:
        raise ModelConfigError(f"ensemble_scheduling: step {number}: input_map: model '{step.model}' needs "
                               f"'{min(missing)}', too; write input_map {{ key: \"{min(missing)}\" value: ... }}")


def check_tensors(config: ModelConfig, models: Sequence[ModelConfig | None]) -> None:
    """Check that producers and consumers of each tensor agree, and that each model accepts the ensemble's batches.

    Parameters
    ----------
    config : ModelConfig
        Configuration of the ensemble.
    models : sequence of ModelConfig or None
        Configurations of the steps' models; None if not known yet.

    Raises
    ------
    ModelConfigError
        A datatype or shape differs, or a model's max_batch_size is less than the ensemble's.
    """
    most = config.batching.max_batch_size
    for number, (step, model) in enumerate(zip(config.steps, models, strict=True)):
        if model and config.batched and model.batched and model.build.split_requests != "true" and (
                most > model.batching.max_batch_size):
            raise ModelConfigError(f"max_batch_size: the ensemble allows {most}, but model '{step.model}' of step "
                                   f"{number} only {model.batching.max_batch_size}; write max_batch_size: "
                                   f"{model.batching.max_batch_size}")
    makers = dict(_ends(config, models, producers=True))
    for name, reader in _ends(config, models, producers=False):
        maker = makers.get(name)
        if maker and not _is_of_files(maker, reader) and not (
                maker.spec.datatype == reader.spec.datatype and _same_shape(maker, reader)):
            raise ModelConfigError(f"ensemble_scheduling: '{name}' is {maker}, but {reader}")


def _ends(config: ModelConfig, models: Sequence[ModelConfig | None], producers: bool) -> Iterator[tuple[str, _End]]:
    """Yield each tensor of the ensemble with its producers' views (`producers`), or else its consumers'."""
    for spec in config.inputs if producers else config.outputs:
        yield spec.name, _End("the ensemble", spec.in_model, config.batched)
    for number, (step, model) in enumerate(zip(config.steps, models, strict=True)):
        if model:
            names = step.outputs if producers else step.inputs
            files = "" if producers else model.parameters.get("image_input", "")
            for spec in model.outputs if producers else model.inputs:
                if spec.name in names:
                    yield names[spec.name], _End(f"model '{step.model}' of step {number}", spec, model.batched,
                                                 spec.name == files)



def _is_of_files(maker: _End, reader: _End) -> bool:
    return reader.takes_files and maker.spec.datatype.name == "BYTES"


def _same_shape(maker: _End, reader: _End) -> bool:
    """Return True if a shape fits both views, possibly after `ensemble_tensors._with_batch` converted it."""
    one, other = maker.spec.dims, reader.spec.dims
    if maker.batched == reader.batched:
        return _may_be_equal(one, other)
    whole, item = (other, one) if maker.batched else (one, other)
    return _may_be_equal(whole, item) or _may_be_equal(whole, (-1, *item))


def _may_be_equal(dims: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return len(dims) == len(others) and all(one == other or -1 in (one, other)
                                            for one, other in zip(dims, others, strict=True))
