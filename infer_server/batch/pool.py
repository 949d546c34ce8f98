"""Pool of processes that work on splits; they end with the process that started them, however that ends."""
from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from infer_server.engines.errors import EngineError

T = TypeVar("T")
Report = Callable[[Any], None]
Work = Callable[[T, Report], None]      # a task, and a function that reports about it


class WorkerDied(EngineError):
    """A worker process has ended before its task."""


class Pool(Generic[T]):
    """Processes that call `work` on tasks, one at a time each.

    work    picklable; it runs in a new interpreter, and its reports must be picklable
    """

    def __init__(self, work: Work[T], processes: int) -> None:
        self._context = multiprocessing.get_context("spawn")        # PyArrow has threads, which a fork would lose
        self._workers: dict[Connection, Any] = {}
        for _ in range(processes):
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(work, there), daemon=True)
            process.start()
            there.close()       # so that the worker's end closes with the worker
            self._workers[here] = process

    def run(self, tasks: Iterable[T]) -> Iterator[Any]:
        """Yield the reports of all tasks. Raises the exceptions of `work`, and WorkerDied."""
        waiting = iter(tasks)
        busy = {connection for connection in self._workers if _hand_out(connection, waiting)}
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    process = self._workers[connection]
                    process.join()
                    raise WorkerDied(f"a worker process ended with exit code {process.exitcode}"
                                     + (" (killed; is there enough memory?)" if process.exitcode == -9 else "")
                                     + "; run the command again to go on") from None
                if kind == "error":
                    raise value
                if kind == "report":
                    yield value
                elif not _hand_out(connection, waiting):
                    busy.discard(connection)

    def close(self) -> None:
        """End the workers, even during their work."""
        for process in self._workers.values():
            process.terminate()
        for connection, process in self._workers.items():
            process.join()
            connection.close()
        self._workers.clear()

    def __enter__(self) -> Pool[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _hand_out(connection: Connection, waiting: Iterator[T]) -> bool:
    for task in waiting:
        with suppress(OSError):         # the worker has died: receiving from it says so
            connection.send(task)
        return True
    return False


def _serve(work: Work[T], connection: Connection) -> None:
    """Work on tasks until the other end of the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # the parent process ends its workers
    try:
        while True:
            task = connection.recv()
            try:
                work(task, lambda value: connection.send(("report", value)))
            except OSError as error:
                if isinstance(error, BrokenPipeError | ConnectionResetError):
                    return
                connection.send(("error", error))
            except Exception as error:      # it is raised in the parent process
                connection.send(("error", error))
            else:
                connection.send(("done", None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
