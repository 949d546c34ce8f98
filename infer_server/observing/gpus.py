"""GPU metrics from NVIDIA's management library, with Triton's names (the extra "nvml").

Calls of the library may block for any time, so they are made on a separate thread.
"""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infer_server.workers import in_daemon_thread

log = logging.getLogger(__name__)

_DRIVER = Path("/dev/nvidiactl")            # exists if the driver is loaded
# Metric name: (description, function that reads the value of a device).
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
    """Metric of the GPUs, by UUID. Values that a GPU does not report are omitted."""
    name: str
    meaning: str
    values: Mapping[str, float]


class Gpus:
    """Reader of GPU metrics. Belongs to the event loop.

    A driver that hangs delays a caller by at most `patience_secs`; there are no GPU metrics until it answers. If it
    answers late, the next call returns that older reading.
    """

    def __init__(self, patience_secs: float = 2.0) -> None:
        self.patience_secs = patience_secs
        self._library = _Library()
        self._reading: asyncio.Future[list[Gauge]] | None = None    # at most one at a time
        self._begun = 0.0                       # start of that reading, on the loop's clock
        self._is_late = False                   # True after a warning, until the driver answers in time

    async def gauges(self) -> Sequence[Gauge]:
        """Return the current metrics; empty if there is no GPU or the driver does not answer."""
        if self._library.has_no_gpu:
            return ()
        clock = asyncio.get_running_loop().time
        before: Sequence[Gauge] = ()            # an earlier reading that arrived after its caller's timeout
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
            log.warning("there are no GPU metrics until the driver answers: it has not answered for %g s",
                        self.patience_secs)
        return before


class _Library:
    """GPUs of this machine, found at the first reading; errors of the library are logged."""
    _devices: Mapping[str, Any] | None = None       # by UUID
    _nvml: Any = None

    @property
    def has_no_gpu(self) -> bool:
        """True if the library was read and found no GPU."""
        return self._devices is not None and not self._devices

    def read(self) -> list[Gauge]:
        """Return the metrics. Blocks."""
        if self._devices is None:
            self._devices = self._find_devices()
        return [Gauge(name, meaning, dict(self._values(name, read)))
                for name, (meaning, read) in _GAUGES.items() if self._devices]

    def _find_devices(self) -> Mapping[str, Any]:
        try:
            import pynvml
        except ImportError:
            if _DRIVER.exists():
                log.info("there are no GPU metrics: pip install 'infer-server[nvml]' to get them")
            return {}
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        except pynvml.NVMLError as error:
            log.info("there are no GPU metrics: %s", error)
            return {}

    def _values(self, name: str, read: Callable[[Any, Any], float]) -> Iterator[tuple[str, float]]:
        for uuid, handle in (self._devices or {}).items():
            try:
                yield uuid, read(self._nvml, handle)
            except self._nvml.NVMLError as error:
                log.debug("%s of %s: %s", name, uuid, error)


def _text(name: str | bytes) -> str:
    """Return a name as str; older versions of the library return bytes."""
    return name.decode() if isinstance(name, bytes) else name
