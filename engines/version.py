"""The compiler's version: part of every cache key, so that what an older compiler made is never taken for new."""
from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path

COMPILER_VERSION = "26"
_LIBRARIES = ("llvmlite", "ml_dtypes", "numpy", "onnx", "pillow")       # libraries whose version may affect a plan


@cache
def compiler_digest() -> str:
    """Return the digest of the compiler: our sources and the libraries' versions."""
    parts = [COMPILER_VERSION, sources_digest(Path(__file__).parent), [_version(name) for name in _LIBRARIES]]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


def _version(library: str) -> str:
    from importlib import metadata
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def sources_digest(package: Path) -> str:
    """Return the digest of the Python modules below a folder."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(package) for name in names
             if name.endswith(".py")]
    hasher = hashlib.blake2b(digest_size=20)
    for path in sorted(paths):
        with open(path, "rb", buffering=0) as file:
            hasher.update(file.read())
    return hasher.hexdigest()
