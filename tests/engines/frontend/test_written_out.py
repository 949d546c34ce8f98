"""Operators lowered to others, where onnx.backend.test has no tests, compared with onnx's reference."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ops.reference import run
from tests.engines.compiler.small_models import feeds_of, node, small_model

I64 = np.int64


@pytest.mark.parametrize(("nodes", "shape", "constants"), [
    ("DFT x n axis onesided=1", [2, 9, 3, 1], {"n": 6, "axis": 1}),
    ("DFT x n axis", [2, 3, 7, 2], {"n": 10, "axis": -2}),
    ("DFT x n axis inverse=1", [2, 5, 3, 2], {"n": 5, "axis": 1}),
    ("STFT x step window n onesided=1", [2, 20], {"step": 3, "window": np.hanning(8).astype(np.float32), "n": 8}),
    ("STFT x step", [2, 20, 1], {"step": 3}),
])
def test_what_is_written_out_is_what_onnx_says(nodes: str, shape: list[int], constants: dict[str, Any]) -> None:
    op, *rest = nodes.split()
    attrs = {name: float(value) if "." in value else int(value) for name, value in
             (word.split("=") for word in rest if "=" in word)}
    arrays = {name: np.asarray(value, I64) if isinstance(value, int) else value for name, value in constants.items()}
    if op == "STFT" and len(shape) == 2:
        shape = [*shape, 1]
    model = small_model([node(op, " ".join(word for word in rest if "=" not in word), "y", **attrs)], {"x": shape},
                        ["y"], arrays, opset=20)
    feeds = feeds_of(model)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    made = run(graph_from_onnx(model), feeds)["y"]
    assert made.dtype == wanted.dtype
    np.testing.assert_allclose(made, wanted, 1e-4, 1e-4)
    assert op not in {part.op for part in graph_from_onnx(model).nodes}


@pytest.mark.parametrize("op", ["STFT x step", "DFT x"])
def test_real_numbers_have_no_imaginary_part_at_the_ends_of_their_spectrum(op: str) -> None:
    name, inputs = op.split(maxsplit=1)
    model = small_model([node(name, inputs, "y", onesided=1)], {"x": [2, 20, 1]}, ["y"], {"step": np.asarray(5, I64)},
                        opset=20)
    spectrum = run(graph_from_onnx(model), feeds_of(model))["y"].reshape(2, 11, 2)
    assert not spectrum[:, [0, 10], 1].any()
    assert spectrum[:, 1:10, 1].all()


@pytest.mark.parametrize(("equation", "shapes"), [
    ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]), ("bij,jk->bik", [(2, 3, 4), (4, 5)]),
    ("abc,cd", [(2, 3, 4), (4, 5)]), ("ijk,ilm->klj", [(2, 3, 4), (2, 5, 6)]), ("ij,ij->", [(2, 3), (2, 3)]),
    ("ij->ji", [(2, 3)]), ("i,j->ij", [(2,), (3,)]), ("ijk->j", [(2, 3, 4)]), ("bi,bj->b", [(2, 3), (2, 4)]),
    ("ij,jk,il->kl", [(2, 3), (3, 4), (2, 5)]), ("bi,bj,bk->ijk", [(2, 3), (2, 4), (2, 5)])])
def test_a_sum_of_products_is_one_of_matrices(equation: str, shapes: list[tuple[int, ...]]) -> None:
    names = "xwv"[:len(shapes)]
    inputs = dict(zip(names, shapes, strict=True))
    model = small_model([node("Einsum", " ".join(names), "y", equation=equation)], inputs, ["y"])
    feeds, graph = feeds_of(model), graph_from_onnx(model)
    np.testing.assert_allclose(run(graph, feeds)["y"], np.einsum(equation, *feeds.values()), 1e-5, 1e-5)
    assert "Einsum" not in {part.op for part in graph.nodes}


@pytest.mark.parametrize(("equation", "message"), [
    ("ij,jk->ik", "has 2 operands, but the node has 1"), ("ijk->i", "needs one letter for each"),
    ("ij->k", "that no operand has")])
def test_an_equation_that_does_not_fit_is_refused(equation: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        graph_from_onnx(small_model([node("Einsum", "x", "y", equation=equation)], {"x": [2, 3]}, ["y"]))


def test_targets_that_do_not_fit_the_scores_are_refused() -> None:
    model = small_model([node("NegativeLogLikelihoodLoss", "x t", "y")], {"x": [3, 4]}, ["y"],
                        {"t": np.zeros((2,), I64)})
    with pytest.raises(ModelError, match=r"the target's shape is \[2\], but must be \[3\]"):
        graph_from_onnx(model)


def test_a_transform_along_the_parts_of_a_number_is_refused() -> None:
    model = small_model([helper.make_node("DFT", ["x"], ["y"], axis=2)], {"x": [3, 4, 2]}, ["y"], opset=17)
    with pytest.raises(ModelError, match="axis must not be the last one"):
        graph_from_onnx(model)


def test_a_deformed_convolution_is_a_product_with_samples_at_places_of_its_own() -> None:
    """Two groups of offsets, and strides, dilations and pads that differ by axis."""
    shapes = {"x": [2, 4, 6, 7], "w": [4, 2, 3, 2], "o": [2, 2 * 6 * 2, 3, 6], "b": [4], "m": [2, 2 * 6, 3, 6]}
    attrs = {"pads": [1, 1, 1, 0], "strides": [2, 1], "dilations": [1, 2], "group": 2, "offset_group": 2}
    model = small_model([node("DeformConv", "x w o b m", "y", **attrs)], shapes, ["y"], opset=20)
    feeds, graph = feeds_of(model), graph_from_onnx(model)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(run(graph, feeds)["y"], wanted, 1e-4, 1e-4)
    assert "DeformConv" not in {part.op for part in graph.nodes}


@pytest.mark.parametrize(("written", "shapes", "constants"), [
    ("AffineGrid x s", [(2, 2, 3)], {"s": I64([2, 3, 5, 4])}),
    ("AffineGrid x s align_corners=1", [(2, 3, 4)], {"s": I64([2, 3, 5, 3, 2])}),
    ("CenterCropPad x s", [(5, 8)], {"s": I64([8, 5])}),
    ("MeanVarianceNormalization x", [(2, 3, 4, 5)], {}),
    ("TensorScatter x w p", [(2, 3, 6, 2), (2, 3, 2, 2)], {"p": I64([4, 1])}),
    ("TensorScatter x w p axis=1 mode=circular", [(2, 6, 2), (2, 4, 2)], {"p": I64([4, 1])})])
def test_a_rare_operator_is_written_out_by_common_ones(written: str, shapes: list[tuple[int, ...]],
                                                       constants: dict[str, Any]) -> None:
    op, *words = written.split()
    attrs = {name: int(value) if value.isdigit() else value for name, value in
             (word.split("=") for word in words if "=" in word)}
    inputs = dict(zip("xw", shapes, strict=False))
    model = small_model([node(op, " ".join(word for word in words if "=" not in word), "y", **attrs)], inputs, ["y"],
                        constants, opset=24)
    feeds, graph = feeds_of(model), graph_from_onnx(model)
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(run(graph, feeds)["y"], wanted, 1e-5, 1e-5)
    assert op not in {part.op for part in graph.nodes}


def test_a_pool_of_whole_images_is_a_norm_of_their_pixels() -> None:
    model = small_model([node("GlobalLpPool", "x", "y", p=1)], {"x": [2, 3, 4, 5]}, ["y"])
    feeds, graph = feeds_of(model), graph_from_onnx(model)
    wanted = np.abs(feeds["x"]).sum((2, 3), keepdims=True)
    np.testing.assert_allclose(run(graph, feeds)["y"], wanted, 1e-5)


def test_a_gemm_that_says_that_it_broadcasts_is_none_of_its_own_kind() -> None:
    inputs = {"x": [2, 3], "w": [4, 3], "b": [4]}
    model = small_model([node("Gemm", "x w b", "y", transB=1, broadcast=1)], inputs, ["y"], opset=6)
    feeds, graph = feeds_of(model), graph_from_onnx(model)
    np.testing.assert_allclose(run(graph, feeds)["y"], feeds["x"] @ feeds["w"].T + feeds["b"], 1e-5)
    assert {part.op for part in graph.nodes} == {"Gemm"}
