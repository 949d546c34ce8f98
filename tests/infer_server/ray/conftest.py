"""Tests of infer_server.ray need the extra `ray`; without it, only test_without_ray.py runs."""
from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("ray") else [
    "test_arguments.py", "test_autoscaling.py", "test_cluster.py", "test_replica.py"]
