"""Parse sequence_batching: control inputs, implicit states, and how requests of sequences are batched."""
from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.policy import BatchPolicy
from infer_server.batching.request import InSequence
from infer_server.batching.sequences import ControlInput, ControlKind, SequencePolicy, SequenceState
from infer_server.config.build import build_options
from infer_server.config.fields import check_array
from infer_server.config.paths import INITIAL_STATE, inside
from infer_server.errors import InvalidRequestError, ModelConfigError
from infer_server.protocol.codec import FROM_CONFIG, Datatype
from infer_server.protocol.parameters import Parameters, typed
from infer_server.protos import model_config

_IDLE_US = 1_000_000
_CAPACITY = 2048            # default of the parameter state_capacity
_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")
_VALUES = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}


@dataclass(frozen=True)
class SequenceConfig:
    """Sequence batching configuration of a model."""
    policy: SequencePolicy
    batching: BatchPolicy                   # how requests of several sequences are batched
    datatypes: dict[str, Datatype]          # datatypes of control inputs and states

    @property
    def added(self) -> set[str]:
        """Inputs of the model that the server adds to requests."""
        return {control.name for control in self.policy.controls} | {
            state.input for state in (*self.policy.states, *self.policy.growing)}

    @property
    def state_outputs(self) -> list[str]:
        """Outputs of the model that are states."""
        return [state.output for state in (*self.policy.states, *self.policy.growing)]


def sequences_of(message: model_config.ModelConfig, folder: Path | None = None) -> SequenceConfig | None:
    """Parse the sequence batching of a configuration; None if it has none.

    Files of initial states are read from `folder`, the model's folder, if it is given. Raises ModelConfigError.
    """
    if not message.HasField("sequence_batching"):
        return None
    settings = message.sequence_batching
    batch = max(1, message.max_batch_size)
    oldest = settings.oldest if settings.HasField("oldest") else None
    if oldest and oldest.max_candidate_sequences < 0:
        raise ModelConfigError("sequence_batching.oldest.max_candidate_sequences: expected 0 or more, got "
                               f"{oldest.max_candidate_sequences}")
    for size in oldest.preferred_batch_size if oldest else ():
        if size < 1 or (message.max_batch_size > 0 and size > message.max_batch_size):
            raise ModelConfigError(f"sequence_batching.oldest.preferred_batch_size: {size} is not within 1..{batch}, "
                                   "the max_batch_size")
    datatypes: dict[str, Datatype] = {}
    controls = tuple(_control(each.name, control, datatypes) for each in settings.control_input
                     for control in each.control)
    states = [_state(state, message.max_batch_size > 0, folder, datatypes) for state in settings.state]
    growable = [each.use_growable_memory for each in settings.state]
    capacity = int(build_options(message)[0].state_capacity or _CAPACITY) if any(growable) else 0
    if states and settings.iterative_sequence:
        raise ModelConfigError("sequence_batching: a state is passed from one request to the next, but with "
                               "iterative_sequence each request is a sequence; keep the state in model.py, by the id "
                               "of a control_input of CONTROL_SEQUENCE_CORRID")
    policy = SequencePolicy(
        idle_us=settings.max_sequence_idle_microseconds or _IDLE_US, controls=controls,
        states=tuple(state for state, grows in zip(states, growable, strict=True) if not grows),
        candidates=(oldest.max_candidate_sequences or batch) if oldest else batch, batched=message.max_batch_size > 0,
        iterative=settings.iterative_sequence,
        growing=tuple(state for state, grows in zip(states, growable, strict=True) if grows), capacity=capacity)
    batching = BatchPolicy(
        batch, frozenset(oldest.preferred_batch_size if oldest else ()),
        (oldest or settings.direct).max_queue_delay_microseconds,
        merges=message.max_batch_size > 0 and not any(growable))        # each sequence has memory of its own
    return SequenceConfig(policy, batching, datatypes)


def _control(name: str, control: Any, datatypes: dict[str, Datatype]) -> ControlInput:
    kind = ControlKind(model_config.ModelSequenceBatching.Control.Kind.Name(control.kind))
    if kind is ControlKind.CORRELATION:
        datatype = FROM_CONFIG.get(control.data_type)
        if datatype is None or datatype.name not in ("UINT64", "INT64", "UINT32", "INT32", "BYTES"):
            raise ModelConfigError(f"control_input '{name}': data_type must be TYPE_UINT64, TYPE_INT64, TYPE_UINT32, "
                                   "TYPE_INT32 or TYPE_STRING")
        datatypes[name] = datatype
        return ControlInput(name, kind, datatype.array)
    for field, of in _VALUES.items():
        values = getattr(control, field)
        if len(values) == 2:
            datatypes[name] = next(each for each in FROM_CONFIG.values() if each.name == of)
            return ControlInput(name, kind, datatypes[name].array, values[0], values[1])
    raise ModelConfigError(f"control_input '{name}': give two values of int32_false_true, fp32_false_true or "
                           "bool_false_true")


def _state(state: Any, batched: bool, folder: Path | None, datatypes: dict[str, Datatype]) -> SequenceState:
    datatype = FROM_CONFIG.get(state.data_type)
    if not state.input_name or not state.output_name or datatype is None:
        raise ModelConfigError("sequence_batching.state: give input_name, output_name and data_type")
    if any(extent < -1 for extent in state.dims):
        raise ModelConfigError(f"state '{state.input_name}': dims {list(state.dims)} must be positive, or -1 for any "
                               "extent")
    datatypes[state.input_name] = datatypes[state.output_name] = datatype
    shape = tuple(1 if extent == -1 else extent for extent in state.dims)
    if len(state.initial_state) > 1:
        raise ModelConfigError(f"state '{state.input_name}': one initial_state at most")
    value = _zeros(state.input_name, shape, datatype)
    for initial in state.initial_state:
        value = _initial(state.input_name, initial, datatype, folder)
    return SequenceState(state.input_name, state.output_name, value[np.newaxis] if batched else value)


def _initial(name: str, initial: Any, datatype: Datatype, folder: Path | None) -> NDArray[Any]:
    shape = tuple(initial.dims)
    check_array(f"state '{name}': initial_state", shape, datatype.array)
    if FROM_CONFIG.get(initial.data_type) != datatype or any(extent < 0 for extent in shape):
        raise ModelConfigError(f"state '{name}': initial_state must have the state's data_type, and numbers as "
                               "dims; a 0 among them begins without elements")
    if initial.WhichOneof("state_data") == "data_file" and folder:
        file = inside(folder, folder / INITIAL_STATE, initial.data_file, f"state '{name}': initial_state")
        try:
            return np.fromfile(file, datatype.array, math.prod(shape) + 1).reshape(shape)
        except (OSError, ValueError) as error:
            raise ModelConfigError(f"state '{name}': initial_state: {file}: {error}") from error
    return _zeros(name, shape, datatype)


def _zeros(name: str, shape: tuple[int, ...], datatype: Datatype) -> NDArray[Any]:
    check_array(f"state '{name}'", shape, datatype.array)
    try:
        return np.full(shape, b"" if datatype.array.hasobject else 0, datatype.array)
    except (MemoryError, ValueError) as error:      # too many dims, or too large ones
        raise ModelConfigError(f"state '{name}': an array of dims {list(shape)} cannot be made: {error}; write smaller "
                               "dims") from error


def sequence_of(parameters: Parameters, otherwise: InSequence | None = None) -> InSequence | None:
    """Return the position in a sequence that request parameters give, or `otherwise` if they give none.

    The result is None for an id of 0 or "". Raises InvalidRequestError.
    """
    if parameters.keys().isdisjoint(_SEQUENCE_PARAMETERS):
        return otherwise
    correlation = parameters.get("sequence_id", otherwise.id if otherwise else 0)
    if type(correlation) not in (int, str):
        raise InvalidRequestError("invalid value type for 'sequence_id' parameter: expected int or str, got "
                                  f"{type(correlation).__name__}")
    start, end = (typed(parameters, name, bool, False) for name in ("sequence_start", "sequence_end"))
    return InSequence(correlation, start, end) if correlation else None
