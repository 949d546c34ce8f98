"""Compiles models when they are loaded, in processes of their own: a model.onnx, or a plan made for another machine.

A process, because compiling is minutes of Python that would hold the interpreter lock of the server, and because a
compiler that crashes must not take the other models with it. The engine cache makes the second build a lookup, and is
all that is kept: an engine runs from memory of its own.
"""
from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from engines.machine.cpu import detect
from infer_server.errors import NotBuiltError, RepositoryError
from infer_server.process import blocked
from infer_server.repository.folders import Source, told_of

log = logging.getLogger(__name__)

_OPTIONS = 7                # where those of build_command() begin that decide what is built
_REASON_LINES = 5           # of a compiler's errors, for the index


class Compiler:
    """Runs builds, any number at a time. Thread-safe."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        """cache_dir: of the engine cache; None is build-engine's own choice."""
        self._cache_dir = cache_dir
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[subprocess.Popen[str]] = set()

    def build(self, source: Source, threads: int, target: str = "") -> AbstractContextManager[Path]:
        """A plan built from the ONNX file of `source`; the file is there for the length of the block. target: "" is
        this machine's CPU.

        Raises RepositoryError with what build-engine said; NotBuiltError: the target cannot run a node.
        """
        return self._compiled(source, lambda plan: build_command(source, plan, self._cache_dir, threads, target),
                              None if target else threads)

    def cached(self, source: Source, threads: int) -> Path | None:
        """Return the file of the engine cache with the plan for this machine's CPU that was built of the same ONNX file
        with the same options; None if there is none. It saves the process that finds that out by importing the
        compiler. Raises OSError."""
        from engines.compiler.engine_cache import EngineCache
        found = EngineCache(self._cache_dir or "").noted(request_key(source, threads))
        if found is None:
            return None
        entry, texts = found
        log.info("%s: from the engine cache (%s)", source.file, entry.name)
        for text in texts:
            log.warning("%s: %s", source.name, text)
        return entry

    def relower(self, source: Source) -> AbstractContextManager[Path]:
        """A plan for this machine, lowered again from the graph in a plan for another; as build() otherwise."""
        return self._compiled(source, lambda plan: [sys.executable, "-m", "infer_server.cli.relower_plan",
                                                    str(source.file), "-o", str(plan)])

    def retune(self, source: Source, gpu: int) -> AbstractContextManager[Path]:
        """The plan with its tactics timed on that GPU, if it was built without one; as build() otherwise."""
        kept = ["--cache-dir", str(self._cache_dir)] if self._cache_dir else []
        return self._compiled(source, lambda plan: [sys.executable, "-m", "infer_server.cli.relower_plan",
                                                    str(source.file), "-o", str(plan), "--retune", str(gpu), *kept])

    @contextmanager
    def _compiled(self, source: Source, command: Callable[[Path], list[str]],
                  threads: int | None = None) -> Iterator[Path]:
        """threads: notes the plan in the engine cache as one for so many: see cached()."""
        with TemporaryDirectory(prefix="infer-server-") as folder:
            plan = Path(folder, f"{source.name}.plan")
            log.info("building %s", source.file)
            entry = Path(folder, "entry")
            said, status = self._run(command(plan) + (["--entry-file", str(entry)] if threads else []))
            lines = [line for line in said.splitlines() if line.strip()]
            if status:
                reason = "\n".join(lines[-_REASON_LINES:]) or f"exit status {status}"
                kind = NotBuiltError if status == NotBuiltError.STATUS else RepositoryError
                raise kind(f"building {source.file} failed: {reason}")
            for line in lines:              # with --quiet: what fell back, and why
                log.warning("%s: %s", source.name, line)
            if threads and entry.exists():
                self._note(source, threads, Path(entry.read_text()), lines)
            yield plan

    def _note(self, source: Source, threads: int, entry: Path, lines: Sequence[str]) -> None:
        from engines.compiler.engine_cache import EngineCache
        try:
            EngineCache(self._cache_dir or "").note(request_key(source, threads), entry, lines)
        except OSError as error:            # a file is gone meanwhile: the next load builds once more
            log.debug("%s: %s", source.file, error)

    def close(self) -> None:
        """Terminates the builds that still run; their build() raises RepositoryError."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.terminate()

    def _run(self, command: list[str]) -> tuple[str, int]:
        """Runs a command to its end; returns what it wrote to stderr, and its exit status."""
        with self._lock:
            if self._closed:
                raise RepositoryError("the server is shutting down")
            with blocked((signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)):      # which do not end the server either
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            self._running.add(process)
        try:
            _, said = process.communicate()
        finally:
            with self._lock:
                self._running.remove(process)
        return said, process.returncode


def request_key(source: Source, threads: int) -> str:
    """Return a digest of all that a build for this machine's CPU follows from: the model, the options and the files
    that they name, the compiler and the CPU. Raises OSError."""
    from engines.compiler.engine_cache import compiler_digest, digest, model_digest
    options, cpu = source.config.build, detect()
    named = [("calib", options.calib), ("calib_cache", options.calib_cache), ("preprocess", options.preprocess)]
    files = [(name, told_of(source.path(given.partition(":")[0], name))) for name, given in named if given]
    command = build_command(source, Path(), None, threads)[_OPTIONS:]
    return digest(json.dumps([
        model_digest(source.file), [option.replace(str(source.folder), "") for option in command], files,
        compiler_digest(), _tools_digest(), cpu.architecture, cpu.model, sorted(cpu.features)]).encode())


@cache
def _tools_digest() -> list[str]:
    """Return digests of what reads the options of a build, and what calibrates."""
    from engines.compiler.engine_cache import sources_digest
    root = Path(__file__).parents[2]
    return [sources_digest(root / "calibration"), sources_digest(root / "infer_server" / "cli")]


def build_command(source: Source, plan: Path, cache_dir: Path | None, threads: int, target: str = "") -> list[str]:
    """The build-engine command for a source, its paths resolved against the model's folder."""
    options = source.config.build
    command = [sys.executable, "-m", "infer_server.cli.build_engine", "--quiet", str(source.file),
               "-o", str(plan), f"--{options.precision}", "--threads", str(threads)]
    if target:
        command += ["--target", target]
    if options.timing == "false":
        command += ["--no-timing"]
    if cache_dir:
        command += ["--cache-dir", str(cache_dir)]
    ragged = source.config.ragged
    for name in sorted(ragged.inputs) if ragged else ():
        command += ["--ragged", name]
    for spec in source.config.inputs:
        if spec.is_optional:
            command += ["--optional", spec.name]
    if not ragged and (source.message.max_batch_size > 0 or options.max_batch):
        command += ["--max-batch", str(source.message.max_batch_size or options.max_batch)]
    if not ragged and source.message.max_batch_size > 0:
        command += ["--batch-first"]
    for spec in source.config.inputs:
        dims = spec.dims if spec.reshape is None else spec.reshape
        if (dims or spec.reshape is not None) and not spec.is_ragged:
            command += ["--dims", f"{spec.name}:{'x'.join(map(str, dims))}"]
    if options.calibrator:
        command += ["--calibrator", options.calibrator]
    for name, path in (("calib", options.calib), ("calib_cache", options.calib_cache)):
        if path:
            command += [f"--{name.replace('_', '-')}", str(source.path(path, name))]
    if options.preprocess:                      # a preset's name, or a file
        file = source.path(options.preprocess, "preprocess")
        command += ["--preprocess", str(file) if file.exists() else options.preprocess]
    for entry in filter(None, map(str.strip, options.keep_float.split(","))):
        command += [f"--keep-float={entry}"]
    for option, shapes in (("--min-shapes", options.min_shapes), ("--opt-shapes", options.opt_shapes),
                           ("--max-shapes", options.max_shapes)):
        if shapes:
            command += [option, shapes]
    if options.uint8_input == "true":
        command += ["--uint8-input"]
    return command

