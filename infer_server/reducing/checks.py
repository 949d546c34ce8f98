"""Checks that a model fails, run in a process of their own, so that a crash or a hang is a verdict too.

    differs             the engine's outputs differ from those of ONNX Runtime, or of the NumPy reference
    build-fails         the model cannot be built
    script.py:function  function(model, inputs), of a path and arrays by name, returns True if the model fails
"""
from __future__ import annotations

import multiprocessing
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from infer_server.calibration import Calibration
from infer_server.calibration.accuracy.verify import verify
from infer_server.calibration.data.sources.script import function_of, is_script
from infer_server.calibration.open_data import open_calibration_data
from infer_server.engines.compiler.build import build_engine
from infer_server.engines.errors import ConfigError, EngineError, did_you_mean
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.reducing.fragments import read_values

DIFFERS, BUILD_FAILS = "differs", "build-fails"
NAMES = (DIFFERS, BUILD_FAILS)
RAISED = "raised"       # kind of the verdict if a user's function raises an exception
_NAMES_AND_NUMBERS = re.compile(r"'[^']*'|\[[^\]]*\]|\d+")


@dataclass(frozen=True)
class Verdict:
    """Result of a check.

    Attributes
    ----------
    kind : str
        Kind of the failure: two models fail alike if their kinds are equal. "" if the check is passed.
    text : str
        Description of the failure.
    """
    kind: str = ""
    text: str = ""


@dataclass(frozen=True)
class Check:
    """Check of a model; picklable.

    Attributes
    ----------
    name : str
        "differs", "build-fails" or script.py:function.
    precision : str
        Precision in which the model is built.
    tolerance : float, optional
        Largest error that "differs" allows, as a share of the output's range. None: the limits of build-engine
        --verify.

    Raises
    ------
    ConfigError
        There is no such check, or the tolerance is not for it.
    """
    name: str = DIFFERS
    precision: str = "fp32"
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES and not is_script(self.name):
            raise ConfigError(f"unknown check '{self.name}'{did_you_mean(self.name, NAMES)}; choose one of "
                              f"{', '.join(NAMES)}, or give a function, script.py:function")
        if self.tolerance is not None and self.name != DIFFERS:
            raise ConfigError(f"a tolerance is for the check '{DIFFERS}'")

    def verdict(self, model: Path, data: Path) -> Verdict:
        """Check a model file with the inputs in an .npz file. Raises CalibrationError, and what a function raises."""
        if self.name == BUILD_FAILS:
            return self._built(model, data)
        return self._compared(model, data) if self.name == DIFFERS else self._called(model, data)

    def _build(self, model: Path, data: Path, plan: Path) -> None:
        calibration = Calibration(str(data), "minmax") if self.precision == "int8" else None
        write_plan(build_engine(model, precision=self.precision, timing=False, cache=False,
                                calibration=calibration).plan, plan)

    def _built(self, model: Path, data: Path) -> Verdict:
        try:
            with _plan_file() as plan:
                self._build(model, data, plan)
        except EngineError as error:
            return _verdict_on_error(error, model)
        return Verdict()

    def _compared(self, model: Path, data: Path) -> Verdict:
        """Return the verdict on the outputs; a model that cannot be built or run fails in another way."""
        try:
            with _plan_file() as plan:
                self._build(model, data, plan)
                return self._judged(plan, model, data)
        except EngineError as error:
            return _verdict_on_error(error, model)

    def _judged(self, plan: Path, model: Path, data: Path) -> Verdict:
        inputs = read_plan(plan).inputs
        report = verify(plan, model, open_calibration_data(str(data), inputs) if inputs else None)
        if self.tolerance is None:
            faults = report.faults
        else:
            faults = tuple(f"output '{one.name}': {one.wrong or f'largest error {one.relative:.3g} of the range'}"
                           for one in report.outputs if one.wrong or not one.relative <= self.tolerance)
        return Verdict(DIFFERS, f"{faults[0]}, beside {report.oracle}") if faults else Verdict()

    def _called(self, model: Path, data: Path) -> Verdict:
        result = function_of(self.name)(str(model), read_values(data))
        return Verdict("function", result if isinstance(result, str) else "the function returned True"
                       ) if result else Verdict()


def _verdict_on_error(error: EngineError, model: Path) -> Verdict:
    """Return the verdict on a failed build, whose kind is the message without names and numbers."""
    text = str(error).partition("\n")[0].replace(f"{model.parent}/", "")
    return Verdict(f"{type(error).__name__}: {_NAMES_AND_NUMBERS.sub('', text)}", text)


@contextmanager
def _plan_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "m.plan")


class Checker:
    """Runs checks in a process, which is started again if it dies or takes too long."""

    def __init__(self, check: Check, timeout: float) -> None:
        """timeout: seconds after which a check is ended."""
        self._check, self._timeout = check, timeout
        self._process: SpawnProcess | None = None
        self._link: Connection | None = None

    def __call__(self, model: Path, data: Path) -> Verdict:
        """Return the verdict on a model with the inputs in an .npz file."""
        link = self._started()
        try:
            link.send((model, data))
            if not link.poll(self._timeout):
                self.close()
                return Verdict("timeout", f"the check took more than {self._timeout:g} s")
            verdict: Verdict = link.recv()
            return verdict
        except (EOFError, OSError):
            code = self.close()
            return Verdict("crash", f"the process ended with exit status {code}")

    def _started(self) -> Connection:
        if self._link is None:
            context = multiprocessing.get_context("spawn")
            self._link, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._check, other), daemon=True)
            self._process.start()
            other.close()
        return self._link

    def close(self) -> int | None:
        """End the process; return its exit status."""
        process, link, self._process, self._link = self._process, self._link, None, None
        if link is not None:
            link.close()
        if process is None:
            return None
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode


def _serve(check: Check, link: Connection) -> None:
    """Answer each pair of paths with a verdict."""
    warnings.simplefilter("ignore")         # overflows of a failing model are no news
    while True:
        try:
            model, data = link.recv()
        except EOFError:
            return
        try:
            link.send(check.verdict(model, data))
        except Exception as error:      # any error of the user's code
            link.send(Verdict(RAISED, f"{check.name} raised {type(error).__name__}: {error}"))
