"""Command line of load-test."""
from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from infer_server.clients.load.schedule import SCENARIOS, Closed, Load, Open, Scenario
from infer_server.clients.load.transports import SCHEMES, is_name_of_grpc, split_url
from infer_server.protos.version import VERSION

EPILOG = """\
A load is measured in windows of a tenth of --duration. It ends when three windows in a row agree (throughput and mean
latency within 10 % of their means; with --rate, latency alone; 100 requests at least in each): the numbers are those of
the three. Else it ends after --duration, and the numbers are those of all of it.
Exit status: 0 all requests were answered; 1 some failed (with --allow-errors: all of a load's); 2 it could not run."""


@dataclass(frozen=True)
class Options:
    """Parsed command line; times are in seconds."""
    model: str
    version: str
    url: str
    against: str            # another server, which is measured in turn with the first; "": none
    loads: tuple[Load, ...]
    scenario: Scenario | None       # in the place of the loads
    batch: int
    duration: float
    warmup: float
    timeout: float
    seed: int
    input_data: Path | None
    shapes: dict[str, tuple[int, ...]]
    check: bool                     # compare the outputs of answers
    allow_errors: bool
    goal_ms: float | None           # goal for the 99th percentile of latency
    json: Path | None
    csv: Path | None
    plot: Path | None

    @property
    def urls(self) -> list[str]:
        """Return the address of the server, or of both servers."""
        return [self.url, *filter(None, [self.against])]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "load-test", description="Measures how fast a model answers, behind a server that speaks KServe v2.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    parser.add_argument("-m", "--model", required=True, help="its name on the server")
    parser.add_argument("--model-version", default="", metavar="V", help="default: the server's choice")
    parser.add_argument("-u", "--url", type=_url, default="localhost:8001", metavar="[http://|shm://]HOST:PORT",
                        help="over gRPC, HTTP, or gRPC with tensors in shared memory; or a name that gRPC resolves, as "
                             "unix:/PATH (default: %(default)s)")
    parser.add_argument("--against", type=_url, metavar="URL",
                        help="another server, or another way to it, measured by turns with the first and compared")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=_counts, metavar="N,...", default=[1],
                      help="closed loop: requests in flight, one load after the other (default: 1)")
    load.add_argument("--rate", type=_rates, metavar="Q,...",
                      help="open loop: Poisson arrivals of so many requests a second; latency counts from when due")
    parser.add_argument("--batch", type=_count, default=1, metavar="N", help="items a request (default: %(default)s)")
    parser.add_argument("--duration", type=_seconds, default=10.0, metavar="S",
                        help="longest measurement of a load (default: %(default)s)")
    parser.add_argument("--warmup", type=_seconds_or_none, default=1.0, metavar="S",
                        help="of a load, not measured (default: %(default)s)")
    parser.add_argument("--timeout", type=_seconds, default=30.0, metavar="S",
                        help="after which a request counts as failed (default: %(default)s)")
    parser.add_argument("--input-data", type=Path, metavar="X.npz",
                        help="an array per model input, items on the leading axis (default: random numbers)")
    parser.add_argument("--shape", type=_shape, action="append", default=[], metavar="NAME:3x224x224",
                        help="of an item, for an input whose extents vary; once for each such input")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs and arrivals (default: %(default)s)")
    parser.add_argument("--allow-errors", action="store_true", help="failed requests are reported, but no failure")
    _add_report(parser)
    _add_scenario(parser, load)
    return parser


def parse(arguments: list[str] | None = None) -> Options:
    """Parse sys.argv, or `arguments`; exits with status 2 and a usage message if they are invalid."""
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    _check_transport(parser, parsed)
    loads: tuple[Load, ...] = (tuple(map(Open, parsed.rate)) if parsed.rate else tuple(map(Closed, parsed.concurrency)))
    return Options(parsed.model, parsed.model_version, parsed.url, parsed.against or "", loads,
                   _scenario(parser, parsed), parsed.batch, parsed.duration, parsed.warmup, parsed.timeout, parsed.seed,
                   parsed.input_data, dict(parsed.shape), parsed.check, parsed.allow_errors, parsed.goal_ms,
                   parsed.json, parsed.csv, parsed.plot)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true",
                        help="over gRPC: read the outputs; an answer whose outputs differ from those of the first to "
                             "the same input has failed (DATA_LOSS)")
    parser.add_argument("--goal-ms", type=_seconds, metavar="MS",
                        help="of the 99th percentile: the report names the most that holds it, the plot shows it")
    parser.add_argument("--json", type=_output, metavar="FILE", help="write the report (schema in its module's text)")
    parser.add_argument("--csv", type=_output, metavar="FILE", help="write a row a load")
    parser.add_argument("--plot", type=_output, metavar="FILE",
                        help="write a PNG: latency over throughput, the parts of latency, batch sizes")


def _add_scenario(parser: argparse.ArgumentParser, load: argparse._MutuallyExclusiveGroup) -> None:
    load.add_argument("--scenario", choices=SCENARIOS,
                      help="one of MLPerf's, by MLCommons' load generator; a sample is a request of one item, and "
                           "--duration the least time of a run")
    parser.add_argument("--latency", type=_seconds, metavar="MS",
                        help="of Server: what the 99th percentile must hold; the highest such rate is searched for")
    parser.add_argument("--queries", type=_count, default=100, metavar="N",
                        help="of a scenario: at least (default: %(default)s)")
    parser.add_argument("--samples-per-query", type=_count, default=8, metavar="N",
                        help="of MultiStream (default: %(default)s)")
    parser.add_argument("--mlperf-logs", type=Path, metavar="FOLDER", help="keep the generator's logs, a folder a run")


def _scenario(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> Scenario | None:
    if not parsed.scenario:
        return None
    if parsed.scenario == "Server" and parsed.latency is None:
        parser.error("argument --scenario: Server needs --latency MS, the bound of its 99th percentile")
    for name, is_set in (("--batch", parsed.batch != 1), ("--csv", parsed.csv), ("--plot", parsed.plot),
                         ("--goal-ms", parsed.goal_ms)):
        if is_set:
            parser.error(f"argument {name}: not with --scenario; there is --json")
    return Scenario(parsed.scenario, parsed.latency or 0.0, parsed.queries, parsed.samples_per_query,
                    parsed.mlperf_logs)


def _check_transport(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    for url in filter(None, (parsed.url, parsed.against)):
        scheme, _ = split_url(url)
        if parsed.check and scheme != "grpc":
            parser.error(f"argument --check: outputs are read over gRPC only, not over {scheme}")
        most = SCHEMES[scheme].max_in_flight
        if most and max(parsed.concurrency) > most:
            parser.error(f"argument --concurrency: over {scheme} at most {most} requests are in flight")


# ---- argparse shows the message of an ArgumentTypeError
def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    return [_seconds(part) for part in text.split(",")]


def _seconds(text: str) -> float:
    value = _seconds_or_none(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _seconds_or_none(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is out of range")
    return value


def _url(text: str) -> str:
    scheme, address = split_url(text)
    host, _, port = address.rpartition(":")
    if scheme not in SCHEMES or "," in address or not (
            (scheme != "http" and is_name_of_grpc(address)) or (host and port.isdecimal())):
        raise argparse.ArgumentTypeError(f"'{text}' is not HOST:PORT, or such behind {'://, '.join(SCHEMES)}://")
    return text


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, extents = text.rpartition(":")
    if not name or not all(part.isdecimal() for part in extents.split("x")):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME:EXTENTxEXTENT, for instance input:3x224x224")
    return name, tuple(map(int, extents.split("x")))


def _output(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder '{path.parent}'")     # known before the test, not after
    return path
