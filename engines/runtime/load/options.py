"""Options of an engine: how a plan is loaded and run."""
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from infer_server.engines.errors import ConfigError
from infer_server.engines.runtime.policy import MOST


@dataclass(frozen=True)
class LoadOptions:
    """Options of an engine; `infer_server.engines.loading.load_engine` documents those that users set.

    trial: the engine of a build, which runs a plan once, also if it is for another machine. It is compiled for this one
    without a warning.
    """
    threads: int = 1
    on_target_mismatch: str = "relower"
    cpus: Sequence[int] | None = None
    specialise: str = "background"
    specialisations: int = MOST
    cache: str | os.PathLike[str] | bool = False
    gpu: int = 0
    trial: bool = False

    def __post_init__(self) -> None:
        if self.on_target_mismatch not in ("relower", "refuse"):
            raise ConfigError(f"on_target_mismatch='{self.on_target_mismatch}': choose 'relower' or 'refuse'")


ON_TRIAL = LoadOptions(specialise="off", trial=True)
