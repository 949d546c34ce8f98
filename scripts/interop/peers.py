"""Checks of peers and their results."""
from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_SECS = 60.0                 # time limit of everything a check waits for


class AbsentError(Exception):
    """A peer is not installed here."""


@dataclass(frozen=True)
class Target:
    """Addresses for a peer: ports of a server, or of a proxy in front of it.

    root : PEM file of the ports' certificate, or None without TLS. metrics : address of the server's metrics port.
    """
    grpc: str
    http: str
    metrics: str
    root: Path | None = None

    @property
    def url(self) -> str:
        """Root URL of the HTTP port."""
        return f"{'https' if self.root else 'http'}://{self.http}"


Check = Callable[[Target], None]


@dataclass(frozen=True)
class Peer:
    """Client, tool or proxy.

    version : returns its version. Raises AbsentError. checks : checks by description; each raises an error if it fails.
    """
    name: str
    version: Callable[[], str]
    checks: Mapping[str, Check]


@dataclass
class Outcome:
    """Result of the checks of a peer."""
    peer: str
    version: str = ""
    absent: str = ""                                            # the reason why it was not tried
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)        # the error by the check


def outcome_of(peer: Peer, target: Target, report: Callable[[str], None]) -> Outcome:
    """Run all checks of a peer."""
    outcome = Outcome(peer.name)
    try:
        outcome.version = peer.version()
    except AbsentError as absent:
        outcome.absent = str(absent)
        report(f"{peer.name}: {absent}")
        return outcome
    for name, check in peer.checks.items():
        began = time.monotonic()
        try:
            check(target)
            outcome.passed.append(name)
            result = "ok"
        except Exception as error:
            outcome.failed[name] = result = f"{type(error).__name__}: {error}"
        report(f"{peer.name} {outcome.version}: {name}: {result} ({time.monotonic() - began:.1f} s)")
    return outcome


def program(name: str, how: str) -> str:
    """Return the path of a program. Raises AbsentError, with how to install it."""
    if path := shutil.which(name):
        return path
    raise AbsentError(f"{name} is not installed ({how})")


def output(command: list[str | Path], env: Mapping[str, str] | None = None) -> str:
    """Return the output of a program. Raises AssertionError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT_SECS, env=env)
    text = done.stdout + done.stderr
    assert done.returncode == 0, f"exit status {done.returncode}: {text.strip()[-400:]}"
    return text


def version_in(text: str) -> str:
    """Return the first version number of a text."""
    match = re.search(r"\d+(\.\d+)+", text)
    assert match, text
    return match.group()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds. Raises AssertionError after TIMEOUT_SECS."""
    end = time.monotonic() + TIMEOUT_SECS
    while not holds():
        assert time.monotonic() < end, f"{what}: not within {TIMEOUT_SECS:g} s"
        time.sleep(0.05)


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| peer | version | tried | result |"
    yield "|---|---|---|---|"
    for outcome in outcomes:
        if outcome.absent:
            yield f"| {outcome.peer} | | | not tried: {outcome.absent} |"
        else:
            failures = "; ".join(f"**{name}**: {' '.join(error.split())[:120]}"
                                 for name, error in outcome.failed.items())
            tried = ", ".join([*outcome.passed, *outcome.failed])
            yield f"| {outcome.peer} | {outcome.version} | {tried} | {failures or 'all pass'} |"
