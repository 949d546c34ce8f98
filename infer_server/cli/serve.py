"""infer-server: serve a repository of models over Triton's protocols, gRPC and HTTP/REST."""
from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import stat
import sys
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from infer_server.backend import EngineLoader, describe_plan, load_plan
from infer_server.cli.access import access_of, add_access
from infer_server.cli.common import (
    add_plan_store,
    add_version,
    boolean,
    natural,
    parse_or_raise,
    positive,
    seconds,
    up_to,
)
from infer_server.cli.triton_options import (
    add_triton_options,
    cache_bytes,
    forwarded_of,
    log_level,
    ports_of,
    without_effect,
)
from infer_server.config.fields import MAX_THREADS
from infer_server.engines.errors import ConfigError
from infer_server.engines.machine.cpu import allowed_cpus
from infer_server.errors import RepositoryError
from infer_server.grpc_ports import GRPC_LIBRARIES, NGHTTP2
from infer_server.listeners import address
from infer_server.observing.log_stream import LogStream, reopen_log
from infer_server.process import age_secs, raise_descriptor_limit, tune_malloc
from infer_server.repository.checking import check
from infer_server.repository.remote import is_remote
from infer_server.repository.repository import LOADS, MAX_LOADS
from infer_server.server import Server, ServerOptions, repository_roots

log = logging.getLogger(__name__)

_MAX_WORKERS = 256
_USUAL_LOADS = 16       # upper limit of the default number of parallel loads: a build takes gigabytes


def main(arguments: list[str] | None = None, load_engine: EngineLoader = load_plan) -> int:
    """Serve until SIGTERM, SIGINT or SIGQUIT; SIGHUP and SIGUSR1 reopen the log file.

    Returns
    -------
    int
        0 if all accepted requests were answered. 1 if not, if a port is in use, if a model failed under
        --exit-on-error, or if --check found errors. 2 for invalid options.
    """
    parsed = _parser().parse_args(arguments)
    try:
        handler = LogStream(parsed.log_file)
    except OSError as error:
        print(f"infer-server: error: --log-file {parsed.log_file}: {error.strerror}", file=sys.stderr)
        return 2
    logging.basicConfig(level=log_level(parsed), handlers=[handler],
                        format="%(asctime)s %(levelname)s %(message)s")
    repositories = [*parsed.model_repository, *([parsed.check] if parsed.check else ())]
    parsed.model_repository = list({_resolved(each): each for each in repositories}.values())
    mistake = _option_error(parsed)
    if mistake:
        print(f"infer-server: error: {mistake}", file=sys.stderr)
        return 2
    if parsed.check is not None:
        return _check(parsed, load_engine)
    if useless := without_effect(parsed):
        log.warning("options without effect on this server: %s", ", ".join(useless))
    tune_malloc()
    raise_descriptor_limit()
    try:
        answered = _run(_serve(_options(parsed), bool(parsed.exit_on_error), load_engine))
    except (OSError, RepositoryError, ConfigError) as error:
        print(f"infer-server: error: {error}", file=sys.stderr)
        return 1
    return 0 if answered else 1


def options_of(arguments: Sequence[str]) -> ServerOptions:
    """Return the options of a server for a command line. Raises ValueError with what the command would print."""
    parsed = parse_or_raise(_parser(), arguments)
    parsed.model_repository = list(dict.fromkeys(map(_resolved, parsed.model_repository)))
    if mistake := _option_error(parsed):
        raise ValueError(mistake)
    return _options(parsed)


def _check(parsed: argparse.Namespace, load_engine: EngineLoader) -> int:
    """Print the remarks on the repositories; return 1 if one cannot be read or a model will not be served."""
    try:
        roots = repository_roots(parsed.model_repository, parsed.repository_cache, parsed.repository_cache_mib << 20)
        # Plans of another loader can only be described by loading them.
        describe = describe_plan if load_engine is load_plan else partial(load_engine, threads=1)
        remarks = list(check(roots, parsed.kind_gpu, parsed.model_config_name, describe, parsed.threads))
    except RepositoryError as error:
        print(f"infer-server: error: {error}", file=sys.stderr)
        return 1
    for remark in remarks:
        print(remark)
    return 1 if any(remark.is_error for remark in remarks) else 0


def _option_error(parsed: argparse.Namespace) -> str:
    """Return an error message for contradictory options, or ""."""
    folders = parsed.model_repository
    if not folders:
        return "--model-repository is missing: a folder of models"
    missing = [f"{folder}: {why}" for folder in folders if not is_remote(folder) and (why := _folder_error(folder))]
    if missing and parsed.exit_on_error is not False:       # otherwise it serves and is not live, as in Triton
        return f"--model-repository {missing[0]}"
    for name, _ in parsed.rate_limit_resource:
        if [other for other, _ in parsed.rate_limit_resource].count(name) > 1:
            return f"--rate-limit-resource {name}: given twice"
    if parsed.load_model and parsed.model_control_mode != "explicit" and not parsed.model_memory_limit_mib:
        return "--load-model needs --model-control-mode explicit; otherwise every model is loaded"
    if parsed.model_memory_limit_mib and parsed.model_control_mode == "poll":
        return "--model-memory-limit-mib loads models at their first request, poll when they change: give one of them"
    try:
        access_of(parsed)
    except ValueError as error:
        return str(error)
    if parsed.plan_store_key and not parsed.plan_store:
        return "--plan-store-key signs the plans of --plan-store: give that, too"
    if "*" in parsed.load_model and len(parsed.load_model) > 1:
        return "--load-model=* loads every model; remove the other --load-model options"
    return ""


def _folder_error(path: str) -> str:
    """Return the reason why a path is not a folder, or ""."""
    try:
        return "" if stat.S_ISDIR(os.stat(path).st_mode) else "no such folder"
    except FileNotFoundError:
        return "no such folder"
    except OSError as error:
        return error.strerror or str(error)


def _resolved(repository: str) -> str:
    """Return a canonical name of a repository, to detect duplicates."""
    return repository.rstrip("/") if is_remote(repository) else os.path.realpath(repository)


def _run(main: Coroutine[Any, Any, bool]) -> bool:
    """Run a coroutine on uvloop's event loop, or on asyncio's if uvloop is not installed."""
    try:
        from uvloop import run
    except ImportError:
        log.warning("uvloop is not installed: serving on asyncio's own event loop, which is slower; pip install uvloop")
        return asyncio.run(main)
    return run(main)


async def _serve(options: ServerOptions, exit_on_error: bool, load_engine: EngineLoader) -> bool:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGHUP, signal.SIGUSR1):
        loop.add_signal_handler(number, _on_reopen, number)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
        # A background job of a shell script ignores Ctrl-C in the terminal.
        if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, _on_signal, number, stop)
    imported_secs = age_secs()
    server = Server(options, load_engine)
    server.lifecycle.startup.took("importing", imported_secs)
    server.log_settings.install()
    ports = await server.start()
    log.info("gRPC on %s, HTTP on %s, metrics on %s%s",
             *(address(options.hosts.get(name, options.host), port) if port else "none"
               for name, port in vars(ports).items()),
             "; gRPC and HTTP open when the models are loaded" if options.listen_when_ready else "")
    loading = asyncio.create_task(_report_loaded(server, stop, exit_on_error))
    await stop.wait()
    has_ports = not loading.done() or loading.exception() is not None or loading.result()
    loading.cancel()
    failed = not has_ports or exit_on_error and bool(server.failures())
    log.info("draining: accepted requests are answered; a second signal exits at once")
    answered = await server.stop()
    log.info("stopped")
    return answered and not failed


async def _report_loaded(server: Server, stop: asyncio.Event, exit_on_error: bool) -> bool:
    """Log when the models are loaded. Set `stop` if a port cannot be opened (returns False), or a model has failed."""
    try:
        await server.loaded()
    except OSError as error:
        log.error("%s", error)
        stop.set()
        return False
    failures = server.failures()
    if not failures:
        log.info("ready")
        return True
    log.error("%d of the models to be served failed: %s", len(failures), ", ".join(failures))
    if exit_on_error:
        log.error("--exit-on-error: exiting")
        stop.set()
    return True


def _on_reopen(number: int) -> None:
    is_file = reopen_log()
    log.info("%s: %s", signal.Signals(number).name,
             "the log file was reopened" if is_file else "nothing to do, the log is written to stderr")


def _on_signal(number: int, stop: asyncio.Event) -> None:
    if stop.is_set():
        log.warning("second signal: exiting at once")
        os._exit(128 + number)
    stop.set()


def _options(parsed: argparse.Namespace) -> ServerOptions:
    return ServerOptions(
        model_repositories=tuple(parsed.model_repository), cache_dir=parsed.cache_dir, host=parsed.host.strip("[]"),
        plan_store=parsed.plan_store, plan_store_key=Path(parsed.plan_store_key) if parsed.plan_store_key else None,
        grpc_port=parsed.grpc_port, http_port=parsed.http_port, metrics_port=parsed.metrics_port,
        workers=parsed.workers, grpc_front=parsed.grpc_front, threads=parsed.threads, cores=parsed.cores,
        kind_gpu=parsed.kind_gpu, kind_auto=parsed.kind_auto, name=parsed.id,
        config_name=parsed.model_config_name,
        response_cache_bytes=parsed.cache_config if parsed.response_cache_byte_size is None else (
            parsed.response_cache_byte_size),
        explicit_control=parsed.model_control_mode == "explicit", repository_cache=parsed.repository_cache,
        repository_cache_bytes=parsed.repository_cache_mib << 20,
        model_memory_bytes=(parsed.model_memory_limit_mib or 0) << 20,
        poll_secs=parsed.repository_poll_secs if parsed.model_control_mode == "poll" else 0.0,
        retry_secs=parsed.repository_poll_secs, listen_when_ready=parsed.listen_when_ready,
        load_threads=parsed.model_load_thread_count or min(_USUAL_LOADS, max(LOADS, parsed.cores)),
        load_models=None if parsed.load_model == ["*"] else tuple(parsed.load_model),
        rate_limit=dict(parsed.rate_limit_resource) if parsed.rate_limit == "execution_count" else None,
        strict_readiness=parsed.strict_readiness, drain_grace_secs=parsed.drain_grace_secs,
        exit_timeout_secs=parsed.exit_timeout_secs, max_message_bytes=parsed.max_message_mib << 20,
        max_body_bytes=parsed.http_max_input_size or parsed.max_message_mib << 20,
        max_json_bytes=parsed.http_max_json_mib << 20, min_body_rate=parsed.min_body_rate,
        body_grace_secs=parsed.body_grace_secs, max_inflight_bytes=parsed.max_inflight_mib << 20,
        send_timeout_secs=parsed.send_timeout_secs,
        forwarded=forwarded_of(parsed), **ports_of(parsed), **access_of(parsed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infer-server",
        description="Serve a repository of models over Triton's protocols, gRPC and HTTP/REST, with dynamic batching.")
    parser.add_argument("--model-repository", "--model-store", action="append", default=[], metavar="DIR|URL",
                        help="repository with <model>/<version>/model.plan (or model.onnx, built when it is loaded): a "
                             "folder, or s3://, gs://, az:// or another address that fsspec supports; can be repeated")
    parser.add_argument("--repository-cache", type=Path, metavar="DIR",
                        help="folder for copies of remote repositories (default: in the user's cache)")
    parser.add_argument("--repository-cache-mib", type=positive, default=20 << 10, metavar="N",
                        help="limit of the copies of each remote repository (default %(default)s)")
    parser.add_argument("--check", metavar="DIR|URL", nargs="?", const="",
                        help="check the models of this repository, and of --model-repository, without loading them: "
                             "print which parts of their configurations differ from Triton or are not served, and what "
                             "to write instead. Exits with 1 if a model will not be served")
    add_version(parser)
    _add_models(parser)
    _add_ports(parser)
    _add_limits(parser)
    add_access(parser)
    add_triton_options(parser)
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info",
                        help="minimum level of log messages (default %(default)s)")
    return parser


def _add_ports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1",
                        help="address to listen on; :: listens on all, IPv4 and IPv6 (default %(default)s)")
    parser.add_argument("--grpc-port", type=_port, default=8001, metavar="N",
                        help="port of gRPC; 0 is any free port (default %(default)s)")
    parser.add_argument("--workers", type=up_to(_MAX_WORKERS), default=1, metavar="N",
                        help="processes that read requests and write responses; with more than one, models execute in "
                             "a separate process (default %(default)s)")
    parser.add_argument("--grpc-front", choices=GRPC_LIBRARIES, default=NGHTTP2,
                        help="library that serves gRPC; grpcio costs more for each request (default %(default)s)")
    parser.add_argument("--listen-when-ready", type=boolean, nargs="?", const=True, metavar="BOOL",
                        default="KUBERNETES_SERVICE_HOST" in os.environ,
                        help="true: refuse connections to gRPC and HTTP until the initial models are loaded, so "
                             "that clients go to other servers; the metrics port answers /v2/health meanwhile (default "
                             "true in a Kubernetes pod, else false)")
    parser.add_argument("--http-port", type=_port, default=8000, metavar="N",
                        help="port of HTTP/REST: inference, metadata, health, control (default %(default)s)")
    parser.add_argument("--metrics-port", type=_port, default=8002, metavar="N",
                        help="port of /metrics for Prometheus (default %(default)s)")


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-control-mode", type=str.lower, choices=("none", "poll", "explicit"),
                        default="none",
                        help="none: load every model at start; poll: also reload models that change; explicit: clients "
                             "load and unload models (default %(default)s)")
    parser.add_argument("--model-memory-limit-mib", type=positive, metavar="N",
                        help="load models at their first request, and unload the least recently used ones when all "
                             "together exceed N MiB (default: every model is loaded at start)")
    parser.add_argument("--repository-poll-secs", type=seconds, default=15.0, metavar="S",
                        help="interval of --model-control-mode poll, and of further tries while a remote repository "
                             "is unreachable at the start (default %(default)s)")
    parser.add_argument("--load-model", action="append", default=[], metavar="NAME",
                        help="model to load at start under explicit control; * is every model; can be repeated")
    parser.add_argument("--model-load-thread-count", type=up_to(MAX_LOADS), metavar="N",
                        help="number of models that are loaded in parallel (default: --cores, at least 2, at most "
                             f"{_USUAL_LOADS})")
    parser.add_argument("--strict-readiness", type=boolean, nargs="?", const=True, default=True, metavar="BOOL",
                        help="report not ready while a model has failed to load (default true)")
    parser.add_argument("--exit-on-error", type=boolean, nargs="?", const=True, metavar="BOOL",
                        help="true: exit with status 1 if a model cannot be loaded at start; false: serve even if a "
                             "repository does not exist (default: exit only for a missing repository)")
    parser.add_argument("--threads", type=up_to(MAX_THREADS), default=1, metavar="N",
                        help="threads of one instance; instance_group sets the number of instances "
                             "(default %(default)s)")
    parser.add_argument("--cores", type=positive, default=len(allowed_cpus()), metavar="N",
                        help="cores for the instances of a model without an instance_group count: one instance for "
                             "every --threads of them (default: all, %(default)s)")
    parser.add_argument("--rate-limit", type=str.lower, choices=("off", "execution_count"), default="off",
                        help="execution_count: an instance whose group has a rate_limiter executes only while its "
                             "resources are free (default %(default)s)")
    parser.add_argument("--rate-limit-resource", type=_resource, action="append", default=[], metavar="NAME:COUNT",
                        help="amount of a resource (default: what the most demanding instance needs)")
    parser.add_argument("--kind-gpu", choices=("cpu", "refuse"), default="cpu",
                        help="what to do with instances of KIND_GPU if no GPU runs the model: serve them on the CPU "
                             "with a warning, or refuse the model (default %(default)s)")
    parser.add_argument("--kind-auto", choices=("cpu", "gpu"), default="cpu",
                        help="device that a model.onnx is built for if its instance_group leaves the kind open; gpu: "
                             "the GPUs of this machine, if any, as in Triton (default %(default)s)")
    parser.add_argument("--cache-config", type=_cache_bytes, default="local,size=67108864", metavar="local,size=N",
                        help="size in bytes of the cache for models with response_cache (default 64 MiB)")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR",
                        help="folder of the engine cache (default: build-engine's)")
    add_plan_store(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drain-grace-secs", type=seconds, default=1.0, metavar="S",
                        help="seconds for which new requests are still accepted after a signal, while the server "
                             "reports not ready (default %(default)s)")
    parser.add_argument("--exit-timeout-secs", type=seconds, default=30.0, metavar="S",
                        help="seconds for accepted requests to be answered after that (default %(default)s)")
    parser.add_argument("--max-message-mib", type=_message_mib, default=256, metavar="N",
                        help="maximum size of a request (default %(default)s)")
    parser.add_argument("--max-inflight-mib", type=positive, default=1024, metavar="N",
                        help="limit of the requests and responses in memory (a response counts twice, because gRPC "
                             "copies it); requests beyond it get RESOURCE_EXHAUSTED (default %(default)s)")
    parser.add_argument("--http-max-json-mib", type=positive, default=64, metavar="N",
                        help="maximum size of the JSON of an HTTP request, without binary tensors after it "
                             "(default %(default)s)")
    parser.add_argument("--min-body-rate", type=natural, default=500, metavar="N",
                        help="minimum rate in bytes per second at which the body of an HTTP request must arrive, on "
                             "average over each --body-grace-secs; slower ones get 408; 0 for no limit "
                             "(default %(default)s)")
    parser.add_argument("--body-grace-secs", type=seconds, default=10.0, metavar="S",
                        help="period of --min-body-rate (default %(default)s)")
    parser.add_argument("--send-timeout-secs", type=seconds, default=60.0, metavar="S",
                        help="seconds that a client may take to read a response before its connection is closed "
                             "(default %(default)s)")


def _message_mib(text: str) -> int:
    """Parse a message size in MiB, up to gRPC's limit of 31 bits of bytes."""
    count = positive(text)
    if count > 2047:
        raise argparse.ArgumentTypeError(f"'{text}' is not at most 2047, the limit of gRPC; for HTTP, "
                                         "--http-max-input-size may be more")
    return count


def _cache_bytes(text: str) -> int:
    size = text.removeprefix("local,size=")
    if size == text or not size.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not local,size=N: the only cache is the server's own, of N "
                                         "bytes")
    return cache_bytes(size)


def _resource(text: str) -> tuple[str, int]:
    """Parse NAME:COUNT, optionally with Triton's device after the count; only one device is supported."""
    name, _, rest = text.partition(":")
    count, _, device = rest.partition(":")
    if not name or not (count.isascii() and count.isdecimal()) or not int(count) or device not in ("", "0", "global"):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME:COUNT, for instance R1:4")
    return name, int(count)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port, 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
