"""Tests of deploy/: valid options of the server, and a persistent engine cache."""
from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from infer_server.cli.serve import _parser

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"


def entry() -> list[str]:
    """Return the image's command."""
    match = re.search(r"^ENTRYPOINT (.*)$", (DEPLOY / "Containerfile").read_text(), re.M)
    assert match
    command: list[str] = json.loads(match[1])
    return command


def test_the_commands_are_accepted() -> None:
    arguments = re.search(r"args: (\[.*\])", (DEPLOY / "kubernetes.yaml").read_text())
    service = re.search(r"^ExecStart=(.*)$", (DEPLOY / "infer-server.service").read_text(), re.M)
    assert arguments and service
    for command in ([*entry(), *json.loads(arguments[1])], shlex.split(service[1])):
        parsed = _parser().parse_args(command[1:])
        assert parsed.cache_dir


def test_the_engine_cache_outlives_pods_and_services() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    mount = re.search(r"\{name: (\w+), mountPath: (/\w+)\}", text)
    assert mount and mount[2] == entry()[entry().index("--cache-dir") + 1]
    claim = re.search(rf"- name: {mount[1]}\n +persistentVolumeClaim: {{claimName: ([\w-]+)}}", text)
    assert claim and f"kind: PersistentVolumeClaim\nmetadata:\n  name: {claim[1]}\n" in text
    service = (DEPLOY / "infer-server.service").read_text()
    assert "CacheDirectory=infer-server" in service and "--cache-dir /var/cache/infer-server" in service


def test_a_reload_of_the_service_opens_the_log_anew() -> None:
    assert "ExecReload=/bin/kill -HUP $MAINPID" in (DEPLOY / "infer-server.service").read_text()
