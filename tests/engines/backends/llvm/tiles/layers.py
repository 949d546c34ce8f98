"""Contractions of the models that the benchmarks run, as INT8 plans have them, and the kernels chosen for them.

ResNet-50 v1.5 and MobileNetV2 at 224x224, MiniLM-L6 with 128 tokens, the PP-OCRv4 recogniser at 48x320.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.matrix_unit.contraction import MatrixUnitContraction
from infer_server.engines.backends.llvm.tuning.candidates import Candidate
from infer_server.engines.backends.llvm.tuning.tuner import Tuner
from infer_server.engines.lowering.problems.convolution import Contraction
from infer_server.engines.machine.timing_cache import TimingCache
from scripts.testing.suite import numpy_dtype, requantise
from tests.engines.backends.llvm.tiles.jobs import counting, kernel_job
from tests.engines.backends.llvm.tiles.trapped import KernelJob
from tests.engines.backends.test_contraction import STORED, Shape


@dataclass(frozen=True)
class Layer:
    """Contraction that occurs `count` times in a model."""
    count: int
    cin: int
    cout: int
    taps: tuple[int, int] = (1, 1)
    stride: int = 1
    residual: bool = False
    border: int = 0             # pixels between two rows of y, which the next layer reads as zeros
    stored: str = ""            # dtype of y, if it is not the precision's
    rows: int = 1
    cols: int = 1

    def problem(self, precision: str = "int8") -> Contraction:
        shape = Shape(self.rows, self.cols, self.cin, self.cout, self.taps, (self.stride, self.stride))
        program, _ = requantise(self.cout, np.random.default_rng(0), residual=self.residual)
        spec = shape.spec(precision, program, self.stored or STORED[precision], self.residual)
        size = spec.y.strides[1]
        row = (self.cols + self.border) * size
        return replace(spec, y=replace(spec.y, strides=(row, *spec.y.strides[1:]), item=self.rows * row))

    def __str__(self) -> str:
        taps = "x".join(map(str, self.taps)) + (f"/{self.stride}" if self.stride > 1 else "")
        return (f"{taps} {self.rows}x{self.cols} {self.cin}-{self.cout}{' residual' if self.residual else ''}"
                f"{f' {self.stored}' if self.stored else ''}")


def _at(rows: int, cols: int, *layers: Layer) -> list[Layer]:
    """Return the layers with images of this size."""
    return [replace(layer, rows=rows, cols=cols) for layer in layers]


_3X3, _1X3 = (3, 3), (1, 3)
RESNET50 = [
    *_at(112, 112, Layer(1, 3, 64, (7, 7), 2)),
    *_at(56, 56, Layer(1, 64, 320, border=2), Layer(3, 64, 256, residual=True), Layer(2, 256, 64, border=2),
         Layer(3, 64, 64, _3X3), Layer(1, 256, 128, border=2)),
    *_at(28, 28, Layer(1, 128, 128, _3X3, 2), Layer(1, 128, 512), Layer(1, 256, 512, stride=2, residual=True),
         Layer(3, 512, 128, border=2), Layer(3, 128, 128, _3X3), Layer(3, 128, 512, residual=True),
         Layer(1, 512, 256, border=2)),
    *_at(14, 14, Layer(1, 256, 256, _3X3, 2), Layer(1, 256, 1024), Layer(1, 512, 1024, stride=2, residual=True),
         Layer(5, 1024, 256, border=2), Layer(5, 256, 256, _3X3), Layer(5, 256, 1024, residual=True),
         Layer(1, 1024, 512, border=2)),
    *_at(7, 7, Layer(1, 512, 512, _3X3, 2), Layer(1, 512, 2048), Layer(1, 1024, 2048, stride=2, residual=True),
         Layer(2, 2048, 512, border=2), Layer(2, 512, 512, _3X3), Layer(2, 512, 2048, residual=True)),
    Layer(1, 2048, 1000, stored="float32")]
MOBILENET_V2 = [
    *_at(112, 112, Layer(1, 3, 32, _3X3, 2, border=2), Layer(1, 32, 16), Layer(1, 16, 96, border=2)),
    *_at(56, 56, Layer(1, 96, 24), Layer(2, 24, 144, border=2), Layer(1, 144, 24, residual=True)),
    *_at(28, 28, Layer(1, 144, 32), Layer(3, 32, 192, border=2), Layer(2, 192, 32, residual=True)),
    *_at(14, 14, Layer(1, 192, 64), Layer(4, 64, 384, border=2), Layer(3, 384, 64, residual=True),
         Layer(1, 384, 96), Layer(3, 96, 576, border=2), Layer(2, 576, 96, residual=True)),
    *_at(7, 7, Layer(1, 576, 160), Layer(3, 160, 960, border=2), Layer(2, 960, 160, residual=True),
         Layer(1, 960, 320), Layer(1, 320, 1280)),
    Layer(1, 1280, 1000, stored="float32")]
MINILM = _at(1, 128, Layer(3, 384, 384), Layer(5, 384, 1152), Layer(6, 384, 1536),
             *(Layer(6, cin, 384, residual=True, stored="float32") for cin in (384, 1536)))
RECOGNISER = [
    *_at(24, 160, Layer(1, 3, 16, _3X3, 2, border=2), Layer(1, 16, 32, border=2), Layer(1, 32, 64, border=2),
         Layer(1, 64, 64, border=2)),
    *_at(12, 160, Layer(1, 64, 128, border=2), Layer(1, 128, 128, border=2)),
    *_at(12, 80, Layer(1, 128, 240, border=4), Layer(4, 240, 240, border=4)),
    *_at(6, 80, Layer(1, 240, 480, border=4), Layer(1, 480, 480, border=4)),
    *_at(3, 80, Layer(1, 480, 480, border=4), Layer(1, 480, 480)),
    *_at(1, 40, Layer(1, 480, 60, _1X3), Layer(1, 960, 60, _1X3), Layer(2, 120, 360), Layer(2, 120, 240),
         Layer(1, 120, 480, border=2), Layer(1, 60, 120), Layer(1, 60, 120, stored="float32"),
         *(Layer(2, cin, 120, residual=True, stored="float32") for cin in (120, 240)),
         Layer(1, 120, 6625, stored="float32")),
    *(Layer(1, cin, cout) for cin, cout in ((240, 60), (480, 120))),
    *(Layer(1, cin, cout, stored="float32") for cin, cout in ((60, 240), (120, 480)))]
MODELS = {"ResNet-50": RESNET50, "MobileNetV2": MOBILENET_V2, "MiniLM": MINILM, "recogniser": RECOGNISER}


def candidates_of(layers: Iterable[Layer], isa: Isa, precision: str = "int8") -> dict[Layer, Candidate]:
    """Return the kernel and the tactic that a build without timing takes for each layer."""
    tuner = Tuner(isa, TimingCache(), "", timing=False)
    return {layer: tuner._usual(layer.problem(precision)) for layer in layers}


def tiled(candidates: dict[Layer, Candidate]) -> dict[Layer, Candidate]:
    """Return the candidates whose kernel uses tile registers."""
    return {layer: one for layer, one in candidates.items() if isinstance(one.kernel, MatrixUnitContraction)}


def count_job(one: Candidate, isa: Isa) -> KernelJob:
    """Return the count of a kernel's tile instructions for one item."""
    kernel, problem = one.kernel, one.kernel.problem
    constants = {"weights": np.zeros((problem.cout, problem.cin, *problem.taps), np.int8),
                 "program": [np.zeros(problem.cout, np.float32)] * problem.program.constants}
    inputs = [np.zeros((1, *view.shape), numpy_dtype(view.dtype)) for view in problem.inputs]
    return counting(kernel_job(kernel, isa, one.tactic, inputs, constants))
