"""The backends by name. A backend makes the machine's part of plans for its targets, and has a device that runs them.

A new one registers itself by a line in _MODULES. Its modules are imported when it is chosen, so that a target costs
nothing to those who do not build for it, and serving a plan loads no compiler.
"""
from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from engines.errors import ConfigError, PlanTargetError, did_you_mean

if TYPE_CHECKING:
    from engines.backends.base import Backend, BuildsForGpus
    from engines.backends.device import Device, GpuInfo


class _Modules(NamedTuple):
    backend: str        # has BACKEND: a Backend. It may list its targets without what it compiles with
    device: str         # has DEVICE: a Device


_MODULES = {        # the first one builds where no target is named
    "llvm": _Modules("engines.backends.llvm.backend", "engines.backends.llvm.runtime.device"),
    "numpy": _Modules("engines.backends.numpy.backend", "engines.backends.numpy.device"),
    "cuda": _Modules("engines.backends.cuda.backend", "engines.backends.cuda.runtime.device"),
    "tensorrt": _Modules("engines.backends.tensorrt.backend", "engines.backends.tensorrt.runtime.device"),
}


def backend_named(name: str) -> Backend:
    """The backend of that name."""
    backend: Backend = import_module(_MODULES[name].backend).BACKEND
    return backend


def backend_of(target: str) -> Backend:
    """The backend that builds for a target; "" is the best target of the first one. ConfigError: no backend has it."""
    if target in ("", *_MODULES):
        return backend_named(target or next(iter(_MODULES)))
    for backend in map(backend_named, _MODULES):
        if target in backend.targets:
            return backend
    raise ConfigError(f"unknown target '{target}'{did_you_mean(target, known_targets())}")


def every_target() -> list[str]:
    """The targets of all backends."""
    return [target for name in _MODULES for target in backend_named(name).targets]


def known_targets() -> list[str]:
    """What may be asked for: these, and "cuda", the one of the GPU at hand."""
    return [*every_target(), "cuda"]


def gpus_here() -> Sequence[tuple[GpuInfo, str]]:
    """The GPUs of this machine, each with the target to build for it; "": it is older than all targets. Nothing of a
    GPU is started."""
    backend: BuildsForGpus = import_module(_MODULES["cuda"].backend).BACKEND
    return backend.gpus()


def device_of(backend: str, number: int = 0) -> Device:
    """The device that runs the plans of a backend. number: which, where the machine has several. PlanTargetError: this
    version has no backend of that name."""
    if backend not in _MODULES:
        raise PlanTargetError(f"the plan is for the backend '{backend}', which this version does not have"
                              f"{did_you_mean(backend, _MODULES)}")
    device: Device = import_module(_MODULES[backend].device).DEVICE
    return device.at(number)
