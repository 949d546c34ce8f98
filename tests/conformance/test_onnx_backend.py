"""ONNX's own tests of its operators, through engines.onnx_backend: each passes, or is listed with its reason.

listed.toml may only shrink: a listed test that passes is a failure here, and nothing on it may give a wrong result or
end in anything but an EngineError.
"""
from fnmatch import fnmatchcase

import pytest
from onnx.backend.test.runner import Runner

from engines.errors import CompilerFault, EngineError
from engines.onnx_backend import EngineBackend
from tests.conformance.cases import cases, data_of, entries, is_about_tensors, listed, model_of

ROUNDED = {"float16": 2 * 2.0 ** -10}       # relative: sums in another order end on a neighbour, or the one after


def run(name, check):
    case = cases()[name]
    representation = EngineBackend.prepare(model_of(case))
    for inputs, expected in data_of(case):
        results = representation.run(inputs)
        assert [y.dtype for y in results] == [y.dtype for y in expected]
        assert [y.shape for y in results] == [y.shape for y in expected]
        check(case, results, expected)


def close(case, results, expected):
    for result, wanted in zip(results, expected, strict=True):
        rtol = max(case.rtol, ROUNDED.get(result.dtype.name, 0))
        Runner.assert_similar_outputs([wanted], [result], rtol, case.atol)


def refused(name, reason):
    with pytest.raises(EngineError) as refusal:
        run(name, close)
        pytest.fail(f"{name} passes, which was not expected because of this: {reason}")
    assert not isinstance(refusal.value, CompilerFault)


@pytest.mark.parametrize("name", cases())
def test_onnx_backend_test(name):
    entry = listed(name)
    if not is_about_tensors(model_of(cases()[name])):
        assert entry is None, f"{name} is about no tensors: remove it from the table"
        refused(name, "its inputs or outputs are no tensors of numbers")
    elif entry is None:
        run(name, close)
    elif entry.outcome == "random":
        run(name, lambda *_: None)
    else:
        refused(name, entry.reason)


def test_the_table_names_tests_that_exist_and_each_once():
    found = {entry.pattern: [name for name in cases() if fnmatchcase(name, entry.pattern)] for entry in entries()}
    assert [pattern for pattern, names in found.items() if not names] == []
    every = sorted(name for names in found.values() for name in names)
    assert every == sorted(set(every))


def test_of_the_tests_on_tensors_seven_of_eight_pass():
    names = [name for name, case in cases().items() if is_about_tensors(model_of(case))]
    passing = [name for name in names if listed(name) is None]
    assert len(passing) >= 7 / 8 * len(names), f"{len(passing)} of {len(names)}"
