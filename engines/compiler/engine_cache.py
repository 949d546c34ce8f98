"""The engine cache: a folder of plans, each under the hash of all that it was made from.

    cache = EngineCache(folder)
    key = cache.key("m.onnx", options)
    with cache.lock(key):                           # a second builder of the same engine waits for the first
        if not cache.fetch(key, "m.plan"):
            write_plan(build(...), "m.plan")
            cache.store(key, "m.plan")
"""
from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.errors import ConfigError, PlanError
from engines.files import atomic_write
from engines.plan.file import VERSION, read_plan
from engines.version import COMPILER_VERSION

_log = logging.getLogger(__name__)
_BLOCK = 1 << 20

# In an ONNX file, a tensor stored elsewhere has an entry {key: "location", value: path relative to the model}. This is
# its protobuf encoding up to the path's length, so that no 2 GB model need be parsed to find its files.
_LOCATION = re.compile(rb"\x0a\x08location\x12")


class EngineCache:
    """Plans by key. Processes may share the folder: entries appear whole, and are never changed."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"engine cache '{folder}' is not a folder; name another one") from error

    def key(self, model: str | os.PathLike[str], options: Mapping[str, Any]) -> str:
        """A hash of the model (with its external data), the options (as JSON would hold them) and the compiler.

        Where the model lies does not matter. Options are whatever else changes the plan: precision, target, ranges, ...
        """
        facts = {"model": _digest(Path(model)),
                 "external": {location: _digest(path) for location, path in external_files(Path(model))},
                 "options": dict(options), "compiler": COMPILER_VERSION, "format": VERSION}
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=20).hexdigest()

    def fetch(self, key: str, output: str | os.PathLike[str]) -> bool:
        """Copy the plan of that key to `output`; False if there is none. A damaged entry is dropped and reported."""
        entry = self._entry(key)
        try:
            read_plan(entry)
        except FileNotFoundError:
            return False
        except PlanError as error:
            _log.warning("engine cache: dropping an entry that cannot be used: %s", error)
            entry.unlink(missing_ok=True)
            return False
        _copy(entry, Path(output))
        return True

    def store(self, key: str, plan: str | os.PathLike[str]) -> None:
        """Keep a copy of the plan file under that key."""
        _copy(Path(plan), self._entry(key))

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held by one process at a time; it goes with its holder, however that ends."""
        with open(self.folder / f"{key}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _entry(self, key: str) -> Path:
        return self.folder / f"{key}.plan"


def external_files(model: Path) -> list[tuple[str, Path]]:
    """(location, path) of the files that hold an ONNX model's external data, in order, each once.

    A location that is no file is left out: to complain about that is the importer's part.
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
    """A protobuf string: its length in groups of seven bits, low ones first, then its bytes."""
    length = shift = 0
    while True:
        byte = data[at]
        length |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return data[at:at + length].decode(errors="replace").replace("\0", "?")


def _digest(path: Path) -> str:
    hasher = hashlib.blake2b(digest_size=20)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def _copy(source: Path, target: Path) -> None:
    """Whoever reads `target` finds what was there before, or the whole copy."""
    with open(source, "rb") as old, atomic_write(target) as new:
        shutil.copyfileobj(old, new, _BLOCK)
