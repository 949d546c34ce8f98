"""A plan file is read as it was written, and other files are refused."""
from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer_server.engines.errors import PlanCorruptError, PlanError, PlanVersionError
from infer_server.engines.ir.graph import QParams
from infer_server.engines.loading import load_engine
from infer_server.engines.plan.checksums import PAGE, page_sums
from infer_server.engines.plan.file import MAGIC, VERSION, fingerprint_of, read_outline, read_plan, write_plan
from infer_server.engines.plan.plan import Buffer, Fallback, Fill, Operand, Plan, Step
from infer_server.engines.plan.sections import INFLATED
from tests.engines.tiny import halo_plan, with_weights
from tests.fuzz.plans import File


def rich_plan() -> Plan:
    """Return a plan with a value in every field."""
    plan = halo_plan()
    view = replace(plan.machine.outputs[0], dtype="uint8", quant=QParams((0.5, 0.25), (3, 0), "uint8", axis=1))
    fallback = Fallback({"op": "Erf", "attrs": {"axes": [1, 2]}}, (view, "w", ""), (view,))
    step = Step("", (), 0, rows=3, depends=(0,), fallback=fallback, fuses=("a", "b"), reason="no kernel for Erf")
    plan = with_weights(plan, {"w": np.arange(6, dtype=np.float16).reshape(2, 3)})
    plan = plan.with_machine(steps=(*plan.machine.steps, step),
                             buffers=(*plan.machine.buffers, Buffer("z", 48, 1, 2)))
    return replace(plan, graph={"nodes": [{"op": "Erf", "inputs": ["x"]}]},
                   weights={**plan.weights, "none": np.zeros((0, 4), np.int64), "one": np.array(7, np.int8),
                            "turned": np.arange(6.).reshape(2, 3).T},
                   metadata={"calibrator": "entropy", "mean": np.float32(0.5), "nested": {"a": (1, 2)}})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_plan(rich_plan(), tmp_path / "m.plan")
    return tmp_path / "m.plan"


def sections(path: Path) -> dict[str, tuple[int, int]]:
    """Return name -> (offset, bytes), including header and manifest."""
    data = path.read_bytes()
    offset, size = (int.from_bytes(data[at:at + 8], "little") for at in (16, 24))
    records = json.loads(zlib.decompress(data[offset:offset + size]))["sections"]
    found = {name: (record["offset"], record["bytes"]) for name, record in records.items()}
    return {"header": (0, 64), **found, "manifest": (offset, size)}


def read_all(path: Path) -> Plan:
    """Read every section, including those read on demand."""
    plan = read_plan(path)
    dict(plan.graph), dict(plan.weights)
    return plan


def test_what_is_written_is_read(path: Path) -> None:
    plan, got = rich_plan(), read_all(path)
    assert got.metadata == {"calibrator": "entropy", "mean": 0.5, "nested": {"a": [1, 2]}}
    assert replace(got, metadata=plan.metadata) == plan
    assert got.machine.steps[1].fallback is not None and got.machine.steps[1].fallback.inputs[1:] == ("w", "")
    assert list(got.weights) == list(plan.weights)
    for name, array in plan.weights.items():
        np.testing.assert_array_equal(got.weights[name], array)
        assert got.weights[name].dtype == array.dtype
        assert not got.weights[name].flags.writeable


def test_constants_are_a_read_only_view_that_begins_on_a_page(path: Path) -> None:
    constants = read_plan(path).machine.constants
    assert isinstance(constants, memoryview) and constants.readonly
    assert np.frombuffer(constants, np.uint8).ctypes.data % mmap.PAGESIZE == 0
    assert sections(path)["constants"][0] % PAGE == 0


def test_a_file_cut_short_anywhere_is_refused(path: Path) -> None:
    data = path.read_bytes()
    cuts = {0, 1, 8, 63, 64, len(data) - 1}
    for offset, size in sections(path).values():
        cuts |= {offset, offset + size // 2, offset + size}
    for cut in sorted(cuts - {len(data)}):
        path.write_bytes(data[:cut])
        with pytest.raises(PlanCorruptError, match=str(path)):
            read_all(path)


def test_a_file_with_something_behind_its_end_is_refused(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")
    with pytest.raises(PlanCorruptError, match=r"bytes, but \d+ were written"):
        read_plan(path)


def test_a_flipped_bit_in_any_section_is_found(path: Path) -> None:
    data = path.read_bytes()
    for name, (offset, size) in sections(path).items():
        for at in {offset, offset + size // 2, offset + size - 1} if size else ():
            if name == "header" and at >= 56:
                continue        # the header's padding means nothing
            changed = bytearray(data)
            changed[at] ^= 0x10
            path.write_bytes(changed)
            with pytest.raises(PlanError, match=str(path)):
                read_all(path)


@pytest.mark.parametrize(("version", "advice"), [(0, "build the plan again"), (99, "update infer-server")])
def test_another_format_says_what_to_do(path: Path, version: int, advice: str) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = version.to_bytes(4, "little")
    path.write_bytes(data)
    expected = rf"plan format {version}, but this runtime reads format {VERSION}.*{advice}"
    with pytest.raises(PlanVersionError, match=expected):
        read_plan(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(100), bytes(64), b"\x08\x07\x12\x04onnx" * 50, MAGIC])
def test_a_foreign_file_is_no_plan(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(PlanCorruptError, match="not an engine plan"):
        load_engine(path)


@pytest.mark.parametrize("read", [read_plan, read_outline])
def test_a_manifest_of_something_else_is_refused(tmp_path: Path, read: Callable[[Path], Plan]) -> None:
    plan = halo_plan()
    for faulty in (plan.with_machine(fills=({"value": 0, "colour": "red"},)),     # type: ignore[arg-type]
                   plan.with_machine(buffers=(1, 2))):                                  # type: ignore[arg-type]
        write_plan(faulty, tmp_path / "m.plan")
        with pytest.raises(PlanCorruptError, match="manifest is not a plan's"):
            read(tmp_path / "m.plan")


@pytest.mark.parametrize("change", [{"max_batch": 2}, {"metadata": {"threads": 3}},
                                    {"machine": halo_plan().machine}])
def test_a_plan_that_was_altered_after_it_was_read_is_not_written_as_that_plan(
        path: Path, change: dict[str, Any]) -> None:
    plan = replace(read_plan(path), **change)
    with pytest.raises(PlanError, match="altered since it was compiled"):
        write_plan(plan, path)
    write_plan(replace(plan, fingerprint=""), path)
    assert read_plan(path) == replace(plan, weights=read_plan(path).weights)


def test_a_manifest_edited_under_a_right_checksum_is_refused_by_its_fingerprint(path: Path) -> None:
    data = path.read_bytes()
    file = File.read(data)
    assert file.write(VERSION) == data
    file.manifest["plan"]["machine"]["steps"][0]["rows_per_item"] = 1
    path.write_bytes(file.write(VERSION))
    with pytest.raises(PlanCorruptError, match="altered since it was compiled, the fingerprint does not match"):
        read_plan(path)


def test_words_exchanged_in_a_page_or_in_a_column_of_pages_are_found(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 60, 4 * PAGE // 8)
    good = page_sums(words.data.cast("B"))
    for one, other in ((3, 200), (3, 3 + PAGE // 8), (3, 200 + PAGE // 8)):
        changed = words.copy()
        changed[[one, other]] = words[[other, one]]
        assert page_sums(changed.data.cast("B")) != good
    changed = words.copy()
    changed[3] += 1
    changed[200] -= 1
    assert page_sums(changed.data.cast("B")) != good


@pytest.mark.parametrize("at", [56, 100, PAGE - 1])
def test_a_byte_that_belongs_to_nothing_is_zero_or_the_file_is_refused(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] = 1
    path.write_bytes(data)
    with pytest.raises(PlanCorruptError):
        read_plan(path)


def test_a_document_that_would_fill_the_memory_is_refused(path: Path) -> None:
    file = File.read(path.read_bytes())
    for content, message in ((bytes(INFLATED + 1), "holds more than"), (b"[" * 10**6, "is no JSON"),
                             (b"[1]", "no JSON object")):
        graph = zlib.compress(content)
        file = replace(file, sections={**file.sections, "graph": graph})
        file.write(VERSION)         # makes the records, and their sums
        file.manifest["plan"]["fingerprint"] = fingerprint_of(file.manifest)
        path.write_bytes(file.write(VERSION))
        with pytest.raises(PlanCorruptError, match=f"section 'graph'.* {message}"):
            dict(read_plan(path).graph)


def test_a_write_that_fails_leaves_the_old_plan_and_no_litter(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(TypeError, match="cannot hold"):
        write_plan(replace(rich_plan(), metadata={"open": path.open}), path)
    with pytest.raises(TypeError):
        write_plan(rich_plan().with_machine(constants="no bytes"), path)     # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_an_engine_runs_on_after_its_file_is_replaced_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "m.plan"
    write_plan(halo_plan(), path)
    engine = load_engine(path)
    write_plan(halo_plan().with_machine(constants=bytes(68)), path)
    path.unlink()
    x = np.zeros((1, 2, 4), np.int32)
    assert engine.run({"x": x})["y"][0, 0].tolist() == [-7, 5, 5, 5, 5, -7]


def test_halos_and_operands_survive_as_their_types(path: Path) -> None:
    plan = read_plan(path)
    assert all(isinstance(fill, Fill) and isinstance(fill.halo[0], tuple) for fill in plan.machine.fills)
    assert plan.machine.steps[0].operands == (Operand(0), Operand(None, 64), Operand(1, 4))


def test_weights_that_were_shifted_or_whose_pages_changed_places_are_found(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).bytes(5 * PAGE + 100)
    plan, path = halo_plan().with_machine(constants=weights), tmp_path / "m.plan"
    write_plan(plan, path)
    good, (offset, _) = path.read_bytes(), sections(path)["constants"]
    pages = [weights[at:at + PAGE] for at in range(0, len(weights), PAGE)]
    pages[1], pages[2] = pages[2], pages[1]
    for wrong in (weights[1:] + b"x", bytes(8) + weights[:-8], b"".join(pages), weights[:PAGE] + bytes(4 * PAGE + 100)):
        path.write_bytes(good[:offset] + wrong + good[offset + len(weights):])
        with pytest.raises(PlanCorruptError, match="section 'constants'"):
            read_plan(path)
