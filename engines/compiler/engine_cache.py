"""Engine cache: a folder of plans, keyed by a hash of everything that affects them.

    cache = EngineCache()                           # the user's; EngineCache(folder, size) is another
    key = cache.key(model_digest("m.onnx"), facts)
    with cache.lock(key):                           # a second builder of the same engine waits for the first
        plan = cache.fetch(key)
        if plan is None:
            plan = build(...)
            cache.store(key, plan)

A cache only saves time: if its folder cannot be used, engines are built without it, after one warning. A plan store
(engines/machine/plan_store.py) is its second level: it has the plans that other machines have built.
"""
from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from infer_server.engines.errors import ConfigError, PlanError
from infer_server.engines.files import atomic_write, user_cache
from infer_server.engines.machine import object_cache
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.object_cache import ObjectCache
from infer_server.engines.machine.plan_store import PlanStore
from infer_server.engines.plan.file import VERSION, read_plan, write_plan
from infer_server.engines.plan.plan import Plan
from infer_server.engines.plan.records import to_plain
from infer_server.engines.version import compiler_digest

USUAL_GIB = 10.0
SIZE_VARIABLE = "INFER_CACHE_GIB"
OBJECTS_SHARE = 0.1         # share of the size for compiled kernels
_BLOCK = 1 << 20
_ABANDONED_SECONDS = 24 * 3600      # a lock or a temporary file that is older has lost its owner
_FORGOTTEN_SECONDS = 90 * 24 * 3600         # notes that were not read for so long are removed

# Names of the cache's files in a folder that may hold others: plans; locks and temporary files.
_ENTRY = re.compile(r"[0-9a-f]{40}\.plan")
_PASSING = re.compile(r"[0-9a-f]{40}\.lock|\.[0-9a-f]{40}\.plan\..*")
_NOTE = re.compile(r"[0-9a-f]{40}\.json")       # see EngineCache.note
_KEY = re.compile(r"[0-9a-f]{40}")

# In an ONNX file, a tensor with external data has an entry {key: "location", value: path relative to the model}. This
# is its protobuf encoding up to the path's length, by which files are found without parsing a 2 GB model.
_LOCATION = re.compile(rb"\x0a\x08location\x12")

_log = logging.getLogger(__name__)


class EngineCache:
    """A folder of plans by key, which processes may share: entries appear whole and never change.

    The least recently used plans are dropped when all together exceed `gib` (default $INFER_CACHE_GIB, or 10), or half
    of what the disk has for them. The folder `objects` inside keeps compiled kernels in at most a tenth of that.
    """

    def __init__(self, folder: str | os.PathLike[str] = "", gib: float | None = None,
                 plan_store: PlanStore | None = None) -> None:
        """Use a folder; "" is the user's, usual_folder(). Raise ConfigError for a file, or a size that is none.

        plan_store: is asked for plans that are not in the folder, and gets those that are stored.
        """
        self.plan_store = plan_store
        self.folder = Path(folder or usual_folder())
        self.limit = int((_usual_gib() if gib is None else gib) * (1 << 30))
        self.objects = ObjectCache(self.folder / "objects", int(self.limit * OBJECTS_SHARE))
        self._warned = False
        if folder and (file := next((p for p in (self.folder, *self.folder.parents) if p.is_file()), None)):
            raise ConfigError(f"engine cache '{folder}' is not a folder: '{file}' is a file; name another one")

    def key(self, model: Mapping[str, str], facts: Mapping[str, Any]) -> str:
        """Return the key of a model (its `model_digest`), the compiler, and all other facts that affect the plan."""
        content = {"model": model, "facts": facts, "compiler": compiler_digest(), "format": VERSION}
        return digest(json.dumps(content, sort_keys=True, default=_plain).encode())

    def entry(self, key: str) -> Path:
        """Return the path of a key's plan, whether or not it exists."""
        return self.folder / f"{key}.plan"

    def fetch(self, key: str) -> Plan | None:
        """Return the plan of a key, or None. A damaged entry is removed with a warning."""
        return self._read(key) or (self._read(key) if self._download(key) else None)

    def find(self, key: str) -> Path | None:
        """Return the file of a key's plan, which is fetched from the plan store if necessary; None if there is none."""
        return self.entry(key) if self.entry(key).exists() or self._download(key) else None

    def kept(self, key: str, make: Callable[[], Plan]) -> Plan:
        """Return the plan of a key; make and store it if there is none. Other processes wait for it meanwhile."""
        with self.lock(key):
            plan = self.fetch(key)
            if plan is None:
                with object_cache.using(self.objects):
                    plan = make()
                self.store(key, plan)
            return plan

    def relowered_key(self, fingerprint: str) -> str:
        """Return the key of the plan with this fingerprint, compiled again for this CPU."""
        cpu = detect()
        return self.key({"plan": fingerprint}, {"relowered for": [cpu.architecture, cpu.model, sorted(cpu.features)]})

    def _download(self, key: str) -> bool:
        """Copy a plan from the plan store into the folder; return False if there is none."""
        if self.plan_store is None:
            return False
        try:
            self._make_folder()
            found = self.plan_store.fetch(key, self.entry(key), self.limit)
            self._evict()
            return found and self.entry(key).exists()
        except OSError as error:
            self._warn(error.strerror)
            return False

    def _read(self, key: str) -> Plan | None:
        entry = self.entry(key)
        try:
            plan = read_plan(entry)
            list(plan.weights.values())     # read now: the entry may be evicted before they are needed
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error.strerror)
            return None
        except PlanError as error:
            _log.warning("engine cache: an entry cannot be used and is built again: %s", error)
            with suppress(OSError):
                entry.unlink()
            return None
        with suppress(OSError):     # a read-only folder
            os.utime(entry)         # the time of its last use
        return plan

    def store(self, key: str, plan: Plan) -> None:
        """Store a plan under a key, if the limit and the disk allow it."""
        try:
            self._make_folder()
            self._evict()           # the disk may have been filled since the last call
            write_plan(plan, self.entry(key))
            self._evict()
            if not self.entry(key).exists():
                self._warn(f"the plan '{plan.name}' alone takes more than the {self.limit / (1 << 30):g} GiB, or the "
                           "half of the free disk, that it may take")
            elif self.plan_store:
                self.plan_store.store(key, self.entry(key))
        except OSError as error:
            self._warn(error.strerror)

    def note(self, key: str, entry: Path, texts: Sequence[str]) -> None:
        """Store a reference from another key to the plan of an entry, with the texts of its build.

        A caller that cannot compute an engine key, which needs the compiler, finds the plan by its own key: see noted.
        """
        if entry.parent == self.folder and _ENTRY.fullmatch(entry.name):
            with suppress(OSError), atomic_write(self.folder / f"{key}.json") as file:
                file.write(json.dumps({"plan": entry.stem, "texts": list(texts)}).encode())

    def noted(self, key: str) -> tuple[Path, list[str]] | None:
        """Return the entry noted under a key and the texts of its build, or None; update the time of its last use."""
        note = self.folder / f"{key}.json"
        try:
            content = json.loads(note.read_bytes())
            entry, texts = self.entry(content["plan"]), [str(text) for text in content["texts"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not _KEY.fullmatch(content["plan"]) or not entry.exists():
            return None
        with suppress(OSError):     # a read-only folder
            os.utime(entry)
            os.utime(note)
        return entry, texts

    @contextmanager
    def lock(self, key: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock of a key, which one process can hold at a time and which ends with its process.

        waiting: called if another process holds it.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(self._locked(key, waiting))
            except OSError as error:        # without the lock, two builders do the same work, which is harmless
                if not self.entry(key).exists():
                    self._warn(error.strerror)
            yield

    @contextmanager
    def _locked(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        self._make_folder()
        path = self.folder / f"{key}.lock"
        while True:
            with open(path, "w") as file:
                _flock(file, waiting)
                if not _is_named(file, path):
                    continue        # its holder has removed the file, so this lock is void: try again
                try:
                    yield
                finally:
                    with suppress(OSError):
                        path.unlink()
                return

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)      # plans are programs: nobody else's to write

    def _evict(self) -> None:
        """Evict the plans used longest ago until the rest is within the limit; remove abandoned files."""
        found = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):       # another process may evict at the same time
                status = path.stat()
                if _ENTRY.fullmatch(path.name):
                    found.append((status.st_mtime_ns, status.st_size, path))
                elif _PASSING.fullmatch(path.name) and time.time() - status.st_mtime > _ABANDONED_SECONDS or (
                        _NOTE.fullmatch(path.name) and time.time() - status.st_mtime > _FORGOTTEN_SECONDS):
                    path.unlink()
        taken = sum(size for _, size, _ in found)
        objects = self.objects.bytes()
        limit = min(self.limit, (taken + objects + shutil.disk_usage(self.folder).free) // 2) - objects
        for _, size, path in sorted(found):
            if taken <= limit:
                return
            path.unlink(missing_ok=True)
            taken -= size

    def _warn(self, why: str | None) -> None:
        """Warn once, although a build may meet an obstacle several times."""
        if not self._warned:
            _log.warning("the engine cache %s cannot be used (%s): engines are built, and not kept; --cache-dir names "
                         "another folder, --no-cache does without", self.folder, why)
        self._warned = True


def usual_folder() -> Path:
    return user_cache() / "engines"


def _usual_gib() -> float:
    text = os.environ.get(SIZE_VARIABLE, "")
    try:
        size = float(text or USUAL_GIB)
    except ValueError:
        size = math.nan
    if not 0 <= size < math.inf:
        raise ConfigError(f"{SIZE_VARIABLE}='{text}' is not a number of GiB, 0 or more")
    return size


def _flock(file: TextIO, waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(file, fcntl.LOCK_EX)


def _is_named(file: TextIO, path: Path) -> bool:
    """Return True if the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


# ---- keys
def model_digest(model: Any) -> dict[str, str]:
    """Return the digests of an ONNX file and its external data, of a file's bytes, or of an onnx.ModelProto.

    The stem of a file's name counts, because it becomes the plan's name; its folder does not.
    """
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        return {"name": path.stem, "": _file_digest(path),
                **{f"file {location}": _file_digest(file) for location, file in external_files(path)}}
    return {"": digest(model) if isinstance(model, bytes) else digest(*_fields(model))}


def _fields(message: Any) -> Iterator[bytes]:
    """Yield the serialised fields of a message and its graph; a whole message of 2 GB cannot be serialised."""
    for field, value in message.ListFields():
        yield field.name.encode()
        if field.name == "graph":
            yield from _fields(value)
        else:
            for part in value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]:
                yield part.SerializeToString(deterministic=True) if hasattr(part, "ListFields") else repr(part).encode()


def external_files(model: Path) -> list[tuple[str, Path]]:
    """Return (location, path) of the files with an ONNX model's external data, sorted by location, each once.

    A missing file is omitted: the importer reports it.
    """
    found: dict[str, Path] = {}
    with open(model, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return []
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            for match in _LOCATION.finditer(data):
                location = _string(data, match.end())
                path = model.parent / location
                if path.is_file():
                    found[location] = path
    return sorted(found.items())


def _string(data: mmap.mmap, at: int) -> str:
    """Read a protobuf string: its length as a varint, then its bytes."""
    length = shift = 0
    while True:
        byte = data[at]
        length |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return data[at:at + length].decode(errors="replace").replace("\0", "?")


def digest(*parts: bytes) -> str:
    """Return the BLAKE2b digest of concatenated bytes as 40 hexadecimal digits."""
    hasher = hashlib.blake2b(digest_size=20)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _file_digest(path: Path) -> str:
    hasher = hashlib.blake2b(digest_size=20)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def _plain(value: Any) -> Any:
    """Convert a value that json cannot write; an array becomes its dtype, shape and digest."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, digest(np.ascontiguousarray(value).tobytes())]
    return str(value) if isinstance(value, os.PathLike) else to_plain(value)
