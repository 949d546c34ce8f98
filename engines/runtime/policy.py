"""Policy of specialisation: when an engine compiles a plan for new shapes, and how many it keeps."""
from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from infer_server.engines.errors import ConfigError, did_you_mean

WAYS = ("wait", "background", "off")
MOST = 64                   # default maximum number of specialisations in memory
MEMORY_SHARE = 0.25         # share of this machine's memory that they may take together
USES = 100                  # runs of a shape after which it is specialised in the background: about its cost
ONCE = 4                    # after so many shapes in a row that came once, the next is expected to come once, too
IDLE_BYTES = 64 << 20       # limit of the memory of contexts whose shapes are not in use
REMEMBERED = 64             # number of remembered shapes for each specialisation that is kept


@dataclass(frozen=True)
class Policy:
    """Rules of when specialisations are compiled and how many are kept.

    In the background, a shape is specialised after USES runs: the symbolic plan is seldom more than a tenth slower,
    and most lengths of a text or of a growing cache recur only a few times. If a caller waits, or the target has no
    symbolic plans, a shape is specialised at once; a caller does not wait for a new shape if each of the last ones came
    only once.
    """
    specialise: str = "wait"
    most: int = MOST
    memory: int | None = None       # bytes; None: MEMORY_SHARE of the machine's memory
    uses: int = USES                # runs of a shape before it is specialised in the background

    def __post_init__(self) -> None:
        if self.specialise not in WAYS:
            raise ConfigError(f"specialise='{self.specialise}'{did_you_mean(self.specialise, WAYS)}")
        if self.most < 1:
            raise ConfigError(f"specialisations={self.most}: at least 1 is kept")


@dataclass
class Demand:
    """Statistics of requested shapes. Not thread-safe: the owner holds a lock.

    once    the last shapes that have come only once
    """
    most: int
    once: deque[Hashable] = field(default_factory=lambda: deque(maxlen=ONCE))
    _requests: Counter[Hashable] = field(default_factory=Counter)

    def count(self, key: Hashable) -> int:
        """Count a request of a shape; return the number of its requests."""
        if key not in self._requests and len(self._requests) > REMEMBERED * self.most:
            self._requests.clear()
        self._requests[key] += 1
        if self._requests[key] == 1:
            self.once.append(key)
        elif key in self.once:
            self.once.remove(key)
        return self._requests[key]

    @property
    def comes_once(self) -> bool:
        """True if each of the last ONCE new shapes has come only once."""
        return len(self.once) == ONCE


T = TypeVar("T")


class HasBytes(Protocol):
    @property
    def bytes(self) -> int: ...


K = TypeVar("K", bound=Hashable)
E = TypeVar("E", bound=HasBytes)


class Kept(OrderedDict[K, E]):
    """Engines by key, the last used at the end; those used longest ago go beyond limits of number and bytes."""

    def __init__(self, most: int, limit: float) -> None:
        super().__init__()
        self._limits, self._bytes, self._total = (most, limit), dict[K, int](), 0

    def keep(self, key: K, engine: E) -> None:
        """Add an engine, and drop others."""
        self.pop(key, None)
        self[key] = engine
        self._bytes[key] = engine.bytes
        self._total += self._bytes[key]
        most, limit = self._limits
        while len(self) > 1 and (len(self) > most or self._total > limit):
            self.pop(next(iter(self)))

    def pop(self, key: K, default: Any = None) -> Any:
        self._total -= self._bytes.pop(key, 0)
        return super().pop(key, default)


class IdleMemory(Generic[T]):
    """Eviction of the contexts of the shapes used longest ago, beyond IDLE_BYTES or two arenas of the shape in use.

    The next shape reuses their memory, whose pages the system has cleared already.
    """

    def __init__(self, free: Callable[[T], object]) -> None:
        self._free = free
        self._held: WeakKeyDictionary[T, int] = WeakKeyDictionary()     # bytes; the last used at the end
        self._most = 0          # at least the sum of these

    def use(self, user: T, arena_bytes: int) -> None:
        """Note that a shape is in use; free others if its arena exceeds the limit together with theirs."""
        known = self._held.pop(user, None) is not None
        self._held[user] = arena_bytes
        if known:
            return
        self._most += arena_bytes
        if self._most <= max(IDLE_BYTES, 2 * arena_bytes):
            return
        held = sum(self._held.values())
        for other, size in list(self._held.items()):
            if held <= max(IDLE_BYTES, 2 * arena_bytes):
                break
            del self._held[other]
            held -= size
            self._free(other)
        self._most = held
