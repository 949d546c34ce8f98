"""Plan <-> file.

    header      64 bytes: magic, format version, where the manifest is, its checksum, the size of the file
    sections    constants, on a page boundary; code; graph and packed (JSON); array/0, array/1, ...
    manifest    JSON: the plan's fields, and for each section its place, size and checksum

Each weight is there once: among the constants, as kernels read it. What the graph needs of it again is read back from
there (engines/packed.py); only constants of the graph that are nowhere else have an array. Code, JSON and manifest are
compressed; constants are not, for the file is mapped, not read: processes that load one plan share its weights. (But
not those that kernels make of others when a plan is made ready to run: Plan.derived.)

Code is checked by BLAKE2b, for it will be executed; the rest by the CRC-32 of the sums of each page's 64-bit words (and
of the bytes behind the last whole page). It finds any change inside one word, and pages that are missing or in each
other's place; it overlooks changes that cancel out in one page, such as two words exchanged. Summing reads 10 GB a
second, three times as fast as a CRC of every byte. Both guard against accidents, not against an attacker: a plan is a
program, load it only from where you would load a program. The graph and its arrays are checked and decoded only when
somebody asks for them.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from engines.errors import PlanCorruptError, PlanVersionError
from engines.ir import Array
from engines.packed import PackedArray, Packing, Picked
from engines.plan import Plan
from engines.records import from_plain, to_plain

MAGIC = b"\x93INFPLAN"      # the first byte is not ASCII: no text file begins like this
VERSION = 6
PAGE, LINE = 4096, 64
_HEADER = struct.Struct("<8sIIQQ16sQ8x")     # magic, version, 0, manifest offset, size, checksum, file size
_ELSEWHERE = ("code", "constants", "graph", "graph_arrays", "packed")        # fields of Plan that are sections
_REBUILD = "build the plan again, or copy it again from where it came"

_Buffer = bytes | memoryview


def _strong(data: _Buffer) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _fast(data: _Buffer) -> str:
    whole = len(data) // PAGE * PAGE
    sums = np.frombuffer(data[:whole], np.uint64).reshape(-1, PAGE // 8).sum(axis=1)
    return f"{zlib.crc32(data[whole:], zlib.crc32(sums)):08x}"


def _checksum(section: str) -> Callable[[_Buffer], str]:
    return _strong if section == "code" else _fast


def _compressed_json(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, default=to_plain, separators=(",", ":")).encode())


# ---- writing
def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the file beside its name, then rename it: whoever reads `path` finds the old plan or the new one, whole."""
    sections, arrays = _sections(plan)
    sections["constants"] = plan.constants

    records: dict[str, dict[str, Any]] = {}
    at = PAGE
    for name, data in sorted(sections.items(), key=lambda item: item[0] != "constants"):
        records[name] = {"offset": at, "bytes": len(data), "checksum": _checksum(name)(data)}
        at = -(-(at + len(data)) // LINE) * LINE
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.name not in _ELSEWHERE}
    manifest = _compressed_json({"plan": fields, "code": [len(code) for code in plan.code],
                                 "arrays": arrays, "sections": records})
    header = _HEADER.pack(MAGIC, VERSION, 0, at, len(manifest), bytes.fromhex(_strong(manifest)), at + len(manifest))

    folder, name = os.path.split(os.fspath(path))
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with open(temporary, "xb") as file:
            file.write(header)
            for name, data in sections.items():
                file.seek(records[name]["offset"])
                file.write(data)
            file.seek(at)
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _sections(plan: Plan) -> tuple[dict[str, _Buffer], dict[str, Any]]:
    """All but the constants, and what the arrays among them are."""
    packings = {item.packing: None for item in plan.packed.values()}
    numbers = {packing: i for i, packing in enumerate(packings)}
    packed = {name: {**to_plain(item), "packing": numbers[item.packing]} for name, item in plan.packed.items()}
    sections: dict[str, _Buffer] = {
        "code": zlib.compress(b"".join(plan.code)),
        "graph": _compressed_json(plan.graph),
        "packed": _compressed_json({"arrays": packed, "packings": [_differences(p) for p in packings]})}
    arrays: dict[str, Any] = {}
    for name, array in plan.graph_arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"a plan cannot hold the array '{name}' of Python objects")
        arrays[name] = None
        if name not in plan.packed:
            arrays[name] = {"dtype": array.dtype.str, "shape": array.shape, "section": f"array/{len(sections)}"}
            sections[f"array/{len(sections)}"] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return sections, arrays


def _differences(packing: Packing | Picked) -> dict[str, Any]:
    """Each number less the one before it: these repeat, so that they compress to little."""
    def differences(numbers: tuple[int, ...]) -> list[int]:
        return np.diff(numbers, prepend=0).tolist()

    if isinstance(packing, Picked):
        return {"lanes": packing.lanes, "short": packing.short, "rows": differences(packing.rows),
                "columns": differences(packing.columns)}
    return {"starts": differences(packing.starts), "kinds": packing.kinds,
            "steps": [differences(steps) for steps in packing.steps]}


def _sums(content: Mapping[str, Any]) -> Packing | Picked:
    """The inverse."""
    def summed(differences: list[int]) -> tuple[int, ...]:
        return tuple(np.cumsum(differences, dtype=np.int64).tolist())

    if "lanes" in content:
        return Picked(content["lanes"], content["short"], summed(content["rows"]), summed(content["columns"]))
    return Packing(summed(content["starts"]), tuple(content["kinds"]), tuple(map(summed, content["steps"])))


# ---- reading
def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file; its constants are a read-only view of the mapped file.

    Raises PlanCorruptError (no plan, cut short, altered), PlanVersionError (another format), OSError (no such file).
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEADER.size:
            raise PlanCorruptError(f"{path}: {size} bytes are no engine plan; {_REBUILD}")
        data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    reader = _Reader(str(path), data, _manifest(str(path), data))
    return reader.plan()


def _manifest(path: str, data: memoryview) -> dict[str, Any]:
    magic, version, _, offset, size, checksum, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise PlanCorruptError(f"{path}: no engine plan, it begins with {bytes(magic)!r}; make one with build-engine")
    if version != VERSION:
        update = "update infer-server, or " if version > VERSION else ""
        raise PlanVersionError(f"{path}: plan format {version}, but this runtime reads format {VERSION}; "
                               f"{update}build the plan again with this version")
    if length != len(data):
        raise PlanCorruptError(f"{path}: {len(data)} bytes, but {length} were written; {_REBUILD}")
    manifest = data[offset:offset + size]
    if len(manifest) != size or _strong(manifest) != checksum.hex():
        raise PlanCorruptError(f"{path}: the manifest's checksum is wrong; {_REBUILD}")
    content: dict[str, Any] = json.loads(zlib.decompress(manifest))
    return content


_Value = TypeVar("_Value")


class _Reader:
    """Sections by name, checked when they are read."""

    def __init__(self, path: str, data: memoryview, manifest: dict[str, Any]) -> None:
        self.path, self._data, self._manifest = path, data, manifest

    def section(self, name: str) -> memoryview:
        record = self._manifest["sections"][name]
        data = self._data[record["offset"]:record["offset"] + record["bytes"]]
        if len(data) != record["bytes"] or _checksum(name)(data) != record["checksum"]:
            raise PlanCorruptError(f"{self.path}: section '{name}' ({record['bytes']} bytes at {record['offset']}) has "
                                   f"a wrong checksum; {_REBUILD}")
        return data

    def plan(self) -> Plan:
        try:
            fields = from_plain(Plan, self._manifest["plan"])
            constants = self.section("constants")
            packed = _Lazy(self._packed)
            return Plan(**fields, code=self._code(), constants=constants, graph=_Lazy(self._graph), packed=packed,
                        graph_arrays=_LazyArrays(self, self._manifest["arrays"], constants, packed))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # The checksums hold, so this is what a faulty or a private version of the compiler wrote.
            raise PlanCorruptError(f"{self.path}: the manifest is not a plan's ({error!r}); {_REBUILD}") from error

    def _code(self) -> tuple[bytes, ...]:
        objects, at = zlib.decompress(self.section("code")), 0
        code = []
        for size in self._manifest["code"]:
            code.append(objects[at:at + size])
            at += size
        return tuple(code)

    def _graph(self) -> dict[str, Any]:
        graph: dict[str, Any] = json.loads(zlib.decompress(self.section("graph")))
        return graph

    def _packed(self) -> dict[str, PackedArray]:
        content = json.loads(zlib.decompress(self.section("packed")))
        packings = [_sums(packing) for packing in content["packings"]]
        return {name: PackedArray(**{**record, "shape": tuple(record["shape"]), "offsets": tuple(record["offsets"]),
                                     "packing": packings[record["packing"]]})
                for name, record in content["arrays"].items()}


class _Lazy(Mapping[str, _Value]):
    """A mapping that is read at the first look."""

    def __init__(self, read: Callable[[], Mapping[str, _Value]]) -> None:
        self._read = read

    @cached_property
    def content(self) -> Mapping[str, _Value]:
        return self._read()

    def __getitem__(self, key: str) -> _Value:
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class _LazyArrays(Mapping[str, Array]):
    """The graph's constants, each checked when it is asked for: views of the file, or read back from the constants."""

    def __init__(self, reader: _Reader, records: dict[str, Any], constants: memoryview,
                 packed: Mapping[str, PackedArray]) -> None:
        self._reader, self._records, self._constants, self._packed = reader, records, constants, packed

    def __getitem__(self, name: str) -> Array:
        record = self._records[name]
        if record is None:
            array = self._packed[name].unpack(self._constants)
            array.flags.writeable = False
            return array
        return np.ndarray(tuple(record["shape"]), np.dtype(record["dtype"]), self._reader.section(record["section"]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)
