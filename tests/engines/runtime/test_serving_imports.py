"""Serving a plan must not need the onnx package, nor anything that compiles."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.engines.compiler.zoo_engines import compiled
from tests.zoo import TINY


def test_operators_reference_and_serialisation_are_imported_without_onnx() -> None:
    code = "import sys, engines.ops, engines.ops.reference, engines.ir.serialize; assert 'onnx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_of_machine_code_runs_without_what_compiled_it(tmp_path: Path) -> None:
    compiled(TINY["explicit_pads"](), tmp_path).save(tmp_path / "m.plan")
    code = """if True:
        import sys
        import numpy as np
        from engines import load_engine
        engine = load_engine("m.plan")
        engine.run({io.name: np.zeros(io.shape_of(1), io.dtype) for io in engine.inputs})
        print(*sys.modules)"""
    loaded = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path)},
                            capture_output=True, text=True, check=True).stdout.split()
    assert "engines.backends.llvm.runtime.execution" in loaded
    compilers = ("llvmlite", "onnx", "engines.ops", "engines.passes", "engines.lowering", "engines.compiler",
                 "engines.backends.base", "engines.backends.llvm.backend", "engines.backends.llvm.codegen",
                 "engines.backends.llvm.kernels", "engines.backends.numpy")
    assert not [module for module in loaded if module.startswith(compilers)]
