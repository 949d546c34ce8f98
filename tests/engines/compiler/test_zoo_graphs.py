"""Each graph stage of the zoo's models, run by the reference, gives ONNX Runtime's results."""
from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir.graph import verify
from infer_server.engines.ops.reference import run
from infer_server.engines.passes.pipeline import optimise, simplify
from tests.engines.compiler.zoo_engines import relative_error
from tests.zoo import TINY, images_for, run_onnx

TOLERANCE = 1e-5        # relative to the largest value: float32 sums in another order, without kernels


@pytest.mark.parametrize("name", TINY)
def test_import_simplify_and_optimise_keep_the_meaning(name: str, tmp_path: Path) -> None:
    model = TINY[name]()
    onnx.save(model, tmp_path / "model.onnx")
    imported = graph_from_onnx(tmp_path / "model.onnx")
    simplified = simplify(imported)
    optimised = optimise(simplified, [])
    x = images_for(model, 2, seed=1)
    expected = run_onnx(model, {"input": x})
    for graph in (imported, simplified, optimised):
        for output, value in run(verify(graph), {"input": x}).items():
            assert relative_error(value, expected[output]) < TOLERANCE
    assert not [node for node in optimised.nodes if node.anchor.op in ("BatchNormalization", "Dropout", "Identity")]


@pytest.mark.parametrize("opset", (9, 11, 21))
@pytest.mark.parametrize("name", ("nanodet", "mobilenet_v2", "explicit_pads", "googlenet", "shufflenet_v2"))
def test_operators_mean_the_same_in_every_operator_set(name: str, opset: int, tmp_path: Path) -> None:
    model = TINY[name](opset=opset)
    onnx.save(model, tmp_path / "model.onnx")
    x = images_for(model, 2, seed=1)
    expected = run_onnx(model, {"input": x})
    for output, value in run(optimise(simplify(graph_from_onnx(tmp_path / "model.onnx")), []), {"input": x}).items():
        assert relative_error(value, expected[output]) < TOLERANCE
