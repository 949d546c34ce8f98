"""Split classifiers of named classes: a segment computes the index of the class, the host looks up its name.

    label = Classifier(x; names)        ->      label = Gather(names, Classifier(x; 0, 1, ...))
"""
from __future__ import annotations

import onnx
from onnx import helper

from infer_server.engines.frontend.branches import defined_in
from infer_server.engines.frontend.cutting.facts import reads

_NUMBERS = {"LinearClassifier": "classlabels_ints", "SVMClassifier": "classlabels_ints",
            "TreeEnsembleClassifier": "classlabels_int64s"}
_NAMES = "classlabels_strings"


def output_class_indices(graph: onnx.GraphProto) -> None:
    """Let the graph's classifiers output indices, followed by Gathers of the class names. Changes the graph."""
    nodes = list(graph.node)
    taken = {*defined_in(graph), *(name for node in nodes for name in reads(node))}
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        names = next((list(attribute.strings) for attribute in node.attribute if attribute.name == _NAMES), [])
        if node.domain != "ai.onnx.ml" or node.op_type not in _NUMBERS or not names or not node.output[0]:
            continue
        classifier, label = graph.node[-1], node.output[0]
        kept = [attribute for attribute in node.attribute if attribute.name != _NAMES]
        del classifier.attribute[:]
        classifier.attribute.extend([*kept, helper.make_attribute(_NUMBERS[node.op_type], range(len(names)))])
        classifier.output[0], classes = (_free(f"{label}.{suffix}", taken) for suffix in ("place", "names"))
        graph.initializer.append(onnx.TensorProto(
            name=classes, data_type=onnx.TensorProto.STRING, dims=[len(names)], string_data=names))
        graph.node.append(helper.make_node("Gather", [classes, classifier.output[0]], [label], node.name))


def _free(name: str, taken: set[str]) -> str:
    """Reserve and return the name, with apostrophes appended while it is taken."""
    while name in taken:
        name += "'"
    taken.add(name)
    return name
