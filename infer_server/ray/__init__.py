"""infer-server as an application of Ray Serve: a whole server without ports in each replica.

    serve run infer_server.ray:app model_repository=models

`app` is the application builder, and `python -m infer_server.ray` writes a configuration file for `serve deploy`.
"""
from __future__ import annotations

try:
    import ray.serve  # noqa: F401
except ImportError:
    raise ImportError("infer_server.ray needs Ray Serve and its HAProxy: pip install 'infer-server[ray]'") from None

from infer_server.ray.application import app

__all__ = ["app"]
