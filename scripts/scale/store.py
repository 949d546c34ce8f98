"""Check servers whose models and plans are in an object store that is slow, unreachable or damaged.

    python -m scripts.scale store               # pip install s3fs 'moto[server]'

An S3 server (moto) runs as a child process, behind a proxy that makes it slow or unreachable. Limits:

    models      20 models, each response 0.3 s late: ready in at most 2.5 times the time of a folder
    away        the store is gone at the start, and copies are on the disk: ready, with infer_repository_reachable 0
    shared      two servers, one plan store, plans of two other targets: two builds in all, and none at a second start
    damaged     a flipped bit and half an object are refused, and built
"""
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from infer_server.engines import build_engine
from infer_server.engines.files import atomic_write
from scripts.scale._bad_store import BadStore, bad_store
from scripts.scale._process import ServerProcess, free_ports

MODELS, DELAY_SECS, MAX_TIMES = 20, 0.3, 2.5
TARGETS = ("aarch64", "aarch64_dotprod") if os.uname().machine == "x86_64" else ("avx2", "avx512_vnni")
BUCKET = "bucket"
_START_SECS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--part", choices=PARTS, action="append", help="check only this; can be repeated")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="starts of each kind; the fastest counts")


def run(arguments: argparse.Namespace) -> int:
    try:
        import boto3  # noqa: F401
        import moto.server  # noqa: F401
        import s3fs  # noqa: F401
    except ImportError as error:
        print(f"not checked: {error}; pip install s3fs 'moto[server]'")
        return 1
    met = True
    for part in arguments.part or PARTS:
        with TemporaryDirectory() as folder, _s3() as store:
            met &= PARTS[part](Path(folder), store, arguments.turns)
    return 0 if met else 1


def _models(folder: Path, store: BadStore, turns: int) -> bool:
    """Compare the start from a slow store with that from a folder."""
    plan = _plan(folder)
    for number in range(MODELS):
        _save(plan, folder / "models" / f"m{number}" / "1" / "model.plan")
    _upload(folder / "models", store)
    local, remote = list[float](), list[float]()
    for turn in range(turns):               # in turns, since other load varies
        store.delay_secs = 0.0
        local.append(_ready(str(folder / "models"), folder / "log", store))
        store.delay_secs = DELAY_SECS
        remote.append(_ready(f"s3://{BUCKET}/models", folder / "log", store, "--repository-cache",
                             str(folder / f"copies{turn}")))
    times = min(remote) / min(local)
    print(f"models: {MODELS} from a folder {min(local):.1f} s, from a store {DELAY_SECS} s late {min(remote):.1f} s: "
          f"{times:.2f} times, bar {MAX_TIMES}", flush=True)
    return times <= MAX_TIMES


def _away(folder: Path, store: BadStore, turns: int) -> bool:
    """Start from copies while the store is unreachable."""
    _save(_plan(folder), folder / "models" / "m" / "1" / "model.plan")
    _upload(folder / "models", store)
    settings = (f"s3://{BUCKET}/models", folder / "log", store, "--repository-cache", str(folder / "copies"),
                "--repository-poll-secs", "1")
    _ready(*settings)
    store.is_away = True
    server = _server(*settings)
    try:
        secs = server.start()
        before = server.metric("infer_repository_reachable")
        store.is_away = False
        end = time.monotonic() + _START_SECS
        while server.metric("infer_repository_reachable") != 1 and time.monotonic() < end:
            time.sleep(0.2)
        after = server.metric("infer_repository_reachable")
    finally:
        server.terminate()
    print(f"away: ready from copies in {secs:.1f} s, infer_repository_reachable {before:g}, then {after:g}; bar 0, 1",
          flush=True)
    return (before, after) == (0, 1)


def _shared(folder: Path, store: BadStore, turns: int) -> bool:
    """Count the builds of two servers with one plan store."""
    _foreign(folder)
    builds = [_builds(folder, store, cache) for cache in ("a", "b", "a")]
    print(f"shared: builds of the first server {builds[0]}, of the second {builds[1]}, at the second start "
          f"{builds[2]}; bar {len(TARGETS)}, 0, 0", flush=True)
    return builds == [len(TARGETS), 0, 0]


def _damaged(folder: Path, store: BadStore, turns: int) -> bool:
    """Damage the plans in the store, and count refused plans and builds."""
    _foreign(folder)
    _builds(folder, store, "a")
    files = _client(store)
    keys = sorted(each["Key"] for each in files.list_objects_v2(Bucket=BUCKET, Prefix="plans/")["Contents"]
                  if each["Key"].endswith(".plan"))
    for key, damage in zip(keys, (lambda data: data[:999] + bytes([data[999] ^ 1]) + data[1000:],
                                  lambda data: data[:len(data) // 2]), strict=True):
        data = files.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        files.put_object(Bucket=BUCKET, Key=key, Body=damage(data))
    (folder / "log").unlink()
    builds = _builds(folder, store, "b")
    refused = {line.partition("refused: plan ")[2] for line in (folder / "log").read_text().splitlines()
               if "refused: plan " in line}
    print(f"damaged: {builds} built; bar {len(TARGETS)}. Refused: {'; '.join(sorted(refused))}", flush=True)
    return builds == len(TARGETS) == len(refused)


PARTS = {"models": _models, "away": _away, "shared": _shared, "damaged": _damaged}


# ---- servers
def _server(models: str, log: Path, store: BadStore, *options: str) -> ServerProcess:
    return ServerProcess(models, log, *options, environment=_environment(store))


def _ready(models: str, log: Path, store: BadStore, *options: str) -> float:
    """Start a server, end it, and return the seconds until it was ready."""
    server = _server(models, log, store, *options)
    try:
        return server.start()
    finally:
        server.terminate()


def _builds(folder: Path, store: BadStore, cache: str) -> int:
    """Return how many models a server with an engine cache of its own builds at the start."""
    server = _server(str(folder / "models"), folder / "log", store, "--cache-dir", str(folder / cache),
                     "--plan-store", f"s3://{BUCKET}/plans")
    try:
        server.start()
        return round(server.metric("infer_model_builds_total"))
    finally:
        server.terminate()


# ---- models
def _plan(folder: Path, target: str = "") -> Path:
    """Build a plan of 0.6 MB."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 400]) for name in "xy")
    weights = numpy_helper.from_array(np.random.default_rng(1).normal(size=(400, 400)).astype(np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "m", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    path = folder / f"{target or 'here'}.plan"
    build_engine(model, target=target, timing=False, max_batch=4, cache=False).save(path)
    return path


def _foreign(folder: Path) -> None:
    """Write a repository with a plan for each of the other targets."""
    for target in TARGETS:
        _save(_plan(folder, target), folder / "models" / target / "1" / "model.plan")


def _save(plan: Path, to: Path) -> None:
    to.parent.mkdir(parents=True)
    with atomic_write(to) as file:
        file.write(plan.read_bytes())


# ---- S3
@contextmanager
def _s3() -> Iterator[BadStore]:
    """Run an S3 server with a bucket, and the proxy in front of it."""
    (port,) = free_ports(1)
    program = shutil.which("moto_server", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    command = [program] if program else [sys.executable, "-m", "moto.server"]
    with subprocess.Popen([*command, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as process:
        try:
            _await(port)
            with bad_store(port) as store:
                _client(store).create_bucket(Bucket=BUCKET)
                yield store
        finally:
            process.terminate()


def _await(port: int) -> None:
    end = time.monotonic() + _START_SECS
    while time.monotonic() < end:
        try:
            urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("moto_server does not answer")


def _environment(store: BadStore) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.port}", "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


def _client(store: BadStore):
    import boto3
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{store.server_port}", aws_access_key_id="a",
                        aws_secret_access_key="b", region_name="us-east-1")


def _upload(models: Path, store: BadStore) -> None:
    client = _client(store)
    for file in models.rglob("*.plan"):
        client.upload_file(str(file), BUCKET, f"models/{file.relative_to(models)}")
