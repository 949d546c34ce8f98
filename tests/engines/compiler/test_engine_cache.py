"""Tests of the engine cache: its keys, and concurrent builders."""
from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.engines.compiler import engine_cache as cache_module
from infer_server.engines.compiler.engine_cache import EngineCache, external_files, model_digest, usual_folder
from infer_server.engines.errors import ConfigError
from infer_server.engines.machine.plan_store import PlanStore
from infer_server.engines.plan.plan import Plan
from infer_server.engines.version import sources_digest
from tests.engines.tiny import halo_plan

KEYS = A, B, C = tuple(40 * digit for digit in "abc")
K = A
FACTS = {"precision": "int8", "ranges": {"x": (0.0, 1.0)}}


def model_with_external_data(path: Path, weight: float) -> Path:
    tensor = numpy_helper.from_array(np.full((8, 8), weight, np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [tensor])
    path.parent.mkdir(exist_ok=True)
    onnx.save(helper.make_model(graph), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def plan_of(name: str) -> Plan:
    return replace(halo_plan(), name=name)


def stored_bytes(folder: Path) -> int:
    """Return the bytes of a cache entry of the plan "a"."""
    cache = EngineCache(folder)
    cache.store(K, plan_of("a"))
    return cache.entry(K).stat().st_size


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Make writes beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_one_machine_keeps_another_one_finds_in_the_plan_store(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    here, there = (EngineCache(tmp_path / name, plan_store=PlanStore(str(tmp_path / "shared"))) for name in "ab")
    assert there.fetch(A) is None and there.find(A) is None
    here.store(A, plan_of("a"))
    found = there.fetch(A)
    assert found is not None and found.name == "a" and there.entry(A).exists()
    made: list[str] = []
    assert there.kept(B, lambda: made.append("b") or plan_of("b")).name == "b"     # type: ignore[func-returns-value]
    assert here.find(B) == here.entry(B) and here.kept(B, lambda: pytest.fail("it is built again")).name == "b"
    assert made == ["b"]
    (tmp_path / "shared" / f"{A}.plan").write_bytes(b"no plan")
    there.entry(A).unlink()
    assert there.fetch(A) is None and "refused" in caplog.text


def test_a_plan_in_the_store_that_is_larger_than_the_cache_is_not_read(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    store = PlanStore(str(tmp_path / "shared"))
    EngineCache(tmp_path / "a", plan_store=store).store(A, plan_of("a"))
    assert EngineCache(tmp_path / "b", 1e-6, plan_store=store).fetch(A) is None
    assert "more than the 0 that the engine cache keeps" in caplog.text


def test_a_key_depends_on_model_data_facts_and_compiler_but_not_on_the_folder(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = EngineCache(tmp_path / "cache")
    model = model_with_external_data(tmp_path / "a" / "m.onnx", 1.0)
    twin = model_with_external_data(tmp_path / "b" / "m.onnx", 1.0)
    other = model_with_external_data(tmp_path / "c" / "m.onnx", 2.0)
    assert model.read_bytes() == other.read_bytes(), "only the external data should differ"
    assert [location for location, _ in external_files(model)] == ["weights.bin"]

    key = cache.key(model_digest(model), FACTS)
    assert cache.key(model_digest(twin), FACTS) == key
    assert cache.key(model_digest(other), FACTS) != key
    assert cache.key(model_digest(model.rename(model.with_stem("n"))), FACTS) != key, "the plan has its name"
    assert cache.key(model_digest(twin), {**FACTS, "precision": "fp32"}) != key
    assert cache.key(model_digest(twin), {**FACTS, "ranges": {"x": (0.0, 1.1)}}) != key
    monkeypatch.setattr(cache_module, "compiler_digest", lambda: "another")
    assert cache.key(model_digest(twin), FACTS) != key


def test_the_compiler_is_another_one_when_a_module_changes(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.py").write_text("1")
    before = sources_digest(tmp_path)
    (tmp_path / "deep" / "a.py").write_text("2")
    assert sources_digest(tmp_path) != before


def test_a_model_in_memory_has_a_digest_of_its_weights_and_its_nodes(tmp_path: Path) -> None:
    model = onnx.load(model_with_external_data(tmp_path / "a" / "m.onnx", 1.0))
    other_weights = onnx.load(model_with_external_data(tmp_path / "b" / "m.onnx", 2.0))
    other_node, twin = onnx.ModelProto(), onnx.ModelProto()
    other_node.CopyFrom(model)
    twin.CopyFrom(model)
    other_node.graph.node[0].name = "another"
    digest = model_digest(model)
    assert model_digest(twin) == digest
    assert digest not in (model_digest(other_weights), model_digest(other_node))
    assert model_digest(model.SerializeToString()) != model_digest(other_node.SerializeToString())


def test_an_array_among_the_facts_counts_with_its_content(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache")
    ones, zeros = np.ones(2000, np.float32), np.zeros(2000, np.float32)
    keys = {cache.key({}, {"constants": {"x": array}}) for array in (ones, zeros, ones.reshape(2, 1000), ones.copy())}
    assert len(keys) == 3


def test_what_was_stored_is_fetched(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache")
    assert cache.fetch(K) is None
    cache.store(K, halo_plan())
    assert cache.fetch(K) == halo_plan()


def test_a_damaged_entry_is_dropped_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = EngineCache(tmp_path / "cache")
    cache.store(K, halo_plan())
    cache.entry(K).write_bytes(cache.entry(K).read_bytes()[:-1])
    assert cache.fetch(K) is None
    assert "cannot be used and is built again" in caplog.text
    assert not cache.entry(K).exists()


def test_of_builders_that_meet_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    built, waited = [], []

    def build(number: int) -> None:
        cache = EngineCache(tmp_path / "cache")
        with cache.lock(K, lambda: waited.append(number)):
            if cache.fetch(K) is None:
                time.sleep(0.05)
                cache.store(K, halo_plan())
                built.append(number)

    builders = [threading.Thread(target=build, args=(number,)) for number in range(4)]
    for thread in builders:
        thread.start()
    for thread in builders:
        thread.join()
    assert len(built) == 1 and built[0] not in waited
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{K}.plan"], "locks are gone with their holders"


def test_a_lock_goes_with_its_holder_however_that_ends(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt), cache.lock(K):
        raise KeyboardInterrupt
    with cache.lock(K, lambda: pytest.fail("nobody holds it")):
        pass


def test_the_plan_that_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "cache", 2.5 * stored_bytes(tmp_path / "measure") / (1 << 30))
    for age, name in enumerate(KEYS[:2]):
        cache.store(name, plan_of(name))
        os.utime(cache.entry(name), (age, age))
    assert cache.fetch(A), "which is its last use so far"
    cache.store(C, plan_of("c"))
    assert [bool(cache.fetch(name)) for name in KEYS] == [True, False, True]


def test_a_plan_that_is_dropped_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    """Two processes share a cache folder, one with a limit of a single plan."""
    reader, writer = EngineCache(tmp_path), EngineCache(tmp_path, 1.5 * stored_bytes(tmp_path / "measure") / (1 << 30))
    stop, seen = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            seen.extend(filter(None, map(reader.fetch, (A, B))))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(5000):
        writer.store(A, plan_of("a"))
        writer.store(B, plan_of("b"))
        if number >= 50 and seen:
            break
    stop.set()
    thread.join()
    assert seen and all(plan in (plan_of("a"), plan_of("b")) for plan in seen)


def test_what_an_interrupted_builder_left_is_removed_after_a_day(tmp_path: Path) -> None:
    abandoned, new = (f".{B}.plan.1.ab", f"{B}.lock"), (f".{C}.plan.1.ab", f"{C}.lock")
    for name in (*abandoned, *new):
        (tmp_path / name).write_text("")
    for name in abandoned:
        os.utime(tmp_path / name, (0, 0))
    EngineCache(tmp_path).store(K, halo_plan())
    assert {path.name for path in tmp_path.iterdir()} == {*new, f"{K}.plan"}


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    names = {"model.plan", ".profile", "x.lock", f"{A}.onnx"}
    for name in names:
        (tmp_path / name).write_text("mine")
        os.utime(tmp_path / name, (0, 0))
    EngineCache(tmp_path, 0).store(K, halo_plan())
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_full_disk_costs_one_warning_and_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = EngineCache(tmp_path)
    with largest_file(100), cache.lock(K):
        cache.store(K, halo_plan())
        cache.store(K, halo_plan())
    assert caplog.text.count("cannot be used (File too large)") == 1
    assert not list(tmp_path.iterdir())


def test_a_plan_larger_than_the_cache_may_be_is_not_kept_and_that_is_said(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = EngineCache(tmp_path, 0)
    cache.store(K, halo_plan())
    assert cache.fetch(K) is None
    assert "alone takes more than the 0 GiB" in caplog.text


def test_a_folder_that_cannot_be_made_costs_one_warning(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache = EngineCache()
    with cache.lock(K):
        assert cache.fetch(K) is None
        cache.store(K, halo_plan())
    assert caplog.text.count("cannot be used (Not a directory)") == 1


def test_the_users_folder_is_the_standards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    for home, folder in (("/caches", "/caches"), ("", "/somebody/.cache"), ("relative", "/somebody/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        assert usual_folder() == Path(folder, "infer-server", "engines")


@pytest.mark.parametrize("size", ["many", "-1", "inf"])
def test_a_size_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("INFER_CACHE_GIB", size)
    with pytest.raises(ConfigError, match=f"INFER_CACHE_GIB='{size}' is not a number of GiB"):
        EngineCache()


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="not a folder"):
            EngineCache(folder)
