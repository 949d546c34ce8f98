"""Responses kept by what was asked: model, version, outputs and the bytes of all inputs. Bounded in bytes."""
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

_OVERHEAD_BYTES = 512           # of an entry, beside its arrays


class ResponseCache:
    """Of all models together; the least used go first. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, tuple[Arrays, int]] = OrderedDict()       # the least used first
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Arrays | None:
        """The outputs of an execution, not to be written."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: bytes, outputs: Arrays) -> None:
        """Keeps copies of the outputs, if they are not larger than all of the cache."""
        kept = {name: np.array(array) for name, array in outputs.items()}
        size = sum(map(bytes_of, kept.values())) + _OVERHEAD_BYTES
        if size > self._limit_bytes:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = (kept, size)
            self._bytes += size
            while self._bytes > self._limit_bytes:
                self._bytes -= self._entries.popitem(last=False)[1][1]

    def drop(self, prefix: bytes) -> None:
        """Forgets the responses of a model: its keys begin with `prefix`."""
        with self._lock:
            for key in [key for key in self._entries if key.startswith(prefix)]:
                self._bytes -= self._entries.pop(key)[1]


class CachedResponses:
    """The responses of one model in the cache. Belongs to the event loop."""

    def __init__(self, cache: ResponseCache, statistics: Statistics, prefix: bytes) -> None:
        """prefix: of the keys of this model, and of no other."""
        self._cache, self._statistics, self._prefix = cache, statistics, prefix

    def answers(self, request: Request, revision: bytes) -> bool:
        """Answers a request from the cache; False: its response will be kept there. revision: begins with the prefix;
        another one finds nothing."""
        begun_ns = time.monotonic_ns()
        key = key_of(revision, request)
        outputs, encode = self._cache.get(key), request.encode
        if outputs is not None:
            response = encode(outputs)
            took_ns = time.monotonic_ns() - begun_ns
            if isinstance(response, Exception):         # it has no room where its client wants it, for one
                self._statistics.failed(Failure.BACKEND, took_ns)
            else:
                self._statistics.looked_up(True, took_ns)
            asyncio.get_running_loop().call_soon(request.finish, response)
            return True

        def keep(computed: Arrays) -> Any:
            if not isinstance(computed, Outputs):       # not whole, or more than its arrays
                self._cache.put(key, computed)
            return encode(computed)

        request.encode = keep
        self._statistics.looked_up(False, time.monotonic_ns() - begun_ns)
        return False

    def drop(self) -> None:
        """Forgets them."""
        self._cache.drop(self._prefix)


def key_of(prefix: bytes, request: Request) -> bytes:
    """What equal requests have in common, behind a prefix that says whose they are."""
    beside = request.outputs, sorted(request.parameters.items())    # a Python model's answer may follow from these
    digest = hashlib.blake2b(repr(beside).encode(), digest_size=20)
    for name in sorted(request.inputs):
        array = request.inputs[name]
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        if array.dtype.hasobject:
            for value in array.flat:
                raw = value.encode() if isinstance(value, str) else value      # which a program makes, for an ensemble
                digest.update(len(raw).to_bytes(8, "little") + raw)
        else:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return prefix + digest.digest()


def bytes_of(array: NDArray[Any]) -> int:
    return sum(map(len, array.flat)) if array.dtype.hasobject else array.nbytes
