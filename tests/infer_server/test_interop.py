"""Runs the checks of scripts/interop: clients and proxies of other projects, as far as they are installed."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from infer_server.protos import http2
from scripts.interop import clients, programs, proxies
from scripts.interop.__main__ import write
from scripts.interop.peers import AbsentError, Outcome, Peer, Target, outcome_of, table
from scripts.interop.servers import server, write_certificate, write_repository
from scripts.stress import Running

pytestmark = pytest.mark.skipif(not http2.is_installed, reason="ngh2 is not installed")
PEERS = {peer.name: peer for peer in (*clients.PEERS, *programs.PEERS)}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interop") / "models"
    write_repository(folder)
    return folder


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return write_certificate(tmp_path_factory.mktemp("certificate"))
    except AbsentError as absent:
        pytest.skip(str(absent))


@pytest.fixture(scope="module")
def plain(repository: Path) -> Iterator[tuple[Running, Target]]:
    with server(repository) as running:
        yield running


@pytest.fixture(scope="module")
def encrypted(repository: Path, certificate: Path) -> Iterator[tuple[Running, Target]]:
    with server(repository, certificate=certificate) as running:
        yield running


def try_peer(peer: Peer, target: Target) -> None:
    try:
        peer.version()
    except AbsentError as absent:
        pytest.skip(str(absent))
    outcome = outcome_of(peer, target, print)
    assert not outcome.failed and set(outcome.passed) == set(peer.checks)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_installed() -> Iterator[None]:
    """Use grpc-js only if it is installed, and install nothing."""
    with pytest.MonkeyPatch.context() as patch:
        actual = programs.node_modules
        patch.setattr(programs, "node_modules", lambda install: actual(False))
        yield


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")        # of tritonclient.http.aio
@pytest.mark.parametrize("name", PEERS)
def test_clients_are_served(plain: tuple[Running, Target], name: str) -> None:
    try_peer(PEERS[name], plain[1])


@pytest.mark.parametrize("name", ["grpcio", "@grpc/grpc-js", "curl"])
def test_clients_are_served_over_tls(encrypted: tuple[Running, Target], name: str) -> None:
    try_peer(PEERS[name], encrypted[1])


@pytest.mark.slow
@pytest.mark.parametrize("proxy", proxies.PROXIES, ids=lambda proxy: proxy.name)
def test_proxies_in_front_are_served(
        plain: tuple[Running, Target], encrypted: tuple[Running, Target], repository: Path, tmp_path: Path,
        proxy: proxies.Proxy) -> None:
    outcomes = proxies.outcomes(proxy, tmp_path, plain[1], encrypted[1], partial(server, repository), print)
    if outcomes[0].absent:
        pytest.skip(outcomes[0].absent)
    assert not {name: error for outcome in outcomes for name, error in outcome.failed.items()}


def test_the_table_tells_what_failed_and_what_was_not_tried(tmp_path: Path) -> None:
    def fail(_: Target) -> None:
        raise ValueError("two\nlines")

    def absent() -> str:
        raise AbsentError("it is not installed")

    target = Target("", "", "")
    outcomes = [outcome_of(Peer("one", lambda: "1.2", {"good": lambda _: None, "bad": fail}), target, print),
                outcome_of(Peer("two", absent, {"good": fail}), target, print), Outcome("three", "3", passed=["good"])]
    lines = list(table(outcomes))
    assert lines[2:] == ["| one | 1.2 | good, bad | **bad**: ValueError: two lines |",
                         "| two | | | not tried: it is not installed |", "| three | 3 | good | all pass |"]
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- begin: python -m scripts.interop -->\nold\n<!-- end -->\nafter\n")
    for _ in range(2):
        write(document, outcomes)
        text = document.read_text()
        assert "old" not in text and text.count("| three |") == 1
        assert text.startswith("before") and text.endswith("after\n")
