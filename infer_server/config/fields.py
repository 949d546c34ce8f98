"""What becomes of every field that a config.pbtxt may have: served, mapped to something of ours, advisory, or refused.

The table has a line for each field, or for a message whose fields are all alike; a test walks the descriptor, so that
none is ever ignored. A second table has the limit of every number, which is checked before anything is allocated.
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
    SERVED = "served"           # as Triton does
    MAPPED = "mapped"           # to what has the same purpose here
    ADVISORY = "advisory"       # kept and reported; the model works without it
    REFUSED = "refused"         # the model would not work as it is meant to


@dataclass(frozen=True)
class Treatment:
    verdict: Verdict
    note: str = ""              # of what is not just served: what happens instead, or what to write instead


@dataclass(frozen=True)
class Finding:
    """A field that a configuration gives, and that is not just served."""
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
_OF_GPU = _advisory("a run on a GPU is one CUDA graph, with pinned memory; it changes nothing")
_LAYOUT = "tensors are linear, row-major; export the model with such inputs and outputs, and remove it"
_ONE_BY_ONE = _mapped("a Python model or an ensemble gets requests one by one, and no tensors for all of them: nothing "
                      "is made, as in Triton")

# By path; a line holds for all that is below it and has none of its own.
TREATMENTS: dict[str, Treatment] = {
    "name": _SERVED,
    "platform": _SERVED,
    "backend": _SERVED,
    "runtime": _advisory("the backend's own library is what runs"),
    "version_policy": _SERVED,
    "max_batch_size": _SERVED,
    "input": _SERVED,
    "input.format": _advisory("what dims say counts; nothing is transposed"),
    "input.reshape": _SERVED,
    "input.is_shape_tensor": _advisory("the build finds by itself which inputs shapes follow from"),
    "input.allow_ragged_batch": _SERVED,
    "input.optional": _SERVED,                          # where the model has a value for it
    "input.is_non_linear_format_io": _refused(_LAYOUT),
    "output": _SERVED,
    "output.is_shape_tensor": _advisory("outputs are alike, whatever is in them"),
    "output.is_non_linear_format_io": _refused(_LAYOUT),
    "batch_input": _ONE_BY_ONE,
    "batch_output": _ONE_BY_ONE,
    "optimization": _advisory("the build optimises every model wholly; precision and threads are "
                              "`parameters`"),
    "optimization.execution_accelerators": _mapped(
        "a precision_mode becomes the parameter precision; the rest changes nothing"),
    "optimization.priority": _advisory("all models' threads have the same priority"),
    "optimization.cuda": _OF_GPU,
    "optimization.input_pinned_memory": _OF_GPU,
    "optimization.output_pinned_memory": _OF_GPU,
    "optimization.gather_kernel_buffer_threshold": _OF_GPU,
    "optimization.eager_batching": _advisory("requests are copied into a batch when an instance is free for it"),
    "dynamic_batching": _SERVED,
    "sequence_batching": _SERVED,
    "sequence_batching.direct.minimum_slot_utilization": _advisory("a batch holds the requests that are there"),
    "sequence_batching.oldest.preserve_ordering": _advisory("the requests of a sequence are answered in their order"),
    "sequence_batching.state.use_same_buffer_for_input_output": _advisory("a state is copied between requests"),
    "sequence_batching.state.use_growable_memory": _refused("a state has the shape of the model's output; remove it"),
    "sequence_batching.iterative_sequence": _refused("an engine has done with a request when it was executed; only a "
                                                     "Python model asks for it again, and this one is none: remove it"),
    "ensemble_scheduling": _SERVED,
    "ensemble_scheduling.step.model_namespace": _refused("names of models are unique; rename it, and remove this"),
    "instance_group.name": _SERVED,
    "instance_group.kind": _SERVED,                     # what no GPU runs is served on the CPU: see --kind-gpu
    "instance_group.count": _SERVED,
    "instance_group.rate_limiter": _SERVED,             # under --rate-limit execution_count, as there
    "instance_group.gpus": _SERVED,
    "instance_group.secondary_devices": _refused("there are no such devices here; remove it"),
    "instance_group.profile": _advisory("profiles are the build's: `parameters` opt_shapes, min_shapes, max_shapes"),
    "instance_group.passive": _refused("an instance that is given no requests has no use here; remove its group"),
    "instance_group.host_policy": _advisory("the parameter pin keeps an instance's threads on CPUs of their own"),
    "default_model_filename": _SERVED,
    "cc_model_filenames": _advisory("a plan says by itself which GPUs run it; default_model_filename counts"),
    "metric_tags": _SERVED,
    "parameters": _SERVED,
    "model_warmup": _SERVED,
    "model_operations": _refused("operators come from ONNX, and not from libraries; export the model without "
                                 "them, or do their part in a Python model"),
    "model_transaction_policy.decoupled": _SERVED,
    "model_repository_agents": _refused("no agents run here; check or decrypt the files before they are put into the "
                                        "repository, and remove it"),
    "response_cache": _SERVED,
    "model_metrics": _advisory("the metrics' buckets are fixed"),
}

MOST_INSTANCES = 1024           # of a model; each has a thread and a context
MOST_PROCESSES = 256            # instances of a Python model; each is a process
MOST_THREADS = 256              # of an instance
MOST_WORKING_THREADS = 1024     # of all instances of a model together
MOST_ITEMS = 1 << 20            # of a batch
MOST_ARRAY_BYTES = 1 << 30      # of what the server makes of a configuration: the inputs of a warm-up, a state
_EXTENT = (1 << 31) - 1

# The largest value of each number, by path; None: any value costs the same.
LIMITS: dict[str, int | None] = {
    "max_batch_size": MOST_ITEMS,
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
    "dynamic_batching.preferred_batch_size": MOST_ITEMS,
    "dynamic_batching.max_queue_delay_microseconds": None,
    "dynamic_batching.priority_levels": 64,
    "dynamic_batching.default_priority_level": None,    # compared with priority_levels
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
    "sequence_batching.oldest.preferred_batch_size": MOST_ITEMS,
    "sequence_batching.oldest.max_queue_delay_microseconds": None,
    "ensemble_scheduling.step.model_version": None,
    "ensemble_scheduling.max_inflight_requests": None,
    "instance_group.count": MOST_INSTANCES,
    "instance_group.gpus": None,                        # compared with those of the machine
    "instance_group.rate_limiter.resources.count": None,
    "instance_group.rate_limiter.priority": None,
    "instance_group.secondary_devices.device_id": None,
    "model_warmup.batch_size": MOST_ITEMS,
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
    """Raise ModelConfigError if the instances of a model, of so many threads each, have too many threads together."""
    if (total := instances * threads) > MOST_WORKING_THREADS:
        raise ModelConfigError(f"instance_group.count: {instances} instances of {threads} threads are {total} threads, "
                               f"more than the limit of {MOST_WORKING_THREADS}; write a lower count, or fewer threads")


def check_array(where: str, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Raise ModelConfigError for an array that takes more than MOST_ARRAY_BYTES, before it is allocated."""
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_ARRAY_BYTES:
        raise ModelConfigError(f"{where}: an array of the dims {list(shape)} takes {size} bytes, more than the limit "
                               f"of {MOST_ARRAY_BYTES}")


def treatment(path: str) -> Treatment:
    """What becomes of a field, by its path in the descriptor. KeyError: nobody has decided."""
    while path not in TREATMENTS:
        path, dot, _ = path.rpartition(".")
        if not dot:
            raise KeyError(path)
    return TREATMENTS[path]


def findings(message: Message) -> list[Finding]:
    """The fields that a configuration gives and that are not just served, in the order of the descriptor, each once."""
    found: dict[str, Finding] = {}
    for path in _given(message, ""):
        line = _line(path)
        if line in TREATMENTS and TREATMENTS[line].verdict is not Verdict.SERVED:
            found.setdefault(line, Finding(line, TREATMENTS[line]))
    return list(found.values())


def _line(path: str) -> str:
    """The line of the table that holds for a path; of a message above every line, itself."""
    line = path
    while line not in TREATMENTS and "." in line:
        line = line.rpartition(".")[0]
    return line if line in TREATMENTS else path


def _given(message: Message, above: str) -> Iterator[str]:
    """The paths of all fields that are set, messages before what is in them."""
    return (path for path, _ in _fields(message, above))


def _fields(message: Message, above: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of all fields that are set, messages before what is in them."""
    for field, value in message.ListFields():
        path = f"{above}{field.name}"
        yield path, value
        for part in _messages(field, value):
            yield from _fields(part, f"{path}.")


def _messages(field: FieldDescriptor, value: Any) -> list[Message]:
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return []
    return [value] if isinstance(value, Message) else list(value)
