"""Worker process with limits on time and memory, for calls that may crash it."""
from __future__ import annotations

import multiprocessing
import resource
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

SECONDS, BYTES = 120.0, 2 << 30      # limits of a case; longer means a hang, even on a busy machine


class Worker:
    """Caller of `answer`, a function of a module, in another process, which is replaced when it is lost."""

    def __init__(self, answer: Callable[..., str]) -> None:
        self._answer = answer
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._mine, its = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(its, self._answer), daemon=True)
        self._process.start()
        its.close()
        self._mine.recv()       # wait until the child has imported all it needs

    def ask(self, *question: Any) -> str:
        """Return the worker's answer, or "CRASH: ...", "HANG: ..." or "TRACEBACK: ..."."""
        self._mine.send(question)
        try:
            if self._mine.poll(SECONDS):
                return str(self._mine.recv())
            lost = f"HANG: more than {SECONDS:.0f} s"
        except (EOFError, ConnectionResetError):
            self._process.join()
            lost = f"CRASH: exit status {self._process.exitcode}"
        self._stop()
        self._start()
        return lost

    def _stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._mine.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 where: TracebackType | None) -> None:
        self._stop()


def _serve(connection: Connection, answer: Callable[..., str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send("ready")
    while True:
        question = connection.recv()
        try:
            connection.send(answer(*question))
        except Exception as error:      # whatever it is, it is what was looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            connection.send(f"TRACEBACK: {type(error).__name__} at {where.filename}:{where.lineno}: {error}")
