"""Reduction of a failing model to a small one that fails alike, written together with the inputs that it fails on.

    reduction = reduce_model("model.onnx", "reduced.onnx", Check("differs", "fp16"))
    print(reduction)
"""
from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infer_server.calibration.accuracy.oracle import oracle_of
from infer_server.calibration.data.sources.script import is_script
from infer_server.calibration.open_data import Source, open_calibration_data
from infer_server.comparing.sides import OnnxSide
from infer_server.engines.errors import ConfigError, EngineError, InputError, ModelError
from infer_server.engines.ir.dtypes import BITS
from infer_server.engines.ir.graph import Array
from infer_server.engines.preprocess import load_preprocess
from infer_server.reducing.checks import BUILD_FAILS, RAISED, Check, Checker, Verdict
from infer_server.reducing.fragments import (
    Fragment,
    FragmentExtractor,
    OnnxModel,
    inner_tensors,
    load,
    operators,
    read_values,
    save,
    save_values,
    weights_count,
)
from infer_server.reducing.search import Search, Stage

MAX_CHECKS, TIMEOUT = 500, 300.0
MAX_BYTES = 4 << 30         # recorded values of a run


@dataclass(frozen=True)
class Reduction:
    """Result of a reduction.

    Attributes
    ----------
    model, data : Path
        The reduced model and the .npz file of its inputs.
    verdict : Verdict
        How the reduced model fails.
    operators : tuple of str
        Operators of its nodes, in order.
    nodes, weights : tuple of int
        Numbers of nodes and of elements of weights, before and after.
    inputs : mapping of str to tuple
        Shapes of its inputs.
    checks : int
        Number of checks that were run.
    complete : bool
        True if no single node can be removed; False if the checks ran out.
    command : str
        Command that shows the failure.
    """
    model: Path
    data: Path
    verdict: Verdict
    operators: tuple[str, ...]
    nodes: tuple[int, int]
    weights: tuple[int, int]
    inputs: Mapping[str, tuple[int, ...]]
    checks: int
    complete: bool
    command: str

    def __str__(self) -> str:
        shown = ", ".join(self.operators[:10]) + ", ..." * (len(self.operators) > 10)
        inputs = ", ".join(f"{name} {list(shape)}" for name, shape in self.inputs.items()) or "none"
        lines = [f"{self.model}: {self.nodes[1]} of {self.nodes[0]} nodes ({shown}), {self.weights[1]} of "
                 f"{self.weights[0]} weights, in {self.checks} checks",
                 f"inputs, in {self.data}: {inputs}", f"fails: {self.verdict.text}", f"reproduce: {self.command}"]
        if not self.complete:
            lines.append("stopped at --max-checks: a smaller model may fail too")
        return "\n".join(lines)


def reduce_model(model: str | os.PathLike[str], output: str | os.PathLike[str], check: Check, *,
                 data: Source | None = None, preprocess: str = "", max_checks: int = MAX_CHECKS,
                 timeout: float = TIMEOUT, stage: Stage = lambda name, nodes: None) -> Reduction:
    """Write the smallest part of a model that fails a check as the complete model does.

    Parameters
    ----------
    model, output : path
        ONNX files. The inputs of the reduced model are written beside it, with the suffix .npz.
    check : Check
    data : path or callable, optional
        Items, in the forms of `infer_server.calibration.open_data`, of which the first is used. None generates one.
    preprocess : str
        Preprocessing of images.
    max_checks : int
        Number of checks after which the smallest model so far is written.
    timeout : float
        Seconds after which a check counts as a failure of its own kind.
    stage : callable, optional
        Called with the stage ("outputs", "inputs", "nodes", or "" for the one before) and the number of nodes left.

    Returns
    -------
    Reduction

    Raises
    ------
    ConfigError
        The model passes the check, or the check itself raises an exception.
    EngineError
        The model or the data cannot be read or run.
    OSError
    """
    path, written = Path(model), Path(output)
    if written.is_dir() or not os.access(written.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {written}: name a file in a folder that exists and is yours to write")
    if written.exists() and written.samefile(path):
        raise ConfigError(f"the reduced model would overwrite {path}: give another file, -o")
    return _Reducing(path, written, check, timeout, stage).run(data, preprocess, max_checks)


def check_model(model: str | os.PathLike[str], check: Check, *, data: Source | None = None, preprocess: str = "",
                timeout: float = TIMEOUT) -> Verdict:
    """Run a check on a model once. Parameters and errors are those of `reduce_model`."""
    path = Path(model)
    with tempfile.TemporaryDirectory() as folder, closing(Checker(check, timeout)) as checker:
        save_values(_feed(path, check, data, preprocess), Path(folder, "x.npz"))
        return _usable(checker(path, Path(folder, "x.npz")))


class _Reducing:
    def __init__(self, path: Path, output: Path, check: Check, timeout: float, stage: Stage) -> None:
        self._path, self._output, self._check, self._timeout, self._stage = path, output, check, timeout, stage
        self._proto = load(path)

    def run(self, data: Source | None, preprocess: str, max_checks: int) -> Reduction:
        feed = _feed(self._path, self._check, data, preprocess)
        self._stage("recording", len(self._proto.graph.node))
        values = {**feed, **_recorded(self._path, self._proto, feed, self._check)}
        extractor = FragmentExtractor(self._proto, values)
        with tempfile.TemporaryDirectory() as folder, closing(Checker(self._check, self._timeout)) as checker:
            def verdict(fragment: Fragment) -> Verdict:
                return self._verdict(extractor, fragment, Path(folder), checker)

            self._stage("outputs", len(extractor.whole.nodes))
            save_values(feed, Path(folder, "x.npz"))
            first = _usable(checker(self._path, Path(folder, "x.npz")))
            if not first.kind:
                raise ConfigError(f"{self._path} passes the check '{self._check.name}': there is nothing to reduce. "
                                  "Give the items on which it fails, --data, or another --precision")
            extractor.declared = False
            # Shapes are fixed, unless the failure needs open ones.
            extractor.declared = verdict(extractor.whole).kind != first.kind
            search = Search(extractor, lambda one: verdict(one).kind == first.kind, max_checks, self._stage)
            best = search.run()
            return self._written(extractor, best, verdict(best), search)

    def _verdict(self, extractor: FragmentExtractor, fragment: Fragment, folder: Path, checker: Checker) -> Verdict:
        model = extractor.extract(fragment)
        if model is None:
            return Verdict()
        part = folder / self._path.name         # errors name the file
        save(model, part)
        save_values(extractor.inputs_of(fragment), folder / "x.npz")
        return checker(part, folder / "x.npz")

    def _written(self, extractor: FragmentExtractor, best: Fragment, verdict: Verdict, search: Search) -> Reduction:
        model = extractor.extract(best)
        assert model is not None
        if not verdict.kind:
            raise ModelError(f"{self._path} fails as it is, and no longer after it is written again: the failure "
                             "depends on the file, or comes and goes")
        data, inputs = self._output.with_suffix(".npz"), extractor.inputs_of(best)
        save(model, self._output)
        save_values(inputs, data)
        names = operators(model)
        return Reduction(self._output, data, verdict, tuple(names), (len(extractor.whole.nodes), len(names)),
                         (weights_count(self._proto), weights_count(model)),
                         {name: array.shape for name, array in inputs.items()}, search.checks, search.complete,
                         self._command(data, bool(inputs)))

    def _command(self, data: Path, has_inputs: bool) -> str:
        check, output = self._check, str(self._output)
        if is_script(check.name) or check.tolerance is not None:
            command = ["reduce-model", output, *["--data", str(data)] * has_inputs, "--check", check.name]
            if check.tolerance is not None:
                command += ["--precision", check.precision, "--tolerance", f"{check.tolerance:g}"]
            return shlex.join([*command, "--check-only"])
        is_read = has_inputs and (check.name != BUILD_FAILS or check.precision == "int8")
        return shlex.join(["build-engine", output, "-o", "reduced.plan", f"--{check.precision}", "--no-timing",
                           *["--calib", str(data)] * is_read, *["--calibrator", "minmax"] * (check.precision == "int8"),
                           *["--verify"] * (check.name != BUILD_FAILS)])


def _usable(verdict: Verdict) -> Verdict:
    if verdict.kind == RAISED:
        raise ConfigError(f"the check itself fails: {verdict.text}")
    return verdict


def _feed(path: Path, check: Check, data: Source | None, preprocess: str) -> dict[str, Array]:
    """Return the first item of the data, or a generated one; {} for a model that cannot be imported."""
    if preprocess and data is None:
        raise ConfigError("--preprocess is for the images of --data, and no data are given")
    try:
        generator = OnnxSide(path).generator()
    except EngineError:
        if isinstance(data, str | Path) and Path(data).suffix == ".npz" and Path(data).is_file():
            return read_values(Path(data))      # the types of the inputs are unknown: the file holds one item
        if check.name == BUILD_FAILS and data is None:
            return {}
        raise
    items = generator.items(1) if data is None else open_calibration_data(
        data, generator.inputs, load_preprocess(preprocess) if preprocess else None, generator.usual)
    first, *_ = items.limit(1)
    return dict(first)


def _recorded(path: Path, proto: OnnxModel, feed: Mapping[str, Array], check: Check) -> dict[str, Array]:
    """Run the model once and return all tensors that it shows; {} for a model that cannot be run."""
    try:
        oracle = oracle_of(path, {name: array.shape for name, array in feed.items()}, shown=inner_tensors(proto))
        outputs: dict[str, Any] = oracle.answer(feed)
    except Exception as error:      # ONNX Runtime raises a different class for each status
        if check.name == BUILD_FAILS:
            return {}
        raise InputError(f"{path} cannot be run to record its tensors: {str(error).splitlines()[0]}") from error
    values = {name: value for name, value in outputs.items()
              if isinstance(value, np.ndarray) and value.dtype.name not in BITS}
    if (size := sum(value.nbytes for value in values.values())) > MAX_BYTES:
        raise InputError(f"the tensors of one item take {size >> 20} MiB, more than {MAX_BYTES >> 20}: give a smaller "
                         "item, --data")
    return values
