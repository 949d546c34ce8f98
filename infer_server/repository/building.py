"""Compile models at load time in child processes: a model.onnx, or a plan that was built for another machine.

A build runs in its own process, because it takes minutes of Python, which would hold the server's interpreter lock, and
because a crash of the compiler must not end other models. The engine cache makes the second build a lookup. The plan
file is deleted after loading: an engine runs from its own memory.
"""
from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.plan_store import PlanStore, read_secret
from infer_server.engines.version import compiler_digest, sources_digest
from infer_server.errors import NotBuiltError, RepositoryError
from infer_server.process import blocked
from infer_server.repository.folders import Source, file_stats
from infer_server.repository.roots import Durations

log = logging.getLogger(__name__)

_OPTIONS = 7                # index of the first argument of build_command() that affects the plan
_REASON_LINES = 5           # last lines of a failed build's output that the repository index shows


class Compiler:
    """Runner of build processes, any number at a time. Thread-safe."""

    def __init__(self, cache_dir: Path | None = None, plan_store: str = "", plan_store_key: Path | None = None) -> None:
        """Use an engine cache and a plan store.

        Parameters
        ----------
        cache_dir : Path, optional
            Folder of the engine cache; None is build-engine's default folder.
        plan_store : str
            Address of the plan store behind it; "" for none.
        plan_store_key : Path, optional
            File with the secret that signs the plans in the store.

        Raises
        ------
        ConfigError, OSError
            The plan store's address is not supported, or the secret cannot be read.
        """
        self._cache_dir = cache_dir
        self._plan_store = PlanStore(plan_store, read_secret(plan_store_key) if plan_store_key else b""
                                     ) if plan_store else None
        self._store_options = [*(["--plan-store", plan_store] if plan_store else ()),
                               *(["--plan-store-key", str(plan_store_key)] if plan_store_key else ())]
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[subprocess.Popen[str]] = set()
        self.durations = Durations()

    def build(self, source: Source, threads: int, target: str = "") -> AbstractContextManager[Path]:
        """Build a plan from the ONNX file of `source`; the plan file exists until the context exits.

        Parameters
        ----------
        source : Source
            Model version with a model.onnx.
        threads : int
            Threads of each instance.
        target : str
            Target of the build; "" is this machine's CPU.

        Raises
        ------
        RepositoryError
            The build failed; the message has the last lines that build-engine printed.
        NotBuiltError
            The target cannot run a node of the model.
        """
        return self._compiled(
            source, lambda plan: build_command(source, plan, self._cache_dir, threads, target) + self._store_options,
            None if target else threads)

    def cached(self, source: Source, threads: int) -> Path | None:
        """Return the engine cache's plan for this model, these options and this machine's CPU, or None.

        A hit saves the build process, which would import the compiler only to find the plan in the cache.

        Raises
        ------
        OSError
            The model or a file that its options name cannot be read.
        """
        noted = self._cache().noted(request_key(source, threads))
        if noted is None:
            return None
        entry: Path = noted[0]
        log.info("%s: from the engine cache (%s)", source.file, entry.name)
        for text in noted[1]:
            log.warning("%s: %s", source.name, text)
        return entry

    def relowered(self, source: Source) -> Path | None:
        """Return the plan that `relower` has made of a plan, from the engine cache or the plan store, or None.

        Raises
        ------
        EngineError, OSError
            The plan cannot be read.
        """
        from infer_server.engines.plan.file import read_outline
        cache = self._cache()
        entry: Path | None = cache.find(cache.relowered_key(read_outline(source.file).fingerprint))
        if entry:
            log.info("%s: compiled for this CPU before, from the engine cache (%s)", source.file, entry.name)
        return entry

    def relower(self, source: Source) -> AbstractContextManager[Path]:
        """Lower the graph of a plan for another machine again, for this one; otherwise as `build`."""
        return self._compiled(source, lambda plan: self._relower_command(source, plan))

    def retune(self, source: Source, gpu: int) -> AbstractContextManager[Path]:
        """Time the tactics of a plan on GPU number `gpu` if it was built without one; otherwise as `build`."""
        return self._compiled(source, lambda plan: [*self._relower_command(source, plan), "--retune", str(gpu)])

    def _relower_command(self, source: Source, plan: Path) -> list[str]:
        return [sys.executable, "-m", "infer_server.cli.relower_plan", str(source.file), "-o", str(plan),
                *(["--cache-dir", str(self._cache_dir)] if self._cache_dir else ()), *self._store_options]

    def _cache(self) -> Any:
        """Return the EngineCache, whose module is not loaded by servers of ready plans."""
        from infer_server.engines.compiler.engine_cache import EngineCache
        return EngineCache(self._cache_dir or "", plan_store=self._plan_store)

    @contextmanager
    def _compiled(self, source: Source, command: Callable[[Path], list[str]],
                  threads: int | None = None) -> Iterator[Path]:
        """Run a build command; `threads` is set if the resulting plan is to be recorded in the engine cache."""
        with TemporaryDirectory(prefix="infer-server-") as folder:
            plan = Path(folder, f"{source.name}.plan")
            log.info("building %s", source.file)
            entry = Path(folder, "entry")
            began = time.monotonic()
            output, status = self._run(command(plan) + (["--entry-file", str(entry)] if threads else []))
            self.durations.add(time.monotonic() - began)
            lines = [line for line in output.splitlines() if line.strip()]
            if status:
                reason = "\n".join(lines[-_REASON_LINES:]) or f"exit status {status}"
                kind = NotBuiltError if status == NotBuiltError.STATUS else RepositoryError
                raise kind(f"building {source.file} failed: {reason}")
            lines = [line for line in lines if not _log_line(source.name, line)]
            for line in lines:              # with --quiet: nodes that run on the fallback, with the reason
                log.warning("%s: %s", source.name, line)
            if threads and entry.exists():
                self._note(source, threads, Path(entry.read_text()), lines)
            yield plan

    def _note(self, source: Source, threads: int, entry: Path, lines: Sequence[str]) -> None:
        try:
            self._cache().note(request_key(source, threads), entry, lines)
        except OSError as error:            # a file was removed in the meantime: the next load builds again
            log.debug("%s: %s", source.file, error)

    def close(self) -> None:
        """Terminate the running builds; their `build` raises RepositoryError."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.terminate()

    def _run(self, command: list[str]) -> tuple[str, int]:
        """Run a command to completion and return its stderr and exit status."""
        with self._lock:
            if self._closed:
                raise RepositoryError("the server is shutting down")
            with blocked((signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)):      # the server ignores them, too
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            self._running.add(process)
        try:
            _, output = process.communicate()
        finally:
            with self._lock:
                self._running.remove(process)
        return output, process.returncode


def _log_line(name: str, line: str) -> bool:
    """Log a line that a build process has logged, at its level; return False for other output."""
    level, _, text = line.partition(": ")
    if level not in ("INFO", "WARNING"):
        return False
    log.log(logging.getLevelName(level), "%s: %s", name, text)
    return True


def request_key(source: Source, threads: int) -> str:
    """Return a digest of everything that a build for this machine's CPU depends on.

    The key covers the model, the build options, the files that they name, the compiler and the CPU.

    Raises
    ------
    OSError
        One of the files cannot be read.
    """
    from infer_server.engines.compiler.engine_cache import digest, model_digest
    options, cpu = source.config.build, detect()
    named = [("calib", options.calib), ("calib_cache", options.calib_cache), ("preprocess", options.preprocess)]
    files = [(name, file_stats(source.path(value.partition(":")[0], name))) for name, value in named if value]
    command = build_command(source, Path(), None, threads)[_OPTIONS:]
    return digest(json.dumps([
        model_digest(source.file), [option.replace(str(source.folder), "") for option in command], files,
        compiler_digest(), _tools_digest(), cpu.architecture, cpu.model, sorted(cpu.features)]).encode())


@cache
def _tools_digest() -> list[str]:
    """Return digests of the sources that parse build options and that calibrate."""
    root = Path(__file__).parents[1]
    return [sources_digest(root / "calibration"), sources_digest(root / "cli")]


def build_command(source: Source, plan: Path, cache_dir: Path | None, threads: int, target: str = "") -> list[str]:
    """Return the build-engine command line of a source, with paths resolved against the model's folder."""
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
    for name in ("weight_only", "group_size", "accuracy_level", "min_shapes", "opt_shapes", "max_shapes"):
        if value := getattr(options, name):
            command += [f"--{name.replace('_', '-')}={value}"]
    if options.uint8_input == "true":
        command += ["--uint8-input"]
    return command

