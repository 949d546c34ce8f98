"""Parse the steps of an ensemble: models, and the tensors that pass between them."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from infer_server.errors import ModelConfigError
from infer_server.protos import model_config

MAX_NESTED = 16                 # maximum nesting depth of ensembles
MAX_STEPS = 1024                # maximum number of steps, including those of nested ensembles


class EnsembleCycleError(ModelConfigError):
    """Raised if an ensemble calls itself, directly or not."""


@dataclass(frozen=True)
class EnsembleStep:
    """Step of an ensemble; its maps lead from the model's tensor names to the ensemble's."""
    model: str
    version: str                            # "" for the highest ready version
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def steps_of(message: model_config.ModelConfig) -> tuple[EnsembleStep, ...]:
    """Parse the steps of an ensemble.

    Raises
    ------
    ModelConfigError
        No step or two steps produce a tensor, or steps depend on each other.
    """
    if not message.HasField("ensemble_scheduling"):
        return ()
    if wrong := [step.model_version for step in message.ensemble_scheduling.step if step.model_version < -1]:
        raise ModelConfigError(f"ensemble_scheduling.step.model_version: {wrong[0]} is not a version; write -1 for the "
                               "highest")
    steps = tuple(EnsembleStep(step.model_name, str(step.model_version) if step.model_version > 0 else "",
                       dict(step.input_map), dict(step.output_map)) for step in message.ensemble_scheduling.step)
    if not steps:
        raise ModelConfigError("ensemble_scheduling: an ensemble needs a step; give step { model_name: ... }")
    for number, step in enumerate(steps):
        if not step.model or not step.inputs or not step.outputs:
            raise ModelConfigError(f"ensemble_scheduling: step {number} needs model_name, input_map and output_map")
        if step.model == message.name:
            raise ModelConfigError(f"ensemble_scheduling: step {number} is the ensemble itself")
    makers = _makers(steps, [tensor.name for tensor in message.input])
    for number, step in enumerate(steps):
        if missing := sorted(set(step.inputs.values()) - makers.keys()):
            raise ModelConfigError(f"ensemble_scheduling: step {number} ('{step.model}') reads '{missing[0]}', which "
                                   "is neither an input of the ensemble nor an output of a step")
    if missing := sorted({tensor.name for tensor in message.output} - makers.keys()):
        raise ModelConfigError(f"ensemble_scheduling: output '{missing[0]}' is made by no step")
    _refuse_circles(steps, makers)
    return steps


def called_models(name: str, steps_of: Callable[[str], Sequence[EnsembleStep]]) -> list[str]:
    """Return the models that an ensemble calls, callees before callers.

    Parameters
    ----------
    name : str
        Name of the ensemble.
    steps_of : callable
        Function that returns the steps of a model by name, () if it is not an ensemble; called once for each model.

    Raises
    ------
    CircleError
        An ensemble calls itself.
    ModelConfigError
        The nesting exceeds MAX_NESTED, or the number of steps MAX_STEPS.
    """
    counts: dict[str, int] = {}         # number of steps by model, in the order of the result
    depths: dict[str, int] = {}         # nesting depth by model

    def visit(model: str, above: tuple[str, ...]) -> None:
        if model in above:
            cycle = " -> ".join((*above[above.index(model):], model))
            raise EnsembleCycleError(f"ensemble_scheduling: {cycle} is a cycle")
        if model in counts:
            return
        steps = steps_of(model) if len(above) <= MAX_NESTED else ()         # the error is raised at the first one
        for step in steps:
            visit(step.model, (*above, model))
        depths[model] = max((1 + depths[step.model] for step in steps), default=0)
        counts[model] = sum(1 + counts[step.model] for step in steps)
        if depths[model] > MAX_NESTED:
            raise ModelConfigError(f"ensemble_scheduling: {depths[model]} ensembles call each other, more than the "
                                   f"limit of {MAX_NESTED}")
        if counts[model] > MAX_STEPS:
            raise ModelConfigError(f"ensemble_scheduling: '{model}' has {counts[model]} steps with those of the "
                                   f"ensembles that it calls, more than the limit of {MAX_STEPS}")

    visit(name, ())
    return [model for model in counts if model != name]


def _makers(steps: Sequence[EnsembleStep], inputs: Sequence[str]) -> dict[str, int]:
    """Return the index of the step that produces each tensor; -1 for inputs of the ensemble."""
    makers = dict.fromkeys(inputs, -1)
    for number, step in enumerate(steps):
        for tensor in step.outputs.values():
            if tensor in makers:
                raise ModelConfigError(f"ensemble_scheduling: '{tensor}' is made twice, the second time by step "
                                       f"{number} ('{step.model}')")
            makers[tensor] = number
    return makers


def _refuse_circles(steps: Sequence[EnsembleStep], makers: Mapping[str, int]) -> None:
    needs = {number: {makers[tensor] for tensor in step.inputs.values()} - {-1} for number, step in enumerate(steps)}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        raise ModelConfigError(f"ensemble_scheduling: steps {error.args[1]} wait for each other") from error
