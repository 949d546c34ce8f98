"""Registry of the backends, which compile plans for their targets and provide devices that run them.

A new backend is one line in _MODULES. Its modules are imported on first use, so unused targets cost nothing and serving
a plan loads no compiler.
"""
from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from infer_server.engines.errors import ConfigError, PlanTargetError, did_you_mean

if TYPE_CHECKING:
    from infer_server.engines.backends.base import Backend, BuildsForGpus
    from infer_server.engines.backends.device import Device, GpuInfo


class _Modules(NamedTuple):
    backend: str        # defines BACKEND, a Backend; importing it must not need the compiler
    device: str         # defines DEVICE, a Device


_MODULES = {        # the first is the default
    "llvm": _Modules("infer_server.engines.backends.llvm.backend", "infer_server.engines.backends.llvm.runtime.device"),
    "numpy": _Modules("infer_server.engines.backends.numpy.backend", "infer_server.engines.backends.numpy.device"),
    "cuda": _Modules("infer_server.engines.backends.cuda.backend", "infer_server.engines.backends.cuda.runtime.device"),
    "tensorrt": _Modules(
        "infer_server.engines.backends.tensorrt.backend", "infer_server.engines.backends.tensorrt.runtime.device"),
}


def backend_named(name: str) -> Backend:
    """Return the backend called `name`, a key of _MODULES."""
    backend: Backend = import_module(_MODULES[name].backend).BACKEND
    return backend


def backend_of(target: str) -> Backend:
    """Return the backend that builds for a target.

    Parameters
    ----------
    target : str
        A target, the name of a backend (its best target here), or "" for the default backend.

    Raises
    ------
    ConfigError
        No backend has the target.
    """
    if target in ("", *_MODULES):
        return backend_named(target or next(iter(_MODULES)))
    for backend in map(backend_named, _MODULES):
        if target in backend.targets:
            return backend
    raise ConfigError(f"unknown target '{target}'{did_you_mean(target, known_targets())}")


def every_target() -> list[str]:
    """Return the targets of all backends, in the order of _MODULES."""
    return [target for name in _MODULES for target in backend_named(name).targets]


def known_targets() -> list[str]:
    """Return the accepted target names: every target, and "cuda" for the architecture of this machine's GPU."""
    return [*every_target(), "cuda"]


def gpus_here() -> Sequence[tuple[GpuInfo, str]]:
    """Return the GPUs of this machine and the target to build for each, without initialising a GPU.

    The target is "" for a GPU that is older than every known target.
    """
    backend: BuildsForGpus = import_module(_MODULES["cuda"].backend).BACKEND
    return backend.gpus()


def device_of(backend: str, number: int = 0) -> Device:
    """Return the device that runs the plans of a backend.

    Parameters
    ----------
    backend : str
        Name of the backend, as a plan has it.
    number : int
        Index of the device on machines with several.

    Raises
    ------
    PlanTargetError
        This version has no backend of that name.
    """
    if backend not in _MODULES:
        raise PlanTargetError(f"the plan is for the backend '{backend}', which this version does not have"
                              f"{did_you_mean(backend, _MODULES)}")
    device: Device = import_module(_MODULES[backend].device).DEVICE
    return device.at(number)
