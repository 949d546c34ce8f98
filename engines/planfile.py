"""Plan <-> file.

    header      64 bytes: magic, format version, where the manifest is, its checksum, the size of the file
    sections    each on a page boundary: code/0, code/1, ..., constants, graph (JSON), array/0, array/1, ...
    manifest    JSON: the plan's fields, and for each section its place, size and checksum

Code is checked by BLAKE2b, for it will be executed; the rest by CRC-32, which finds every burst of up to 32 wrong bits
and reads 3.5 GB a second, so that 25 MB of weights take 7 ms. Both guard against accidents, not against an attacker:
a plan is a program, load it only from where you would load a program.

The file is mapped, not read: processes that load one plan share its weights. The graph and its arrays are checked and
decoded only when somebody asks for them.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import secrets
import struct
import types
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import PlanCorruptError, PlanVersionError
from engines.ir import Array
from engines.plan import Plan

MAGIC = b"\x93INFPLAN"      # the first byte is not ASCII: no text file begins like this
VERSION = 1
PAGE = 4096
_HEADER = struct.Struct("<8sIIQQ16sQ8x")     # magic, version, 0, manifest offset, size, checksum, file size
_ELSEWHERE = ("code", "constants", "graph", "graph_arrays")      # fields of Plan that are sections, not manifest
_REBUILD = "build the plan again, or copy it again from where it came"

_Buffer = bytes | memoryview


def _strong(data: _Buffer) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _fast(data: _Buffer) -> str:
    return f"{zlib.crc32(data):08x}"


def _checksum(section: str) -> Callable[[_Buffer], str]:
    return _strong if section.startswith("code/") else _fast


# ---- writing
def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the file beside its name, then rename it: whoever reads `path` finds the old plan or the new one, whole."""
    target = Path(path)
    sections: dict[str, _Buffer] = {f"code/{i}": code for i, code in enumerate(plan.code)}
    sections["constants"] = plan.constants
    sections["graph"] = json.dumps(dict(plan.graph), default=_plain).encode()
    arrays = {}
    for i, (name, array) in enumerate(plan.graph_arrays.items()):
        if array.dtype.hasobject:
            raise TypeError(f"a plan cannot hold the array '{name}' of Python objects")
        arrays[name] = {"dtype": array.dtype.str, "shape": array.shape}
        sections[f"array/{i}"] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    records: dict[str, dict[str, Any]] = {}
    at = PAGE
    for name, data in sections.items():
        records[name] = {"offset": at, "bytes": len(data), "checksum": _checksum(name)(data)}
        at = -(-(at + len(data)) // PAGE) * PAGE
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.name not in _ELSEWHERE}
    manifest = json.dumps({"plan": fields, "code": len(plan.code), "arrays": arrays, "sections": records},
                          default=_plain, separators=(",", ":")).encode()
    header = _HEADER.pack(MAGIC, VERSION, 0, at, len(manifest), bytes.fromhex(_strong(manifest)), at + len(manifest))

    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
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
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    """What json cannot write by itself: dataclasses (by field), mappings, numpy's numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a plan cannot hold a {type(value).__name__}: {value!r}")


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
    content: dict[str, Any] = json.loads(bytes(manifest))
    return content


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
            fields = _from_plain(Plan, self._manifest["plan"])
            return Plan(**fields, code=tuple(bytes(self.section(f"code/{i}")) for i in range(self._manifest["code"])),
                        constants=self.section("constants"),
                        graph=_LazyGraph(self), graph_arrays=_LazyArrays(self, self._manifest["arrays"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # The checksums hold, so this is what a faulty or a private version of the compiler wrote.
            raise PlanCorruptError(f"{self.path}: the manifest is not a plan's ({error!r}); {_REBUILD}") from error


class _LazyGraph(Mapping[str, Any]):
    """The graph's JSON, decoded at the first look."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._content: dict[str, Any] | None = None

    def _read(self) -> dict[str, Any]:
        if self._content is None:
            self._content = json.loads(bytes(self._reader.section("graph")))
        return self._content

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class _LazyArrays(Mapping[str, Array]):
    """The graph's constants: read-only views of the file, each checked when it is asked for."""

    def __init__(self, reader: _Reader, records: dict[str, Any]) -> None:
        self._reader = reader
        self._records = {name: (i, record) for i, (name, record) in enumerate(records.items())}

    def __getitem__(self, name: str) -> Array:
        index, record = self._records[name]
        data = self._reader.section(f"array/{index}")
        return np.ndarray(tuple(record["shape"]), np.dtype(record["dtype"]), data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


# ---- JSON -> dataclasses, by their annotations
@cache
def _decoders(cls: type) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return {f.name: _decoder(hints[f.name]) for f in dataclasses.fields(cls)}


def _from_plain(cls: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """Field name -> value. Raises KeyError for a field that the class does not have."""
    decoders = _decoders(cls)
    return {name: decoders[name](value) for name, value in content.items()}


def _decoder(hint: Any) -> Callable[[Any], Any]:
    """JSON knows lists, not tuples, and no dataclasses: what undoes that for a value of this type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        cls = hint
        return lambda value: cls(**_from_plain(cls, value))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        inner = _decoder(arguments[0])
        return tuple if inner is _same else lambda value: tuple(inner(v) for v in value)
    if origin is tuple:
        inners = [_decoder(argument) for argument in arguments]
        return lambda value: tuple(inner(v) for inner, v in zip(inners, value, strict=True))
    return _same


def _union_decoder(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    """A union has at most one member that needs decoding here, and JSON writes that one as an object."""
    inner = next((decode for decode in map(_decoder, arguments) if decode is not _same), _same)
    return lambda value: inner(value) if isinstance(value, dict) else value


def _same(value: Any) -> Any:
    return value
