"""Run the server under load for a given time, with accidents that must not affect the responses to other clients.

    python -m scripts.soak --seconds 3600 --load 0.7

Clients of every protocol send requests to models of every kind, and compare each response with the expected one: unary
and in streams, over HTTP, in shared memory, in sequences, through an ensemble. The accidents: clients are killed during
requests, connections are left half open, a model is reloaded repeatedly, another is loaded and unloaded, and the
process of a Python model is killed, which only its own clients may notice. At the end, the server must have released
all descriptors and memory of these.

With --load, clients first send a request whenever the last one is answered, which measures the server's rate under
accidents on this machine; then each sends at random times, at that share of its measured rate. test_soak.py is a
shorter version.
"""
from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from scripts.soak.models import write_repository
from scripts.soak.run import Soak
from scripts.stress import Running, add_front, front, serving

_WARM_SECS = 20.0                   # time for measuring the rates that --load is a share of
_SETTLING_SECS = 5.0                # time for the server to notice disconnected clients and to return memory
_REPORT_SECS = 60.0
OPTIONS = ("--model-control-mode", "explicit", "--load-model=*", "--cores", "1", "--allow-client-shm")
SERVER = (sys.executable, "-c", "import sys; from infer_server.cli.serve import main; sys.exit(main())")


def descriptors(server: Running) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


async def watched(soak: Soak, server: Running, repository: Path) -> None:
    """Report progress every minute."""
    begin, cpu = time.monotonic(), server.cpu_secs()
    running = asyncio.create_task(soak.run(server, repository))
    while not (await asyncio.wait([running], timeout=_REPORT_SECS))[0]:
        now, used = time.monotonic() - begin, server.cpu_secs()
        print(f"{now:6.0f} s: {soak.answers} answers, {len(soak.failures())} kinds of failures, the longest wait "
              f"{soak.longest_secs:.2f} s, {(used - cpu) / _REPORT_SECS:.0%} of a core, RSS {server.rss_mb():.0f} MB, "
              f"{descriptors(server)} descriptors", flush=True)
        soak.longest_secs, cpu = 0.0, used
    await running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=float, help="share of what the server can do (default: all of it)")
    add_front(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name)
        write_repository(repository)
        with serving(repository, *front(options), *OPTIONS, command=SERVER) as server:
            warm = Soak(min(_WARM_SECS, options.seconds), options.seed)
            asyncio.run(warm.run(server, repository))
            print(f"without a rate: {warm.answers / warm.seconds:.0f} answers/s", *warm.failures(), sep="\n",
                  flush=True)
            time.sleep(_SETTLING_SECS)
            before = server.rss_mb(), descriptors(server)
            soak = Soak(options.seconds, options.seed, warm.share(options.load) if options.load else None)
            asyncio.run(watched(soak, server, repository))
            time.sleep(_SETTLING_SECS)
            print(f"{options.seconds:g} s; {soak.answers} answers; RSS {before[0]:.0f} -> {server.rss_mb():.0f} MB, "
                  f"descriptors {before[1]} -> {descriptors(server)}")
    for what, count in sorted(soak.seen.items()):
        print(f"{count:7} {what[:300]}")
    return int(bool(warm.failures() or soak.failures()))


if __name__ == "__main__":
    raise SystemExit(main())
