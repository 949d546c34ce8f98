"""An object cache gives equal plans, and compiles only changed kernels."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.engines import EngineCache, build_engine
from infer_server.engines.backends.llvm.codegen import compile as compile_module
from infer_server.engines.backends.llvm.codegen.compile import compile_object, object_key
from infer_server.engines.backends.llvm.codegen.executor import scheduler_object
from infer_server.engines.backends.llvm.codegen.isa import ALL, PORTABLE
from infer_server.engines.backends.llvm.tuning import candidates as candidates_module
from infer_server.engines.backends.llvm.tuning.candidates import CandidateCode
from infer_server.engines.machine.object_cache import VARIABLE, ObjectCache, using
from infer_server.engines.plan.plan import Plan

OPTIONS: dict[str, Any] = {"timing": False, "max_batch": 2}
TEXT = "define i64 @f(i64 %x) {\n  ret i64 %x\n}\n"


def model(*widths: int) -> bytes:
    """Return a chain of matrix products, from each width to the next."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])
            for name, width in (("x", widths[0]), (f"t{len(widths) - 1}", widths[-1])))
    shapes = list(zip(widths, widths[1:], strict=False))
    weights = [numpy_helper.from_array(np.full(shape, 0.5, np.float32), f"w{i}") for i, shape in enumerate(shapes)]
    nodes = [helper.make_node("MatMul", ["x" if i == 0 else f"t{i}", f"w{i}"], [f"t{i + 1}"])
             for i in range(len(shapes))]
    made = helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights),
                             opset_imports=[helper.make_opsetid("", 21)])
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make builds use the object cache of their engine cache, whatever this test run uses."""
    monkeypatch.delenv(VARIABLE, raising=False)
    scheduler_object.cache_clear()      # else the first build of a process alone compiles it


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the LLVM IR which this process compiles."""
    texts, compile_ = [], compile_module._compile

    def noted(ir: str, *arguments: str, **options: str) -> bytes:
        texts.append(ir)
        return compile_(ir, *arguments, **options)

    monkeypatch.setattr(compile_module, "_compile", noted)
    return texts


def files_of(cache: EngineCache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.folder.glob("objects/*")}


def objects_of(cache: EngineCache) -> list[str]:
    """Return the names of the entries with machine code; the others refer to them."""
    return [name for name, content in files_of(cache).items() if b"\x7fELF" in content]


def plan_bytes(plan: Plan, path: Path) -> bytes:
    from infer_server.engines.plan.file import write_plan
    write_plan(plan, path)
    return path.read_bytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plans_are_equal_without_a_cache_into_an_empty_one_and_out_of_a_full_one(
        tmp_path: Path, compiled: list[str], precision: str) -> None:
    options = {**OPTIONS, "precision": precision}
    cache, source = EngineCache(tmp_path / "cache"), model(64, 96, 32)
    plain = build_engine(source, cache=False, **options).plan
    count = len(compiled)
    plans = [plain]
    for _ in range(2):
        scheduler_object.cache_clear()
        plans.append(build_engine(source, cache=cache, **options).plan)
        for entry in cache.folder.glob("*.plan"):
            entry.unlink()
    assert len({plan_bytes(plan, tmp_path / "m.plan") for plan in plans}) == 1
    assert count > 0
    assert len(compiled) == 2 * count       # the third build compiles nothing


def test_a_build_of_a_changed_model_compiles_only_what_changed(tmp_path: Path, compiled: list[str]) -> None:
    cache = EngineCache(tmp_path / "cache")
    build_engine(model(64, 96, 32), cache=cache, **OPTIONS)
    before = objects_of(cache)
    assert len(before) == len(compiled)
    compiled.clear()
    scheduler_object.cache_clear()
    build = build_engine(model(64, 96, 32, 48), cache=cache, **OPTIONS)
    assert build.cached is None
    assert len(compiled) == 1               # the third product; the two others and the executor are found
    assert len(objects_of(cache)) == len(before) + 1


def test_the_text_of_a_cached_kernel_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, text = [], CandidateCode._text
    monkeypatch.setattr(CandidateCode, "_text", lambda code, some: written.append(some) or text(code, some))
    cache, source = EngineCache(tmp_path / "cache"), model(64, 96, 32)

    def texts_of_a_build() -> int:
        written.clear()
        build_engine(source, cache=cache, **OPTIONS)
        for entry in cache.folder.glob("*.plan"):
            entry.unlink()
        return len(written)

    assert [texts_of_a_build(), texts_of_a_build()] == [2, 0]
    monkeypatch.setattr(candidates_module, "compiler_digest", lambda: "another")
    assert texts_of_a_build() == 2


def test_a_cached_kernel_is_reported_as_progress(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache")

    def reported(source: bytes) -> list[tuple[Any, ...]]:
        seen: list[tuple[Any, ...]] = []
        build_engine(source, cache=cache, progress=lambda *what: seen.append(what), **OPTIONS)
        for entry in cache.folder.glob("*.plan"):
            entry.unlink()
        return seen

    first, second = (reported(model(64, 96, 32)) for _ in range(2))
    assert first and second == first


def test_without_an_engine_cache_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build_engine(model(64, 96), cache=False, **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_the_environment_disables_the_cache_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    cache = EngineCache(tmp_path / "cache")
    build = build_engine(model(64, 96), cache=cache, **OPTIONS)
    assert build.entry and build.entry.exists()
    assert not cache.objects.folder.exists()


def test_damaged_objects_are_compiled_again(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache")
    first = build_engine(model(64, 96), cache=cache, **OPTIONS)
    intact = files_of(cache)
    for path in cache.folder.glob("objects/*"):
        path.write_bytes(path.read_bytes()[:-9])
    for path in cache.folder.glob("*.plan"):
        path.unlink()
    scheduler_object.cache_clear()
    assert build_engine(model(64, 96), cache=cache, **OPTIONS).plan.machine.code == first.plan.machine.code
    assert files_of(cache) == intact


def test_objects_count_towards_the_size_of_the_engine_cache(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache", gib=1.0)
    build = build_engine(model(64, 96), cache=cache, **OPTIONS)
    assert build.entry
    size, objects = build.entry.stat().st_size, cache.objects.bytes()
    assert objects > 0
    for room, kept in ((1, True), (-1, False)):
        EngineCache(cache.folder, (size + objects + room) / (1 << 30)).store("0" * 40, build.plan)
        assert (cache.folder / f"{'0' * 40}.plan").exists() == kept


@pytest.mark.parametrize("change", [("ir", TEXT.replace("%x)", "%y)")), ("cpu", "x86-64-v3"), ("features", "+avx2"),
                                    ("triple", "aarch64-unknown-linux-gnu")], ids=lambda change: change[0])
def test_a_key_depends_on_the_text_and_the_machine(change: tuple[str, str]) -> None:
    usual = {"ir": TEXT, "triple": "", "cpu": "x86-64", "features": ""}
    assert object_key(**usual) != object_key(**{**usual, change[0]: change[1]})


@pytest.mark.parametrize("name, value", [("_OPTIONS", {"reloc": "static"}), ("_GLOBAL_OPTIONS", ())])
def test_a_key_depends_on_llvms_options(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    before = object_key(TEXT, "", "x86-64", "")
    assert object_key(TEXT, "", "x86-64", "", opt=3) != before
    monkeypatch.setattr(compile_module, name, value)
    assert object_key(TEXT, "", "x86-64", "") != before


def test_a_key_depends_on_llvms_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = object_key(TEXT, "", "x86-64", "")
    monkeypatch.setattr(compile_module.llvm, "llvm_version_info", (1, 2, 3))
    assert object_key(TEXT, "", "x86-64", "") != before


def test_instruction_sets_have_objects_of_their_own(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    plain = [compile_object(TEXT, isa) for isa in ALL]
    for _ in range(2):
        with using(cache):
            assert [compile_object(TEXT, isa) for isa in ALL] == plain
    assert cache.misses == len({(isa.triple, isa.cpu, isa.features) for isa in ALL})


def test_an_invalid_text_is_refused_and_not_kept(tmp_path: Path) -> None:
    with using(ObjectCache(tmp_path)):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="use of undefined value '%y'"):
                compile_object(TEXT.replace("ret i64 %x", "ret i64 %y"), PORTABLE)
    assert not list(tmp_path.iterdir())
