"""Tests of the processes that build engines for the server."""
from __future__ import annotations

import signal
import sys

import pytest

from infer_server.repository.building import Compiler


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_does_not_end_the_server_does_not_end_its_builds(number: signal.Signals) -> None:
    """Closing a terminal sends SIGHUP to all processes of a group."""
    kills_itself = f"import os, sys; os.kill(os.getpid(), {int(number)}); sys.stderr.write('built')"
    assert Compiler()._run([sys.executable, "-c", kills_itself]) == ("built", 0)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {number}
