"""Configuration file of Ray Serve for the application, with the ports and services that `serve run` cannot set."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer_server.ray.options import builder_arguments

SERVICES = "infer_server.ray.servicer.add_services"


def configuration(arguments: Mapping[str, Any], name: str = "models", host: str = "0.0.0.0", grpc_port: int = 8001,
                  http_port: int = 8000) -> dict[str, Any]:
    """Return the configuration for `serve deploy` and `serve run`.

    Parameters
    ----------
    arguments : mapping
        Arguments of the application builder, infer_server.ray.app.
    name : str
        Name of the application.
    host : str
        Address that Serve's HTTP port listens on.
    grpc_port, http_port : int
        Ports of Serve's proxy on every node. The HTTP port serves Serve's own routes only.

    Raises
    ------
    ValueError
        An argument is unknown, or its value is not valid.
    """
    builder_arguments(arguments)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": http_port},
        "grpc_options": {"port": grpc_port, "grpc_servicer_functions": [SERVICES]},
        "applications": [{"name": name, "route_prefix": "/", "import_path": "infer_server.ray:app",
                          "args": dict(arguments)}]}
