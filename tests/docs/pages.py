"""Run the blocks of a page in order, as a reader would: commands, servers in the background, Python as in a notebook.

A fenced block is run by its language: `bash`, `python`. A comment before the block, <!-- not run: reason -->, keeps it
from being run. A bash block that begins with `infer-server` starts the server for the blocks behind it, in place of the
one before. The server gets free ports, which replace the usual ones in later blocks, and refuses requests as soon as it
stops.

Starting Python and importing a command takes longer than most commands of a page. A line that is a command of ours and
needs nothing of the shell is therefore called in this process; bash runs the other lines.
"""
from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from infer_server.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$",
                   re.MULTILINE | re.DOTALL)
COMPOUND = re.compile(r"^\s|^(for|while|until|if|case|function)\b|<<", re.MULTILINE)     # lines that belong together
QUOTED, SHELL = re.compile(r"'[^']*'"), re.compile(r"""[|&;<>()$`\\"'*?\[\]{}~!]""")
CALLED = frozenset(COMMANDS) - {"infer-server"}      # which sets up logging of the whole process
PORTS = (8001, 8000, 8002)      # gRPC, HTTP, metrics


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int           # line of the page before the code
    reason: str         # why it is not run; "": it is

    @property
    def is_server(self) -> bool:
        return self.language == "bash" and self.code.startswith("infer-server") and "--check" not in self.code


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(found["language"], found["code"], text.count("\n", 0, found.start("code")), found["reason"] or "")
            for found in BLOCK.finditer(text)]


def steps(code: str) -> list[list[str] | str]:
    """Split a bash block into the words of commands that this process can call, and scripts for bash."""
    code = code.replace("\\\n", " ")
    if COMPOUND.search(code):
        return [code]
    parts: list[list[str] | str] = []
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] in CALLED and not SHELL.search(QUOTED.sub("", re.sub(r"\s#.*", "", line))):
            parts.append(words)
        elif parts and isinstance(parts[-1], str):
            parts[-1] += f"\n{line}"
        else:
            parts.append(line)
    return parts


class Reader:
    """Runner of blocks in a folder. Commands are those of this checkout, installed or not."""

    def __init__(self, page: Path, folder: Path, cache: Path, further: Mapping[str, str]) -> None:
        self._page, self._folder, self._further = page, folder, further
        self._names: dict[str, Any] = {"__name__": "notebook"}
        self._ports: tuple[int, ...] = PORTS
        self._server: subprocess.Popen[bytes] | None = None
        programs = folder / ".programs"
        programs.mkdir()
        commands = {name: f'"{sys.executable}" -m infer_server {name}' for name in COMMANDS}
        for name, call in {**commands, "python": f'"{sys.executable}"'}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {call} "$@" {further.get(name, "")}\n')
            (programs / name).chmod(0o755)
        self._environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(cache),
                             "PYTHONPATH": str(ROOT)}

    def run(self, block: Block) -> None:
        code = block.code
        for usual, port in zip(PORTS, self._ports, strict=True):
            code = code.replace(f"localhost:{usual}", f"localhost:{port}")
        if block.language == "python":
            exec(compile("\n" * block.line + code, str(self._page), "exec"), self._names)
        elif block.is_server:
            self._start(code)
        else:
            for step in steps(code):
                status, output = self._bash(step) if isinstance(step, str) else self._call(*step)
                assert status == 0, f"{self._page}:{block.line + 1} ended with {status}:\n{code}\n{output}"

    def _bash(self, script: str) -> tuple[int, str]:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=self._folder, env=self._environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
        return done.returncode, done.stdout

    def _call(self, command: str, *arguments: str) -> tuple[object, str]:
        output = StringIO()
        with chdir(self._folder), redirect_stdout(output), redirect_stderr(output):
            try:
                is_timed = "--max-slowdown" in arguments        # a limit of time needs timings
                further = () if is_timed else shlex.split(self._further.get(command, ""))
                status = resolve_name(COMMANDS[command].main)([*arguments, *further])
            except SystemExit as ended:
                status = ended.code or 0
        return status, output.getvalue()

    def _start(self, code: str) -> None:
        self.stop()
        self._ports = tuple(free_port() for _ in PORTS)
        options = ["--drain-grace-secs=0", *(
            f"--{name}-port={port}" for name, port in zip(("grpc", "http", "metrics"), self._ports, strict=True))]
        command = shlex.split(code.replace("\\\n", " "), comments=True)
        log = self._folder / ".server.log"
        with log.open("w") as output:
            self._server = subprocess.Popen([*command, *options], cwd=self._folder, env=self._environment,
                                            stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                with urlopen(f"http://localhost:{self._ports[1]}/v2/health/ready", timeout=5):
                    return
            except (URLError, OSError) as error:
                if isinstance(error, HTTPError):
                    error.close()
                time.sleep(0.02)
        raise AssertionError(f"{self._page}: the server did not become ready:\n{log.read_text()}")

    def stop(self) -> None:
        """Stop the server, if there is one; it drains and exits with 0."""
        if self._server:
            self._server.send_signal(signal.SIGINT)
            try:
                status = self._server.wait(60)
                assert status == 0, f"the server exited with {status}:\n{(self._folder / '.server.log').read_text()}"
            finally:
                self._server.kill()
                self._server.wait()
                self._server = None


@contextmanager
def reader(page: Path, folder: Path, cache: Path, further: Mapping[str, str]) -> Iterator[Reader]:
    """Yield a runner of a page's blocks.

    cache: $XDG_CACHE_HOME of this process. further: options by command that it gets beside those of the page.
    """
    actual = Reader(page, folder, cache, further)
    try:
        yield actual
    finally:
        actual.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
