"""infer-server: serves a repository of models over Triton's protocols, gRPC and HTTP/REST."""
from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import stat
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from engines.machine.cpu import allowed_cpus
from infer_server.backend import EngineLoader, describe_plan, load_plan
from infer_server.cli.access import access_of, add_access
from infer_server.cli.common import add_version, boolean, natural, positive, seconds, up_to
from infer_server.cli.triton_options import (
    add_triton_options,
    cache_bytes,
    forwarded_of,
    log_level,
    ports_of,
    without_effect,
)
from infer_server.config.fields import MOST_THREADS
from infer_server.errors import RepositoryError
from infer_server.grpc_ports import FRONTS, NGHTTP2
from infer_server.listeners import address
from infer_server.observing.log_stream import LogStream, reopen_log
from infer_server.process import age_secs, raise_descriptor_limit, tune_malloc
from infer_server.repository.checking import check
from infer_server.repository.remote import is_remote
from infer_server.repository.repository import LOADS, MOST_LOADS
from infer_server.server import Server, ServerOptions, places_of

log = logging.getLogger(__name__)

_MOST_WORKERS = 256
_USUAL_LOADS = 16       # at most: a build takes gigabytes


def main(arguments: list[str] | None = None, load_engine: EngineLoader = load_plan) -> int:
    """Runs until SIGTERM, SIGINT or SIGQUIT. SIGHUP and SIGUSR1 open the log file anew.

    0: all accepted requests answered; 1: not, or a port taken, a model failed under --exit-on-error, or --check found
    what will not be served; 2: bad options.
    """
    parsed = _parser().parse_args(arguments)
    try:
        handler = LogStream(parsed.log_file)
    except OSError as error:
        print(f"infer-server: error: --log-file {parsed.log_file}: {error.strerror}", file=sys.stderr)
        return 2
    logging.basicConfig(level=log_level(parsed), handlers=[handler],
                        format="%(asctime)s %(levelname)s %(message)s")
    given = [*parsed.model_repository, *([parsed.check] if parsed.check else ())]
    parsed.model_repository = list({_settled(each): each for each in given}.values())
    mistake = _mistake(parsed)
    if mistake:
        print(f"infer-server: error: {mistake}", file=sys.stderr)
        return 2
    if parsed.check is not None:
        return _check(parsed, load_engine)
    if useless := without_effect(parsed):
        log.warning("options that change nothing on this server: %s", ", ".join(useless))
    tune_malloc()
    raise_descriptor_limit()
    try:
        answered = _run(_serve(_options(parsed), bool(parsed.exit_on_error), load_engine))
    except (OSError, RepositoryError) as error:
        print(f"infer-server: error: {error}", file=sys.stderr)
        return 1
    return 0 if answered else 1


def _check(parsed: argparse.Namespace, load_engine: EngineLoader) -> int:
    """Prints what is to be said of the repositories. 1: one cannot be read, or a model of them will not be served."""
    try:
        places = places_of(parsed.model_repository, parsed.repository_cache, parsed.repository_cache_mib << 20)
        # Of another backend's plans nothing is known but by its loader.
        describe = describe_plan if load_engine is load_plan else partial(load_engine, threads=1)
        remarks = list(check(places, parsed.kind_gpu, parsed.model_config_name, describe, parsed.threads))
    except RepositoryError as error:
        print(f"infer-server: error: {error}", file=sys.stderr)
        return 1
    for remark in remarks:
        print(remark)
    return 1 if any(remark.is_error for remark in remarks) else 0


def _mistake(parsed: argparse.Namespace) -> str:
    """What is wrong with the options together; nothing if they can be served."""
    folders = parsed.model_repository
    if not folders:
        return "--model-repository is missing: a folder of models"
    missing = [f"{folder}: {why}" for folder in folders if not is_remote(folder) and (why := _why_no_folder(folder))]
    if missing and parsed.exit_on_error is not False:       # else it answers, and is not live, as in Triton
        return f"--model-repository {missing[0]}"
    for name, _ in parsed.rate_limit_resource:
        if [other for other, _ in parsed.rate_limit_resource].count(name) > 1:
            return f"--rate-limit-resource {name}: given twice"
    if parsed.load_model and parsed.model_control_mode != "explicit" and not parsed.model_memory_limit_mib:
        return "--load-model needs --model-control-mode explicit; otherwise every model is loaded"
    if parsed.model_memory_limit_mib and parsed.model_control_mode == "poll":
        return "--model-memory-limit-mib loads models when they are asked for, poll when they change: give one of them"
    try:
        access_of(parsed)
    except ValueError as error:
        return str(error)
    if "*" in parsed.load_model and len(parsed.load_model) > 1:
        return "--load-model=* loads every model; give no other --load-model beside it"
    return ""


def _why_no_folder(path: str) -> str:
    """Nothing: it is one."""
    try:
        return "" if stat.S_ISDIR(os.stat(path).st_mode) else "no such folder"
    except FileNotFoundError:
        return "no such folder"
    except OSError as error:
        return error.strerror or str(error)


def _settled(repository: str) -> str:
    """One name of each repository."""
    return repository.rstrip("/") if is_remote(repository) else os.path.realpath(repository)


def _run(main: Coroutine[Any, Any, bool]) -> bool:
    """Runs `main` on uvloop's event loop, or on asyncio's where uvloop is not installed."""
    try:
        from uvloop import run
    except ImportError:
        log.warning("uvloop is not installed: serving on asyncio's own event loop, which is slower")
        return asyncio.run(main)
    return run(main)


async def _serve(options: ServerOptions, exit_on_error: bool, load_engine: EngineLoader) -> bool:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGHUP, signal.SIGUSR1):
        loop.add_signal_handler(number, _on_reopen, number)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
        # Ctrl-C in a terminal is not for a job that a script started in the background.
        if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, _on_signal, number, stop)
    imported_secs = age_secs()
    server = Server(options, load_engine)
    server.lifecycle.startup.took("importing", imported_secs)
    server.log_settings.install()
    ports = await server.start()
    log.info("gRPC on %s, HTTP on %s, metrics on %s",
             *(address(options.hosts.get(name, options.host), port) if port else "none"
               for name, port in vars(ports).items()))
    loading = asyncio.create_task(_report_loaded(server, stop if exit_on_error else None))
    await stop.wait()
    loading.cancel()
    failed = exit_on_error and bool(server.failures())
    log.info("draining: what was accepted is answered; a second signal exits at once")
    answered = await server.stop()
    log.info("stopped")
    return answered and not failed


async def _report_loaded(server: Server, stop: asyncio.Event | None) -> None:
    """Says when the models are loaded. stop: to be set if one has failed."""
    await server.loaded()
    failures = server.failures()
    if not failures:
        log.info("ready")
        return
    log.error("%d of the models to be served failed: %s", len(failures), ", ".join(failures))
    if stop:
        log.error("--exit-on-error: exiting")
        stop.set()


def _on_reopen(number: int) -> None:
    is_file = reopen_log()
    log.info("%s: %s", signal.Signals(number).name,
             "the log file was opened anew" if is_file else "nothing to do, the log is written to stderr")


def _on_signal(number: int, stop: asyncio.Event) -> None:
    if stop.is_set():
        log.warning("second signal: exiting at once")
        os._exit(128 + number)
    stop.set()


def _options(parsed: argparse.Namespace) -> ServerOptions:
    return ServerOptions(
        model_repositories=tuple(parsed.model_repository), cache_dir=parsed.cache_dir, host=parsed.host.strip("[]"),
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
        description="Serves a repository of models over Triton's protocols, gRPC and HTTP/REST, with dynamic "
                    "batching.")
    parser.add_argument("--model-repository", "--model-store", action="append", default=[], metavar="DIR|URL",
                        help="folders <model>/<version>/model.plan (or model.onnx, built when it is loaded), here or "
                             "at s3://, gs://, az:// or another address that fsspec knows; can be repeated")
    parser.add_argument("--repository-cache", type=Path, metavar="DIR",
                        help="where models of addresses are copied to (default: in the user's cache)")
    parser.add_argument("--repository-cache-mib", type=positive, default=20 << 10, metavar="N",
                        help="of the copies from an address that are kept (default %(default)s)")
    parser.add_argument("--check", metavar="DIR|URL", nargs="?", const="",
                        help="says of each model in the folder, and in those of --model-repository, what of its "
                             "configuration means something else here, or is not served, and what to write instead; "
                             "loads none. Exits with 1 if one will not be served")
    add_version(parser)
    _add_models(parser)
    _add_ports(parser)
    _add_limits(parser)
    add_access(parser)
    add_triton_options(parser)
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info",
                        help="the least that is written to stderr (default %(default)s)")
    return parser


def _add_ports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1",
                        help="address to listen on; :: is every one, IPv4 and IPv6 (default %(default)s)")
    parser.add_argument("--grpc-port", type=_port, default=8001, metavar="N", help="0 is any free port "
                                                                                   "(default %(default)s)")
    parser.add_argument("--workers", type=up_to(_MOST_WORKERS), default=1, metavar="N",
                        help="processes that read requests and write answers, beside the one that executes models "
                             "where there is more than one (default %(default)s)")
    parser.add_argument("--grpc-front", choices=FRONTS, default=NGHTTP2,
                        help="the library that serves gRPC; grpcio costs more for each request (default %(default)s)")
    parser.add_argument("--http-port", type=_port, default=8000, metavar="N",
                        help="HTTP/REST: inference, metadata, health, control (default %(default)s)")
    parser.add_argument("--metrics-port", type=_port, default=8002, metavar="N",
                        help="/metrics for Prometheus (default %(default)s)")


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-control-mode", type=str.lower, choices=("none", "poll", "explicit"),
                        default="none",
                        help="none: every model is loaded at start; poll: and again when it changes; explicit: clients "
                             "load and unload (default %(default)s)")
    parser.add_argument("--model-memory-limit-mib", type=positive, metavar="N",
                        help="models are loaded when they are first asked for, and the least used are unloaded when "
                             "together they hold more (default: every model is loaded at start)")
    parser.add_argument("--repository-poll-secs", type=seconds, default=15.0, metavar="S",
                        help="between looks for changes under poll (default %(default)s)")
    parser.add_argument("--load-model", action="append", default=[], metavar="NAME",
                        help="under explicit control, a model to load at start; can be repeated; * is every one")
    parser.add_argument("--model-load-thread-count", type=up_to(MOST_LOADS), metavar="N",
                        help="models that are loaded at a time (default: as many as --cores, at least 2, at most "
                             f"{_USUAL_LOADS})")
    parser.add_argument("--strict-readiness", type=boolean, nargs="?", const=True, default=True, metavar="BOOL",
                        help="not ready while a model that was to be served has failed (default true)")
    parser.add_argument("--exit-on-error", type=boolean, nargs="?", const=True, metavar="BOOL",
                        help="true: exit with status 1 if a model cannot be loaded at start; false: go on even where a "
                             "repository is not there (default: end for the latter only)")
    parser.add_argument("--threads", type=up_to(MOST_THREADS), default=1, metavar="N",
                        help="threads for one batch; instance_group says how many batches run at a time "
                             "(default %(default)s)")
    parser.add_argument("--cores", type=positive, default=len(allowed_cpus()), metavar="N",
                        help="a model whose instance_group says nothing has an instance for every --threads of these "
                             "(default: all, %(default)s)")
    parser.add_argument("--rate-limit", type=str.lower, choices=("off", "execution_count"), default="off",
                        help="execution_count: an instance whose group has a rate_limiter executes when the resources "
                             "that it names are free (default %(default)s)")
    parser.add_argument("--rate-limit-resource", type=_resource, action="append", default=[], metavar="NAME:COUNT",
                        help="how much there is of a resource (default: what the most demanding instance needs)")
    parser.add_argument("--kind-gpu", choices=("cpu", "refuse"), default="cpu",
                        help="where no GPU runs a model's instances of KIND_GPU they are served on the CPU, with a "
                             "warning, or it is refused (default %(default)s)")
    parser.add_argument("--kind-auto", choices=("cpu", "gpu"), default="cpu",
                        help="what a model.onnx is built for whose instance_group leaves the kind open; gpu: the GPUs "
                             "of this machine, where there are any, as in Triton (default %(default)s)")
    parser.add_argument("--cache-config", type=_cache_bytes, default="local,size=67108864", metavar="local,size=N",
                        help="bytes for the responses of models that have a response_cache (default 64 MiB)")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR",
                        help="where engines built from ONNX files are kept (default: build-engine's engine cache)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drain-grace-secs", type=seconds, default=1.0, metavar="S",
                        help="how long new requests are accepted after a signal, when ready no more "
                             "(default %(default)s)")
    parser.add_argument("--exit-timeout-secs", type=seconds, default=30.0, metavar="S",
                        help="how long accepted requests may take to be answered after that (default %(default)s)")
    parser.add_argument("--max-message-mib", type=_message_mib, default=256, metavar="N",
                        help="largest request (default %(default)s)")
    parser.add_argument("--max-inflight-mib", type=positive, default=1024, metavar="N",
                        help="of requests and answers (an answer counts twice: gRPC has a copy) that are held at a "
                             "time; requests beyond it get RESOURCE_EXHAUSTED (default %(default)s)")
    parser.add_argument("--http-max-json-mib", type=positive, default=64, metavar="N",
                        help="largest JSON of a request over HTTP; tensors as bytes behind it do not count "
                             "(default %(default)s)")
    parser.add_argument("--min-body-rate", type=natural, default=500, metavar="N",
                        help="bytes per second at which the body of a request over HTTP must arrive, on average over "
                             "each --body-grace-secs; slower ones get 408; 0: any (default %(default)s)")
    parser.add_argument("--body-grace-secs", type=seconds, default=10.0, metavar="S",
                        help="the period of --min-body-rate (default %(default)s)")
    parser.add_argument("--send-timeout-secs", type=seconds, default=60.0, metavar="S",
                        help="how long a client may take to read an answer, before its connection is closed "
                             "(default %(default)s)")


def _message_mib(text: str) -> int:
    """gRPC counts the bytes of a message in 31 bits."""
    count = positive(text)
    if count > 2047:
        raise argparse.ArgumentTypeError(f"'{text}' is not at most 2047, which is what gRPC takes; over HTTP "
                                         "--http-max-input-size may be more")
    return count


def _cache_bytes(text: str) -> int:
    size = text.removeprefix("local,size=")
    if size == text or not size.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not local,size=N: the one cache is the server's own, of N bytes")
    return cache_bytes(size)


def _resource(text: str) -> tuple[str, int]:
    """A device behind the count is Triton's; there is one here."""
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
