"""What an engine does about shapes that it has not met."""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from engines.errors import ConfigError, did_you_mean

WAYS = ("wait", "background", "off")
MOST = 64                   # specialisations in memory, by default
MEMORY_SHARE = 0.25         # of this machine's memory, that they may take together
PATIENCE = 0.2              # seconds: the first answer of a general version takes as long, for it imports the model too
USES = 100                  # of a shape until it is specialised in the background: about what making it costs
ONCE = 4                    # shapes in a row that were asked for once: the next is likely to be no other
IDLE_BYTES = 64 << 20       # of contexts that wait for their shapes to come again
REMEMBERED = 64             # shapes for each specialisation that is kept


@dataclass(frozen=True)
class Policy:
    """When specialisations are made, and how many are kept.

    In the background one is made of a shape that has come USES times: the general version is seldom slower by more
    than a tenth, and most shapes of a text or of a cache that grows come a few times. Where the general version is not
    compiled, and where a caller waits, one is made at once; but of shapes that come once each, when one comes again.

    segment: of a program. Its batch may be 0, and its extents often follow from data, so that most shapes come once:
    what is made in the background is made when its shape comes a second time.
    """
    specialise: str = "wait"
    most: int = MOST
    memory: int | None = None       # bytes; None: MEMORY_SHARE of the machine's
    patience: float = PATIENCE      # seconds that a specialisation is waited for before there is a general version
    segment: bool = False
    uses: int = USES                # of a shape, before one is made of it in the background

    def __post_init__(self) -> None:
        if self.specialise not in WAYS:
            raise ConfigError(f"specialise='{self.specialise}'{did_you_mean(self.specialise, WAYS)}")
        if self.most < 1:
            raise ConfigError(f"specialisations={self.most}: at least 1 is kept")


@dataclass
class Demand:
    """The shapes that were asked for, as far as they are remembered. Who owns it holds a lock.

    once    those asked for last of which each has come once
    met     how often the general version was asked for a shape
    """
    most: int
    once: deque[Hashable] = field(default_factory=lambda: deque(maxlen=ONCE))
    met: Counter[Hashable] = field(default_factory=Counter)
    _met: set[Hashable] = field(default_factory=set)

    def is_new(self, key: Hashable) -> bool:
        """Whether it comes for the first time."""
        if key in self._met:
            self.again(key)
            return False
        if len(self._met) > REMEMBERED * self.most:
            self._met.clear()
        self._met.add(key)
        self.once.append(key)
        return True

    def count(self, key: Hashable) -> int:
        """Count a use of the general version; return how many there have been of this shape."""
        if len(self.met) > REMEMBERED * self.most:
            self.met.clear()
        self.met[key] += 1
        return self.met[key]

    def again(self, key: Hashable) -> None:
        """It has been met before."""
        if key in self.once:
            self.once.remove(key)

    @property
    def comes_once(self) -> bool:
        """Whether each of the last shapes was asked for once, as far as is known."""
        return len(self.once) == ONCE


T = TypeVar("T")


class IdleMemory(Generic[T]):
    """Frees the contexts of shapes that were used longest ago, beyond IDLE_BYTES or two arenas of the shape in use.

    The next shape takes their memory, whose pages the system has cleared already.
    """

    def __init__(self, free: Callable[[T], object]) -> None:
        self._free = free
        self._held: WeakKeyDictionary[T, int] = WeakKeyDictionary()     # bytes, the one used last at the end

    def use(self, user: T, arena_bytes: int) -> None:
        """Note that a shape is in use, whose arena has so many bytes."""
        known = self._held.pop(user, None) is not None
        self._held[user] = arena_bytes
        if known:
            return
        held = sum(self._held.values())
        for other, size in list(self._held.items()):
            if held <= max(IDLE_BYTES, 2 * arena_bytes):
                break
            del self._held[other]
            held -= size
            self._free(other)
