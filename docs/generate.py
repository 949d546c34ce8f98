"""Generate the pages of the site that the source already says: mkdocs-gen-files runs this file at each build.

The functions return Markdown and need no MkDocs: tests/docs/test_generated_pages.py calls them.
"""
from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import dirname, relpath
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from infer_server.__main__ import COMMANDS, parser_of  # noqa: E402
from infer_server.config.fields import LIMITS, TREATMENTS, Verdict, treatment  # noqa: E402
from infer_server.engines.lowering import lower  # noqa: E402, F401  (fills the tables of rules)
from infer_server.engines.lowering.calls.calls import FALLBACK_RULES, RULES  # noqa: E402
from infer_server.engines.ops import OPS, Op, Stored  # noqa: E402

PACKAGES = ("engines", "calibration", "infer_server", "protos", "clients")
STORED = {Stored.FLOAT: "as in the model", Stored.ALIKE: "any, as its input",
          Stored.CONVERTED: "float32, 16 bits, INT8"}

# Documents at the root of the repository, and their pages.
ROOT_PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "internals/architecture.md",
              "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md",
              "CODE_OF_CONDUCT.md": "code-of-conduct.md"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; `|` in a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
                     for line in lines) + "\n"


# ---- commands
def cli_page(command: str) -> str:
    """Return the options of one command, as its parser describes them."""
    parser = parser_of(command)
    names = [str(action.metavar or action.dest) for action in parser._positionals._group_actions
             if not action.option_strings]
    usage = " ".join([command, "[options]", *names])
    parts = [f"# {command}\n", f"{(parser.description or '').strip()}\n", f"```text\n{usage}\n```\n"]
    for group in parser._action_groups:
        if rows := [_option(parser, action) for action in group._group_actions if action.help is not argparse.SUPPRESS]:
            parts += [f"## {(group.title or 'options').capitalize()}\n", table(["option", "meaning"], rows)]
    return "\n".join(parts)


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    names = " ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
    if action.choices:
        value = "|".join(map(str, action.choices))
    else:
        value = str(action.metavar or action.dest.upper()) if action.nargs != 0 and action.option_strings else ""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"{names} {_code(value)}".strip(), _escaped(text)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _escaped(text: str) -> str:
    """Keep <placeholders>, *patterns* and [indices] of a text from being read as HTML or Markdown; `code` stays."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([<*_\[])", r"\\\1", part) for part in parts)


# ---- config.pbtxt
def config_page() -> str:
    """Return every field of a model's configuration, what becomes of it here, and its limit."""
    from google.protobuf.descriptor import FieldDescriptor

    from infer_server.protos import model_config

    def paths(fields: Iterable[FieldDescriptor], above: str, seen: frozenset[str]) -> Iterator[str]:
        for field in fields:
            path, message = f"{above}{field.name}", field.message_type
            yield path
            if message and not message.GetOptions().map_entry and message.full_name not in seen:
                yield from paths(message.fields, f"{path}.", seen | {message.full_name})

    rows = []
    for path in paths(model_config.ModelConfig.DESCRIPTOR.fields, "", frozenset()):
        try:
            said = treatment(path)
        except KeyError:            # a message that only holds fields with lines of their own
            continue
        limit = f"{LIMITS[path]:,}" if LIMITS.get(path) is not None else ""
        rows.append((f"`{path}`", said.verdict.value, limit, _escaped(said.note)))
    counts = [sum(said.verdict is verdict for said in TREATMENTS.values()) for verdict in Verdict]
    summary = ", ".join(f"{count} {verdict.value}" for count, verdict in zip(counts, Verdict, strict=True))
    return f"""# Fields of config.pbtxt

Each line holds for a field and for all fields below it that have no line of their own ({summary}).

* **served**: the field means what it means in Triton.
* **mapped**: the field is translated to an option of this server with the same purpose.
* **advisory**: the field is kept and reported in the log; the model works without it.
* **refused**: the model would not work as its author means; the error says what to write instead.

`infer-server --check DIR` prints the lines that hold for your own repository. What the served fields do is explained in
[Model configuration](model-configuration.md).

{table(["field", "verdict", "limit", "note"], rows)}"""


# ---- operators
def operators_page() -> str:
    """Return every operator that the compiler knows, and how it is compiled."""
    import onnx

    from infer_server.engines.frontend.operators.extension import EXTENSIONS
    from infer_server.engines.frontend.operators.normalise import RULES as FORMS

    standard = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    rows = [(_code(name), how_compiled(name, OPS.get(name)), STORED[OPS[name].stored] if name in OPS else "",
             "yes" if name in OPS and OPS[name].epilogue else "", _summary(OPS.get(name)))
            for name in sorted(standard & (set(OPS) | set(FORMS)))]
    others = sorted(standard - set(OPS) - set(FORMS))
    extensions = [(_code(domain), ", ".join(_code(op) for name, op in sorted(EXTENSIONS) if name == domain))
                  for domain in sorted({domain for domain, _ in EXTENSIONS})]
    return f"""# Operators

How each ONNX operator is compiled, as the registries in `engines/ops`, `engines/lowering/rules` and
`engines/frontend/operators` have it (onnx {onnx.__version__}).

* **kernel**: a lowering rule makes problems for which the CPU backend has tuned kernels.
* **loops**: compiled as generated loops.
* **kernel or loops**: a kernel in the usual forms, generated loops for the others.
* **view or rewritten**: no kernel of its own. The node becomes a view of memory, is rewritten into other operators by
  a pass, or runs on the reference.
* **rewritten**: the importer writes the node as other operators of this table.

"Stored types" are those in which kernels read and write the tensors. "Epilogue" marks operators that fuse into the
kernel before them. `build-engine` says of your model which nodes run on the NumPy reference, and why.

{table(["operator", "compiled as", "stored types", "epilogue", "meaning"], rows)}
## Operators that run on the reference

These are evaluated by the onnx package, by the host between the segments of a program, or refused. The build says
which:

{", ".join(map(_code, others))}.

## Operators of other domains

{table(["domain", "operators"], extensions)}"""


def how_compiled(name: str, op: type[Op] | None) -> str:
    if op is None:
        return "rewritten"
    if name in RULES:
        return "kernel or loops" if name in FALLBACK_RULES else "kernel"
    return "loops" if name in FALLBACK_RULES else "view or rewritten"


def _summary(op: type[Op] | None) -> str:
    """Return the first sentence of the class's own docstring."""
    text = (op.__dict__.get("__doc__") or "") if op else ""
    return _escaped(first_sentence(text))


def first_sentence(text: str) -> str:
    """Return the text up to the first full stop that ends a sentence, or its first paragraph, on one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[^.][.])\s(?=[A-Z])", paragraph, maxsplit=1)[0]


# ---- metrics and routes
def metrics_page() -> str:
    """Return the names of all metrics, read from the modules that write them."""
    rows = [(f"`{name}`", kind, _escaped(text)) for name, kind, text in metric_families()]
    return f"""# Metrics

Families on `http://HOST:8002/metrics`, in Prometheus's text format, under Triton's names where Triton has them. Metrics
of a model have the labels `model` and `version`, and those of its `metric_tags`. [Metrics to
watch](../howto/metrics.md) says which to scale and alert on.

{table(["metric", "type", "meaning"], rows)}"""


def metric_families() -> list[tuple[str, str, str]]:
    """(name, type, help) of every family, from a page rendered for a model that has none of its own values yet."""
    from infer_server.endpoints import metrics
    from infer_server.observing.gpus import _GAUGES, COUNTERS
    families: dict[str, tuple[str, str, str]] = {}
    tables: tuple[Mapping[str, tuple[str, object]], ...] = (
        metrics._COUNTS, metrics._EXECUTIONS, metrics._CACHE_COUNTERS)
    for names in tables:
        families |= {name: (name, "counter", text) for name, (text, _) in names.items()}
    for durations in (metrics._DURATIONS, metrics._CACHE_DURATIONS):
        families |= {name: (name, "counter", f"Cumulative {text} in microseconds")
                     for name, (text, _) in durations.items()}
    for prefix, phases in (("nv_inference_", metrics.PHASES), ("nv_", metrics.CACHE_PHASES)):
        for phase in phases:
            name = f"{prefix}{phase}_summary_us"
            what = phase.replace("_", " ")
            families[name] = (name, "summary", f"Quantiles of {what} durations in microseconds, last minute")
    families |= {name: (name, "counter" if name in COUNTERS else "gauge", text) for name, (text, _) in _GAUGES.items()}
    for path in ("endpoints/metrics.py", "endpoints/status/state.py", "observing/machine.py"):
        for name, kind, text in _literal_families((ROOT / "infer_server" / path).read_text()):
            families.setdefault(name, (name, kind, text))
    return [families[name] for name in sorted(families)]


def _literal_families(source: str) -> Iterator[tuple[str, str, str]]:
    """Names, types and help texts that a module writes as literals: in calls of _family, tuples and yields."""
    constants = {target.id: node.value.value for node in ast.parse(source).body
                 if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                 for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(ast.parse(source)):
        items = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else ()
        texts = [constants.get(item.id) if isinstance(item, ast.Name) else getattr(item, "value", None)
                 for item in items]
        name, *rest = [text for text in texts if isinstance(text, str)] or [""]
        if re.fullmatch(r"(nv|infer|process)_\w+", name) and not name.endswith("_"):
            help_texts = [text for text in rest if " " in text]
            if help_texts:
                stated = next((text for text in rest if text in ("counter", "gauge", "histogram")), "")
                yield name, stated or ("counter" if name.endswith("_total") else "gauge"), help_texts[0]


def routes_page() -> str:
    """Return the paths of the HTTP port and the methods of the gRPC port."""
    from infer_server import protos
    from infer_server.endpoints.restrictions import CATEGORY_BY_CALL

    rows = [(f"`{method}`", f"`{path}`", category) for method, path, category in http_routes()]
    calls = [(f"`{method.name}`", CATEGORY_BY_CALL[method.name]) for method in protos.methods(protos.INFERENCE_SERVICE)]
    return f"""# Routes of the protocol

`--http-restricted-api` and `--grpc-restricted-protocol` restrict calls by category ([Secure it](../howto/secure.md)).
`[...]` marks a part that may be left out. Requests and answers are described in [Requests](requests.md).

## HTTP

{table(["method", "path", "category"], rows)}
The metrics port serves `GET /metrics`, `GET /v2/health/live` and `GET /v2/health/ready`.

## gRPC

Methods of `{protos.INFERENCE_SERVICE}`. The port also serves `{protos.HEALTH_SERVICE}`, and with `--grpc-reflection`
the reflection service.

{table(["method", "category"], calls)}"""


def http_routes() -> list[tuple[str, str, str]]:
    """Return (method, path, category) of each route in infer_server/endpoints/http/routes.py."""
    from infer_server.endpoints.http import routes
    from infer_server.endpoints.http.server_pages import status_pages
    tree = ast.parse(Path(routes.__file__).read_text())
    found = [("POST", readable(f"{routes._MODEL}/{how}"), "inference")
             for how in ("infer", "generate", "generate_stream")]
    found += [("GET", path, "statistics") for path in status_pages(SimpleNamespace(current=None, past=None))]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "_Routes"]
    for line in (line for call in calls for line in call.args[0].elts if isinstance(line, ast.Tuple)):
        category, method, pattern = (
            eval(compile(ast.Expression(part), routes.__file__, "eval"), vars(routes)) for part in line.elts[:3])
        if category:
            found.append(("POST" if method == routes.CHANGE else method, readable(pattern), category))
    return found


def readable(pattern: str) -> str:
    """Rewrite a path's regular expression for readers: `(?P<model>[^/]+)` as `MODEL`, optional groups in brackets."""
    text = re.sub(r"\(\?P<(\w+)>\[\^/\]\+\)", lambda match: match[1].upper(), pattern)
    text = re.sub(r"\(\?P<\w+>([\w|]+)\)", r"{\1}", text)
    text = re.sub(r"\(([^()]*)\)\?", r"[\1]", text)
    text = re.sub(r"\(([^()]*)\|([^()]*)\)", r"{\1|\2}", text)
    return text.replace("/?", "").replace("\\", "")


# ---- modules
def docstring(source: str) -> str | None:
    """Return the docstring of a module, of which the rest is not parsed."""
    found = re.match(r'(?:\s*#[^\n]*\n)*\s*r?""".*?"""', source, re.DOTALL)
    return ast.get_docstring(ast.parse(found[0])) if found else None


def modules_page() -> str:
    """Return every module with the first sentence of its docstring, a table for each folder."""
    folders: dict[str, list[tuple[str, str]]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if text := docstring(path.read_text()):
                folder = str(path.parent.relative_to(ROOT))
                folders.setdefault(folder, []).append((f"`{path.name}`", _escaped(first_sentence(text))))
    parts = [f"## {folder}\n\n{table(['module', 'what it holds'], rows)}" for folder, rows in folders.items()]
    return "\n".join(["# Modules\n", "The first sentence of each module's docstring, by folder.\n", *parts])


# ---- results of benchmarks
def cases_page() -> str:
    """Return the ratios of every case in docs/benchmarks/results, a table for each file."""
    parts = ["""# Every case

Costs are medians over turns. A ratio is the time of the peer's fastest build over ours, turn by turn: median and
quartiles; above 1, ours is faster. From the files in `docs/benchmarks/results`; how they were measured:
[One inference](one-inference.md).
"""]
    for path in sorted((ROOT / "docs" / "benchmarks" / "results").glob("*.json")):
        results = json.loads(path.read_text())
        peers = sorted({name for case in results["cases"] for name in case["peers"]}, reverse=True)
        header = ["model", "precision", "batch", "ours", "unit",
                  *(cell for name in peers for cell in (name, "its build", "ratio"))]
        rows = [[case["model"], case["precision"], str(case["batch"]), f"{case['cost']:.3g}", case["unit"],
                 *(cell for name in peers for cell in _ratio_cells(case["peers"].get(name)))]
                for case in results["cases"]]
        parts += [f"## {path.stem}\n", f"`{results['command']}`, on {results['machine']}; {results['versions']}.\n",
                  table(header, rows)]
    return "\n".join(parts)


def _ratio_cells(peer: Mapping[str, float | str] | None) -> tuple[str, str, str]:
    if peer is None:
        return "failed", "", ""
    return (f"{peer['cost']:.3g}", str(peer["build"]),
            f"{peer['ratio']:.2f} ({peer['low']:.2f} to {peer['high']:.2f})")


# ---- documents at the root
def root_page(document: str) -> str:
    """Return a document of the repository's root with links that hold on its page."""
    page = ROOT_PAGES[document]

    def target(match: re.Match[str]) -> str:
        text, link = match[1], match[2]
        path, mark, anchor = link.partition("#")
        if "://" in link or not path:
            return match[0]
        inside = path.removeprefix("docs/") if path.startswith("docs/") else ROOT_PAGES.get(path)
        return f"[{text}]({relpath(inside, dirname(page) or '.')}{mark}{anchor})" if inside else f"{text} (`{path}`)"

    text = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", target, (ROOT / document).read_text())
    return re.sub(r'(src="|!\[[^\]]*\]\()docs/', r"\1", text)


def pages() -> dict[str, str]:
    """Return the path of every generated page, and its text."""
    made = {f"reference/cli/{command}.md": cli_page(command) for command in COMMANDS}
    made |= {"reference/config-fields.md": config_page(), "reference/operators.md": operators_page(),
             "reference/metrics.md": metrics_page(), "reference/routes.md": routes_page(),
             "internals/modules.md": modules_page(), "benchmarks/every-case.md": cases_page()}
    return made | {page: root_page(document) for document, page in ROOT_PAGES.items() if (ROOT / document).exists()}


def write() -> None:
    import mkdocs_gen_files
    for path, text in pages().items():
        with mkdocs_gen_files.open(path, "w") as file:
            file.write(text)


if __name__ == "<run_path>":        # as mkdocs-gen-files runs it
    write()
