"""Tests of the object cache: storage, eviction, refused entries and folders, and selection by a build."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infer_server.engines.machine import object_cache
from infer_server.engines.machine.object_cache import VARIABLE, ObjectCache, current, digest, using

KEYS = A, B, C, D = tuple(digest(name) for name in "abcd")
CODE = bytes(range(256)) * 4

WRITER = """
import sys
from infer_server.engines.machine.object_cache import ObjectCache, digest
cache = ObjectCache(sys.argv[1], 24 << 10)
for i in range(200):
    key = digest(str(i % 40))
    code = key.encode() * 25
    assert cache.fetch(key) in (None, code)
    cache.store(key, code)
"""


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path / "engines" / "objects")


def entry(cache: ObjectCache, key: str) -> Path:
    return cache.folder / f"{key}.object"


def used_at(cache: ObjectCache, key: str, seconds: float) -> None:
    os.utime(entry(cache, key), (seconds, seconds))


def test_an_object_is_found_by_every_cache_of_the_folder(cache: ObjectCache) -> None:
    assert cache.fetch(A) is None
    cache.store(A, CODE)
    assert cache.fetch(A) == CODE
    assert ObjectCache(cache.folder).fetch(A) == CODE
    assert cache.fetch(B) is None
    assert (cache.hits, cache.misses) == (1, 2)


def test_nobody_else_may_read_or_write_the_folders(cache: ObjectCache) -> None:
    cache.store(A, CODE)
    assert cache.folder.stat().st_mode & 0o777 == cache.folder.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [
    lambda content: content[:-1], lambda content: content[:10], lambda content: b"",
    lambda content: content[:300] + bytes([content[300] ^ 1]) + content[301:],
    lambda content: bytes([content[0] ^ 1]) + content[1:], lambda content: content + b"\0",
], ids=["truncated", "truncated checksum", "empty", "changed", "changed checksum", "longer"])
def test_a_damaged_entry_is_removed_and_replaced(cache: ObjectCache, damage: object,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    assert callable(damage)
    cache.store(A, CODE)
    entry(cache, A).write_bytes(damage(entry(cache, A).read_bytes()))
    assert cache.fetch(A) is None
    assert not entry(cache, A).exists()
    assert f"{entry(cache, A)} is damaged" in caplog.text
    cache.store(A, CODE)
    assert cache.fetch(A) == CODE


def test_an_entry_under_the_key_of_another_is_refused(cache: ObjectCache) -> None:
    cache.store(A, CODE)
    entry(cache, A).rename(entry(cache, B))
    assert cache.fetch(B) is None


def test_the_entries_used_longest_ago_are_evicted(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, int(3.5 * len(CODE)))
    for age, key in zip((50, 60, 40), (A, B, C), strict=True):
        cache.store(key, CODE)
        used_at(cache, key, time.time() - age)
    assert cache.fetch(B) == CODE       # it was the oldest
    cache.store(D, CODE)
    assert [ObjectCache(tmp_path).fetch(key) is not None for key in KEYS] == [False, True, True, True]


def test_one_process_never_exceeds_the_limit(tmp_path: Path) -> None:
    limit = 20 * len(CODE)
    cache = ObjectCache(tmp_path, limit)
    for i in range(100):
        cache.store(digest(str(i)), CODE)
        assert cache.bytes() <= limit
    assert cache.bytes() > limit / 2


def test_what_another_process_wrote_counts(tmp_path: Path) -> None:
    first, second = (ObjectCache(tmp_path, 40 * len(CODE)) for _ in range(2))
    for i in range(200):
        (first if i % 2 else second).store(digest(str(i)), CODE)
    assert first.bytes() <= first.limit * (1 + 2 / 16)


def test_an_object_larger_than_the_cache_is_not_kept(tmp_path: Path) -> None:
    for limit in (0, len(CODE)):
        cache = ObjectCache(tmp_path, limit)
        cache.store(A, CODE)
        assert cache.bytes() == 0


def test_temporary_files_of_dead_writers_are_removed(cache: ObjectCache) -> None:
    cache.store(A, CODE)
    old, young = (cache.folder / f".{B}.object.1.{name}" for name in ("old", "young"))
    for path in (old, young, cache.folder / "README"):
        path.write_bytes(b"part")
    os.utime(old, (0, 0))
    os.utime(cache.folder / "README", (0, 0))
    assert cache.bytes() == entry(cache, A).stat().st_size
    assert {path.name for path in cache.folder.iterdir()} == {entry(cache, A).name, young.name, "README"}


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(cache: ObjectCache, mode: int,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    cache.store(A, CODE)
    cache.folder.chmod(mode)
    other = ObjectCache(cache.folder)
    assert other.fetch(A) is None
    other.store(B, CODE)
    assert not entry(cache, B).exists()
    assert caplog.text.count(f"the object cache {cache.folder} is not used") == 1


def test_a_folder_of_another_user_is_not_used(cache: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(A, CODE)
    monkeypatch.setattr(os, "geteuid", lambda: cache.folder.stat().st_uid + 1)
    assert ObjectCache(cache.folder).fetch(A) is None


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = ObjectCache(tmp_path / "file" / "objects")
    cache.store(A, CODE)
    assert cache.fetch(A) is None
    assert cache.bytes() == 0


def test_processes_share_a_folder_while_entries_are_evicted(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert not list(tmp_path.glob(".*"))
    assert 0 < ObjectCache(tmp_path).bytes() <= (24 << 10) * (1 + 3 / 16)


def test_a_key_depends_on_each_part_and_on_where_it_ends() -> None:
    keys = [digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("ab", "c", ""), digest("ab", "C")]
    assert len(set(keys)) == len(keys)
    assert digest("ab", "c") == keys[0]


def test_a_thread_uses_the_cache_of_its_block(cache: ObjectCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    seen = []
    assert current() is None
    with using(cache):
        assert current() is cache
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        with using(None):
            assert current() is None
        assert current() is cache
    assert current() is None
    assert seen == [None]


def test_the_environment_names_another_folder_or_disables_the_cache(cache: ObjectCache, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with using(cache):
        named = current()
    assert named and named.folder == tmp_path and named.limit == object_cache.USUAL_BYTES
    assert current() is named
    monkeypatch.setenv(VARIABLE, "off")
    with using(cache):
        assert current() is None
