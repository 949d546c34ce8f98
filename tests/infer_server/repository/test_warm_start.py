"""The server loads engines found in the engine cache without starting a process with the compiler."""
from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from infer_server.backend import load_plan
from infer_server.cli.serve import _options, _parser
from infer_server.repository.building import Compiler, request_key
from infer_server.repository.folders import Source, read_model
from tests.infer_server.serving import serving


def write_onnx(repository: Path, add: float = 1.0, config: str = "") -> Source:
    """Write the ONNX model m, which computes x + add."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Add", ["x", "c"], ["y"])], "m", [x], [y], [
        helper.make_tensor("c", TensorProto.FLOAT, [4], np.full(4, add))])
    (repository / "m" / "1").mkdir(parents=True, exist_ok=True)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
         repository / "m" / "1" / "model.onnx")
    if config:
        (repository / "m" / "config.pbtxt").write_text(config)
    return read_model(repository, "m")[0]


def test_a_second_start_builds_nothing_and_a_damaged_entry_is_built_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    source = write_onnx(tmp_path)
    compiler = Compiler(tmp_path / ".cache")
    assert compiler.cached(source, 1) is None
    with compiler.build(source, 1) as plan:
        expected = plan.read_bytes()
    entry = compiler.cached(source, 1)
    assert entry is not None and entry.read_bytes() == expected
    started: list[Any] = []

    def refused(command: Any, *_: Any, **__: Any) -> Any:
        started.append(command)
        raise OSError("no process")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with serving(tmp_path, load_plan) as server:
        assert server.server.repository.versions("m") == [1] and not started
    entry.write_bytes(b"\0" * 100)
    with serving(tmp_path, load_plan) as server:
        assert not server.server.repository.versions("m") and len(started) == 1
    assert "the engine cache's plan cannot be used and is built again" in caplog.text
    entry.unlink()
    assert compiler.cached(source, 1) is None, "its note leads nowhere"


def test_what_a_build_follows_from_is_in_its_key(tmp_path: Path) -> None:
    keys = [request_key(write_onnx(tmp_path), 1), request_key(write_onnx(tmp_path), 2),
            request_key(write_onnx(tmp_path, 2.0), 1),
            request_key(write_onnx(tmp_path, config="max_batch_size: 3"), 1),
            request_key(write_onnx(tmp_path, config="""max_batch_size: 3
                parameters { key: "precision" value { string_value: "int8" } }
                parameters { key: "calib_cache" value { string_value: "ranges" } }"""), 1)]
    (tmp_path / "m" / "ranges").write_text("x: 1")
    keys.append(request_key(read_model(tmp_path, "m")[0], 1))
    assert len(set(keys)) == len(keys)
    os.rename(tmp_path / "m", tmp_path / "other")
    assert request_key(read_model(tmp_path, "other")[0], 1) == keys[-1], "the folder does not count"


@pytest.mark.parametrize(("arguments", "loads"), [
    (["--cores", "1"], 2), (["--cores", "9"], 9), (["--cores", "500"], 16), (["--model-load-thread-count", "1"], 1)])
def test_so_many_models_are_loaded_at_a_time(arguments: list[str], loads: int) -> None:
    assert _options(_parser().parse_args(["--model-repository", "m", *arguments])).load_threads == loads
