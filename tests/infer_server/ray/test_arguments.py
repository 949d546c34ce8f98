"""Arguments of the application builder, and the configuration file."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs the extra ray")

from infer_server.ray import app
from infer_server.ray.__main__ import main
from infer_server.ray.options import builder_arguments, server_options


def test_texts_and_values_of_a_file_mean_the_same(tmp_path: Path) -> None:
    texts = {"model_repository": str(tmp_path), "num_cpus": "2", "max_replicas": "3", "target_ongoing_requests": "8",
             "strict_readiness": "false", "allow_python_proxy": "true"}
    values: dict[str, Any] = {"model_repository": [str(tmp_path)], "num_cpus": 2, "max_replicas": 3,
                              "target_ongoing_requests": 8, "strict_readiness": False, "allow_python_proxy": True}
    actual = builder_arguments(texts)
    assert actual == builder_arguments(values)
    assert actual.allow_python_proxy and actual.deployment["num_cpus"] == 2.0
    assert actual.deployment["autoscaling_config"]["max_replicas"] == 3
    options = server_options(actual.server)
    assert (options.cores, options.strict_readiness) == (2, False)
    assert options.closed == {"grpc", "http", "metrics"}


def test_a_path_is_absolute_and_an_address_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = builder_arguments({"model_repository": ["models", "s3://bucket/models"]}).server
    assert line[:4] == ("--model-repository", str(tmp_path / "models"), "--model-repository", "s3://bucket/models")


@pytest.mark.parametrize("given, text", [
    ({}, "model_repository is missing"),
    ({"grpc_port": 1}, "grpc_port: Ray Serve has the ports"),
    ({"help": ""}, "help: Ray Serve has the ports"),
    ({"treads": 2}, "unknown options: --treads"),
    ({"threads": "two"}, "'two' is not a whole number"),
    ({"num_cpus": "two"}, "num_cpus: could not convert"),
    ({"min_replicas": 1}, "autoscaling needs max_replicas"),
    ({"num_replicas": 1, "max_replicas": 2}, "num_replicas is a fixed number"),
    ({"model_control_mode": "explicit"}, "model_control_mode: a client would load a model in one replica"),
    ({"rate_limit_resource": "R"}, "'R' is not NAME:COUNT"),
], ids=lambda value: "-".join(value) or "nothing" if isinstance(value, dict) else "")
def test_a_wrong_argument_is_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        app(given if not given else {"model_repository": "models", **given})


def test_a_folder_that_is_missing_where_the_replica_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        server_options(builder_arguments({"model_repository": str(tmp_path / "nowhere")}).server)


def test_the_configuration_file_is_valid_for_serve(capsys: pytest.CaptureFixture[str]) -> None:
    from ray.serve.schema import ServeDeploySchema
    assert main(["--grpc-port", "9001", "model_repository=s3://bucket/models", "max_replicas=4"]) == 0
    schema = ServeDeploySchema.model_validate(json.loads(capsys.readouterr().out))
    assert schema.grpc_options.port == 9001
    assert schema.grpc_options.grpc_servicer_functions == ["infer_server.ray.servicer.add_services"]
    assert schema.applications[0].args == {"model_repository": "s3://bucket/models", "max_replicas": "4"}
    assert main(["model_repository"]) == 2 and "not NAME=VALUE" in capsys.readouterr().err
    assert main(["threads=2"]) == 2 and "model_repository is missing" in capsys.readouterr().err
