"""Response cache, keyed by model, version, requested outputs, parameters and input contents; bounded in bytes."""
from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer_server.batching.request import Arrays, Outputs, Request
from infer_server.batching.statistics import Failure, Statistics

_OVERHEAD_BYTES = 512           # size of an entry in addition to its arrays


class ResponseCache:
    """Least-recently-used cache shared by all models. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, tuple[Arrays, int]] = OrderedDict()       # least recently used first
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Arrays | None:
        """Return the cached outputs, which must not be modified, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: bytes, outputs: Arrays) -> None:
        """Store copies of the outputs unless they exceed the size of the cache."""
        copies = {name: np.array(array) for name, array in outputs.items()}
        size = sum(map(bytes_of, copies.values())) + _OVERHEAD_BYTES
        if size > self._limit_bytes:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = (copies, size)
            self._bytes += size
            while self._bytes > self._limit_bytes:
                self._bytes -= self._entries.popitem(last=False)[1][1]

    def drop(self, prefix: bytes) -> None:
        """Remove all entries whose keys begin with `prefix`, which is that of a model."""
        with self._lock:
            for key in [key for key in self._entries if key.startswith(prefix)]:
                self._bytes -= self._entries.pop(key)[1]


class CachedResponses:
    """Response cache of one model. Belongs to the event loop."""

    def __init__(self, cache: ResponseCache, statistics: Statistics, prefix: bytes) -> None:
        """Use the entries of one model, whose keys, and no others, begin with `prefix`."""
        self._cache, self._statistics, self._prefix = cache, statistics, prefix

    def answers(self, request: Request, revision: bytes) -> bool:
        """Answer a request from the cache and return True, or arrange that its response is stored and return False.

        `revision` begins with the prefix; after a change of the revision, older entries are not found.
        """
        start_ns = time.monotonic_ns()
        key = key_of(revision, request)
        outputs, encode = self._cache.get(key), request.encode
        if outputs is not None:
            response = encode(outputs)
            elapsed_ns = time.monotonic_ns() - start_ns
            if isinstance(response, Exception):         # e.g. the client's shared memory region is too small
                self._statistics.failed(Failure.BACKEND, elapsed_ns)
            else:
                self._statistics.looked_up(True, elapsed_ns)
            asyncio.get_running_loop().call_soon(request.finish, response)
            return True

        def store(computed: Arrays) -> Any:
            if not isinstance(computed, Outputs):       # outputs are missing, or there are parameters
                self._cache.put(key, computed)
            return encode(computed)

        request.encode = store
        self._statistics.looked_up(False, time.monotonic_ns() - start_ns)
        return False

    def drop(self) -> None:
        """Remove the model's entries."""
        self._cache.drop(self._prefix)


def key_of(prefix: bytes, request: Request) -> bytes:
    """Return the cache key of a request: a digest of its inputs, outputs and parameters after `prefix`."""
    options = request.outputs, sorted(request.parameters.items())   # the response of a Python model may depend on them
    digest = hashlib.blake2b(repr(options).encode(), digest_size=20)
    for name in sorted(request.inputs):
        array = request.inputs[name]
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        if array.dtype.hasobject:
            for value in array.flat:
                raw = value.encode() if isinstance(value, str) else value      # programs make str, in ensembles
                digest.update(len(raw).to_bytes(8, "little") + raw)
        else:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return prefix + digest.digest()


def bytes_of(array: NDArray[Any]) -> int:
    return sum(map(len, array.flat)) if array.dtype.hasobject else array.nbytes
