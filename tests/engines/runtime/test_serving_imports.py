"""Serving a plan must not import the onnx package."""
import subprocess
import sys


def test_operators_reference_and_serialisation_are_imported_without_onnx():
    code = ("import sys; from infer_server.engines.ir import serialize; "
            "from infer_server.engines.ops import reference; assert 'onnx' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
