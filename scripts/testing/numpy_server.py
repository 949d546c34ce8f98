"""Server of NumPy engines: the command infer-server over scripts/testing/numpy_engine.py.

    python -m scripts.testing.numpy_server --model-repository models
"""
from __future__ import annotations

import sys

from infer_server.process import imported

if __name__ == "__main__":
    serve = imported("infer_server.cli.serve:main")
    sys.exit(serve(load_engine=imported("scripts.testing.numpy_engine:load_numpy_engine")))
