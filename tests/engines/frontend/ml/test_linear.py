"""Linear models give ONNX Runtime's results."""
import numpy as np
import onnx
import pytest
from onnx import helper

from infer_server.engines import build_engine
from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from tests.engines.frontend.one_node import check, imported, model_of, normal

ML = {"domain": "ai.onnx.ml"}
TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"]
LABELS = [4, 7, 9]


def weights(count, width=3):
    return {"coefficients": normal(count * width).tolist(), "intercepts": normal(count).tolist()}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("targets", [1, 3])
def test_a_linear_model_predicts_numbers(transform, targets):
    check("LinearRegressor", [normal(5, 3)], targets=targets, post_transform=transform, **weights(targets), **ML)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("count, classes", [(3, 3), (2, 2), (1, 2)])
def test_a_linear_model_tells_classes(transform, count, classes):
    check("LinearClassifier", [normal(9, 3)], (), 2, post_transform=transform, classlabels_ints=LABELS[:classes],
          **weights(count), **ML)


def test_a_score_of_nothing_has_no_probability():
    given = {"coefficients": [1.0, 0.0, 0.0, 1.0, 0.0, 0.0], "intercepts": [0.0, 0.0, 0.0]}
    x = np.float32([[1, 2], [0, 2], [-3, 0]])
    check("LinearClassifier", [x], (), 2, post_transform="SOFTMAX_ZERO", classlabels_ints=LABELS, **given, **ML)


def test_classes_that_have_names_are_their_places_and_the_user_is_told():
    model = model_of("LinearClassifier", [normal(5, 3)], (), 2, classlabels_strings=["cat", "dog", "cow"],
                     **weights(3), **ML)
    notices = []
    graph = graph_from_onnx(model, notices=notices)
    assert graph.types["o0"].dtype == np.int64
    assert notices == ["m: node 'n' (LinearClassifier): 'o0' is the index of a class instead of its name, in the order "
                       "cat, dog, cow"]


@pytest.mark.parametrize("labels", [{"classlabels_strings": ["cat", "dog"]}, {"classlabels_int64s": [4, 7]}])
def test_of_maps_the_probabilities_are_left_and_the_user_is_told(labels):
    x, notices = normal(5, 2), []
    graph = graph_from_onnx(model_of("ZipMap", [x], **labels, **ML), notices=notices)
    np.testing.assert_array_equal(imported("ZipMap", [x], **labels, **ML)["o0"], x)
    classes = ", ".join(map(str, *labels.values()))
    assert graph.shape("o0") == x.shape and notices == [
        f"m: node 'n' (ZipMap): 'o0' is the tensor of the probabilities instead of maps, in the order of the classes "
        f"{classes}"]


def test_a_model_that_declares_a_sequence_of_maps_is_one_graph():
    model = model_of("ZipMap", [normal(5, 2)], classlabels_int64s=[4, 7], **ML)
    kind = helper.make_map_type_proto(onnx.TensorProto.INT64, helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, []))
    model.graph.output[0].type.CopyFrom(helper.make_sequence_type_proto(kind))
    plan = build_engine(model, cache=False, timing=False).plan
    assert plan.program is None and plan.outputs[0].shape == (5, 2)


def test_a_zip_map_that_makes_nothing_is_no_traceback():
    model = model_of("ZipMap", [normal(5, 2)], classlabels_int64s=[4, 7], **ML)
    del model.graph.node[0].output[:]
    with pytest.raises(ModelError):
        build_engine(model, cache=False, timing=False)


@pytest.mark.parametrize("op, attrs, message", [
    ("LinearRegressor", {**weights(1), "targets": 2}, "3 coefficients and 1 intercepts do not fit 2 scores of 3"),
    ("LinearRegressor", {**weights(1), "post_transform": "PROBIT"}, "post_transform = PROBIT is not supported"),
    ("LinearClassifier", {**weights(2), "classlabels_ints": LABELS},
     "the coefficients are for 2 scores, but there are 3 classes"),
    ("LinearClassifier", weights(2), "class labels are missing")])
def test_what_does_not_fit_is_refused(op, attrs, message):
    with pytest.raises(ModelError, match=message):
        imported(op, [normal(5, 3)], (), 2 if op == "LinearClassifier" else 1, **attrs, **ML)
