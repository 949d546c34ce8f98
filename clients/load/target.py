"""Server under test: its transport, requests and statistics."""
from __future__ import annotations

import time
import zipfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np

from infer_server.clients.channels import StatusError
from infer_server.clients.codec import Array
from infer_server.clients.errors import ClientError, ServerError, error_of
from infer_server.clients.load.arguments import Options
from infer_server.clients.load.checking import checked
from infer_server.clients.load.generator import LoadLevel, Sender, Timing, run_level
from infer_server.clients.load.measure import Summary
from infer_server.clients.load.payload import PayloadError, prepare, request_bytes
from infer_server.clients.load.report import Report
from infer_server.clients.load.schedule import Load
from infer_server.clients.load.statistics import Reading, read
from infer_server.clients.load.transports import open_transport
from infer_server.clients.load.transports.transport import SETUP_SECS, Send, Transport


class Target:
    """Server under test, from open_target()."""

    def __init__(self, options: Options, url: str, transport: Transport, requests: Sequence[Send],
                 bytes_of_one: int) -> None:
        self.url, self.requests = url, requests
        self.unavailable: set[str] = set()              # why there are no statistics
        self._options, self._transport, self._bytes_of_one = options, transport, bytes_of_one
        self._levels: list[LoadLevel] = []

    def sender(self) -> Sender:
        return Sender(self.requests, self._bytes_of_one, self._options.timeout)

    async def measure(self, load: Load, observe: Callable[[Load, float, Summary], None]) -> None:
        """Measure the target under the load. observe: see run_level()."""
        options = self._options
        self._levels.append(await run_level(
            load, self.sender(), options.batch, Timing(options.warmup, options.duration), options.seed,
            self._read_statistics, partial(observe, load)))

    def report(self, against: Report | None = None) -> Report:
        """Return the report of all loads so far."""
        options = self._options
        return Report(options.model, options.version, self.url, options.batch, options.duration, options.warmup,
                      options.seed, options.goal_ms, self._levels, against)

    async def try_once(self) -> float:
        """Send one request and return its duration in seconds.

        Raises ClientError if the model refuses the input. A model that fails on it can still be measured.
        """
        begun = time.monotonic()
        try:
            await self.requests[0](SETUP_SECS)
        except StatusError as error:
            named = error_of(error.status, self.url, "ModelInfer", error.details)
            if not isinstance(named, ServerError):
                raise named from error
        return time.monotonic() - begun

    async def _read_statistics(self) -> Reading | None:
        try:
            return read(await self._transport.statistics(self._options.model, self._options.version))
        except ClientError as error:
            self.unavailable.add(str(error))
            return None


@asynccontextmanager
async def open_target(options: Options, url: str) -> AsyncIterator[Target]:
    """Connect to a server and send one request. Raises ClientError if the model is unreachable or refuses it."""
    transport = open_transport(url)
    try:
        metadata = await transport.metadata(options.model, options.version)
        feeds = prepare(metadata, options.batch, seed=options.seed, shapes=options.shapes,
                        data=load_arrays(options.input_data) if options.input_data else None)
        requests = await transport.prepare(options.model, options.version, feeds)
        target = Target(options, url, transport, [*map(checked, requests)] if options.check else requests,
                        request_bytes(feeds))
        await target.try_once()
        yield target
    finally:
        await transport.close()


def load_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of an .npz file by name. Raises PayloadError if it cannot be read as one."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise PayloadError(f"--input-data {path} is no .npz file; write one with numpy.savez(path, NAME=array)")
            file.seek(0)
            with np.load(file) as archive:
                return {name: archive[name] for name in archive.files}
    except OSError as error:
        raise PayloadError(f"--input-data {path}: {error.strerror or error}") from error
    except (ValueError, zipfile.BadZipFile) as error:
        raise PayloadError(f"--input-data {path} cannot be read: {error}") from error
