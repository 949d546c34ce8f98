"""Helpers that run the commands in this process, on a small zoo model, without timing unless a test asks for it."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from infer_server.cli import build_engine
from infer_server.engines.ir.graph import Array
from infer_server.engines.loading import load_engine
from infer_server.engines.runtime.engine import Engine
from tests.zoo import TINY, images_for, run_onnx

MODEL = TINY["explicit_pads"]
CALIBRATION_ITEMS = 8
UNTIMED = ("--no-timing", "--max-batch", "4")


@dataclass
class Workshop:
    """Folder with a model, calibration data, and the engines that build-engine makes of it."""
    folder: Path
    capture: pytest.CaptureFixture[str]
    said: str = ""              # stderr of the last build

    def __post_init__(self) -> None:
        self.model = MODEL()
        onnx.save(self.model, self.folder / "m.onnx")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def calibration(self, name: str = "calib.npz") -> str:
        np.savez(self.folder / name, input=images_for(self.model, CALIBRATION_ITEMS, seed=100))
        return self.path(name)

    def build(self, *options: str, model: str = "m.onnx", output: str = "m.plan") -> int:
        """Run build-engine and return its exit status."""
        code = build_engine.main([self.path(model), "-o", self.path(output), *options])
        self.said = self.capture.readouterr().err
        return code

    def built(self, *options: str, output: str = "m.plan") -> Engine:
        """Run a build that must succeed, and return the engine."""
        assert self.build(*options, output=output) == 0, self.said
        return load_engine(self.path(output))

    def feeds(self, items: int = 3) -> dict[str, Array]:
        return {"input": images_for(self.model, items, seed=1)}

    def expected(self, items: int = 3) -> Array:
        """Return ONNX Runtime's output for the same model."""
        return run_onnx(self.model, self.feeds(items))["output"]
