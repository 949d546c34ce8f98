"""Tests of ONNX files that the server builds for emulated GPUs, one of which is too old."""
from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import InferenceServerClient

from infer_server.backend import Engine, load_plan
from infer_server.cli import serve
from infer_server.engines.errors import PlanTargetError
from scripts.testing.gpu.emulated import EmulatedGpu, install
from tests.engines.compiler.small_models import node, small_model
from tests.infer_server.serving import RunningServer, serving

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(1, 8)
WANTED = np.maximum(X + 1, 0)
GPU, CPU = 1, 2         # values of ModelInstanceGroup.Kind
USUAL = 'max_batch_size: 4 parameters { key: "timing" value { string_value: "false" } } '
CONFIGS = {
    "asks": "instance_group { kind: KIND_GPU count: 2 }",
    "both": "instance_group { kind: KIND_GPU gpus: 1 } instance_group { kind: KIND_CPU count: 1 }",
    "open": "instance_group { count: 1 }",
    "mixed": "instance_group { count: 1 } instance_group { gpus: 0 }",
    "older": "instance_group { gpus: 2 }",
    "missing": "instance_group { kind: KIND_GPU gpus: 7 }",
}
NO_KERNEL = small_model([node("Det", "x", "y")], {"x": ["N", 3, 3]}, ["y"])


def write(folder: Path, name: str, config: str, model: object) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(USUAL + config)
    (folder / name / "1" / "model.onnx").write_bytes(model.SerializeToString())     # type: ignore[attr-defined]


def write_add(folder: Path, name: str, config: str) -> None:
    write(folder, name, config, small_model([node("Add", "x one", "s"), node("Relu", "s", "y")], {"x": ["N", 8]}, ["y"],
                                            {"one": np.ones(1, np.float32)}))


@pytest.fixture(scope="module")
def gpus() -> Iterator[list[EmulatedGpu]]:
    found = [EmulatedGpu(architecture, name=f"card {number}")
             for number, architecture in enumerate(("sm_80", "sm_75", "sm_52"))]
    with pytest.MonkeyPatch.context() as patch:
        install(patch, *found)
        yield found


@pytest.fixture(scope="module")
def served(gpus: list[EmulatedGpu], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        write_add(folder, name, config)
    with serving(folder, load_plan, cores=2) as server:
        yield server


def groups(server: RunningServer, model: str) -> list[tuple[int, list[int], int]]:
    with InferenceServerClient(server.address) as client:
        config = client.get_model_config(model).config
    return [(group.kind, list(group.gpus), group.count) for group in config.instance_group]


def infer(server: RunningServer, model: str, x: np.ndarray) -> np.ndarray:
    tensor = tritonclient.grpc.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    with InferenceServerClient(server.address) as client:
        found: np.ndarray = client.infer(model, [tensor]).as_numpy("y")
    return found


def test_a_model_is_built_for_the_gpus_that_its_groups_ask_for(served: RunningServer, gpus: list[EmulatedGpu]) -> None:
    assert groups(served, "asks") == [(GPU, [0, 1], 2)]             # all that something is built for
    assert groups(served, "both") == [(GPU, [1], 1), (CPU, [], 1)]
    assert groups(served, "open") == [(CPU, [], 1)]
    assert groups(served, "mixed") == [(CPU, [], 1), (GPU, [0], 1)]
    # Of each plan its constants are on each of its GPUs, and an arena for each instance.
    assert [len(gpu.allocated) for gpu in gpus] == [1 + 2 + 1 + 1, 1 + 2 + 1 + 1, 0]
    for model in ("asks", "both", "open", "mixed"):
        for _ in range(4):
            np.testing.assert_array_equal(infer(served, model, X), WANTED)
    with InferenceServerClient(served.address) as client:
        said = client.get_inference_statistics("both").model_stats[0].memory_usage
    assert sorted((each.type, each.id) for each in said) == [("CPU", 0), ("GPU", 1)]


def test_a_gpu_that_is_too_old_or_not_there_is_an_error_that_a_check_finds_as_well(
        served: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    failures = served.server.failures()
    assert failures.keys() == {"older version 1", "missing version 1"}
    assert serve.main(["--check", str(served.folder)]) == 1
    said = capsys.readouterr().out
    for model, why in (
            ("older", "GPU 2 (card 2) does not run the model: nothing is built for sm_52, which is too old"),
            ("missing", "there is no GPU 7; this machine has GPU 0 (card 0), GPU 1 (card 1), GPU 2 (card 2)")):
        assert why in failures[f"{model} version 1"] and f"{model}: error: instance_group.gpus: {why}" in said
    assert "asks: ok" in said
    serve.main(["--check", str(served.folder), "--kind-gpu", "refuse"])
    assert "asks: instance_group: KIND_GPU: not checked, " in capsys.readouterr().out


def test_what_has_no_kernel_on_a_gpu_is_served_on_the_cpu_with_a_warning_that_names_the_node_or_refused(
        gpus: list[EmulatedGpu], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "det", "instance_group { kind: KIND_GPU gpus: 1 }", NO_KERNEL)
    with caplog.at_level(logging.WARNING), serving(tmp_path, load_plan) as server:
        assert groups(server, "det") == [(CPU, [], 1)]
        np.testing.assert_allclose(infer(server, "det", np.eye(3, dtype=np.float32)[None]), [1])
    assert re.search(r"det: not served on GPU 1 \(card 1\).*'det' \(Det\) cannot run on sm_75", caplog.text)
    with serving(tmp_path, load_plan, kind_gpu="refuse") as server:
        assert re.search("KIND_GPU is refused.*'det' \\(Det\\) cannot run on sm_75", server.server.failures()[
            "det version 1"])


def test_groups_that_leave_the_kind_open_are_on_gpus_where_the_server_is_told_so(
        gpus: list[EmulatedGpu], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def load(path: Path, threads: int, specialise: str = "", gpu: int = 0) -> Engine:
        if gpu == 1:
            raise PlanTargetError("its driver is too old")
        return load_plan(path, threads, specialise, gpu)
    write_add(tmp_path, "open", "")
    write(tmp_path, "det", "", NO_KERNEL)
    with caplog.at_level(logging.WARNING), serving(tmp_path, load, kind_auto="gpu", kind_gpu="refuse") as server:
        assert groups(server, "open") == [(GPU, [0], 1)]
        assert groups(server, "det") == [(CPU, [], 1)], "nobody has asked for a GPU"
        np.testing.assert_array_equal(infer(server, "open", X), WANTED)
    assert "open: not served on GPU 1 (card 1): its driver is too old" in caplog.text
