"""Compile modules in several processes: LLVM's Python binding compiles in one thread at a time.

A worker is a backend's compiler, run as a program that calls `serve`: it reads texts and writes objects, each preceded
by its length, until its input ends.
"""
from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import IO, NamedTuple

from infer_server.engines.machine import object_cache
from infer_server.engines.machine.object_cache import ObjectCache

ENOUGH = 1_000_000      # characters of IR, about one second of work, below which no process is started
MOST_WORKERS = 8        # each needs about 80 MB
_SIZE = struct.Struct("<q")         # bytes of the message that follows; negative if it is an error's text


@dataclass(frozen=True)
class Source:
    """Module whose text is written only if its object is not cached.

    identity: names everything that the text depends on, the code that writes it included.
    """
    identity: str
    write: Callable[[], str]


class CompilerPool:
    """Pool of compiler processes, one for each processor up to MOST_WORKERS.

    It starts them when ENOUGH text waits; until then, and on one processor, this process compiles. Objects that are in
    the object cache are not compiled again, and new ones are stored there.
    """

    def __init__(self, compiler: Callable[[str], bytes], program: Sequence[str],
                 key: Callable[[str], str] | None = None) -> None:
        """Make a pool; it starts no process yet.

        Parameters
        ----------
        compiler : compile the text of a module to object code, in this process.
        program : module of Python that calls `serve` with this compiler, and its arguments.
        key : return the key of a module's text in the object cache. None: do not use the cache.
        """
        self._compiler, self._program, self._key = compiler, program, key
        self._count = min(len(os.sched_getaffinity(0)), MOST_WORKERS) if hasattr(os, "sched_getaffinity") else 1
        self._threads: ThreadPoolExecutor | None = None     # one thread for each worker, to wait for its answers
        self._workers: SimpleQueue[_Worker] = SimpleQueue()

    def __enter__(self) -> CompilerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
            for _ in range(self._count):
                self._workers.get().stop()

    def compile(self, sources: Iterable[str | Source], done: Callable[[], None] = lambda: None) -> list[bytes]:
        """Return the object of each module; compilation starts while `sources` still produces the next ones.

        Parameters
        ----------
        sources : LLVM IR, a module each, or what writes it.
        done : called once for each finished object, for a progress bar.

        Raises
        ------
        RuntimeError
            A text is not valid IR (the message is LLVM's), or a process ended early.
        """
        cache = object_cache.current() if self._key else None
        keys: list[str] = []
        objects: dict[int, bytes] = {}      # position of the source -> object; at first those from the cache
        waiting: dict[int, str] = {}
        futures: dict[int, Future[bytes]] = {}
        for i, source in enumerate(sources):
            if cache and self._key:
                found = _found(source, cache, self._key)
                keys.append(found.key)
                if found.code is not None:
                    objects[i] = found.code
                    continue
                source = found.text
            waiting[i] = source if isinstance(source, str) else source.write()
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


class _Found(NamedTuple):
    """Key of a module's object, and the object; its text, if there is no object."""
    key: str
    code: bytes | None
    text: str = ""


def _found(source: str | Source, cache: ObjectCache, key_of: Callable[[str], str]) -> _Found:
    """Look up a module; the cache keeps the key of a `Source`'s text under the key of its identity."""
    if isinstance(source, str):
        key = key_of(source)
        return _Found(key, cache.fetch(key), source)
    known = cache.fetch(identity := key_of(source.identity))
    if known is not None and (code := cache.fetch(known.decode())) is not None:
        return _Found(known.decode(), code)
    text = source.write()
    key = key_of(text)
    cache.store(identity, key.encode())
    return _Found(key, cache.fetch(key), text)


def compile_in_subprocess(text: str, program: Sequence[str]) -> bytes:
    """Compile a text in a process of its own, so that LLVM takes no memory in this one.

    Parameters
    ----------
    text : LLVM IR of a module.
    program : module of Python that calls `serve`, and its arguments.

    Raises
    ------
    RuntimeError
        The text is not valid IR (the message is LLVM's), or the process ended early.
    """
    worker = _Worker(program)
    try:
        return worker.compile(text)
    finally:
        worker.stop()


class _Worker:
    """Handle of one compiler process."""

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
            raise RuntimeError(f"a compiler process ended with status {self._process.wait()}, maybe for lack of "
                               "memory: free some, or let the build use fewer CPUs (taskset)") from error
        if failed:
            raise RuntimeError(answer.decode())
        return answer

    def stop(self) -> None:
        self._process.communicate()         # closes its input, which ends it, and waits


def _write(stream: IO[bytes], data: bytes, failed: bool = False) -> None:
    stream.write(_SIZE.pack(-len(data) if failed else len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> tuple[bytes, bool]:
    """Read one message: (data, True if it is an error's text). Raises EOFError at the end of the stream."""
    head = stream.read(_SIZE.size)
    if len(head) < _SIZE.size:
        raise EOFError
    size, = _SIZE.unpack(head)
    data = stream.read(abs(size))
    if len(data) < abs(size):
        raise EOFError
    return data, size < 0


def serve(compiler: Callable[[str], bytes]) -> None:
    """Compile each text of standard input to an object on standard output, until the input ends."""
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
