"""Server of NumPy engines: the command infer-server over scripts/testing/numpy_engine.py.

    python -m scripts.testing.numpy_server --model-repository models
"""
from __future__ import annotations

import sys

from infer_server.cli import serve
from scripts.testing.numpy_engine import load_numpy_engine

if __name__ == "__main__":
    sys.exit(serve.main(load_engine=load_numpy_engine))
