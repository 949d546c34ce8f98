"""Tests of deploy/: valid options of the server, sound resources, files that the programs which read them accept."""
from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from infer_server.cli.serve import _parser
from scripts.scale import manifests
from scripts.testing.numpy_engine import write_model
from tests.infer_server.serving import serving

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
needs_yaml = pytest.mark.skipif(importlib.util.find_spec("yaml") is None, reason="PyYAML is not installed")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def documents(path: str) -> list[dict[str, Any]]:
    import yaml
    return [each for each in yaml.safe_load_all((DEPLOY / path).read_text()) if each]


def entry() -> list[str]:
    """Return the image's command."""
    match = re.search(r"^ENTRYPOINT (.*)$", (DEPLOY / "Containerfile").read_text(), re.M)
    assert match
    command: list[str] = json.loads(match[1])
    return command


def pod(resources: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod of the deployment of servers."""
    found: dict[str, Any] = next(each for each in resources if each["kind"] == "Deployment"
                                 and each["metadata"]["name"] == "infer-server")["spec"]["template"]["spec"]
    return found


@needs_yaml
def test_the_commands_are_accepted() -> None:
    service = re.search(r"^ExecStart=(.*)$", (DEPLOY / "infer-server.service").read_text(), re.M)
    assert service
    base = documents("kubernetes/base/deployment.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    kserve = documents("kserve.yaml")[0]["spec"]["containers"][0]
    s3 = documents("kubernetes/overlays/s3/models.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    commands = [shlex.split(service[1]), *([*each.get("command", entry()), *each["args"]]
                                           for each in (base, kserve, s3))]
    for command in commands:
        assert _parser().parse_args(command[1:]).cache_dir


@needs_yaml
def test_the_engine_cache_outlives_pods_and_services() -> None:
    cache = entry()[entry().index("--cache-dir") + 1]
    server = pod(documents("kubernetes/base/deployment.yaml"))
    name = next(each["name"] for each in server["containers"][0]["volumeMounts"] if each["mountPath"] == cache)
    claim = next(each for each in server["volumes"] if each["name"] == name)["persistentVolumeClaim"]["claimName"]
    assert claim in [each["metadata"]["name"] for each in documents("kubernetes/base/volumes.yaml")]
    service = (DEPLOY / "infer-server.service").read_text()
    assert "CacheDirectory=infer-server" in service and "--cache-dir /var/cache/infer-server" in service


def test_a_reload_of_the_service_opens_the_log_anew() -> None:
    assert "ExecReload=/bin/kill -HUP $MAINPID" in (DEPLOY / "infer-server.service").read_text()


def test_the_image_runs_as_a_numbered_user_without_the_sources() -> None:
    stages = (DEPLOY / "Containerfile").read_text().split("\nFROM ")
    assert len(stages) == 3 and re.search(r"^USER 1000$", stages[2], re.M)
    assert "COPY . ." in stages[1] and "COPY . ." not in stages[2]


@needs_yaml
@needs_kubectl
@pytest.mark.parametrize("folder", manifests.folders(), ids=lambda folder: folder.name)
def test_every_overlay_selects_its_pods_and_stops_them_gently(folder: Path) -> None:
    resources = manifests.render(folder)
    server = pod(resources)
    (container,) = server["containers"]
    options = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert server["terminationGracePeriodSeconds"] > float(options["--drain-grace-secs"]) + 30
    assert options["--cores"] == container["resources"]["requests"]["cpu"]
    assert server["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in server["volumes"]}
    labels = {"app.kubernetes.io/name": "infer-server"}
    for kind, path in (("Service", ("selector",)), ("PodDisruptionBudget", ("selector", "matchLabels")),
                       ("NetworkPolicy", ("podSelector", "matchLabels")), ("Deployment", ("selector", "matchLabels"))):
        value = next(each["spec"] for each in resources
                     if each["kind"] == kind and each["metadata"]["name"] == "infer-server")
        for key in path:
            value = value[key]
        assert value == labels, kind
    (policy,) = (each for each in resources if each["kind"] == "NetworkPolicy")
    scrapers = policy["spec"]["ingress"][1]["from"][0]["podSelector"]["matchLabels"]
    assert scrapers == {"app.kubernetes.io/name": "prometheus"}
    deployment = next(each["spec"] for each in resources
                      if each["kind"] == "Deployment" and each["metadata"]["name"] == "infer-server")
    assert ("replicas" not in deployment) == (folder.name in ("hpa", "keda"))


@needs_yaml
@needs_kubectl
@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None,
                    reason="kubernetes-validate is not installed")
def test_the_resources_are_valid() -> None:
    outcomes = list(manifests.validated(manifests.rendered(), "1.33", None))
    assert len(outcomes) > 20 and not [wrong for _, wrong in outcomes if wrong]


def test_the_overlays_copy_of_envoys_configuration_is_equal() -> None:
    copy = DEPLOY / "kubernetes" / "overlays" / "envoy" / "envoy.yaml"
    assert copy.read_bytes() == (DEPLOY / "envoy.yaml").read_bytes()


@pytest.mark.parametrize(("command", "file"), [
    (["envoy", "--mode", "validate", "-c"], "envoy.yaml"), (["haproxy", "-c", "-f"], "haproxy.cfg"),
    (["promtool", "check", "rules"], "rules.yaml")])
def test_programs_accept_their_files(command: list[str], file: str) -> None:
    try:
        outcomes = list(manifests.checked(command[0], *command[1:], str(DEPLOY / file)))
    except manifests.NotInstalledError as error:
        pytest.skip(str(error))
    assert not [wrong for _, wrong in outcomes if wrong]


@needs_yaml
def test_queries_and_rules_name_metrics_that_a_server_has(tmp_path: Path) -> None:
    import urllib.request
    write_model(tmp_path, "m")
    with serving(tmp_path) as server, urllib.request.urlopen(
            f"http://127.0.0.1:{server.ports.metrics}/metrics") as page:
        names = {line.split()[2] for line in page.read().decode().splitlines() if line.startswith("# TYPE")}
    names |= {f"{name}_bucket" for name in names} | set(manifests.recorded().values()) | {"up"}
    rules = [rule["expr"] for group in documents("rules.yaml")[0]["groups"] for rule in group["rules"]]
    used = {name for text in (*manifests.queries().values(), *rules)
            for name in re.findall(r"\b(?:nv|process|infer|up)(?:_\w+)?\b(?![-\"])", text)}
    assert len(used) > 15 and not used - names


def test_panels_have_numbers_and_places_of_their_own() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    assert len(manifests.queries()) == len(panels) == len({panel["id"] for panel in panels})
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
