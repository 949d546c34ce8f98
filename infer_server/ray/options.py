"""Arguments of the application builder: settings of the deployment, and the options of infer-server."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infer_server.cli import serve
from infer_server.cli.common import boolean
from infer_server.repository.remote import is_remote
from infer_server.server import ServerOptions

_ALL_PORTS = frozenset({"grpc", "http", "metrics"})
# Options of ports and of the process, which are Serve's here.
_SERVE_OPTIONS = re.compile(r"help|version|check|host|workers|listen-|log-|exit-on-error|drain-grace-secs|"
                            r"allowed-hosts|min-body-rate|body-grace-secs|allow-|http-|metrics-|"
                            r"grpc-(?!restricted-protocol|header-forward-pattern)")
_POLICY = "infer_server.ray.autoscaling:replicas_for_load"
_REPOSITORY = "model-repository"


@dataclass(frozen=True)
class Arguments:
    """Checked arguments of the application builder."""
    server: tuple[str, ...]                 # command line of infer-server
    deployment: Mapping[str, Any]           # options of Serve's deployment
    allow_python_proxy: bool = False


# Settings of Serve's deployment and of its autoscaling, with the parser of each.
DEPLOYMENT: dict[str, Callable[[str], Any]] = {"num_cpus": float, "num_replicas": int, "max_ongoing_requests": int}
AUTOSCALING: dict[str, Callable[[str], Any]] = {
    "min_replicas": int, "max_replicas": int, "target_ongoing_requests": float, "upscale_delay_s": float,
    "downscale_delay_s": float, "look_back_period_s": float, "metrics_interval_s": float}


def builder_arguments(arguments: Mapping[str, Any]) -> Arguments:
    """Check the arguments of the application builder, which are texts or the values of a YAML file.

    Raises
    ------
    ValueError
        An argument is unknown, or its value is not valid.
    """
    left = dict(arguments)
    deployment = _settings(left, DEPLOYMENT)
    autoscaling = _settings(left, AUTOSCALING)
    allow_python_proxy = bool(_settings(left, {"allow_python_proxy": boolean}).get("allow_python_proxy", False))
    if autoscaling and "num_replicas" in deployment:
        raise ValueError(f"num_replicas is a fixed number; remove it, or {', '.join(autoscaling)}")
    if autoscaling and "max_replicas" not in autoscaling:
        raise ValueError(f"{', '.join(autoscaling)}: autoscaling needs max_replicas, too")
    if autoscaling:
        deployment["autoscaling_config"] = {**autoscaling, "policy": {"policy_function": _POLICY}}
    server = list(_command_line(left))
    cpus = deployment.setdefault("num_cpus", 1.0)
    if "--cores" not in server:
        server += ["--cores", str(max(1, int(cpus)))]
    serve.options_of([*server, "--exit-on-error=false"])        # which accepts a folder that only other nodes have
    return Arguments(tuple(server), deployment, allow_python_proxy)


def server_options(arguments: Sequence[str]) -> ServerOptions:
    """Return the options of a server without ports from a command line. Raises ValueError."""
    return replace(serve.options_of(arguments), closed=_ALL_PORTS, workers=1, drain_grace_secs=0.0)


def _settings(arguments: dict[str, Any], parsers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Take the settings with these names out of the arguments."""
    settings = {}
    for name in parsers.keys() & arguments.keys():
        try:
            settings[name] = parsers[name](str(arguments.pop(name)))
        except Exception as error:
            raise ValueError(f"{name}: {error}") from None
    return settings


def _command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return the command line for options by name; underscores stand for hyphens, and a list repeats an option."""
    line = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if _SERVE_OPTIONS.match(option):
            raise ValueError(f"{name}: Ray Serve has the ports and the process; set it in Serve's configuration")
        if option == "model-control-mode" and value == "explicit":
            raise ValueError(f"{name}: a client would load a model in one replica, which the balancer chooses; use "
                             "poll, or deploy again")
        for each in value if isinstance(value, list) else [value]:
            text = str(each).lower() if isinstance(each, bool) else str(each)
            if option == _REPOSITORY and not is_remote(text):
                text = str(Path(text).absolute())       # a replica has another working directory
            line += [f"--{option}", text]
    if f"--{_REPOSITORY}" not in line:
        raise ValueError("model_repository is missing: a folder of models that every node has, or an address")
    return line
