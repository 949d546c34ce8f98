"""The engine cache: what a key depends on, and builders that meet."""
from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engines.compiler import engine_cache as cache_module
from engines.compiler.engine_cache import EngineCache, external_files
from engines.errors import ConfigError
from engines.plan.file import read_plan, write_plan
from tests.engines.tiny import halo_plan

OPTIONS = {"precision": "int8", "ranges": {"x": (0.0, 1.0)}}


def model_with_external_data(path: Path, weight: float) -> Path:
    tensor = numpy_helper.from_array(np.full((8, 8), weight, np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [tensor])
    path.parent.mkdir(exist_ok=True)
    onnx.save(helper.make_model(graph), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_a_key_depends_on_model_data_options_and_compiler_but_not_on_the_folder(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = EngineCache(tmp_path / "cache")
    model = model_with_external_data(tmp_path / "a" / "m.onnx", 1.0)
    twin = model_with_external_data(tmp_path / "b" / "m.onnx", 1.0)
    other = model_with_external_data(tmp_path / "c" / "m.onnx", 2.0)
    assert model.read_bytes() == other.read_bytes(), "only the external data should differ"
    assert [location for location, _ in external_files(model)] == ["weights.bin"]

    key = cache.key(model, OPTIONS)
    assert cache.key(twin, OPTIONS) == key
    assert cache.key(other, OPTIONS) != key
    assert cache.key(model, {**OPTIONS, "precision": "fp32"}) != key
    assert cache.key(model, {**OPTIONS, "ranges": {"x": (0.0, 1.1)}}) != key
    monkeypatch.setattr(cache_module, "COMPILER_VERSION", "another")
    assert cache.key(model, OPTIONS) != key


def test_what_was_stored_is_fetched(tmp_path: Path) -> None:
    cache, plan = EngineCache(tmp_path / "cache"), tmp_path / "m.plan"
    write_plan(halo_plan(), plan)
    assert not cache.fetch("k", tmp_path / "copy.plan")
    cache.store("k", plan)
    assert cache.fetch("k", tmp_path / "copy.plan")
    assert read_plan(tmp_path / "copy.plan") == halo_plan()


def test_a_damaged_entry_is_dropped_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, plan = EngineCache(tmp_path / "cache"), tmp_path / "m.plan"
    write_plan(halo_plan(), plan)
    plan.write_bytes(plan.read_bytes()[:-1])
    cache.store("k", plan)
    assert not cache.fetch("k", tmp_path / "copy.plan")
    assert not (tmp_path / "copy.plan").exists()
    assert "dropping an entry" in caplog.text
    assert not list(cache.folder.glob("*.plan"))


def test_of_builders_that_meet_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    built = []

    def build(number: int) -> None:
        cache, output = EngineCache(tmp_path / "cache"), tmp_path / f"{number}.plan"
        with cache.lock("k"):
            if not cache.fetch("k", output):
                time.sleep(0.05)
                write_plan(halo_plan(), output)
                cache.store("k", output)
                built.append(number)

    builders = [threading.Thread(target=build, args=(number,)) for number in range(4)]
    for thread in builders:
        thread.start()
    for thread in builders:
        thread.join()
    assert len(built) == 1
    assert all(read_plan(tmp_path / f"{number}.plan") == halo_plan() for number in range(4))


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="not a folder"):
            EngineCache(folder)
