"""The steps of an ensemble: models, and the tensors that pass between them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from infer_server.errors import ModelConfigError
from protos import model_config


@dataclass(frozen=True)
class Step:
    """One model of an ensemble; the maps lead from its own names to the ensemble's tensors."""
    model: str
    version: str                            # "": the highest that is ready
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def steps_of(message: model_config.ModelConfig) -> tuple[Step, ...]:
    """Raises ModelConfigError: a tensor that no step makes, or two do, or steps that wait for each other."""
    if not message.HasField("ensemble_scheduling"):
        return ()
    steps = tuple(Step(step.model_name, str(step.model_version) if step.model_version > 0 else "",
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


def _makers(steps: Sequence[Step], inputs: Sequence[str]) -> dict[str, int]:
    """Which step makes each tensor; -1: it is an input of the ensemble."""
    makers = dict.fromkeys(inputs, -1)
    for number, step in enumerate(steps):
        for tensor in step.outputs.values():
            if tensor in makers:
                raise ModelConfigError(f"ensemble_scheduling: '{tensor}' is made twice, the second time by step "
                                       f"{number} ('{step.model}')")
            makers[tensor] = number
    return makers


def _refuse_circles(steps: Sequence[Step], makers: Mapping[str, int]) -> None:
    needs = {number: {makers[tensor] for tensor in step.inputs.values()} - {-1} for number, step in enumerate(steps)}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        raise ModelConfigError(f"ensemble_scheduling: steps {error.args[1]} wait for each other") from error
