"""infer_server.ray where Ray is not installed."""
from __future__ import annotations

import os
import subprocess
import sys


def test_the_error_names_the_extra() -> None:
    program = """if True:
        import sys
        sys.modules["ray"] = None           # import ray fails, as if it were not there
        import infer_server.ray"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.stderr.splitlines()[-1] == (
        "ImportError: infer_server.ray needs Ray Serve and its HAProxy: pip install 'infer-server[ray]'")
