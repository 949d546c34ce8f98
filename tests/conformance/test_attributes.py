"""Every attribute of every operator that we implement has its effect, in each opset.

An attribute set to another value changes the result as in onnx.reference, or as in ONNX Runtime where the two differ,
or is refused with a reason. The models are those of onnx's node tests.

In the newest opset kernels compute every value of each attribute on one model of the operator, and target "numpy",
which compiles no kernel, on others. In older ones the reference computes the graph: the importer makes the same nodes
of every opset.
"""
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, helper
from onnx.reference import ReferenceEvaluator

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.subject import read_subject
from infer_server.engines.errors import CompilerFault, EngineError, ModelError
from infer_server.engines.frontend.operators.normalise import RULES
from infer_server.engines.onnx_backend import EngineBackend
from infer_server.engines.ops import OPS
from infer_server.engines.ops.reference import run
from tests.conformance.cases import Arrays, cases, data_of, is_about_tensors, model_of

NUMBERS = {AttributeProto.INT: (-1, 0, 1, 2), AttributeProto.FLOAT: (0.0, 0.5, 2.0), AttributeProto.FLOATS: ([0.5],),
           AttributeProto.INTS: ([0], [1], [1, 1], [2, 2], [1, 1, 1, 1], [0, 1, 1, 0])}
NOT_IN_THE_REFERENCE = ("clip", "input_forget")     # attributes of recurrent layers that the reference ignores
OLDEST_OPSET = 9        # older ones are not in onnx.reference
EACH = 2            # models of an operator in the newest opset; one in each older


@cache
def models() -> dict[str, list[str]]:
    """Return the tests of one node, by operator."""
    found: dict[str, list[str]] = {}
    for name, case in cases().items():
        if case.kind == "node" and len(case.model.graph.node) == 1 and is_about_tensors(case.model):
            (node,) = case.model.graph.node
            if not node.domain and node.op_type in {*OPS, *RULES}:
                found.setdefault(node.op_type, []).append(name)
    return found


@cache
def words(op: str, attribute: str) -> tuple[str, ...]:
    """Return the values of a string attribute in the operator's tests, and one that has no meaning."""
    nodes = [node for name in models()[op] for node in model_of(cases()[name]).graph.node]
    return "nonsense", *sorted({a.s.decode() for node in nodes for a in node.attribute if a.name == attribute})


def with_attribute(model: onnx.ModelProto, opset: int, attribute: str, value: Any) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    changed.opset_import[0].version = opset
    (node,) = changed.graph.node
    known = onnx.defs.get_schema(node.op_type, opset).attributes
    kept = [a for a in node.attribute if a.name != attribute and a.name in known]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(attribute, value)])
    for output in changed.graph.output:     # the shape may be another one
        output.type.tensor_type.ClearField("shape")
    return changed


@cache
def schemas() -> dict[str, list[onnx.defs.OpSchema]]:
    """Return ONNX's operators in every opset, by name."""
    found: dict[str, list[onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain and not schema.deprecated:
            found.setdefault(schema.name, []).append(schema)
    return found


def variants(op: str) -> Iterator[tuple[str, int, str, Any]]:
    """Yield (test, opset, attribute, value)."""
    newest = onnx.defs.get_schema(op).since_version
    for schema in schemas()[op]:
        if max(schema.since_version, OLDEST_OPSET) > newest:
            continue
        opset = max(schema.since_version, OLDEST_OPSET)
        for test in models()[op][:EACH if schema.since_version == newest else 1]:
            for name, attribute in schema.attributes.items():
                kind = attribute.type.value
                values = words(op, name) if kind == AttributeProto.STRING else NUMBERS.get(kind, ())
                yield from ((test, opset, name, value) for value in values)


def expected(model: onnx.ModelProto, inputs: Arrays, attribute: str) -> Iterator[Arrays]:
    """Yield the results of onnx.reference and of ONNX Runtime; one that refuses the model ends the sequence.

    No `yield` inside `errstate`: a generator that is left there, and collected as garbage while NumPy changes its state
    elsewhere, takes the memory of that change with it (CPython 3.11, Python/hamt.c).
    """
    feeds = dict(zip([value.name for value in model.graph.input], inputs, strict=True))
    for compute in (by_reference, by_runtime)[attribute in NOT_IN_THE_REFERENCE:]:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                answer = compute(model, feeds)
        except Exception:       # whatever NumPy makes of attributes that do not fit
            return
        yield answer


def by_reference(model: onnx.ModelProto, feeds: dict[str, Any]) -> Arrays:
    return [np.asarray(y) for y in ReferenceEvaluator(model).run(None, feeds)]


def by_runtime(model: onnx.ModelProto, feeds: dict[str, Any]) -> Arrays:
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1        # models of one node gain nothing by more
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def same(results: Arrays, wanted: Arrays) -> bool:
    return all(y.dtype == z.dtype and y.shape == z.shape and np.allclose(
        y.astype(np.float64), z.astype(np.float64), rtol=1e-2 if y.itemsize == 2 else 1e-3, atol=1e-5, equal_nan=True)
        for y, z in zip(results, wanted, strict=True))


def results_of(test: str, opset: int, model: onnx.ModelProto, inputs: Arrays) -> Arrays:
    """Return what an engine computes; in an opset before the operator's newest, what the optimised graph means."""
    (node,) = model.graph.node
    if opset == max(onnx.defs.get_schema(node.op_type).since_version, OLDEST_OPSET):
        is_first = test == models()[node.op_type][0]
        return list(EngineBackend.run_model(model, inputs, target="" if is_first else "numpy"))
    feeds = dict(zip([value.name for value in model.graph.input], inputs, strict=True))
    builder = Builder(BuildConfig(target="numpy", timing=False))
    graph = read_subject(builder, model, lambda inputs: feeds).graph
    made = run(graph, {name: feeds[name] for name in graph.inputs})
    return [made[name] for name in graph.outputs]


def judged(test: str, opset: int, attribute: str, value: Any) -> str:
    """Return "right", "refused", "undefined" if onnx.reference has no answer, or the fault."""
    case = cases()[test]
    model = with_attribute(model_of(case), opset, attribute, value)
    inputs, _ = next(data_of(case))
    answers = expected(model, inputs, attribute)
    wanted = next(answers, None)
    try:
        results = results_of(test, opset, model, inputs)
    except CompilerFault as fault:
        return f"{test} in opset {opset}, {attribute}={value}: {fault}"
    except EngineError:
        return "refused"
    if wanted is None:
        return "undefined"
    if same(results, wanted) or any(same(results, others) for others in answers):
        return "right"
    return f"{test} in opset {opset}, {attribute}={value}: another result than onnx.reference and ONNX Runtime"


@pytest.mark.parametrize("op", models())
def test_no_attribute_is_ignored(op):
    wrong = [verdict for variant in variants(op) if " " in (verdict := judged(*variant))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", models())
def test_an_attribute_that_onnx_does_not_know_is_refused(op):
    opset = max(onnx.defs.get_schema(op).since_version, OLDEST_OPSET)
    model = with_attribute(model_of(cases()[models()[op][0]]), opset, "frobnicate", 1)
    with pytest.raises(ModelError, match="has no attribute 'frobnicate'"):
        EngineBackend.prepare(model)
