"""Tests of build_engine: forms of models, cache hits, and early refusals."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from infer_server.calibration import Calibration
from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.engines import EngineBuild, EngineCache, build_engine, load_engine
from infer_server.engines.compiler.specialise import relower
from infer_server.engines.errors import CalibrationError, ConfigError, ModelError
from infer_server.engines.ir.graph import Array
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.file import read_plan
from infer_server.engines.preprocess import IMAGENET, load_preprocess
from infer_server.engines.runtime.load.create import engine_of
from tests.engines.compiler.test_engine_cache import model_with_external_data
from tests.zoo import TINY, images_for, run_onnx

MODEL = TINY["explicit_pads"]()
OPTIONS: dict[str, Any] = {"timing": False, "max_batch": 4}
X = {"input": images_for(MODEL, 3, seed=1)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(MODEL, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / "cache")


def feeds(count: int = 8) -> list[dict[str, Array]]:
    return [{"input": item[None]} for item in images_for(MODEL, count, seed=100)]


def answer(build: EngineBuild) -> Array:
    return build.engine().run(X)["output"]


def test_a_model_is_a_path_its_bytes_or_a_proto(path: Path) -> None:
    models = (path, str(path), path.read_bytes(), onnx.load(path))
    builds = [build_engine(model, cache=False, **OPTIONS) for model in models]
    assert [build.plan.name for build in builds] == ["m", "m", MODEL.graph.name, MODEL.graph.name]
    expected = run_onnx(MODEL, X)["output"]
    np.testing.assert_allclose(answer(builds[0]), expected, rtol=1e-3, atol=1e-4)
    assert len({answer(build).tobytes() for build in builds}) == 1


def test_what_is_saved_is_what_was_built(path: Path, cache: EngineCache, tmp_path: Path) -> None:
    first, second = (build_engine(path, cache=cache, threads=2, **OPTIONS) for _ in range(2))
    assert first.cached is None and second.cached == cache.entry(second.cached.stem)
    for build, name in ((first, "a.plan"), (second, "b.plan")):
        build.save(tmp_path / name)
        np.testing.assert_array_equal(load_engine(tmp_path / name).run(X)["output"], answer(first))
    assert (tmp_path / "a.plan").read_bytes() == (tmp_path / "b.plan").read_bytes()
    assert second.plan.metadata["threads"] == 2 and second.engine(threads=2).threads == 2


def test_a_plan_from_the_cache_is_whole_when_its_entry_is_dropped(
        path: Path, cache: EngineCache, tmp_path: Path) -> None:
    build_engine(path, cache=cache, **OPTIONS)
    build = build_engine(path, cache=cache, **OPTIONS)
    assert build.cached
    build.cached.unlink()
    build.save(tmp_path / "m.plan")
    np.testing.assert_array_equal(engine_of(relower(read_plan(tmp_path / "m.plan"), "portable")).run(X)["output"],
                                  engine_of(relower(build.plan, "portable")).run(X)["output"])


def test_an_entry_with_damaged_weights_is_built_again(
        path: Path, cache: EngineCache, caplog: pytest.LogCaptureFixture) -> None:
    first = build_engine(path, cache=cache, **OPTIONS)
    entry, = cache.folder.iterdir()
    content = bytearray(entry.read_bytes())
    weight = next(array for name, array in first.plan.weights.items() if name not in first.plan.machine.weight_offsets)
    content[content.index(weight.tobytes())] ^= 1
    entry.write_bytes(content)
    assert not build_engine(path, cache=cache, **OPTIONS).cached
    assert "cannot be used and is built again" in caplog.text
    assert build_engine(path, cache=cache, **OPTIONS).cached


def test_the_users_cache_is_the_default_and_a_folder_is_another(
        path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert not build_engine(path, **OPTIONS).cached
    cached = build_engine(path, **OPTIONS).cached
    assert cached and cached.is_relative_to(tmp_path / "home" / "infer-server" / "engines")
    assert not build_engine(path, cache=tmp_path / "other", **OPTIONS).cached
    assert not build_engine(path, cache=False, **OPTIONS).cached


@pytest.mark.parametrize("changed", [{"max_batch": 8}, {"precision": "bf16"}, {"threads": 2}, {"target": "portable"},
                                     {"opt_batch": 2}])
def test_another_option_is_another_engine(path: Path, cache: EngineCache, changed: dict[str, Any]) -> None:
    build_engine(path, cache=cache, **OPTIONS)
    assert not build_engine(path, cache=cache, **{**OPTIONS, **changed}).cached
    assert build_engine(path, cache=cache, **OPTIONS).cached


def test_other_layers_in_float_are_another_engine(path: Path, cache: EngineCache) -> None:
    options = {**OPTIONS, "precision": "int8", "calibration": Calibration(feeds(), "minmax"), "cache": cache}
    assert not build_engine(path, **options).cached
    assert not build_engine(path, **options, keep_float=("*",)).cached
    assert build_engine(path, **options).cached


def test_a_lookup_says_again_what_its_user_should_know(path: Path, cache: EngineCache) -> None:
    said: list[str] = []
    built, looked_up = (build_engine(path, cache=cache, precision="fp16", notify=said.append, **OPTIONS)
                        for _ in range(2))
    assert looked_up.cached and "sums are in float32" in " ".join(looked_up.notices)
    assert said == [*built.notices, *looked_up.notices] and built.notices == looked_up.notices


def test_progress_is_told_by_stage(path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    build_engine(path, calibration=Calibration(feeds(), "minmax"), precision="int8", cache=False,
                 progress=lambda stage, done, of, what: told.append((stage, done, of)), **OPTIONS)
    assert [done for stage, done, _ in told if stage == "calibrating"] == [4, 8]
    stage, done, of = told[-1]
    assert stage == "compiling" and done == of > 0


def test_what_a_callback_raises_comes_through_and_leaves_no_lock(path: Path, cache: EngineCache) -> None:
    def stop(*what: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(path, cache=cache, progress=stop, **OPTIONS)
    assert not list(cache.folder.iterdir())
    assert not build_engine(path, cache=cache, **OPTIONS).cached


def test_what_was_timed_before_an_interrupt_is_not_timed_again(
        path: Path, tmp_path: Path) -> None:
    def stop(stage: str, done: int, of: int, what: str) -> None:
        if 2 * done > of:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(path, cache=False, timing_cache=str(tmp_path / "times.json"), progress=stop)
    assert len(TimingCache(tmp_path / "times.json"))


def test_a_timing_cache_that_is_not_there_is_written_and_not_skipped_by_a_lookup(
        path: Path, cache: EngineCache, tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    options = {**OPTIONS, "timing_cache": str(times)}
    build_engine(path, cache=cache, **options)
    assert build_engine(path, cache=cache, **options).cached
    times.unlink()
    assert not build_engine(path, cache=cache, **options).cached and times.exists()


def test_a_plan_for_another_cpu_runs_here_when_it_is_asked_to(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build = build_engine(path, target="aarch64", cache=False, **OPTIONS)
    assert build.plan.machine.target == "aarch64"
    np.testing.assert_allclose(answer(build), run_onnx(MODEL, X)["output"], rtol=1e-3, atol=1e-4)


def test_importing_the_package_imports_neither_the_compiler_nor_onnx() -> None:
    code = ("import sys; from infer_server import calibration, engines; "
            "print([m for m in sys.modules if m in ('onnx', 'numpy', 'llvmlite')])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---- what is refused, before any work
@pytest.mark.parametrize(("options", "refusal"), [
    ({"precison": "int8"}, "unknown option 'precison'; did you mean 'precision'"),
    ({"precision": "int9"}, "unknown precision 'int9'; did you mean 'int8'"),
    ({"precision": "int8"}, "an int8 build needs calibration"),
    ({"calibration": feeds(1), "precision": "int8"}, "calibration is a list; wrap the data"),
    ({"calibration": Calibration(feeds(1))}, "calibration is for int8, best, fp16 and weight_only; this build is fp32"),
    ({"max_batch": 0}, "--max-batch 0: it must be a whole number of at least 1"),
    ({"max_batch": "8"}, "--max-batch 8: it must be a whole number"),
    ({"target": "avx"}, "avx"),
])
def test_options_that_make_no_sense_are_refused(path: Path, options: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        build_engine(path, cache=False, **options)


@pytest.mark.parametrize(("model", "refusal"), [
    ("missing.onnx", "there is no model file missing.onnx"),
    (b"", "the model is not an ONNX model"),
    (b"text", "the model is not a"),
    (b"\x18\0\0\0ORTM\0\0", "the model is in ONNX Runtime's own format"),
    (onnx.ModelProto(), "the model is not an ONNX model"),
    (7, "a model is a path, the bytes of an ONNX file or an onnx.ModelProto; this is a int"),
])
def test_what_is_no_model_is_refused(model: Any, refusal: str) -> None:
    with pytest.raises(ModelError, match=refusal):
        build_engine(model, cache=False)


def test_bytes_without_the_weights_that_lie_beside_the_file_say_what_to_give(tmp_path: Path) -> None:
    path = model_with_external_data(tmp_path / "a" / "m.onnx", 1.0)
    assert build_engine(path, cache=False, timing=False)
    with pytest.raises(ModelError, match="tensor 'w' is stored as external data.*give the path"):
        build_engine(path.read_bytes(), cache=False)


# ---- calibration on a program's feeds
def int8(path: Path, data: Any, engines: EngineCache | bool = False, **calibration: Any) -> EngineBuild:
    return build_engine(path, calibration=Calibration(data, **{"calibrator": "minmax", **calibration}), cache=engines,
                        precision="int8", **OPTIONS)


def test_feeds_calibrate_as_a_file_of_them_does(path: Path, tmp_path: Path) -> None:
    items = feeds()
    np.savez(tmp_path / "items.npz", input=np.concatenate([feed["input"] for feed in items]))
    expected = int8(path, tmp_path / "items.npz")
    forms: list[Any] = [items, (feed for feed in items), lambda: iter(items),
                        {"input": np.concatenate([feed["input"] for feed in items])}]
    for build in (int8(path, data) for data in forms):
        assert answer(build).tobytes() == answer(expected).tobytes()
        assert (build.plan.metadata["calibrator"], build.plan.metadata["calibration_items"]) == ("minmax", 8)


def test_a_lookup_goes_by_what_the_feeds_hold(path: Path, cache: EngineCache) -> None:
    assert not int8(path, (feed for feed in feeds()), cache).cached
    assert int8(path, feeds(), cache).cached
    assert not int8(path, feeds(7), cache).cached
    assert not int8(path, feeds(), cache, calibrator="percentile").cached


def test_calibration_is_searched_for_and_the_errors_are_recorded(path: Path) -> None:
    build = int8(path, feeds(), calibrator="")
    errors = build.plan.metadata["calibrators"]
    assert build.plan.metadata["calibrator"].split("+")[0] and all(found["sqnr_db"] > 0 for found in errors.values())
    assert any("calibrators by their error" in notice for notice in build.notices)


def test_a_calibration_cache_that_is_not_there_is_written_and_not_skipped_by_a_lookup(
        path: Path, cache: EngineCache, tmp_path: Path) -> None:
    ranges = tmp_path / "ranges.json"
    first = int8(path, feeds(), cache, cache=ranges)
    assert int8(path, feeds(), cache, cache=ranges).cached
    assert answer(int8(path, None, cache, cache=ranges)).tobytes() == answer(first).tobytes()
    ranges.unlink()
    assert not int8(path, feeds(), cache, cache=ranges).cached and ranges.exists()


def test_what_a_script_yields_counts_and_not_its_time(path: Path, cache: EngineCache, tmp_path: Path) -> None:
    np.save(tmp_path / "items.npy", np.concatenate([feed["input"] for feed in feeds()]))
    script = tmp_path / "data.py"
    script.write_text("import numpy as np\ndef feeds():\n"
                      f"    yield {{'input': np.load({str(tmp_path / 'items.npy')!r})}}")
    source = f"{script}:feeds"
    assert not int8(path, source, cache).cached
    assert int8(path, source, cache).cached
    np.save(tmp_path / "items.npy", np.concatenate([feed["input"] for feed in feeds(9)]))
    assert not int8(path, source, cache).cached, "the script is the same, what it reads is not"


def test_what_a_generator_raises_comes_through_as_it_is(path: Path, cache: EngineCache) -> None:
    def broken() -> Any:
        yield from feeds(2)
        raise LookupError("no more of them")

    for data in (broken(), broken):
        with pytest.raises(LookupError, match="no more of them") as raised:
            int8(path, data, cache)
        assert raised.value.__cause__ is None
    assert not list(cache.folder.glob("*"))
    assert not int8(path, feeds(2), cache).cached


@pytest.mark.parametrize(("data", "refusal"), [
    ([], "the calibration data holds no items"),
    (iter(()), "the calibration data holds no items"),
    ([{"pixels": X["input"]}], r"feed 0 holds \['pixels'\]; the model's inputs are \['input'\]"),
    ([*feeds(1), {"input": X["input"][:, :1]}], "feed 1: 'input' has shape"),
    ([{"input": X["input"].astype(np.uint8)}], "feed 0: 'input' is uint8; the model takes float32"),
    ([X["input"]], "feed 0 is a ndarray; give dicts"),
    ([{"input": [[1.0], [1.0, 2.0]]}], "feed 0: 'input' is no array"),
    ([{"input": ["a", None]}], "feed 0: 'input' is no array of numbers"),
])
def test_feeds_that_do_not_fit_are_named(path: Path, data: Any, refusal: str, cache: EngineCache) -> None:
    for engines in (False, cache):
        with pytest.raises(CalibrationError, match=refusal):
            int8(path, data, engines)


@pytest.mark.parametrize(("calibration", "refusal"), [
    ({}, "calibration needs data, or a cache that exists"),
    ({"data": 7}, "this is a int"),
    ({"data": "photos", "calibrator": "entropi"}, "no calibrator 'entropi'; did you mean 'entropy'"),
    ({"data": "photos", "preprocess": "inceptoin"}, "did you mean 'inception'"),
])
def test_a_calibration_that_makes_no_sense_is_refused_where_it_is_made(
        calibration: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        Calibration(**calibration)


def test_a_cache_without_data_that_is_not_there_says_so(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ranges.json does not exist; give --calib"):
        int8(path, None, cache=tmp_path / "ranges.json")


def test_pixels_are_what_the_engine_takes_and_what_it_is_calibrated_on(path: Path) -> None:
    height, width = X["input"].shape[2:]
    pictures = np.random.default_rng(0).integers(0, 256, (8, height, width, 3), np.uint8)
    build = build_engine(path, calibration=Calibration({"input": pictures}, "minmax", preprocess="imagenet"),
                         pixels=load_preprocess("imagenet").pixels, precision="int8", cache=False, **OPTIONS)
    values = (pictures * IMAGENET.scale - np.array(IMAGENET.mean)) / np.array(IMAGENET.std)
    expected = run_onnx(MODEL, {"input": np.ascontiguousarray(values.transpose(0, 3, 1, 2), np.float32)})["output"]
    assert sqnr_db(expected, build.engine().run({"input": pictures})["output"]) > 15
