"""Tests of ONNX Runtime's fused norms."""
import numpy as np
import pytest

from infer_server.engines.errors import ModelError
from tests.engines.frontend.one_node import check, imported, normal


@pytest.mark.parametrize("opset", [12, 17, 23])
@pytest.mark.parametrize("attrs", [{}, {"epsilon": 0.1}, {"axis": 1}])
def test_a_simplified_norm_of_onnx_runtimes_default_domain_is_an_rms_norm(opset, attrs):
    scale = normal(3, 8) if "axis" in attrs else normal(8)
    check("SimplifiedLayerNormalization", [normal(2, 3, 8), scale], (1,), domain="", version=opset, **attrs)


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_layer_norm_may_be_older_than_onnxs(outputs):
    check("LayerNormalization", [normal(2, 3, 8), normal(8), normal(8)], (1, 2), outputs, domain="", version=11,
          epsilon=0.01)


def test_a_statistic_of_an_rms_norm_is_refused():
    with pytest.raises(ModelError, match="a training statistic"):
        imported("SimplifiedLayerNormalization", [normal(2, 8), normal(8)], (1,), 2, domain="")


@pytest.mark.parametrize("skip", [(2, 3, 8), (1, 3, 8), (3, 8)])
@pytest.mark.parametrize("given", ["gamma", "gamma beta", "gamma beta bias", "gamma bias"])
@pytest.mark.parametrize("outputs", ["y", "y--y"])
def test_a_sum_is_normalised_and_may_be_an_output(skip, given, outputs):
    constants = [normal(8) if name in given else None for name in ("gamma", "beta", "bias")]
    check("SkipLayerNormalization", [normal(2, 3, 8), normal(*skip), *constants], (2, 3, 4), outputs, epsilon=1e-3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", ["y", "y--y"])
def test_a_sum_is_normalised_by_its_squares_alone(bias, outputs):
    constants = [normal(8), normal(8)] if bias else [normal(8)]
    check("SkipSimplifiedLayerNormalization", [normal(2, 3, 8), normal(2, 3, 8), *constants], (2, 3), outputs)


def embeddings(**absent):
    """Return input_ids, segment_ids, word, position, segment, gamma, beta, mask and position_ids."""
    rng = np.random.default_rng(3)
    ids, segments, positions = (rng.integers(0, most, (2, 5)).astype(np.int32) for most in (20, 2, 9))
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    given = {"ids": ids, "segments": segments, "words": normal(20, 8), "positions": normal(9, 8),
             "of_segments": normal(2, 8), "gamma": normal(8), "beta": normal(8), "mask": mask, "places": positions}
    return list((given | absent).values())


TABLES = (2, 3, 4, 5, 6)


@pytest.mark.parametrize("absent", [{}, {"places": None}, {"mask": None}, {"segments": None, "of_segments": None}])
def test_embeddings_are_summed_and_normalised(absent):
    outputs = "yyy" if absent.get("mask", 1) is not None else "y-y"
    check("EmbedLayerNormalization", embeddings(**absent), TABLES, outputs, epsilon=1e-3)


@pytest.mark.parametrize("absent", [{}, {"mask": None}, {"segments": None, "of_segments": None}])
def test_embeddings_of_quantised_tables_are_too(absent):
    given = embeddings(places=None, **absent)[:-1]
    tables = [None if table is None else np.clip(np.rint(table * 40 + 128), 0, 255).astype(np.uint8)
              for table in given[2:7]]
    there = [table is not None for table in tables]
    scales = [np.float32(0.02 + 0.001 * i) if known else None for i, known in enumerate(there)]
    zeros = [np.uint8(120 + i) if known else None for i, known in enumerate(there)]
    check("QEmbedLayerNormalization", [*given[:2], *tables, given[7], *scales, *zeros],
          (*TABLES, *range(8, 18)), 2, epsilon=1e-3)


def test_a_mask_that_is_not_there_counts_nothing():
    check("EmbedLayerNormalization", embeddings(mask=None, places=None), TABLES, "yy")


def group_norm(x, gamma, beta, groups, activation, epsilon=1e-5):
    """Compute GroupNorm of x [N, H, W, C]."""
    n, h, w, c = x.shape
    lines = x.reshape(n, h * w, groups, c // groups)
    mean, variance = (f(lines, axis=(1, 3), keepdims=True) for f in (np.mean, np.var))
    y = ((lines - mean) / np.sqrt(variance + epsilon)).reshape(x.shape) * gamma + beta
    return y / (1 + np.exp(-y)) if activation else y


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("last", [0, 1])
def test_groups_of_channels_are_normalised(activation, last):
    x, gamma, beta = normal(2, 4, 5, 8), normal(8), normal(8)
    given = x if last else x.transpose(0, 3, 1, 2)
    result = imported("GroupNorm", [given, gamma, beta], (1, 2), groups=4, activation=activation, channels_last=last)
    y = result["o0"] if last else result["o0"].transpose(0, 2, 3, 1)
    np.testing.assert_allclose(y, group_norm(x, gamma, beta, 4, activation), 1e-4, 1e-5)


@pytest.mark.parametrize("skip", [(2, 4, 5, 8), (2, 1, 1, 8), (2, 8)])
def test_groups_of_a_sum_are_normalised(skip):
    x, gamma, beta, other, bias = normal(2, 4, 5, 8), normal(8), normal(8), normal(*skip), normal(8)
    result = imported("SkipGroupNorm", [x, gamma, beta, other, bias], (1, 2, 4), 2, groups=2, activation=1)
    total = x + (other[:, None, None] if len(skip) == 2 else other) + bias
    np.testing.assert_allclose(result["o1"], total, 1e-5, 1e-6)
    np.testing.assert_allclose(result["o0"], group_norm(total, gamma, beta, 2, 1), 1e-4, 1e-5)
