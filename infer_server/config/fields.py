"""Table of the fields of config.pbtxt: each is served, mapped to something equivalent, advisory, or refused.

The table has a line for each field, or for a message whose fields are all treated alike; a test walks the descriptor,
so that none is ignored. A second table has the limit of every number, checked before anything is allocated.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from infer_server.errors import ModelConfigError


class Verdict(Enum):
    """Treatment of a field of config.pbtxt."""
    SERVED = "served"           # as in Triton
    MAPPED = "mapped"           # mapped to an equivalent setting
    ADVISORY = "advisory"       # kept and reported; the model works without it
    REFUSED = "refused"         # the field cannot be ignored: the model would not work as intended


@dataclass(frozen=True)
class Treatment:
    """Verdict on a field, with a note on what happens instead, or what to write instead."""
    verdict: Verdict
    note: str = ""              # empty for SERVED


@dataclass(frozen=True)
class Finding:
    """Field of a configuration that is not just served."""
    path: str
    treatment: Treatment

    def __str__(self) -> str:
        return f"{self.path}: {self.treatment.note}"


def _mapped(note: str) -> Treatment:
    return Treatment(Verdict.MAPPED, note)


def _advisory(note: str) -> Treatment:
    return Treatment(Verdict.ADVISORY, note)


def _refused(note: str) -> Treatment:
    return Treatment(Verdict.REFUSED, note)


_SERVED = Treatment(Verdict.SERVED)
_GPU_ADVICE = _advisory("an execution on a GPU is one CUDA graph, with pinned memory; it has no effect")
_LAYOUT = "tensors are linear, row-major; export the model with such inputs and outputs, and remove it"
_ONE_BY_ONE = _mapped("a Python model or an ensemble gets requests one by one: no tensor is computed for a batch, as "
                      "in Triton")

# Treatment by path; a line also applies to all fields below it that have no line of their own.
TREATMENTS: dict[str, Treatment] = {
    "name": _SERVED,
    "platform": _SERVED,
    "backend": _SERVED,
    "runtime": _advisory("the server's own runtime is used"),
    "version_policy": _SERVED,
    "max_batch_size": _SERVED,
    "input": _SERVED,
    "input.format": _advisory("only dims are used; nothing is transposed"),
    "input.reshape": _SERVED,
    "input.is_shape_tensor": _advisory("the build detects shape tensors"),
    "input.allow_ragged_batch": _SERVED,
    "input.optional": _SERVED,                          # requires a default value in the model
    "input.is_non_linear_format_io": _refused(_LAYOUT),
    "output": _SERVED,
    "output.is_shape_tensor": _advisory("all outputs are treated alike"),
    "output.is_non_linear_format_io": _refused(_LAYOUT),
    "batch_input": _ONE_BY_ONE,
    "batch_output": _ONE_BY_ONE,
    "optimization": _advisory("the build always optimises fully; precision and threads are `parameters`"),
    "optimization.execution_accelerators": _mapped(
        "a precision_mode becomes the parameter precision; the rest has no effect"),
    "optimization.priority": _advisory("all models' threads have the same priority"),
    "optimization.cuda": _GPU_ADVICE,
    "optimization.input_pinned_memory": _GPU_ADVICE,
    "optimization.output_pinned_memory": _GPU_ADVICE,
    "optimization.gather_kernel_buffer_threshold": _GPU_ADVICE,
    "optimization.eager_batching": _advisory("requests are copied into a batch when an instance is free for it"),
    "dynamic_batching": _SERVED,
    "sequence_batching": _SERVED,
    "sequence_batching.direct.minimum_slot_utilization": _advisory("a batch contains the available requests"),
    "sequence_batching.oldest.preserve_ordering": _advisory("the requests of a sequence are answered in their order"),
    "sequence_batching.state.use_same_buffer_for_input_output": _advisory("a state is copied between requests, but "
                                                                          "for those with use_growable_memory"),
    "sequence_batching.state.use_growable_memory": _SERVED,     # for engines, up to the parameter state_capacity
    "sequence_batching.iterative_sequence": _refused("only a Python model can reschedule requests, and this model is "
                                                     "none; remove it"),
    "ensemble_scheduling": _SERVED,
    "ensemble_scheduling.step.model_namespace": _refused("names of models are unique; rename it, and remove this"),
    "instance_group.name": _SERVED,
    "instance_group.kind": _SERVED,                     # KIND_GPU without a GPU: see --kind-gpu
    "instance_group.count": _SERVED,
    "instance_group.rate_limiter": _SERVED,             # with --rate-limit execution_count, as in Triton
    "instance_group.gpus": _SERVED,
    "instance_group.secondary_devices": _refused("secondary devices are not supported; remove it"),
    "instance_group.profile": _advisory("profiles are the build's: `parameters` opt_shapes, min_shapes, max_shapes"),
    "instance_group.passive": _refused("passive instances are not supported; remove the group"),
    "instance_group.host_policy": _advisory("use the parameter pin to pin an instance's threads to CPUs"),
    "default_model_filename": _SERVED,
    "cc_model_filenames": _advisory("a plan records its own target; only default_model_filename is used"),
    "metric_tags": _SERVED,
    "parameters": _SERVED,
    "model_warmup": _SERVED,
    "model_operations": _refused("libraries of custom operators are not supported; export the model without them, or "
                                 "implement them in a Python model"),
    "model_transaction_policy.decoupled": _SERVED,
    "model_repository_agents": _refused("repository agents are not supported; check or decrypt the files before they "
                                        "are put into the repository, and remove it"),
    "response_cache": _SERVED,
    "model_metrics": _advisory("the metrics' buckets are fixed"),
}

MAX_INSTANCES = 1024            # instances of a model, each with a thread and a context
MAX_PROCESSES = 256             # instances of a Python model, each with a process
MAX_THREADS = 256               # threads of an instance
MAX_WORKING_THREADS = 1024      # threads of all instances of a model
MAX_ITEMS = 1 << 20             # items of a batch
MAX_TOKENS = 1 << 24            # tokens of the growable states of a sequence
MAX_ARRAY_BYTES = 1 << 30       # bytes of an array that a configuration defines: warm-up inputs, initial states
_EXTENT = (1 << 31) - 1

# Largest value of each number by path; None if the value does not affect resources.
LIMITS: dict[str, int | None] = {
    "max_batch_size": MAX_ITEMS,
    "version_policy.latest.num_versions": None,
    "version_policy.specific.versions": None,
    "input.dims": _EXTENT,
    "input.reshape.shape": _EXTENT,
    "output.dims": _EXTENT,
    "output.reshape.shape": _EXTENT,
    "optimization.graph.level": None,
    "optimization.cuda.graph_spec.batch_size": None,
    "optimization.cuda.graph_spec.graph_lower_bound.batch_size": None,
    "optimization.gather_kernel_buffer_threshold": None,
    "dynamic_batching.preferred_batch_size": MAX_ITEMS,
    "dynamic_batching.max_queue_delay_microseconds": None,
    "dynamic_batching.priority_levels": 64,
    "dynamic_batching.default_priority_level": None,    # checked against priority_levels
    "dynamic_batching.default_queue_policy.default_timeout_microseconds": None,
    "dynamic_batching.default_queue_policy.max_queue_size": None,
    "sequence_batching.max_sequence_idle_microseconds": None,
    "sequence_batching.control_input.control.int32_false_true": None,
    "sequence_batching.control_input.control.fp32_false_true": None,
    "sequence_batching.state.dims": _EXTENT,
    "sequence_batching.state.initial_state.dims": _EXTENT,
    "sequence_batching.direct.max_queue_delay_microseconds": None,
    "sequence_batching.direct.minimum_slot_utilization": None,
    "sequence_batching.oldest.max_candidate_sequences": 1 << 16,
    "sequence_batching.oldest.preferred_batch_size": MAX_ITEMS,
    "sequence_batching.oldest.max_queue_delay_microseconds": None,
    "ensemble_scheduling.step.model_version": None,
    "ensemble_scheduling.max_inflight_requests": None,
    "instance_group.count": MAX_INSTANCES,
    "instance_group.gpus": None,                        # checked against the GPUs of the machine
    "instance_group.rate_limiter.resources.count": None,
    "instance_group.rate_limiter.priority": None,
    "instance_group.secondary_devices.device_id": None,
    "model_warmup.batch_size": MAX_ITEMS,
    "model_warmup.count": 10_000,
    "model_metrics.metric_control.histogram_options.buckets": None,
}


def check_limits(message: Message) -> None:
    """Raise ModelConfigError with every number of a configuration that is above its limit."""
    excesses = [f"{path}: {number} is more than the limit of {most}"
                for path, value in _fields(message, "") if (most := LIMITS.get(path)) is not None
                for number in ([value] if isinstance(value, int | float) else value) if number > most]
    if excesses:
        raise ModelConfigError(*excesses)


def check_threads(instances: int, threads: int) -> None:
    """Raise ModelConfigError if a model's instances have too many threads in total.

    Parameters
    ----------
    instances : int
        Number of instances.
    threads : int
        Threads of each instance.
    """
    if (total := instances * threads) > MAX_WORKING_THREADS:
        raise ModelConfigError(f"instance_group.count: {instances} instances of {threads} threads are {total} threads, "
                               f"more than the limit of {MAX_WORKING_THREADS}; write a lower count, or fewer threads")


def check_array(where: str, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Raise ModelConfigError for an array of more than MAX_ARRAY_BYTES, before it is allocated."""
    size = math.prod(shape) * dtype.itemsize
    if size > MAX_ARRAY_BYTES:
        raise ModelConfigError(f"{where}: an array of the dims {list(shape)} takes {size} bytes, more than the limit "
                               f"of {MAX_ARRAY_BYTES}; write smaller dims")


def treatment(path: str) -> Treatment:
    """Return the treatment of a field by its path in the descriptor. Raises KeyError if the table has no line."""
    while path not in TREATMENTS:
        path, dot, _ = path.rpartition(".")
        if not dot:
            raise KeyError(path)
    return TREATMENTS[path]


def findings(message: Message) -> list[Finding]:
    """Return the fields of a configuration that are not just served, each once, in the order of the descriptor."""
    by_line: dict[str, Finding] = {}
    for path, _ in _fields(message, ""):
        line = _line(path)
        if line in TREATMENTS and TREATMENTS[line].verdict is not Verdict.SERVED:
            by_line.setdefault(line, Finding(line, TREATMENTS[line]))
    return list(by_line.values())


def _line(path: str) -> str:
    """Return the most specific line of TREATMENTS that covers a field path, else the path itself."""
    line = path
    while line not in TREATMENTS and "." in line:
        line = line.rpartition(".")[0]
    return line if line in TREATMENTS else path



def _fields(message: Message, above: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of all fields that are set, messages before their fields."""
    for field, value in message.ListFields():
        path = f"{above}{field.name}"
        yield path, value
        for part in _messages(field, value):
            yield from _fields(part, f"{path}.")


def _messages(field: FieldDescriptor, value: Any) -> list[Message]:
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return []
    return [value] if isinstance(value, Message) else list(value)
