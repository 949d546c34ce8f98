"""load-test: how fast does a model answer, and how long does it take, under a given load?

    load-test -m classifier -u localhost:8001 --concurrency 1,4,16 --plot latency.png     as fast as it can
    load-test -m classifier -u localhost:8001 --rate 200,400                              as users would
"""
from __future__ import annotations

import asyncio
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import TextIO

import grpc
import numpy as np

from clients.aio import AsyncInferenceClient
from clients.calls import bind_raw_infer, channel_options
from clients.codec import Array
from clients.errors import ClientError, ServerError, error_from_rpc
from clients.load.arguments import Options, parse
from clients.load.generator import Sender, Timing, run_level
from clients.load.measure import Summary
from clients.load.payload import PayloadError, prepare
from clients.load.plot import require_matplotlib, write_plot
from clients.load.report import Report, table, write_csv, write_json
from clients.load.schedule import Load
from clients.load.statistics import Reading, read

FINE, FAILED, CANNOT_RUN, INTERRUPTED = 0, 1, 2, 130
CLEAR = "\r\033[K"
SETUP_TIMEOUT = 30.0        # seconds for a call that is not part of the load


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, 1 or 2 as --help says, 130 when interrupted."""
    options = parse(arguments)
    progress = Progress()
    try:
        if options.plot:
            require_matplotlib()
        report = asyncio.run(run(options, progress))
    except ClientError as error:
        progress.clear()
        print(f"load-test: {error}", file=sys.stderr)
        return CANNOT_RUN
    except KeyboardInterrupt:
        progress.clear()
        print("load-test: interrupted; nothing is reported", file=sys.stderr)
        return INTERRUPTED
    progress.clear()
    print(table(report))
    for path, write in ((options.json, write_json), (options.csv, write_csv), (options.plot, write_plot)):
        if path:
            write(report, path)
    return verdict(report, options.allow_errors)


def verdict(report: Report, allow_errors: bool) -> int:
    """FAILED when requests failed; with `allow_errors` only when a load had no success at all."""
    if allow_errors:
        return FINE if all(level.client.requests for level in report.levels) else FAILED
    return FAILED if any(level.client.errors or not level.client.requests for level in report.levels) else FINE


async def run(options: Options, progress: Progress) -> Report:
    """Measures all loads in turn. Raises ClientError when the model cannot be reached or refuses the input."""
    async with (AsyncInferenceClient(options.url) as client,
                grpc.aio.insecure_channel(options.url, options=channel_options()) as channel):
        metadata = await client.model_metadata(options.model, options.version, timeout=SETUP_TIMEOUT)
        requests = prepare(metadata, options.version, options.batch, seed=options.seed, shapes=options.shapes,
                           data=load_arrays(options.input_data) if options.input_data else None)
        await try_once(channel, options.url, requests[0])
        unavailable: set[str] = set()

        async def read_statistics() -> Reading | None:
            try:
                return read(await client.statistics(options.model, options.version, timeout=SETUP_TIMEOUT))
            except ClientError as error:
                unavailable.add(str(error))
                return None

        levels = []
        for load in options.loads:
            progress.write(f"{load}: warming up")
            levels.append(await run_level(
                load, Sender(channel, requests, options.timeout), options.batch,
                Timing(options.warmup, options.duration), options.seed, read_statistics,
                partial(progress.window, load)))
    progress.clear()
    for problem in sorted(unavailable):
        print(f"load-test: no statistics from the server: {problem}", file=sys.stderr)
    return Report(options.model, options.version, options.url, options.batch, options.duration, options.warmup,
                  options.seed, levels)


async def try_once(channel: grpc.aio.Channel, url: str, request: bytes) -> None:
    """One request, so that a model that refuses the input says so before the test; one that fails on it is measured."""
    try:
        await bind_raw_infer(channel)(request, timeout=SETUP_TIMEOUT)
    except grpc.aio.AioRpcError as error:
        named = error_from_rpc(error, url, "ModelInfer")
        if not isinstance(named, ServerError):
            raise named from error


def load_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file by name. Raises PayloadError when it is none."""
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


class Progress:
    """One line that is rewritten while a load test runs; nothing where there is no terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()

    def window(self, load: Load, seconds: float, summary: Summary) -> None:
        """Shows the summary of the last window, `seconds` into the measurement."""
        errors = sum(summary.errors.values())
        self.write(f"{load}: {seconds:.1f} s, {summary.throughput:.1f} infer/s, p50 {summary.latency.p50:.2f} ms, "
                    f"p99 {summary.latency.p99:.2f} ms, {errors} errors")

    def clear(self) -> None:
        self.write("")

    def write(self, text: str) -> None:
        if self._live:
            self._stream.write(CLEAR + text)
            self._stream.flush()


if __name__ == "__main__":
    sys.exit(main())
