"""Check clients, tools and proxies of other projects against this server, with a table of the results.

    python -m scripts.interop                           # all installed peers
    python -m scripts.interop --only nginx --only curl
    python -m scripts.interop --write docs/reference/interop.md   # update the document's table

Servers run in their own processes, with engines of this project and models in Python. Programs that are not installed
are listed as not tested. npm, if installed, installs @grpc/grpc-js into the user's cache.
"""
from __future__ import annotations

import argparse
import re
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from scripts.interop import clients, programs, proxies
from scripts.interop.peers import AbsentError, Outcome, Peer, outcome_of, table
from scripts.interop.servers import server, write_certificate, write_repository

_MARKS = "<!-- begin: python -m scripts.interop -->\n", "<!-- end -->"


def encrypted(peer: Peer) -> Peer:
    """Return the peer under another name, for a server with TLS."""
    return Peer(f"{peer.name}, TLS", peer.version, peer.checks)


def run(names: list[str], folder: Path, front: str) -> list[Outcome]:
    """Run the checks of all peers whose names contain one of `names`."""
    report = partial(print, flush=True)
    chosen = [peer for peer in (*clients.PEERS, *programs.PEERS, *programs.PLAIN_PEERS) if _is_chosen(peer.name, names)]
    # Triton's HTTP clients are tested without TLS only: each configures trusted certificates differently.
    over_tls = [encrypted(peer) for peer in chosen if peer not in programs.PLAIN_PEERS
                and not peer.name.startswith("tritonclient.http")]
    repository = folder / "models"
    write_repository(repository)
    options = ("--grpc-front", front)
    outcomes: list[Outcome] = []
    if chosen:
        with server(repository, *options) as (_, target):
            outcomes += [outcome_of(peer, target, report) for peer in chosen]
    certificate: Path | None = None
    with suppress(AbsentError):
        certificate = write_certificate(folder)
        if chosen:
            with server(repository, *options, certificate=certificate) as (_, target):
                outcomes += [outcome_of(peer, target, report) for peer in over_tls]
    chosen_proxies = [proxy for proxy in proxies.PROXIES if _is_chosen(proxy.name, names)]
    if chosen_proxies and certificate:
        with server(repository, *options) as (_, plain), server(repository, *options, certificate=certificate) as (
                _, tls):
            for proxy in chosen_proxies:
                outcomes += proxies.outcomes(proxy, folder, plain, tls, partial(server, repository, *options), report)
    return outcomes


def _is_chosen(name: str, names: list[str]) -> bool:
    return not names or any(each in name for each in names)


def write(path: Path, outcomes: list[Outcome]) -> None:
    """Put the table between the marks of a document."""
    text = path.read_text()
    begin, end = _MARKS
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    assert pattern.search(text), f"{path} has no lines {begin.strip()} and {end}"
    lines = "\n".join(table(outcomes))
    path.write_text(pattern.sub(lambda _: f"{begin}\n{lines}\n\n{end}", text))


def main() -> int:
    parser = argparse.ArgumentParser("scripts.interop", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="of a peer, or a part of it")
    parser.add_argument("--grpc-front", default="nghttp2", help="as infer-server's")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put the table between its marks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(options.only, Path(folder), options.grpc_front)
    print("\n".join(table(outcomes)))
    if options.write:
        write(options.write, outcomes)
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
