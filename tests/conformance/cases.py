"""Tests of onnx.backend.test that run without a network, a function that runs one, and the expected failures."""
import pickle
import random
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner
from onnx.reference.ops import op_pool_common

from infer_server.engines.machine import object_cache
from infer_server.engines.onnx_backend import EngineBackend
from infer_server.engines.plan.plan import Plan

TABLE = Path(__file__).with_name("listed.toml")
ROUNDED = {"float16": 2 * 2.0 ** -10}       # relative: sums in another order end on a neighbour, or the one after
CANCELLED = "test_dft*"     # sums of large numbers that leave nothing, of which ONNX's own data has rounding errors
KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Entry:
    """Reason why a test of ONNX is not expected to pass.

    outcome: "refused" with an EngineError; "random", if ONNX specifies only shape and type; "runtimes", if these agree
    on another result.
    """
    pattern: str
    outcome: str
    reason: str


@cache
def entries() -> list[Entry]:
    return [Entry(pattern, row["outcome"], row["reason"]) for row in tomllib.loads(TABLE.read_text())["listed"]
            for pattern in row["tests"]]


@cache
def cases() -> dict[str, TestCase]:
    """Return ONNX's test cases by name, from the object cache if they are there: making them takes seconds."""
    cache = object_cache.current()
    key = object_cache.digest("onnx cases", onnx.__version__, np.__version__, *KINDS)
    content = cache.fetch(key) if cache else None
    if content is not None:
        kept: dict[str, TestCase] = pickle.loads(content)
        return kept
    made = _made_cases()
    if cache:
        cache.store(key, pickle.dumps(made))
    return made


def _made_cases() -> dict[str, TestCase]:
    """Return ONNX's test cases by name. onnx draws their data when its modules are imported."""
    state = np.random.get_state(), random.getstate()
    np.random.seed(0)
    random.seed(0)
    with warnings.catch_warnings(), patch.object(op_pool_common, "pool", partial(_pooled, op_pool_common.pool)):
        warnings.simplefilter("ignore")         # of making the data: not ours
        found = {case.name: case for kind in KINDS for case in load_model_tests(kind=kind)}
    np.random.set_state(state[0])
    random.setstate(state[1])
    return dict(sorted(found.items()))


def _pooled(by_window: Callable[..., np.ndarray], padded: np.ndarray, shape: Any, kernel: list[int],
            strides: list[int] | None, out_shape: Any, kind: str, *padding: Any, p: int = 1, **more: Any) -> np.ndarray:
    """Pool all windows at once where onnx would take seconds to pool 90,000 windows: without padding and strides."""
    if padding or more or set(strides or ()) - {1}:
        return by_window(padded, shape, kernel, strides, out_shape, kind, *padding, p=p, **more)
    windows = sliding_window_view(padded, kernel, tuple(range(2, padded.ndim)))
    values = windows.reshape(*windows.shape[:padded.ndim], -1)
    compute = {"AVG": np.mean, "MAX": np.max, "LPPOOL": lambda x, axis: (np.abs(x) ** p).sum(axis) ** (1 / p)}[kind]
    return compute(values, axis=-1)


def model_of(case: TestCase) -> onnx.ModelProto:
    return case.model or onnx.load(Path(case.model_dir, "model.onnx"))


def is_about_tensors(model: onnx.ModelProto) -> bool:
    """Return True if all inputs and outputs are tensors of numbers, not sequences, optionals, maps or strings."""
    types = [value.type for value in (*model.graph.input, *model.graph.output)]
    return all(t.WhichOneof("value") == "tensor_type" and t.tensor_type.elem_type != onnx.TensorProto.STRING
               for t in types)


def data_of(case: TestCase) -> Iterator[tuple[Arrays, Arrays]]:
    """Yield (inputs, outputs) of each data set; values that are not tensors stay unchanged."""
    if case.data_sets is not None:
        yield from (([_array(x) for x in inputs], [_array(y) for y in outputs]) for inputs, outputs in case.data_sets)
        return
    for folder in sorted(Path(case.model_dir).glob("test_data_set_*")):
        yield _stored(folder, "input"), _stored(folder, "output")


def _array(value: np.ndarray | onnx.TensorProto) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _stored(folder: Path, what: str) -> Arrays:
    count = len(list(folder.glob(f"{what}_*.pb")))
    files = [folder / f"{what}_{i}.pb" for i in range(count)]
    return [numpy_helper.to_array(onnx.TensorProto.FromString(file.read_bytes())) for file in files]


def listed(name: str) -> Entry | None:
    return next((entry for entry in entries() if fnmatchcase(name, entry.pattern)), None)


def run(name: str, check: Callable[[TestCase, Arrays, Arrays], None], **options: Any) -> list[Plan]:
    """Run all data sets of a test and return their plans. Raises EngineError, or AssertionError on a wrong result.

    options: options of the build.
    """
    case = cases()[name]
    representation, plans = EngineBackend.prepare(model_of(case), **options), []
    for inputs, expected in data_of(case):
        results = list(representation.run(inputs))
        assert [kind_of(y) for y in results] == [kind_of(y) for y in expected]
        check(case, results, expected)
        plans.append(representation.plan_of(inputs))
    return plans


def kind_of(value: Any) -> Any:
    """Return the type and shape of a tensor, or a list of them for a sequence; strings are objects."""
    if isinstance(value, list) or value is None:
        return value and [kind_of(item) for item in value]
    array = np.asarray(value)
    return (object if array.dtype.kind in "OUS" else array.dtype), array.shape


def texts(array: Any) -> list[str]:
    return [word.decode() if isinstance(word, bytes) else str(word) for word in np.asarray(array).reshape(-1).tolist()]


def close(case: TestCase, results: Arrays, expected: Arrays) -> None:
    """Assert that the results are as close to the expected ones as ONNX's own runner requires."""
    for result, wanted in zip(results, expected, strict=True):
        if isinstance(wanted, list):
            close(case, result, wanted)
            continue
        if wanted is None or kind_of(wanted)[0] is object:
            assert wanted is result is None or texts(result) == texts(wanted)
            continue
        rtol = max(case.rtol, ROUNDED.get(result.dtype.name, 0))
        atol = 1e-6 * float(np.abs(wanted).max()) if fnmatchcase(case.name, CANCELLED) else case.atol
        Runner.assert_similar_outputs([wanted], [result], rtol, atol)
