"""Builds that a case compares: our plan, and for each peer all models that may be its fastest.

    fp32    the ONNX file
    bf16    the ONNX file; OpenVINO is set to bf16, ONNX Runtime runs float32, as it has no bf16
    int8    our exported Q/DQ model in both runtimes; NNCF's in OpenVINO; ONNX Runtime's static percentile Q/DQ in both;
            where there is attention, NNCF's transformer mode, and Q/DQ around MatMul, Gemm and Conv only; where a
            layer recurs, ONNX Runtime's dynamic quantisation

Builds are kept in a folder, each under a digest of everything that affects it.
"""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.models import Model, digest
from benchmarks.runtimes.quantisers import QUANTISERS, save_items, traits
from benchmarks.runtimes.runtimes import OPENVINO, ORT, OURS, versions

CALIBRATION_ITEMS = 64      # at most, for the peers' quantisers
# Folders whose sources determine our plans, and the ranges in them: calibration takes longer than the rest of a build.
COMPILER = ("engines", "calibration", "infer_server/cli")
CALIBRATION = ("calibration", "engines/passes", "engines/frontend", "infer_server/cli")
ROOT = Path(__file__).resolve().parents[2]

Log = Callable[[str], None]


@dataclass(frozen=True)
class Build:
    """Model file for a runtime, or the reason why there is none."""
    runtime: str
    name: str
    file: Path | None
    failure: str = ""


class Workshop:
    """Builder of the models of a case, which reuses files in `folder`."""

    def __init__(self, folder: Path, log: Log) -> None:
        self.folder, self.log = folder, log
        self._compiler, self._calibration = sources_digest(COMPILER), sources_digest(CALIBRATION)

    def builds(self, model: Model, precision: str) -> list[Build]:
        """Return all builds of a model in a precision, ours first."""
        plan = self._plan_file(model, precision)
        ours = self._build(OURS, precision, partial(self._plan, model, precision, plan))
        if precision != "int8":
            return [ours, *(Build(runtime, "fp32" if runtime == ORT else precision, model.source)
                            for runtime in (OPENVINO, ORT))]
        exported = plan.with_suffix(".onnx")
        if ours.failure and plan.exists():
            ours = replace(ours, file=plan, failure="")     # the ONNX export failed, but the plan runs
        qdq = Build(OPENVINO, "our Q/DQ", *((exported,) if exported.exists() else (None, "it could not be exported")))
        return [ours, qdq, replace(qdq, runtime=ORT), *self._quantised(model)]

    def _quantised(self, model: Model) -> Iterator[Build]:
        model_traits = traits(model.source)
        for quantiser in QUANTISERS.values():
            if not quantiser.only or quantiser.only in model_traits:
                build = self._build(quantiser.runtimes[0], quantiser.name, partial(self._peer, model, quantiser.name))
                yield from (replace(build, runtime=runtime) for runtime in quantiser.runtimes)

    def _build(self, runtime: str, name: str, make: Callable[[], Path]) -> Build:
        try:
            return Build(runtime, name, make())
        except subprocess.CalledProcessError as error:
            lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
            why = lines[-1].strip() if lines else f"ended with {error.returncode} and said nothing"
            self.log(f"{runtime}, {name}: {why}")
            return Build(runtime, name, None, why)

    # ---- builds, each in its own process
    def _plan_file(self, model: Model, precision: str) -> Path:
        data = model.data_digest if precision == "int8" else ""
        key = digest(model.source.read_bytes(), self._compiler, precision, data, *model.build_options)
        return self._path(model, f"{precision}-{key}.plan")

    def _plan(self, model: Model, precision: str, plan: Path) -> Path:
        """Build a plan with build-engine's defaults, and for INT8 also export the Q/DQ model."""
        options: tuple[str, ...] = (f"--{precision}", *model.build_options)
        if precision == "int8":
            ranges = self._path(model, f"ranges-{digest(self._calibration, model.data_digest)}.json")
            options += (*model.calibration_options, "--calib-cache", str(ranges),
                        "--export-qdq", str(plan.with_suffix(".onnx")))
        return self._run(plan, f"infer-server builds {model.name} in {precision}", "infer_server.cli.build_engine",
                         str(model.source), "-o", str(plan), "--no-cache", *options)

    def _peer(self, model: Model, quantiser: str) -> Path:
        key = digest(model.source.read_bytes(), quantiser, str(versions()), model.data_digest)
        output = self._path(model, f"{quantiser}-{key}{QUANTISERS[quantiser].suffix}")
        items = self._path(model, f"items-{model.data_digest}.npz")
        if not items.exists():
            save_items(items, list(model.data.limit(CALIBRATION_ITEMS)))
        return self._run(output, f"{quantiser} quantises {model.name}", "benchmarks.runtimes.quantisers", quantiser,
                         str(model.source), str(items), str(output))

    def _path(self, model: Model, file: str) -> Path:
        folder = self.folder / model.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder / file

    def _run(self, output: Path, description: str, module: str, *arguments: str) -> Path:
        """Run a module of this repository unless its output exists. Raises CalledProcessError."""
        if not output.exists():
            self.log(description)
            subprocess.run([sys.executable, "-m", module, *arguments], check=True, capture_output=True, text=True)
        return output


def sources_digest(folders: Sequence[str] = COMPILER) -> str:
    """Return the digest of all modules in these folders."""
    return digest(*(path.read_bytes() for name in folders for path in sorted((ROOT / name).rglob("*.py"))))
