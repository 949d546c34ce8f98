"""Models that run on an engine: a plan, or an ONNX file from which one was built."""
from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from infer_server.backend import (
    BATCH,
    CachingEngine,
    Engine,
    ExecutionContext,
    GpuDevice,
    Shapes,
    ZeroCopyContext,
    is_mixed,
    is_open,
    precision_of,
    warm_up,
)
from infer_server.batching.batch_times import ShortBatches
from infer_server.batching.engine_executor import EngineExecutor
from infer_server.batching.instances import Executor
from infer_server.batching.request import Arrays
from infer_server.batching.state_caches import CachingExecutor
from infer_server.config.autocomplete import complete, takes_whole
from infer_server.config.config import ModelConfig, from_message
from infer_server.config.signature import ANY_ITEMS, Items, ModelSignature
from infer_server.engines.errors import EngineError
from infer_server.engines.machine.cpu import allowed_cpus
from infer_server.errors import ModelConfigError
from infer_server.protos import model_config
from infer_server.rate_limiter import RateLimiter
from infer_server.repository.cores import CpuDealer, check_memory, check_state_memory
from infer_server.repository.folders import Source
from infer_server.repository.kinds.padding import PaddedExecutor, Padding, padding_of
from infer_server.repository.kinds.ragged import RaggedExecutor, single_request_shapes
from infer_server.repository.kinds.warmup import warmup_requests
from infer_server.repository.model import QueuedModel

log = logging.getLogger(__name__)


class ServedEngine(NamedTuple):
    """Engine with the size and build time of its plan."""
    engine: Engine
    plan_bytes: int                     # size of the plan file, an estimate of the engine's constants
    built_secs: float = 0.0             # time at which the plan was written, in seconds since the epoch


class Engines(NamedTuple):
    """Engines of a model, one for each device on which instances execute."""
    loaded: Mapping[int | None, ServedEngine]   # by GPU number; None is the CPU
    gpus: Sequence[GpuDevice] = ()            # GPUs of this machine that may run the model
    instances: int = 1                  # default number of instances on the CPU

    @property
    def first(self) -> Engine:
        """Any of the engines: they differ only in their device."""
        return next(iter(self.loaded.values())).engine


class EngineModel(QueuedModel):
    """Model that runs on an engine, with warmed-up contexts."""

    def __init__(self, source: Source, engines: Engines, loop: asyncio.AbstractEventLoop, dealer: CpuDealer,
                 limiter: RateLimiter | None, make_signature: Callable[..., ModelSignature] = ModelSignature) -> None:
        """Create instances and warm them up; `dealer` provides the CPUs of pinned threads."""
        engine = engines.first
        message = complete(source.message, source.name, engine, source.file.name, engines.instances, engines.gpus)
        config = from_message(message, source.folder)
        if config.batched and not config.ragged and (why := _why_unbatched(engine)):
            config = _without_merging(config, message, why)
        checked = is_open(engine) and not config.sequences      # requests of sequences lack the shapes of states
        signature = make_signature(config, items_of(config, engine), _check(engine, config) if checked else None,
                                   defaults_of(config, engine))
        super().__init__(source.name, source.version, message, config, signature, loop)
        if None in engines.loaded:
            cpu = engines.loaded[None].engine
            check_memory(config.devices.count(None), cpu.threads, cpu.arena_bytes)
        own = [engines.loaded[device].engine for device in config.devices]
        cpus = [dealer.deal(each.threads) if config.build.pin == "true" else None for each in own]
        contexts = [each.create_context(cores) for each, cores in zip(own, cpus, strict=True)]
        growing = config.sequences.policy.growing if config.sequences else ()
        if growing:
            _check_growing(config, engine)
        padding = padding_of(config, engine, contexts[0])
        if padding:
            signature.padded = padding.padded
        short = _short(engines, config, message)
        began = time.monotonic()
        if not growing:                                         # else caches have contexts of their own
            self._warm_up_contexts(contexts, engine, short)
        states = config.sequences.policy.states if config.sequences else ()
        outputs = list(dict.fromkeys([*(spec.name for spec in config.outputs), *(state.output for state in states)]))
        executors = [_executor(context, config, outputs, engine, padding, device)
                     for context, device in zip(contexts, config.devices, strict=True)]
        for executor in executors:
            for request in warmup_requests(self, message, source.folder):
                executor.execute([request])
        self.warmup_secs = time.monotonic() - began
        self.precision, self.built_secs = precision_of(engine), next(iter(engines.loaded.values())).built_secs
        if not (config.ragged or padding or config.sequences):      # such batches are assembled in host memory
            self.zero_copy_devices = {None, *(device for context, device in zip(contexts, config.devices, strict=True)
                                    if device is not None and isinstance(context, ZeroCopyContext)
                                    and context.binds_arrays)}
        self.gpus = tuple(gpu for gpu in engines.gpus if gpu.number in engines.loaded)
        self.device_bytes = {
            device: each.plan_bytes + config.devices.count(device) * each.engine.threads * each.engine.arena_bytes
            for device, each in engines.loaded.items()}
        self.memory_bytes = sum(self.device_bytes.values())
        self.start(executors, limiter, [cores[0] if cores else None for cores in cpus], short)


    def _warm_up_contexts(self, contexts: Sequence[ExecutionContext], engine: Engine,
                          short: ShortBatches | None) -> None:
        """Execute on zeros in each instance's context, and record the times."""
        for context, device in zip(contexts, self.config.devices, strict=True):
            times = _warm_up(self.name, context, engine)
            if not times:
                break
            for batch, ns in times.items():
                self.record_time(batch, ns)
                if short is not None and device is None:
                    short.add(batch, ns, ns)


def _executor(context: ExecutionContext, config: ModelConfig, outputs: Sequence[str], engine: Engine,
              padding: Padding | None, gpu: int | None) -> Executor:
    if config.sequences and (growing := config.sequences.policy.growing):
        assert isinstance(engine, CachingEngine)
        return CachingExecutor(config.name, engine, context, config.sequences.policy.capacity,
                               {state.input: state.initial for state in growing}, outputs)
    if config.ragged:
        return RaggedExecutor(context, config, config.ragged, gpu)
    if padding:
        return PaddedExecutor(padding, context, outputs, engine.max_batch, gpu)
    return EngineExecutor(context, outputs, engine.max_batch, is_open(engine), gpu, is_mixed(engine))


def _check_growing(config: ModelConfig, engine: Engine) -> None:
    """Check the states that grow in place against the engine, and compile what their executions need.

    Raises
    ------
    ModelConfigError
        They cannot grow in place, or sequences of the full capacity take more memory than there is.
    """
    assert config.sequences
    policy, where = config.sequences.policy, "sequence_batching.state.use_growable_memory"
    if any(device is not None for device in config.devices) or not isinstance(engine, CachingEngine):
        raise ModelConfigError(f"{where}: states grow in place on the CPU only; write instance_group {{ kind: "
                               "KIND_CPU }, or remove it")
    if engine.threads > 1:
        raise ModelConfigError(f"{where}: an engine of {engine.threads} threads copies its states; write the parameter "
                               "threads: 1, or remove it")
    caches = {cache["past"]: cache for cache in engine.metadata.get("caches", ())}
    for state in policy.growing if caches else ():
        if state.input not in caches or caches[state.input]["present"] != state.output:
            raise ModelConfigError(f"{where}: output '{state.output}' is not input '{state.input}' with tokens added "
                                   "by a Concat, Attention or GroupQueryAttention; remove it")
        if any(spec.name == state.output for spec in config.outputs):
            raise ModelConfigError(f"{where}: output '{state.output}' stays in its place and is not sent; remove it "
                                   "from `output`")
    if missing := caches.keys() - {state.input for state in policy.growing}:
        raise ModelConfigError(f"{where}: '{min(missing)}' grows with the other states; give it a `state` with "
                               "use_growable_memory, too")
    try:
        cache = engine.create_cache(policy.capacity)
        cache.compile()
        cache.start({state.input: state.initial for state in policy.growing})
    except EngineError as error:
        raise ModelConfigError(f"{where}: {error}") from error
    token_bytes = sum(state.initial.itemsize * math.prod(
        extent for axis, extent in enumerate(state.initial.shape) if axis != caches[state.input]["axis"])
        for state in policy.growing)
    check_state_memory(config.instances * policy.candidates, policy.capacity, token_bytes)


def _warm_up(name: str, context: ExecutionContext, engine: Engine) -> Mapping[int, int]:
    """Warm up a context and return batch times; {} if a model of strings rejects the strings that were tried."""
    try:
        return warm_up(context, engine)
    except EngineError as error:
        if not any(tensor.dtype == "object" for tensor in engine.inputs):
            raise
        log.warning("%s is served without a warm-up, because no string that it accepts is known: %s", name, error)
        return {}


def defaults_of(config: ModelConfig, engine: Engine) -> Arrays:
    """Return the model's default values of optional inputs."""
    values = engine.metadata.get("defaults", {})
    return {spec.name: np.array(values[spec.name], spec.datatype.array) for spec in config.inputs if spec.is_optional}


def items_of(config: ModelConfig, engine: Engine) -> Items:
    """Return how many items a request for an engine may have, and whether it may be split.

    Raises
    ------
    ModelConfigError
        split_requests is set, and the model's batch cannot be split.
    """
    split = config.build.split_requests == "true"
    if split and engine.dependence:
        raise ModelConfigError("parameter split_requests: the items of this model's batch depend on each other: "
                               f"{engine.dependence}; remove it")
    if split and config.batched and not engine.max_batch and not config.ragged:
        raise ModelConfigError("parameter split_requests: a program takes a request whole; remove it")
    if split and config.ragged:
        raise ModelConfigError("parameter split_requests: a request of a ragged batch is executed whole; remove it")
    if config.ragged and config.batched:
        return Items(True, config.batching.max_batch_size)
    if not engine.max_batch:
        return Items(config.batched, config.batching.max_batch_size if config.batched else 1)
    if is_mixed(engine):
        return Items(False, engine.max_batch, {tensor.name: tensor.shape.index(BATCH) for tensor in engine.inputs
                                               if BATCH in tensor.shape})
    if engine.dependence or (config.batched and not split):
        return Items(True, config.batching.max_batch_size if config.batched else engine.max_batch)
    return Items(True, ANY_ITEMS)


def _why_unbatched(engine: Engine) -> str:
    """Return the reason why requests are not batched together; "" if they are.

    A program is never batched: the dependences between its items are not analysed.
    """
    if takes_whole(engine):
        return "the model is a program"
    return f"the items of a batch depend on each other ({engine.dependence})" if engine.dependence else ""


def _without_merging(config: ModelConfig, message: model_config.ModelConfig, why: str) -> ModelConfig:
    """Return a copy of the configuration without merging requests into batches."""
    if message.HasField("dynamic_batching"):
        log.warning("%s: dynamic_batching is ignored: requests are executed one by one, because %s", config.name, why)
    return replace(config, batching=replace(config.batching, merges=False))


def _short(engines: Engines, config: ModelConfig, message: model_config.ModelConfig) -> ShortBatches | None:
    """Return a record of batch times on the CPU if the event loop may execute short batches, else None.

    GPU batches are never short: an execution waits for other models' work on the device. Batches whose responses must
    keep the order of requests are excluded, because instances deliver later than the event loop.
    """
    cpu = engines.loaded.get(None)
    in_turn = config.sequences or config.ragged or message.dynamic_batching.preserve_ordering
    if cpu is None or not cpu.engine.is_steady or in_turn:
        return None
    return ShortBatches(cpu.engine.max_batch or 1, len(allowed_cpus()))


def _check(engine: Engine, config: ModelConfig) -> Callable[[Shapes], None]:
    """Return the engine's check of request shapes, which raises for shapes that it cannot run."""
    ragged = config.ragged
    return (lambda shapes: engine.check(single_request_shapes(ragged, shapes))) if ragged else engine.check
