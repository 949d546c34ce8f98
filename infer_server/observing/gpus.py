"""What NVIDIA's management library says of the GPUs, under Triton's names (the extra "nvml").

Its calls block, for as long as the driver likes: they are made on a thread beside the event loop.
"""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infer_server.workers import in_daemon_thread

log = logging.getLogger(__name__)

_DRIVER = Path("/dev/nvidiactl")            # there is one where a GPU can be used
# Name -> (meaning, what reads it of a device).
_GAUGES: Mapping[str, tuple[str, Callable[[Any, Any], float]]] = {
    "nv_gpu_utilization": ("GPU utilization rate [0.0 - 1.0)",
                           lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
    "nv_gpu_memory_total_bytes": ("GPU total memory, in bytes",
                                  lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    "nv_gpu_memory_used_bytes": ("GPU used memory, in bytes", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    "nv_gpu_power_usage": ("GPU power usage in watts", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    "nv_gpu_power_limit": ("GPU power management limit in watts",
                           lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000),
    "nv_energy_consumption": ("GPU energy consumption in joules since the driver was loaded",
                              lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000),
}
COUNTERS = frozenset({"nv_energy_consumption"})


class Gauge(NamedTuple):
    """A metric of the GPUs, by their UUIDs. What a GPU does not tell is left out."""
    name: str
    meaning: str
    values: Mapping[str, float]


class Gpus:
    """Belongs to the event loop. A driver that hangs holds up who waits for it for `patience_secs`, and nothing else:
    until it answers there are no metrics of GPUs. Of one that is only slow there are those of the reading before."""

    def __init__(self, patience_secs: float = 2.0) -> None:
        self.patience_secs = patience_secs
        self._library = _Library()
        self._reading: asyncio.Future[list[Gauge]] | None = None    # one at a time: the library is called by one thread
        self._begun = 0.0                       # when that one was, on the loop's clock
        self._is_late = False                   # as was said; until it answers in time

    async def gauges(self) -> Sequence[Gauge]:
        """What they say now; nothing where there are none, or where the driver does not answer."""
        if self._library.has_no_gpu:
            return ()
        clock = asyncio.get_running_loop().time
        before: Sequence[Gauge] = ()            # what came too late for who asked then
        reading = self._reading
        if reading is None or reading.done():
            self._begun = clock()
            self._reading = asyncio.ensure_future(in_daemon_thread(self._library.read))
            before = reading.result() if reading and self._is_late else ()
            reading = self._reading
        await asyncio.wait((reading,), timeout=max(0.0, self._begun + self.patience_secs - clock()))
        if reading.done():
            self._is_late = False
            return reading.result()
        if not self._is_late:
            self._is_late = True
            log.warning("there are no metrics of GPUs until their driver answers: it has not in %g s",
                        self.patience_secs)
        return before


class _Library:
    """The GPUs of this machine, as they are when it is read first; none where nothing can be said of them, which is
    logged."""
    _devices: Mapping[str, Any] | None = None       # by UUID
    _nvml: Any = None

    @property
    def has_no_gpu(self) -> bool:
        """Whether it was asked, and there is none."""
        return self._devices is not None and not self._devices

    def read(self) -> list[Gauge]:
        """Blocks."""
        if self._devices is None:
            self._devices = self._found()
        return [Gauge(name, meaning, dict(self._values(name, read)))
                for name, (meaning, read) in _GAUGES.items() if self._devices]

    def _found(self) -> Mapping[str, Any]:
        try:
            import pynvml
        except ImportError:
            if _DRIVER.exists():
                log.info("there are no metrics of the GPUs: pip install 'infer-server[nvml]'")
            return {}
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        except pynvml.NVMLError as error:
            log.info("there are no metrics of GPUs: %s", error)
            return {}

    def _values(self, name: str, read: Callable[[Any, Any], float]) -> Iterator[tuple[str, float]]:
        for uuid, handle in (self._devices or {}).items():
            try:
                yield uuid, read(self._nvml, handle)
            except self._nvml.NVMLError as error:
                log.debug("%s of %s: %s", name, uuid, error)


def _text(name: str | bytes) -> str:
    """Older versions of the library give bytes."""
    return name.decode() if isinstance(name, bytes) else name
