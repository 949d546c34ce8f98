"""What NVIDIA's management library says of the GPUs, under Triton's names (the extra "nvml")."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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


class Gpus:
    """Those of this machine, as they are when it is made; none where nothing can be said of them, which is logged."""

    def __init__(self) -> None:
        self._devices: dict[str, Any] = {}      # by its UUID
        try:
            import pynvml
        except ImportError:
            if _DRIVER.exists():
                log.info("there are no metrics of the GPUs: pip install 'infer-server[nvml]'")
            return
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self._devices = {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        except pynvml.NVMLError as error:
            log.info("there are no metrics of GPUs: %s", error)

    def gauges(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        """Name, meaning, and the value of each GPU by its UUID. What a GPU does not tell is left out."""
        for name, (meaning, read) in _GAUGES.items() if self._devices else ():
            values = {}
            for uuid, handle in self._devices.items():
                try:
                    values[uuid] = read(self._nvml, handle)
                except self._nvml.NVMLError as error:
                    log.debug("%s of %s: %s", name, uuid, error)
            yield name, meaning, values


def _text(name: str | bytes) -> str:
    """Older versions of the library give bytes."""
    return name.decode() if isinstance(name, bytes) else name
