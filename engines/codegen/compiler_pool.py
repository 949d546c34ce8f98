"""Compiles modules in processes of their own, several at once: LLVM's Python binding lets one thread compile at a time.

A worker is a backend's compiler run as a program, which calls `serve`: it reads texts and writes objects, each after
its length, until its input ends.
"""
from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import IO

from engines.machine import object_cache

ENOUGH = 1_000_000      # characters of IR, a second's work: for less it does not pay to start processes
MOST_WORKERS = 8        # each takes some 80 MB
_SIZE = struct.Struct("<q")         # of what follows; negative: of an error's text


class CompilerPool:
    """As many workers as processors, started when there is enough to do; until then, and on one processor, this process
    compiles. Objects in the object cache are not compiled, and what is compiled is kept there."""

    def __init__(self, compiler: Callable[[str], bytes], program: Sequence[str],
                 key: Callable[[str], str] | None = None) -> None:
        """compiler: a module's text -> its code. program: a module of Python that serves it, and its arguments. key: a
        module's text -> its key in the object cache; None: objects are not kept."""
        self._compiler, self._program, self._key = compiler, program, key
        self._count = min(len(os.sched_getaffinity(0)), MOST_WORKERS) if hasattr(os, "sched_getaffinity") else 1
        self._threads: ThreadPoolExecutor | None = None     # one for each worker, waiting for it
        self._workers: SimpleQueue[_Worker] = SimpleQueue()

    def __enter__(self) -> CompilerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
            for _ in range(self._count):
                self._workers.get().stop()

    def compile(self, texts: Iterable[str], done: Callable[[], None] = lambda: None) -> list[bytes]:
        """The object of each module's text, compiled while the next texts are made. done() is called after each.

        Raises RuntimeError, with LLVM's own message, if a text is no valid IR.
        """
        cache = object_cache.current() if self._key else None
        keys: list[str] = []
        objects: dict[int, bytes] = {}      # those of the cache, by the text's position
        waiting: dict[int, str] = {}
        futures: dict[int, Future[bytes]] = {}
        for i, text in enumerate(texts):
            if cache and self._key:
                keys.append(self._key(text))
                found = cache.fetch(keys[i])
                if found is not None:
                    objects[i] = found
                    continue
            waiting[i] = text
            if self._threads is None and self._count > 1 and sum(map(len, waiting.values())) >= ENOUGH:
                self._start()
            if self._threads:
                futures |= {j: self._threads.submit(self._compile, text) for j, text in waiting.items()}
                waiting.clear()
        for i in range(len(objects) + len(futures) + len(waiting)):
            if i not in objects:
                objects[i] = futures[i].result() if i in futures else self._compiler(waiting[i])
                if cache:
                    cache.store(keys[i], objects[i])
            done()
        return [objects[i] for i in range(len(objects))]

    def _start(self) -> None:
        self._threads = ThreadPoolExecutor(self._count)
        for _ in range(self._count):
            self._workers.put(_Worker(self._program))

    def _compile(self, text: str) -> bytes:
        worker = self._workers.get()
        try:
            return worker.compile(text)
        finally:
            self._workers.put(worker)


def compile_apart(text: str, program: Sequence[str]) -> bytes:
    """The object of a text, compiled in a process of its own: who wants nothing else has no use for a compiler in its
    memory. program: see CompilerPool. Raises RuntimeError."""
    worker = _Worker(program)
    try:
        return worker.compile(text)
    finally:
        worker.stop()


class _Worker:
    """One process."""

    def __init__(self, program: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen([sys.executable, "-m", *program], env=environment,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def compile(self, text: str) -> bytes:
        assert self._process.stdin and self._process.stdout
        try:
            _write(self._process.stdin, text.encode())
            answer, failed = _read(self._process.stdout)
        except (BrokenPipeError, EOFError) as error:
            raise RuntimeError(f"a compiler process ended with status {self._process.wait()}; is there enough memory "
                               "for all of them?") from error
        if failed:
            raise RuntimeError(answer.decode())
        return answer

    def stop(self) -> None:
        self._process.communicate()         # its input ends, and so does it


def _write(stream: IO[bytes], data: bytes, failed: bool = False) -> None:
    stream.write(_SIZE.pack(-len(data) if failed else len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> tuple[bytes, bool]:
    """(data, is it an error's text); EOFError where the stream ends."""
    head = stream.read(_SIZE.size)
    if len(head) < _SIZE.size:
        raise EOFError
    size, = _SIZE.unpack(head)
    data = stream.read(abs(size))
    if len(data) < abs(size):
        raise EOFError
    return data, size < 0


def serve(compiler: Callable[[str], bytes]) -> None:
    """What a worker does, from its standard input to its standard output."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            text, _ = _read(requests)
        except EOFError:
            return
        try:
            _write(answers, compiler(text.decode()))
        except RuntimeError as error:
            _write(answers, str(error).encode(), failed=True)
