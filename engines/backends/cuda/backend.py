"""CUDA's compiler side. Targets are compute capabilities; building for them needs no GPU, and LLVM is loaded on use."""
from __future__ import annotations

from collections.abc import Sequence

from infer_server.engines.backends import backend_of
from infer_server.engines.backends.base import Backend, Session
from infer_server.engines.backends.cuda.codegen.gpu import GPUS
from infer_server.engines.backends.cuda.cost import CARDS
from infer_server.engines.backends.cuda.runtime.device import DEVICE
from infer_server.engines.backends.cuda.runtime.driver import GpuDriver
from infer_server.engines.backends.cuda.runtime.library import CudaError
from infer_server.engines.backends.device import GpuInfo
from infer_server.engines.errors import ConfigError
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.roofline import Level, Peaks


class CudaBackend:
    """Backend for NVIDIA GPUs. Its own name as a target stands for the architecture of this machine's GPU."""
    name = "cuda"
    targets = tuple(GPUS)
    selects = False

    def session(self, target: str, cache: TimingCache, timing: bool) -> Session:
        """Return a session, which times tactics if this machine has a GPU of the target's architecture."""
        target = _local_target() if target == self.name else target
        try:
            from infer_server.engines.backends.cuda.session import CudaSession
        except ImportError as error:
            raise ConfigError(f"building for '{target}' needs llvmlite ({error}): pip install llvmlite") from error
        return CudaSession(target, cache, _device_for(target) if timing else None)

    def session_here(self, cache: TimingCache, sibling: Session) -> Session:
        """Return a session of the default backend: this machine may have no GPU."""
        return backend_of("").session_here(cache, sibling)

    def peaks(self) -> Peaks:
        """Return the data-sheet peaks of this machine's GPU. Nothing is measured."""
        target = _local_target()
        card = CARDS[target]
        macs = {precision: rate * card.grouped * card.multiprocessors * card.hertz if precision != "fp32" else
                rate * card.multiprocessors * card.hertz for precision, rate in card.products.items()}
        return Peaks(card.name, target, macs, (Level("memory", float("inf"), card.memory),), is_core=False)

    def gpus(self) -> Sequence[tuple[GpuInfo, str]]:
        return [(gpu, _target_of(gpu.architecture)) for gpu in DEVICE.find()]


def _local_target() -> str:
    """Return the target for this machine's GPU. Raise ConfigError if there is none, or it is too old."""
    try:
        here = DEVICE.gpu.architecture
    except CudaError as error:
        raise ConfigError(f"target 'cuda' is the GPU of this machine, but {error}; name an architecture to build for "
                          f"another machine: {', '.join(GPUS)}") from error
    target = _target_of(here)
    if not target:
        raise ConfigError(f"target 'cuda' is the GPU of this machine, but that is {here}, which is older than all that "
                          f"there are kernels for: {', '.join(GPUS)}")
    return target


def _target_of(architecture: str) -> str:
    """Return the newest target that a GPU of this architecture can run, or "" if all are newer."""
    if architecture == "sm_90":
        return "sm_90a"         # a target of Hopper alone
    return max((known for known in GPUS if _number(known) <= _number(architecture)), key=_number, default="")


def _device_for(target: str) -> GpuDriver | None:
    """Return this machine's first GPU of the target's architecture, or None."""
    numbers = [gpu.number for gpu in DEVICE.find() if gpu.architecture == target.rstrip("a")]
    try:
        return DEVICE.at(numbers[0]).gpu if numbers else None
    except CudaError:       # present, but unusable
        return None


def _number(name: str) -> int:
    return int(name.removeprefix("sm_").rstrip("a"))


BACKEND: Backend = CudaBackend()
