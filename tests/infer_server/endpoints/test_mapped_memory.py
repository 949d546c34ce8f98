"""Requests read mapped files of their clients; changes to such files harm no other client."""
from __future__ import annotations

import ctypes
import gc
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from infer_server.endpoints import shared_memory
from infer_server.endpoints.mapped_memory import Guard, Mapping, guard, mapped
from infer_server.endpoints.shared_memory import Regions
from infer_server.engines.backends.llvm.codegen.bus_guard import GuardRow, ProcessAddresses, bus_guard_object
from infer_server.engines.backends.llvm.codegen.isa import isa_named
from infer_server.engines.errors import ConfigError
from infer_server.errors import InvalidRequestError
from infer_server.protocol.parameters import MemoryReference

SIZE = 5 * 4096 + 100           # neither it nor the offset is whole pages
OFFSET = 4096 + 200
CONTENT = np.random.default_rng(0).integers(1, 255, SIZE, np.uint8).tobytes()
KEY = f"mapped_{os.getpid()}"


@pytest.fixture
def installed() -> Guard:
    actual = guard()
    if actual is None:
        pytest.skip("there is no guard for this machine")
    return actual


@pytest.fixture
def file() -> Iterator[int]:
    path = Path("/dev/shm") / KEY
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.pwrite(descriptor, CONTENT, OFFSET)
    yield descriptor
    os.close(descriptor)
    path.unlink()


def test_a_file_is_read_as_it_is_at_each_moment(installed: Guard, file: int) -> None:
    actual = Mapping(installed, file, OFFSET, SIZE)
    assert actual.bytes == CONTENT and actual.bytes.readonly
    os.pwrite(file, b"other", OFFSET)
    assert actual.bytes[:7] == b"other" + CONTENT[5:7] and not actual.is_lost


def test_what_a_file_no_longer_has_is_zeros_and_a_mark(installed: Guard, file: int) -> None:
    actual, other = Mapping(installed, file, OFFSET, SIZE), Mapping(installed, file, OFFSET, 100)
    os.truncate(file, OFFSET + 100)
    assert actual.bytes[:100] == CONTENT[:100] and not actual.is_lost
    assert not any(actual.bytes[8192:]) and actual.is_lost
    os.truncate(file, OFFSET + SIZE)
    assert not any(actual.bytes)                    # all of it, for good
    assert other.bytes == CONTENT[:100] and not other.is_lost


def test_threads_that_meet_the_end_of_a_file_together_all_go_on(installed: Guard, file: int) -> None:
    for _ in range(20):
        os.pwrite(file, CONTENT, OFFSET)
        found = Mapping(installed, file, OFFSET, SIZE)
        everybody = threading.Barrier(4)
        seen: list[bool] = []

        def look(found: Mapping = found, everybody: threading.Barrier = everybody, seen: list[bool] = seen) -> None:
            everybody.wait()
            seen.append(bool(np.frombuffer(found.bytes, np.uint8).any()))
        threads = [threading.Thread(target=look) for _ in range(4)]
        os.truncate(file, 0)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [False] * 4 and found.is_lost


def test_a_mapping_lasts_as_long_as_its_bytes_and_its_place_in_the_table_no_longer(installed: Guard, file: int) -> None:
    gc.collect()
    before = len(installed._free)
    actual = Mapping(installed, file, OFFSET, SIZE)
    tensor = np.frombuffer(actual.bytes, np.uint8)[1:]
    del actual
    gc.collect()
    assert tensor.tobytes() == CONTENT[1:] and len(installed._free) == before - 1
    assert KEY in Path("/proc/self/maps").read_text()
    del tensor
    gc.collect()
    assert len(installed._free) == before and KEY not in Path("/proc/self/maps").read_text()


def test_a_row_that_is_free_again_holds_no_address_and_is_used_last(installed: Guard) -> None:
    row = installed.watch(1 << 40, 1 << 41)
    installed.forget(row)
    begin, end = (ctypes.c_uint64(installed._table[row + word]).value for word in (GuardRow.BEGIN, GuardRow.END))
    assert (begin, end) == ((1 << 64) - 1, 0)
    next_row = installed.watch(1 << 40, 1 << 41)
    installed.forget(next_row)
    assert next_row != row


def test_without_room_in_the_table_a_file_is_not_mapped(installed: Guard, file: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    assert mapped(file, OFFSET, SIZE)
    monkeypatch.setattr(installed, "_free", type(installed._free)())
    assert mapped(file, OFFSET, SIZE) is None


def test_a_tensor_of_more_bytes_than_the_system_moves_at_a_time_is_whole(file: int, monkeypatch: pytest.MonkeyPatch
                                                                         ) -> None:
    """Linux moves at most 2 GiB per call; this test lowers that limit."""
    read, write = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda file, count, at: read(file, min(count, 5000), at))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:5000], at))
    monkeypatch.setattr(shared_memory, "mapped", lambda *_: None)
    regions = Regions(allowed=True)
    regions.register("r", KEY, OFFSET, SIZE)
    place = regions.locate(MemoryReference("r", 100, 12000))
    assert place.read() == CONTENT[100:12100]
    place.write(memoryview(CONTENT[:11000]), "y")
    assert read(file, SIZE, OFFSET) == CONTENT[:100] + CONTENT[:11000] + CONTENT[11100:]


def test_a_region_that_lost_its_mapping_is_read_by_system_calls(installed: Guard, file: int) -> None:
    regions = Regions(allowed=True)
    regions.register("r", KEY, OFFSET, SIZE)
    place = regions.locate(MemoryReference("r", 4096, 8192))
    assert place.read() == CONTENT[4096:12288]
    os.truncate(file, 0)
    for _ in range(2):                              # of the mapping, of the file
        with pytest.raises(InvalidRequestError, match="shorter than it was"):
            place.read()
    os.pwrite(file, CONTENT, OFFSET)
    assert place.read() == CONTENT[4096:12288]


OTHERS = """
import faulthandler, mmap, os, sys
from infer_server.endpoints.mapped_memory import Mapping, guard
assert guard()
file = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
os.truncate(file, 4096)
mine, other = Mapping(guard(), file, 0, 4096), mmap.mmap(file, 4096)
if "late" in sys.argv:
    faulthandler.enable()
    assert not guard().is_installed
os.truncate(file, 0)
if "late" not in sys.argv:
    assert mine.bytes[0] == 0 and mine.is_lost
print("so far", flush=True)
os.kill(os.getpid(), 7) if "killed" in sys.argv else other[0]
print("too far")
"""


@pytest.mark.parametrize("options, how, says", [
    ([], "touched", ""), ([], "killed", ""), (["-X", "faulthandler"], "touched", "Fatal Python error: Bus error"),
    ([], "late", "Fatal Python error: Bus error")])
def test_any_other_bus_error_ends_the_process_as_it_would_have(installed: Guard, options: list[str], how: str,
                                                               says: str) -> None:
    done = subprocess.run([sys.executable, *options, "-c", OTHERS, how], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "so far\n") and says in done.stderr


@pytest.mark.parametrize("target, architecture, machine", [("avx2", "x86_64", 62), ("aarch64", "aarch64", 183)])
def test_the_handler_is_compiled_for_every_architecture_that_it_knows(target: str, architecture: str,
                                                                      machine: int) -> None:
    process = ProcessAddresses(*(0x7F0000000000 + 4096 * i for i in range(5)))
    code = bus_guard_object(process, isa_named(target), architecture)
    assert struct.unpack_from("<H", code, 18) == (machine,) and b"\0on_bus_error\0" in code      # ELF's e_machine
    with pytest.raises(ConfigError, match="no guard for mapped files on riscv64"):
        bus_guard_object(process, isa_named("portable"), "riscv64")
