"""Support vector machines give ONNX Runtime's results."""
from itertools import combinations

import numpy as np
import pytest

from infer_server.engines import build_engine
from infer_server.engines.errors import ModelError
from infer_server.engines.runtime.engine import Engine
from tests.engines.frontend.one_node import check, feeds_of, imported, model_of, normal, onnx_runtime

ML = {"domain": "ai.onnx.ml"}
KERNELS = ["LINEAR", "POLY", "RBF", "SIGMOID"]
TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"]
LABELS = [4, 7, 9, 1, 0, 5]
WIDTH = 3


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("one_class", [0, 1])
def test_support_vectors_predict_numbers(kernel, one_class):
    check("SVMRegressor", [normal(6, 3)], kernel_type=kernel, kernel_params=[0.3, 0.5, 2.0], n_supports=4,
          support_vectors=normal(12).tolist(), coefficients=normal(4).tolist(), rho=[0.25], one_class=one_class, **ML)


def test_support_vectors_may_be_summed_up():
    check("SVMRegressor", [normal(6, 3)], coefficients=normal(3).tolist(), rho=[0.25], kernel_params=[0.0] * 3, **ML)


def machine(classes, kernel="RBF", proba=False, **more):
    """Return attributes of an SVM for each pair of classes, with two or three support vectors per class."""
    each, pairs = [2 + i % 2 for i in range(classes)], len([*combinations(range(classes), 2)])
    platt = {"prob_a": (-1 - normal(pairs) ** 2).tolist(), "prob_b": normal(pairs).tolist()} if proba else {}
    return {"classlabels_ints": LABELS[:classes], "vectors_per_class": each, "kernel_type": kernel,
            "kernel_params": [0.3, 0.5, 2.0], "support_vectors": normal(sum(each) * WIDTH).tolist(),
            "coefficients": normal((classes - 1) * sum(each)).tolist(), "rho": normal(pairs).tolist(),
            **platt, **more, **ML}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("proba", [False, True])
def test_support_vectors_tell_classes(kernel, classes, proba):
    check("SVMClassifier", [normal(40, WIDTH)], (), 2, **machine(classes, kernel, proba))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("proba", [False, True])
def test_scores_of_support_vectors_become_probabilities(transform, classes, proba):
    check("SVMClassifier", [normal(40, WIDTH)], (), 2, **machine(classes, proba=proba, post_transform=transform))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("classes, positive", [(2, False), (2, True), (3, False)])
def test_without_support_vectors_each_class_has_a_score(transform, classes, positive):
    numbers = normal(classes * WIDTH)
    coefficients = (np.abs(numbers) if positive else numbers).tolist()
    check("SVMClassifier", [normal(40, WIDTH)], (), 2, classlabels_ints=LABELS[:classes], coefficients=coefficients,
          rho=[0.25], post_transform=transform, kernel_type="LINEAR", kernel_params=[0.0] * 3, **ML)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_rows_may_be_of_other_types(dtype):
    check("SVMClassifier", [(normal(20, WIDTH) * 2).astype(dtype)], (), 2, **machine(3))


@pytest.mark.parametrize("classes, proba, compiled", [
    (3, False, True), (2, True, True), (3, True, True), (5, True, True), (6, True, False)])
def test_all_is_compiled_but_probabilities_of_many_classes(classes, proba, compiled):
    x, attrs = normal(400, WIDTH), machine(classes, proba=proba)
    model = model_of("SVMClassifier", [x], (), 2, batch=True, **attrs)
    plan = build_engine(model, cache=False, timing=False).plan
    assert all(step.symbol for step in plan.machine.steps) == compiled
    x[7] = np.nan
    result, expected = Engine(plan).run({"i0": x}), onnx_runtime(model, feeds_of(model, [x]))
    np.testing.assert_array_equal(result["o0"], expected["o0"])
    np.testing.assert_allclose(result["o1"], expected["o1"], 1e-4, 1e-5)


@pytest.mark.parametrize("attrs, message", [
    ({"kernel_type": "COSINE"}, "kernel_type is 'COSINE'"),
    ({"vectors_per_class": [2, 3]}, "do not fit 3 classes and 5 vectors of 3 columns"),
    ({"rho": [0.5]}, "rho 1, which do not fit 3 classes"),
    ({"prob_a": [1.0], "prob_b": [1.0]}, "prob_a has 1 values and prob_b 1, but there are 3 pairs of classes"),
    ({"vectors_per_class": [0], "coefficients": [1.0]},
     "coefficients has 1 values and rho 3, which do not fit 3 classes of 3 columns"),
    ({"post_transform": "PROBIT"}, "post_transform = PROBIT is not supported")])
def test_what_does_not_fit_is_refused(attrs, message):
    with pytest.raises(ModelError, match=message):
        imported("SVMClassifier", [normal(5, WIDTH)], (), 2, **{**machine(3), **attrs})
