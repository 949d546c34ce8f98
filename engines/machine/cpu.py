"""Detection of this machine's CPU: features that code may use, caches and cores.

Feature names are those of Linux's /proc/cpuinfo ("avx2", "avx512_vnni", "asimddp", ...): the kernel lists a feature
only if it also saves its registers. It saves the tile registers (amx_*) only for processes that request permission, so
`detect` requests it where they are listed, and omits them if it is refused (tiles.py). Linux does not list amx_fp16,
for which `detect` asks the CPU (cpuid.py).
"""
from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from infer_server.engines.machine.cpuid import unlisted_features
from infer_server.engines.machine.tiles import permitted

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class CpuInfo:
    architecture: str                       # "x86_64", "aarch64", ...
    model: str                              # the vendor's name
    features: frozenset[str]                # empty if unknown (no /proc/cpuinfo)
    caches: tuple[tuple[str, int], ...]     # caches of the first core: ("L1d", bytes), ("L2", bytes), ...
    cores: int                              # number of CPUs that this process may use
    tile_refusal: str = ""                  # why this process may not use the tile registers that the CPU has

    def missing(self, required: frozenset[str]) -> frozenset[str]:
        """Return the required features that this machine lacks."""
        return required - self.features

    def lacking(self, required: frozenset[str]) -> str:
        """Return the missing features as text, with the reason if the kernel refuses tile registers; "" if none."""
        missing = self.missing(required)
        refused = self.tile_refusal if any(name.startswith("amx_") for name in missing) else ""
        return ", ".join(sorted(missing)) + (f" ({refused})" if refused else "")


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Return (model, features) of the first processor in the text of /proc/cpuinfo, of x86 or ARM."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower(), value.strip())
    model = fields.get("model name") or " ".join(fields.get(k, "?") for k in ("cpu implementer", "cpu part"))
    return model, frozenset((fields.get("flags") or fields.get("features") or "").split())


def _bytes(size: str) -> int:
    """Parse a size: "512K" is 524288."""
    number, unit = re.fullmatch(r"(\d+)([KMG]?)", size.strip()).groups()    # type: ignore[union-attr]
    return int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]


def _caches() -> tuple[tuple[str, int], ...]:
    found = []
    for index in sorted(_CACHES.glob("index*")):
        kind, level, size = (index.joinpath(name).read_text().strip() for name in ("type", "level", "size"))
        if kind != "Instruction":
            found.append((f"L{level}{'d' if kind == 'Data' else ''}", _bytes(size)))
    return tuple(found)


def allowed_cpus() -> list[int]:
    """Return the CPUs that this process may use; all of them if the system has no affinity."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@cache
def detect() -> CpuInfo:
    """Detect this machine. Without /proc/cpuinfo no feature is known, and only portable plans run."""
    known = _CPUINFO.exists()
    model, features = parse_cpuinfo(_CPUINFO.read_text()) if known else (platform.processor(), frozenset())
    if "amx_tile" in features:
        features |= unlisted_features()
    features, refusal = permitted(features)
    return CpuInfo(platform.machine(), model, features, _caches(), len(allowed_cpus()), refusal)
