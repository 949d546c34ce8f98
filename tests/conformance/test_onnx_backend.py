"""ONNX's own tests of its operators, through engines/onnx_backend.py: each passes, or is listed with its reason.

listed.toml may only shrink: a listed test that passes is a failure here, and nothing on it may give a wrong result or
end in anything but an EngineError.
"""
from fnmatch import fnmatchcase

import pytest

from infer_server.engines.errors import CompilerFault, EngineError
from tests.conformance import census
from tests.conformance.cases import cases, close, entries, is_about_tensors, listed, model_of, run


def refused(name, reason):
    with pytest.raises(EngineError) as refusal:
        run(name, close)
        pytest.fail(f"{name} passes, which was not expected because of this: {reason}")
    assert not isinstance(refusal.value, CompilerFault)


@pytest.mark.parametrize("name", cases())
def test_onnx_backend_test(name):
    entry = listed(name)
    if entry is None:
        run(name, close)
    elif entry.outcome == "random":
        run(name, lambda *_: None)
    elif entry.outcome == "runtimes":
        with pytest.raises(AssertionError):
            run(name, close)
    else:
        refused(name, entry.reason)


def test_the_table_names_tests_that_exist_and_each_once():
    found = {entry.pattern: [name for name in cases() if fnmatchcase(name, entry.pattern)] for entry in entries()}
    assert [pattern for pattern, names in found.items() if not names] == []
    every = sorted(name for names in found.values() for name in names)
    assert every == sorted(set(every))


def test_of_the_tests_on_tensors_97_of_100_pass():
    names = [name for name, case in cases().items() if is_about_tensors(model_of(case))]
    failing = [name for name in names if (entry := listed(name)) and entry.outcome == "refused"]
    assert len(failing) <= 3 / 100 * len(names), f"{len(failing)} of {len(names)} do not"


def test_the_census_tells_what_is_compiled_from_what_runs_by_reference():
    names = ("test_relu", "test_adam", "test_flexattention_soft_cap", "test_bernoulli")
    verdicts = {name: census.judged(name) for name in names}
    assert [verdict.outcome for verdict in verdicts.values()] == [
        census.COMPILED, census.REFERENCE, census.REFUSED, census.RANDOM]
    assert "| pass | 3 | 75.0 % |" in census.counts(verdicts)
    assert "1 Adam: no kernel for Adam (test_adam)" in census.by_operator(verdicts)


def test_the_census_of_a_gpu_tells_what_has_a_kernel_there():
    verdicts = {name: census.judged(name, "sm_80") for name in ("test_relu", "test_constant_pad", "test_det_2d")}
    assert [verdict.outcome for verdict in verdicts.values()] == [census.COMPILED, census.COMPILED, census.REFUSED]
    assert "cannot run on sm_80" in verdicts["test_det_2d"].reason


def test_the_document_names_each_family_that_does_not_pass():
    text = census.DOCUMENT.read_text()
    assert [entry.reason for entry in entries() if entry.outcome == "refused" and entry.reason not in text] == []
