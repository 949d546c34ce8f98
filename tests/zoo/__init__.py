"""Tests of the architectures of benchmarks/zoo, shrunk (TINY), against ONNX Runtime."""
from __future__ import annotations

from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

import benchmarks.zoo
from benchmarks.zoo import ZOO, Net, Tensor, architecture, images, images_for, run_onnx
from infer_server.engines.machine import object_cache
from infer_server.engines.version import sources_digest

__all__ = ["TINY", "ZOO", "Net", "Tensor", "architecture", "images", "images_for", "run_onnx"]


@cache
def _builder() -> str:
    """Return a digest of all that decides on the bytes of a model."""
    return repr((sources_digest(Path(benchmarks.zoo.__file__).parent),
                 *map(version, ("numpy", "onnx", "onnxruntime"))))


def _tiny(name: str, **options: Any) -> onnx.ModelProto:
    """Return a small model of the zoo, from the object cache if it is there: its statistics take long."""
    kept = object_cache.current()
    key = object_cache.digest("zoo", _builder(), name, repr(sorted(options.items())))
    content = kept.fetch(key) if kept else None
    if content is None:
        content = benchmarks.zoo.TINY[name](**options).SerializeToString()
        if kept:
            kept.store(key, content)
    return onnx.ModelProto.FromString(content)


TINY = {name: partial(_tiny, name) for name in benchmarks.zoo.TINY}
