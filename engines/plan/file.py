"""Plan files: write_plan and read_plan.

    header      64 bytes: magic, format version, offset, size and checksum of the manifest, size of the file
    sections    constants, on a page boundary; code; graph (JSON); weights
    manifest    JSON: the plan's fields, and for each section its offset, size and checksum

Constants are the weights as kernels read them: packed, in order of execution. Weights are the unpacked constants of the
graph, which only compiling it again needs: a plan runs without that section (--strip omits it). A constant that kernels
read unpacked is stored with the constants only. Code, JSON and manifest are compressed; constants and weights are not,
because they would hardly shrink.

A plan with open extents also holds the model that specialisations are made from, as ONNX without weights ("model") and
its weights ("weights.open"), symbolic plans ("symbolic"), and the specialisations made at the build, each as a plan of
its own: sections without a number belong to the first, "constants.1" to the second.

A plan of a program has instructions in the manifest instead of steps. It holds the weights of all segments
("weights.program"), and for each segment its ONNX model ("model.s2" of the third) and its plans ("constants.s2.0").

A plan runs from a private copy of the file in memory (sections.py), verified while it is copied and never read again:
later changes to the file have no effect. A file that changes while it is read either fails its checksums or is read as
the whole old or new plan: the header has the manifest's checksum, and the manifest those of all sections. Only the
weights stay in the file until they are needed, and are verified then.

Constants and weights have page checksums, which are as fast as memory; all else has BLAKE2b. Both protect against
accidents, not against an attacker: a plan contains machine code, so load it only from a source that you trust.
"""
from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from infer_server.engines.errors import PlanCorruptError, PlanError, PlanVersionError
from infer_server.engines.files import atomic_write
from infer_server.engines.ir.content import EqualArrays
from infer_server.engines.ir.dtypes import dtype_in_file, name_in_file
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.checksums import PAGE, Bytes, page_sums, strong
from infer_server.engines.plan.plan import MachinePart, OpenPart, Plan, ProgramPart, SegmentPart
from infer_server.engines.plan.records import FieldError, from_plain, read_record, to_plain
from infer_server.engines.plan.sections import (
    REBUILD,
    WEIGHTS,
    Section,
    Sections,
    deflate,
    read_document,
    reading_manifest,
    summed,
)
from infer_server.engines.plan.verification import verify

MAGIC = b"\x93INFPLAN"      # the first byte is not ASCII: no text file begins like this
VERSION = 13
ALIGNMENT = 64          # alignment of sections and of the arrays in the weights
_HEADER = struct.Struct("<8sIIQQ16sQQ")      # magic, version, 0, manifest offset, size, checksum, file size, 0
_ELSEWHERE = ("code", "constants", "graph", "weights", "model")     # fields that are sections
_NOT_FIELDS = (*_ELSEWHERE, "open", "others", "symbolic", "program", "segments", "plans", "of_symbolic")
_MODEL, _OPEN, _SYMBOLIC, _PROGRAM = "model", "open", "symbolic", "program"


def _json(value: Any) -> bytes:
    return json.dumps(value, default=to_plain, separators=(",", ":")).encode()


def fingerprint_of(manifest: Mapping[str, Any]) -> str:
    """Return the BLAKE2b digest of a manifest: the plan's fields and the checksums of its sections.

    Code is valid only for the offsets, grids and layouts that it was compiled for. A plan in which one of these was
    altered is rejected, even if the file's checksums were updated.
    """
    fields = {name: value for name, value in manifest["plan"].items() if name != "fingerprint"}
    sums = {name: record["checksum"] for name, record in manifest["sections"].items()}
    return strong(_json([fields, manifest["code"], manifest["arrays"], sums, manifest.get(_OPEN),
                         manifest.get(_PROGRAM)]))


# ---- writing
def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan atomically: concurrent readers of `path` see the old file.

    Raises PlanError if a section is too large or the plan was altered after it was read; OSError.
    """
    content, sections = _content(plan)
    records: dict[str, dict[str, Any]] = {}
    at = PAGE
    for name, data in sections.items():
        records[name] = {"offset": at, "bytes": len(data), "checksum": (page_sums if summed(name) else strong)(data)}
        at = -(-(at + len(data)) // ALIGNMENT) * ALIGNMENT
    content = {**content, "sections": records}
    fingerprint = fingerprint_of(json.loads(_json(content)))
    if plan.fingerprint not in ("", fingerprint):
        raise PlanError(f"{plan.name}: the plan was altered since it was compiled; compile it again, or clear its "
                        "fingerprint to write it as another plan")
    fields = {**content["plan"], "fingerprint": fingerprint}
    manifest = deflate(_json({**content, "plan": fields}), "the manifest")
    header = _HEADER.pack(MAGIC, VERSION, 0, at, len(manifest), bytes.fromhex(strong(manifest)), at + len(manifest), 0)
    with atomic_write(path) as file:
        for offset, data in ((0, header), *((records[name]["offset"], data) for name, data in sections.items()),
                             (at, manifest)):
            file.seek(offset)
            file.write(data)


def _content(plan: Plan, number: str = "") -> tuple[dict[str, Any], dict[str, Bytes]]:
    """Return a plan's part of the manifest and its sections. number: suffix of the section names, "" for the first."""
    arrays, weights = _stored(plan.weights, plan.machine.weight_offsets)
    sections: dict[str, Bytes] = {
        _numbered("constants", number): plan.machine.constants,
        _numbered("code", number): deflate(b"".join(plan.machine.code), "the code"),
        _numbered("graph", number): deflate(_json(dict(plan.graph)), "the graph")}
    if not plan.stripped:
        sections[_numbered(WEIGHTS, number)] = weights
    fields = {**_fields(plan), "machine": _fields(plan.machine)}
    content: dict[str, Any] = {"plan": fields, "code": [len(code) for code in plan.machine.code], "arrays": arrays}
    if plan.open is not None:
        content[_OPEN], more = _open_content(plan, plan.open, number)
        sections |= more
    if plan.program is not None:
        content[_PROGRAM], more = _program_content(plan.program)
        sections |= more
    return content, sections


def _open_content(plan: Plan, part: OpenPart, number: str) -> tuple[dict[str, Any], dict[str, Bytes]]:
    prefix = f"{number}." if number else ""
    others = [_content(other, f"{prefix}{index}") for index, other in enumerate(part.others, 1)]
    shared = _shared(part.weights, plan)
    arrays, weights = _stored(part.weights, shared)
    content = {"part": _fields(part), "arrays": arrays, "shared": shared, "others": [one for one, _ in others]}
    sections: dict[str, Bytes] = {_numbered(_MODEL, number): deflate(part.model, "the model"),
                                  _numbered(f"{WEIGHTS}.{_OPEN}", number): weights}
    if part.symbolic:
        sections[_numbered(_SYMBOLIC, number)] = part.symbolic
    return content, {**sections, **{name: data for _, part in others for name, data in part.items()}}


def _program_content(part: ProgramPart) -> tuple[dict[str, Any], dict[str, Bytes]]:
    arrays, weights = _stored(part.weights, {})
    sections: dict[str, Bytes] = {f"{WEIGHTS}.{_PROGRAM}": weights}
    segments = []
    for number, segment in enumerate(part.segments):
        plans = [_content(replace(plan, open=replace(plan.open, weights={})) if plan.open else plan,     # weights: once
                          f"s{number}.{index}") for index, plan in enumerate(segment.plans)]
        segments.append({"part": _fields(segment), "plans": [document for document, _ in plans]})
        sections[f"{_MODEL}.s{number}"] = deflate(segment.model, "the model")
        sections |= {name: data for _, part in plans for name, data in part.items()}
    return {"part": _fields(part), "arrays": arrays, "segments": segments}, sections


def _numbered(section: str, number: str) -> str:
    return f"{section}.{number}" if number else section


def _fields(value: Plan | MachinePart | OpenPart | ProgramPart | SegmentPart) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name not in _NOT_FIELDS}


def _stored(weights: Mapping[str, Array], elsewhere: Mapping[str, int]) -> tuple[dict[str, Any], bytes]:
    """Return a record of each array and the weights section: equal arrays once, those in `elsewhere` omitted."""
    arrays, parts, size, equal, offsets = dict[str, Any](), list[Bytes](), 0, EqualArrays(), dict[int, int]()
    for name, array in weights.items():
        if array.dtype.hasobject:
            raise TypeError(f"a plan cannot hold the array '{name}' of Python objects")
        at = size if name in elsewhere else offsets.setdefault(equal.number(array), size)
        arrays[name] = {"dtype": name_in_file(array.dtype), "shape": array.shape, "offset": at}
        if at == size and name not in elsewhere:
            parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, bytes(-array.nbytes % ALIGNMENT)]
            size += array.nbytes + len(parts[-1])
    return arrays, b"".join(parts)


def _shared(weights: Mapping[str, Array], plan: Plan) -> dict[str, int]:
    """Return the model's weights that the plan's constants hold unpacked, with their offsets."""
    found = {}
    for name, offset in plan.machine.weight_offsets.items():
        array = weights.get(name)
        if array is not None and np.ascontiguousarray(array).tobytes() == bytes(
                plan.machine.constants[offset:offset + array.nbytes]):
            found[name] = offset
    return found


# ---- reading
@dataclass(frozen=True)
class _StoredArray:
    """Record of a graph constant. `offset` is into the weights, unless MachinePart.weight_offsets has another."""
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _OnePlan:
    plan: Mapping[str, Any]                         # the fields of Plan that are not sections
    code: tuple[int, ...]                           # size of each object in bytes
    arrays: Mapping[str, _StoredArray]              # the graph's constants
    open: _Open | None = None


@dataclass(frozen=True)
class _Segment:
    part: Mapping[str, Any]                         # the fields of SegmentPart that are not sections
    plans: tuple[_OnePlan, ...]


@dataclass(frozen=True)
class _Program:
    part: Mapping[str, Any]                         # the fields of ProgramPart that are not sections
    arrays: Mapping[str, _StoredArray]              # the weights of its segments
    segments: tuple[_Segment, ...]


@dataclass(frozen=True)
class _Open:
    part: Mapping[str, Any]                         # the fields of OpenPart that are not sections
    arrays: Mapping[str, _StoredArray]              # the model's weights
    shared: Mapping[str, int]                       # offset in the constants of weights stored there
    others: tuple[_OnePlan, ...]


@dataclass(frozen=True)
class _Manifest(_OnePlan):
    sections: Mapping[str, Section] = dataclasses.field(default_factory=dict)
    program: _Program | None = None


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan into private memory; later changes to the file have no effect.

    Raises PlanCorruptError (not a plan, truncated, altered), PlanVersionError (another format), OSError.
    """
    name = str(path)
    with open(path, "rb", buffering=0) as file:
        end, manifest = _read_manifest(name, file.fileno())
        sections = Sections(name, file.fileno(), manifest.sections, end)
    # The checksums are right, so any error from here on is in what a faulty or modified compiler wrote.
    with reading_manifest(name):
        plan = _plan(manifest, sections)
    try:
        for one in plan.within():
            verify(one)
        return plan
    except PlanCorruptError as error:
        raise PlanCorruptError(f"{name}: {error}") from error


def read_outline(path: str | os.PathLike[str]) -> Plan:
    """Read a plan's manifest only: the plan without code, constants, graph and weights. Raises as read_plan."""
    with open(path, "rb", buffering=0) as file:
        _, manifest = _read_manifest(str(path), file.fileno())
    with reading_manifest(str(path)):
        fields = {name: value for name, value in manifest.plan.items() if name != "machine"}
        machine = MachinePart(**from_plain(MachinePart, manifest.plan["machine"]))
        opened = OpenPart(**from_plain(OpenPart, manifest.open.part)) if manifest.open else None
        return Plan(**from_plain(Plan, fields), machine=machine, open=opened)


def _read_manifest(path: str, file: int) -> tuple[int, _Manifest]:
    """Return the manifest's offset in the file, which is the end of the sections, and the manifest."""
    size, first = os.fstat(file).st_size, os.pread(file, PAGE, 0)
    header = first[:_HEADER.size]
    if len(header) < _HEADER.size:
        raise PlanCorruptError(f"{path}: not an engine plan, it has only {size} bytes; {REBUILD}")
    magic, version, zero, offset, length, checksum, total, zeros = _HEADER.unpack(header)
    if magic != MAGIC:
        raise PlanCorruptError(f"{path}: not an engine plan, it begins with {magic!r}; make one with build-engine")
    if version != VERSION:
        update = "update infer-server, or " if version > VERSION else ""
        raise PlanVersionError(f"{path}: plan format {version}, but this runtime reads format {VERSION}; "
                               f"{update}build the plan again with this version")
    if total != size or zero or zeros or any(first[_HEADER.size:]):
        raise PlanCorruptError(f"{path}: {size} bytes, but {total} were written; {REBUILD}")
    if not PAGE <= offset <= size or offset + length != size:
        raise PlanCorruptError(f"{path}: the manifest ({length} bytes at {offset}) is not at the end; {REBUILD}")
    data = os.pread(file, length, offset)
    if len(data) != length or strong(data) != checksum.hex():
        raise PlanCorruptError(f"{path}: the manifest's checksum is wrong; {REBUILD}")
    content = read_document(data, f"{path}: the manifest")
    try:
        manifest: _Manifest = read_record(_Manifest, content)
    except FieldError as error:
        raise PlanCorruptError(f"{path}: the manifest is not a plan's ({error}); {REBUILD}") from error
    if manifest.plan.get("fingerprint") != fingerprint_of(content):
        raise PlanCorruptError(f"{path}: altered since it was compiled, the fingerprint does not match; {REBUILD}")
    return offset, manifest


def _plan(manifest: _OnePlan, sections: Sections, number: str = "") -> Plan:
    fields = from_plain(Plan, {name: value for name, value in manifest.plan.items() if name != "machine"})
    part = from_plain(MachinePart, manifest.plan["machine"])
    if elsewhere := sorted((fields.keys() | part.keys()) & {*_NOT_FIELDS}):
        raise ValueError(f"'{elsewhere[0]}' is a section")
    constants = _numbered("constants", number)
    machine = MachinePart(**part, code=_code(manifest.code, sections, _numbered("code", number)),
                          constants=sections[constants])
    weights = _Weights(sections, manifest.arrays, machine.weight_offsets, _numbered(WEIGHTS, number), constants)
    opened = _open_part(manifest.open, sections, number) if manifest.open else None
    program = manifest.program if isinstance(manifest, _Manifest) else None
    return Plan(**fields, machine=machine, graph=_Document(lambda: sections.document(_numbered("graph", number))),
                weights=weights, open=opened, program=_program_part(program, sections) if program else None)


def _program_part(manifest: _Program, sections: Sections) -> ProgramPart:
    fields = from_plain(ProgramPart, manifest.part)
    weights = _Weights(sections, manifest.arrays, {}, f"{WEIGHTS}.{_PROGRAM}")
    segments = []
    for number, one in enumerate(manifest.segments):
        part = from_plain(SegmentPart, one.part)
        own = _Some(weights, frozenset(part["reads"]))
        plans = [_plan(plan, sections, f"s{number}.{index}") for index, plan in enumerate(one.plans)]
        segments.append(SegmentPart(**part, model=sections.inflated(f"{_MODEL}.s{number}"), plans=tuple(
            replace(plan, open=replace(plan.open, weights=own)) if plan.open else plan for plan in plans)))
    return ProgramPart(**fields, segments=tuple(segments), weights=weights)


def _open_part(manifest: _Open, sections: Sections, number: str) -> OpenPart:
    fields = from_plain(OpenPart, manifest.part)
    if elsewhere := sorted(fields.keys() & {*_NOT_FIELDS}):
        raise ValueError(f"'{elsewhere[0]}' is a section")
    weights = _Weights(sections, manifest.arrays, manifest.shared, _numbered(f"{WEIGHTS}.{_OPEN}", number),
                       _numbered("constants", number))
    prefix = f"{number}." if number else ""
    others = tuple(_plan(other, sections, f"{prefix}{index}") for index, other in enumerate(manifest.others, 1))
    return OpenPart(**fields, model=sections.inflated(_numbered(_MODEL, number)), weights=weights, others=others,
                    symbolic=sections.get(_numbered(_SYMBOLIC, number), b""))


def _code(sizes: Sequence[int], sections: Sections, section: str) -> tuple[bytes, ...]:
    code, bounds = sections.inflated(section), [0, *accumulate(sizes)]
    if min(sizes, default=0) < 0 or bounds[-1] != len(code):
        raise ValueError(f"code of {len(code)} bytes, but of {bounds[-1]} in objects")
    return tuple(code[begin:end] for begin, end in pairwise(bounds))


class _Document(Mapping[str, Any]):
    """JSON object that is read on first access."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    @cached_property
    def content(self) -> Mapping[str, Any]:
        return self._read()

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class _Some(Mapping[str, Array]):
    """View of a mapping of weights that is restricted to some names."""

    def __init__(self, weights: Mapping[str, Array], names: frozenset[str]) -> None:
        self._weights, self._names = weights, names

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Weights(Mapping[str, Array]):
    """Lazy mapping from names to a graph's constants, as views of the section that holds them."""

    def __init__(self, sections: Sections, records: Mapping[str, _StoredArray], offsets: Mapping[str, int],
                 section: str = WEIGHTS, constants: str = "constants") -> None:
        """Take the offsets of arrays that the section `constants` holds; the others are in `section`."""
        self._sections, self._records, self._offsets = sections, records, offsets
        self._section, self._constants = section, constants

    def __getitem__(self, name: str) -> Array:
        record, offset = self._records[name], self._offsets.get(name)
        data = self._sections[self._section if offset is None else self._constants]
        try:
            dtype = dtype_in_file(record.dtype)
            return np.ndarray(record.shape, dtype, data, record.offset if offset is None else offset)
        except (TypeError, ValueError, OverflowError, MemoryError) as error:
            raise PlanCorruptError(f"{self._sections.path}: the constant '{name}' of the graph cannot be read "
                                   f"({error!r}); {REBUILD}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._records        # does not read the array

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)
