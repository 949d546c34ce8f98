"""Print the configuration of Ray Serve for a repository, in JSON, which `serve deploy` reads as YAML.

    python -m infer_server.ray model_repository=models max_replicas=4 > serve.yaml
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from infer_server.ray.configuration import configuration


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the configuration; return 2 if an argument is not valid."""
    parser = argparse.ArgumentParser("python -m infer_server.ray", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--name", default="models", help="name of the application (default %(default)s)")
    parser.add_argument("--host", default="0.0.0.0", help="address of Serve's HTTP port (default %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=8001, metavar="N", help="port of gRPC (default %(default)s)")
    parser.add_argument("--http-port", type=int, default=8000, metavar="N",
                        help="port of Serve's own routes (default %(default)s)")
    parser.add_argument("arguments", nargs="+", metavar="NAME=VALUE",
                        help="argument of the application builder: model_repository, an option of infer-server with "
                             "underscores, or a setting of the deployment")
    options = parser.parse_args(arguments)
    pairs = [each.partition("=") for each in options.arguments]
    try:
        if wrong := [name for name, equals, _ in pairs if not equals]:
            raise ValueError(f"'{wrong[0]}' is not NAME=VALUE")
        result = configuration({name: value for name, _, value in pairs}, options.name, options.host, options.grpc_port,
                               options.http_port)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
