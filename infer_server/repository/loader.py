"""Load a version of a model: build its engine, complete its configuration, create its instances and warm them up."""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from infer_server.backend import SPECIALISE, EngineLoader, GpuDevice, load_plan
from infer_server.batching.cache import ResponseCache
from infer_server.config.fields import check_threads
from infer_server.config.groups import ON_CPU, REFUSED, devices, with_devices, without_gpus
from infer_server.config.kinds import ModelKind
from infer_server.engines.errors import EngineError, PlanTargetError
from infer_server.engines.machine.cpu import allowed_cpus
from infer_server.errors import ModelConfigError, NotBuiltError, RepositoryError
from infer_server.observing.custom_metrics import CustomMetrics, MetricsOwner
from infer_server.rate_limiter import RateLimiter
from infer_server.repository.building import Compiler
from infer_server.repository.cores import CpuDealer, default_instances
from infer_server.repository.folders import Source, no_such_file, read_labels
from infer_server.repository.kinds.engine_model import EngineModel, Engines, ServedEngine
from infer_server.repository.kinds.ensemble import EnsembleModel
from infer_server.repository.kinds.image_model import ImageModel
from infer_server.repository.kinds.local import UNCOUNTED, Find, ModelControl, TensorMemory
from infer_server.repository.kinds.python_model import PythonModel
from infer_server.repository.model import Model, QueuedModel

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class Loader:
    """Factory of models. `load` blocks and is called on a worker thread."""
    loop: asyncio.AbstractEventLoop             # event loop on which requests are submitted and answered
    find: Find                                  # looks up models that ensembles and Python models call, on `loop`
    control: Callable[[], ModelControl]              # loads and unloads models for Python models, on `loop`
    compiler: Compiler                          # builds model.onnx files and plans for other machines
    cache: ResponseCache                        # shared by the models that enable response_cache
    threads: int = 1                            # default of a model's `threads` parameter
    load_engine: EngineLoader = load_plan
    cores: int = 1                              # cores for the instances of a model without an instance count
    kind_gpu: str = "cpu"                       # KIND_GPU without a GPU: "cpu" runs on the CPU, "refuse" fails the load
    kind_auto: str = "cpu"                      # device of a model.onnx with KIND_AUTO groups: "cpu" or "gpu"
    limiter: RateLimiter | None = None          # None: instances execute whenever they are free
    custom_metrics: CustomMetrics = field(default_factory=CustomMetrics)        # metrics that Python models define
    memory: TensorMemory = UNCOUNTED            # accounts for tensors between the steps of ensembles
    dealer: CpuDealer = field(default_factory=lambda: CpuDealer(allowed_cpus()))

    def load(self, source: Source) -> Model:
        """Load one version of a model. Blocks.

        Raises
        ------
        RepositoryError
            The model cannot be loaded; the repository index shows the message.
        """
        auto = not source.is_onnx or self.kind_auto == "gpu"
        gpus = source.gpus() if auto or source.config.requests_gpu else []
        message = with_devices(source.message, gpus, auto)
        if source.config.requests_gpu and set(devices(message)) == {None}:
            if self.kind_gpu == "refuse":
                raise ModelConfigError(REFUSED)
            log.warning("%s: %s", source.name, ON_CPU)
        for notice in source.config.notices:
            log.warning("%s: %s", source.name, notice)
        if source.config.kind is ModelKind.ENSEMBLE:
            return self._cached(source, self._guarded(source, lambda: EnsembleModel(source, self.find, self.memory)))
        if not source.file.exists():
            raise RepositoryError(no_such_file(source, source.file))
        if source.config.kind is ModelKind.PYTHON:
            return self._cached(source, self._guarded(source, lambda: self._python_model(source)))
        return self._cached(source, self._guarded(
            source, lambda: self._engine_model(replace(source, message=message), gpus)))

    def _cached(self, source: Source, model: Model) -> Model:
        if source.config.cached:
            model.use_cache(self.cache)
        return model

    def _python_model(self, source: Source) -> PythonModel:
        owner = MetricsOwner()
        try:
            return PythonModel(source, self.loop, self.find, self.limiter, self.custom_metrics, owner, self.control)
        except BaseException:
            self.custom_metrics.release(owner)          # a model that failed to load is never unloaded
            raise

    def _engine_model(self, source: Source, gpus: Sequence[GpuDevice]) -> QueuedModel:
        """Load the engines of a model on each device that its instance groups name."""
        threads = int(source.config.build.threads or self.threads)
        check_threads(source.config.instances, threads)
        used = [gpu for gpu in gpus if gpu.number in devices(source.message)]
        loaded: dict[int | None, ServedEngine] = {}
        for target in dict.fromkeys(gpu.target for gpu in used):
            those = [gpu for gpu in used if gpu.target == target]
            try:
                loaded |= self._on_gpus(source, target, those)
            except (NotBuiltError, PlanTargetError) as refusal:
                if not target:
                    raise
                source = self._without_gpus(source, those, refusal)
        instances = 1
        if None in devices(source.message):
            cpu = self._on_cpu(source, threads, any(not gpu.why_not for gpu in gpus))
            instances = default_instances(self.cores, threads, cpu.engine.arena_bytes)
            loaded = {None: cpu, **loaded}
        kind = ImageModel if source.config.build.image_input else EngineModel
        return kind(source, Engines(loaded, gpus, instances), self.loop, self.dealer, self.limiter)

    def _on_gpus(self, source: Source, target: str, gpus: Sequence[GpuDevice]) -> dict[int | None, ServedEngine]:
        """Load an engine on each GPU: built for `target`, or from the plan itself if `target` is empty."""
        built: AbstractContextManager[Path] = nullcontext(source.file)
        if target:
            built = self.compiler.build(source, 1, target)
        with built as plan:
            return {gpu.number: self._on_gpu(source, plan, gpu) for gpu in gpus}

    def _on_gpu(self, source: Source, plan: Path, gpu: GpuDevice) -> ServedEngine:
        log.info("%s: on %s, %s", source.name, gpu, gpu.uuid)
        if gpu.target or source.config.build.retune != "true":
            return self._loaded(source, plan, 1, gpu.number)
        with self.compiler.retune(source, gpu.number) as timed:
            return self._loaded(source, timed, 1, gpu.number)

    def _without_gpus(self, source: Source, gpus: Sequence[GpuDevice], refusal: Exception) -> Source:
        """Return the source with GPUs replaced by the CPU, after they refused the model.

        Raises
        ------
        ModelConfigError
            The configuration requires a GPU and --kind-gpu is "refuse".
        """
        if source.config.requests_gpu and self.kind_gpu == "refuse":
            raise ModelConfigError(f"{REFUSED}: {refusal}") from refusal
        log.warning("%s: not served on %s: %s", source.name, ", ".join(map(str, gpus)), refusal)
        return replace(source, message=without_gpus(source.message, [gpu.number for gpu in gpus]))

    def _guarded(self, source: Source, load: Callable[[], M]) -> M:
        try:
            labels = read_labels(source)        # before load(): if this failed later, the model would never be drained
            model = load()
            model.labels = {**model.labels, **labels}
            return model
        except RepositoryError:
            raise
        except EngineError as error:
            where = "" if str(source.file) in str(error) else f"{source.file}: "
            raise RepositoryError(f"{where}{error}") from error
        except Exception as error:      # an unforeseen defect of a file, which must not affect other models
            log.exception("loading %s failed", source.file)
            raise RepositoryError(f"{source.file}: {type(error).__name__}: {error}") from error

    def _on_cpu(self, source: Source, threads: int, runs_elsewhere: bool) -> ServedEngine:
        """Load an engine on the CPU; `runs_elsewhere` is True for a plan whose target is a GPU of this machine."""
        if source.is_onnx:
            if cached := self._cached_engine(source, threads, lambda: self.compiler.cached(source, threads)):
                return cached
            with self.compiler.build(source, threads) as plan:
                return self._loaded(source, plan, threads)
        try:
            if not runs_elsewhere:
                return self._loaded(source, source.file, threads)
            log.warning("%s: instance_group.kind: KIND_CPU, but the plan is for a GPU: its graph is compiled again for "
                        "the CPU; build a plan for the CPU to avoid this", source.name)
        except PlanTargetError as mismatch:
            log.warning("%s: %s", source.name, mismatch)
        if cached := self._cached_engine(source, threads, lambda: self.compiler.relowered(source)):
            return cached
        with self.compiler.relower(source) as plan:
            return self._loaded(source, plan, threads)

    def _cached_engine(self, source: Source, threads: int, find: Callable[[], Path | None]) -> ServedEngine | None:
        """Load the engine that `find` finds in the engine cache; return None if it is missing or unusable."""
        try:
            plan = find()
            return self._loaded(source, plan, threads) if plan else None
        except (EngineError, OSError) as error:
            log.warning("%s: the engine cache's plan cannot be used and is built again: %s", source.file, error)
            return None

    def _loaded(self, source: Source, plan: Path, threads: int, gpu: int = 0) -> ServedEngine:
        specialise = source.config.build.specialise or (
            "off" if source.config.ragged else SPECIALISE)      # the total length of a ragged batch hardly ever repeats
        file = plan.stat()
        return ServedEngine(self.load_engine(plan, threads, specialise, gpu), file.st_size, file.st_mtime)
