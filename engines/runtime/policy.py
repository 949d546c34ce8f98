"""What an engine does about shapes that it has not met."""
from __future__ import annotations

from dataclasses import dataclass

from engines.errors import ConfigError, did_you_mean

WAYS = ("wait", "background", "off")
MOST = 16                   # specialisations in memory, by default
MEMORY_SHARE = 0.25         # of this machine's memory, that they may take together
PATIENCE = 0.2              # seconds: the first answer of a general version takes as long, for it imports the model too


@dataclass(frozen=True)
class Policy:
    """When specialisations are made, and how many are kept.

    segment: of a program. Its extents may be 0, and often follow from data, so that most shapes come once: what is made
    in the background is made when its shape comes a second time.
    """
    specialise: str = "wait"
    most: int = MOST
    memory: int | None = None       # bytes; None: MEMORY_SHARE of the machine's
    patience: float = PATIENCE      # seconds that a specialisation is waited for before there is a general version
    segment: bool = False

    def __post_init__(self) -> None:
        if self.specialise not in WAYS:
            raise ConfigError(f"specialise='{self.specialise}'{did_you_mean(self.specialise, WAYS)}")
        if self.most < 1:
            raise ConfigError(f"specialisations={self.most}: at least 1 is kept")
