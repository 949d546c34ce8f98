"""A Ray cluster of this machine with Serve behind HAProxy, and the CPU time of its processes."""
from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

BIN = Path(sys.executable).parent
DEPLOYMENT = "InferServer"
# Environment of the cluster; the time limits are for slow machines. The mode of authentication is explicit, because Ray
# otherwise switches tokens on in some of the processes if the user has a token of another cluster.
SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_raylet_start_wait_time_s": "150", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled"}
_POLL_SECS = 2.0


class Cluster:
    """A cluster of one node, started at the beginning of a `with` block and killed at its end."""

    def __init__(self, port: int, cpus: int) -> None:
        """Use the ports `port` (gRPC) to `port + 6`."""
        self.grpc, self._http, self._gcs, self._dashboard = port, port + 1, port + 2, port + 3
        self._cpus = cpus
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))        # Ray's sockets need a short path
        haproxy = self._folder / "haproxy"
        haproxy.mkdir()
        self._environment = {
            **os.environ, **SETTINGS, "RAY_SERVE_HAPROXY_METRICS_PORT": str(port + 4),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(port + 5), "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{haproxy}/server-state",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{haproxy}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{haproxy}/admin.sock"}
        self._starts = 3            # attempts: Ray exits if its raylet has not started within 30 s
        self._head: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Cluster:
        try:
            wait_until(self._has_started, 300, "the cluster starts")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _has_started(self) -> bool:
        """Return True if Serve answers; start Ray if it has not been started, or has failed to start."""
        if self._head is None or self._head.poll() is not None:
            if not self._starts:
                raise RuntimeError(f"Ray does not start:\n{(self._folder / 'ray.log').read_text()[-2000:]}")
            self._starts -= 1
            self._kill()
            command = ["ray", "start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=true",
                       "--node-ip-address=127.0.0.1",
                       f"--port={self._gcs}", f"--dashboard-port={self._dashboard}", f"--num-cpus={self._cpus}",
                       "--object-store-memory=80000000", f"--temp-dir={self._folder}"]
            with open(self._folder / "ray.log", "wb") as log:
                self._head = subprocess.Popen([BIN / command[0], *command[1:]], env=self._environment, stdout=log,
                                              stderr=subprocess.STDOUT)
        with socket.socket() as dashboard:      # a cheap check first: the start keeps the machine busy
            if dashboard.connect_ex(("127.0.0.1", self._dashboard)):
                return False
        return self._serve("status").returncode == 0

    def __exit__(self, *_: object) -> None:
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        if self._head is None:
            return
        self.processes()
        for process in [*self._seen.values(), *self._folder_processes()]:
            with suppress(psutil.Error):
                process.kill()
        self._head.kill()
        self._head.wait()

    def _folder_processes(self) -> list[psutil.Process]:
        """Return the processes whose command line names this cluster's folder: HAProxy outlives its parent."""
        return [process for process in psutil.process_iter(["cmdline"])
                if str(self._folder) in " ".join(process.info["cmdline"] or ()) and process.pid != os.getpid()]

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the cluster."""
        assert self._head
        children: list[psutil.Process] = []
        with suppress(psutil.Error):
            children = psutil.Process(self._head.pid).children(recursive=True)
        self._seen |= {process.pid: process for process in children}
        return children

    def replicas(self) -> list[psutil.Process]:
        return [process for process in self.processes() if kind_of(process) == "replica"]

    def _serve(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BIN / "serve", *arguments, "-a", f"http://127.0.0.1:{self._dashboard}"],
                              env=self._environment, capture_output=True, text=True, timeout=120)

    def deploy(self, arguments: Mapping[str, Any]) -> None:
        """Deploy the application with these arguments; returns before the replicas have changed."""
        from infer_server.ray.configuration import configuration
        file = self._folder / "serve.json"
        file.write_text(json.dumps(configuration(arguments, host="127.0.0.1", grpc_port=self.grpc,
                                                 http_port=self._http)))
        done = self._serve("deploy", str(file))
        if done.returncode:
            raise RuntimeError(f"serve deploy: {done.stderr[-2000:]}")

    def status(self) -> dict[str, Any]:
        """Return the application's entry of `serve status`."""
        import yaml
        status = yaml.safe_load(self._serve("status").stdout) or {}
        application = status.get("applications", {}).get("models", {})
        if application.get("status") == "DEPLOY_FAILED":
            raise RuntimeError(f"the application failed: {application['message'][-2000:]}")
        return application

    def running(self) -> int:
        """Return the number of running replicas by `serve status`, 0 while the application changes."""
        application = self.status()
        if application.get("status") != "RUNNING":
            return 0
        return int(application["deployments"][DEPLOYMENT]["replica_states"].get("RUNNING", 0))

    def wait_for(self, replicas: int, timeout_secs: float = 240) -> None:
        wait_until(lambda: self.running() == replicas, timeout_secs, f"{replicas} replicas are running")


def wait_until(condition: Callable[[], bool], timeout_secs: float, what: str) -> None:
    """Wait for a condition. Raises TimeoutError."""
    end = time.monotonic() + timeout_secs
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout_secs:g} s")
        time.sleep(_POLL_SECS)


def kind_of(process: psutil.Process) -> str:
    """Return the part that a process has in a cluster: "haproxy", "replica" or "rest"."""
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        if DEPLOYMENT in line:
            return "replica"
        return "haproxy" if "/haproxy -" in line else "rest"
    return "rest"


def cpu_secs(processes: list[psutil.Process]) -> dict[str, float]:
    """Return the CPU seconds of processes by their kinds: user and system time, ended threads included."""
    sums: dict[str, float] = {}
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            kind = kind_of(process)
            sums[kind] = sums.get(kind, 0.0) + times.user + times.system
    return sums
