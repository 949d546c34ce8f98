"""Application builder of Ray Serve."""
from __future__ import annotations

from typing import Any

from ray import serve

from infer_server.ray.options import builder_arguments
from infer_server.ray.replica import InferServer as Replica

MAX_ONGOING_REQUESTS = 1024     # of a replica; the server queues, batches and limits by itself
GRACEFUL_SHUTDOWN_SECS = 60.0   # time for a replica to drain; Serve takes the first 30 s to tell its proxies


class InferServer(Replica):
    """Replica that stops when Serve calls its destructor, once it gets no more calls."""

    async def __del__(self) -> None:
        await self.close()


def app(arguments: dict[str, Any]) -> serve.Application:
    """Build the application from arguments of `serve run` or of a configuration file.

    Parameters
    ----------
    arguments : dict
        model_repository, options of infer-server that are not about ports (underscores for hyphens), settings of the
        deployment (num_cpus, num_replicas, max_ongoing_requests), of its autoscaling (min_replicas, max_replicas,
        target_ongoing_requests, upscale_delay_s, downscale_delay_s, look_back_period_s, metrics_interval_s), and
        allow_python_proxy.

    Returns
    -------
    ray.serve.Application
        One deployment, InferServer.

    Raises
    ------
    ValueError
        An argument is unknown, or its value is not valid.
    """
    parsed = builder_arguments(arguments)
    settings = {"max_ongoing_requests": MAX_ONGOING_REQUESTS, "graceful_shutdown_timeout_s": GRACEFUL_SHUTDOWN_SECS,
                **parsed.deployment}
    settings["ray_actor_options"] = {"num_cpus": settings.pop("num_cpus")}
    deployment = serve.deployment(InferServer).options(**settings)
    return deployment.bind(parsed.server, parsed.allow_python_proxy)
