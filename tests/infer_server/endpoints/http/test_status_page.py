"""Tests of the status page: its data, and the page in a real browser."""
from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from infer_server.endpoints.http.server_pages import _FILES
from infer_server.endpoints.status.history import History
from scripts.testing.numpy_engine import write_model
from tests.infer_server.endpoints.http import browser
from tests.infer_server.endpoints.http.plain import CLOSE, ask
from tests.infer_server.endpoints.http.test_inference import X, tensor
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import WORKERS, RunningServer, serving

STATIC = Path(__file__).parents[4] / "infer_server" / "endpoints" / "status" / "static"
HOSTILE = "<img src=x onerror=alert(1)>"


def get(server: RunningServer, path: str, method: str = "GET") -> tuple[dict[str, str], bytes]:
    """Return the response headers, with names in lower case, and the body."""
    head, _, body = ask(server, f"{method} {path} HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode()).partition(
        b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    assert " 200 " in first, head
    return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}, body


def data(server: RunningServer) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(get(server, "/status/data.json")[1])
    return answer


def of(server: RunningServer, name: str) -> dict[str, Any]:
    (model,) = [model for model in data(server)["models"] if model["name"] == name]
    return dict(model)


def test_the_page_runs_its_own_files_and_no_others(server: RunningServer) -> None:
    for path, (name, content_type) in _FILES.items():
        headers, body = get(server, path)
        assert headers["content-type"] == content_type and body == (STATIC / name).read_bytes()
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    page = get(server, "/")[1].decode()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\son\w+=|style=|http-equiv|https?://", page)
    assert get(server, "/", "HEAD")[1] == b""


def test_the_page_is_small() -> None:
    assert sum(len((STATIC / name).read_bytes()) for name, _ in _FILES.values()) < 30_000


def test_the_data_has_models_states_failures_and_batches(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    before = of(server, "affine")
    client.infer("affine", [tensor(np.repeat(X, 3, 0))])
    after = of(server, "affine")
    assert after["requests"] == before["requests"] + 1 and after["items"] == before["items"] + 3
    assert after["state"] == "READY" and after["precision"] == "fp32" and after["built_secs"] > 1e9
    assert after["memory_bytes"] > 0 and after["load_secs"] >= after["warmup_secs"] >= 0
    assert any(size == 3 and count and ms > 0 for size, count, ms in after["batches"])
    assert sum(after["closed"].values()) and len(after["latencies_ms"]) == 3
    with pytest.raises(Exception, match="negative"):
        client.infer("fragile", [tensor(-X)])
    assert of(server, "fragile")["failures"]["BACKEND"] >= 1
    corrupt = of(server, "corrupt")
    assert corrupt["state"] == "UNAVAILABLE" and "corrupt/1/model.plan" in corrupt["reason"]
    whole = data(server)["server"]
    assert whole["inflight_limit_bytes"] and whole["versions"]["UNAVAILABLE"] == 1
    assert all(each["resident_bytes"] > 0 for each in whole["processes"].values())
    assert len(whole["processes"]) == 1 + (whole["workers"] if whole["workers"] > 1 else 0)


def test_a_model_that_is_loaded_again_counts_anew_under_another_revision(tmp_path: Path) -> None:
    write_model(tmp_path, "affine")
    with (serving(tmp_path, explicit_control=True, load_models=None) as server,
          triton.InferenceServerClient(f"127.0.0.1:{server.ports.http}") as client):
        client.infer("affine", [tensor(X)])
        before = of(server, "affine")
        (tmp_path / "affine" / "1" / "model.plan").touch()
        client.load_model("affine")
        assert eventually(lambda: of(server, "affine")["revision"] != before["revision"])
        assert of(server, "affine")["requests"] == 0


def test_the_data_of_no_model_and_of_no_repository_say_so(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert data(server)["models"] == [] and data(server)["server"]["problem"] == ""
    with serving(tmp_path / "nowhere") as server:
        problem = data(server)["server"]["problem"]
        assert "nowhere: No such file" in problem and str(tmp_path) not in problem


def test_the_history_has_rates_latencies_and_failures_of_models_in_use(
        server: RunningServer, client: triton.InferenceServerClient) -> None:
    async def sample() -> None:
        server.server._history.sample()

    server.run(sample())
    for _ in range(3):
        client.infer("affine", [tensor(X)])
    server.run(sample())
    history = json.loads(get(server, "/status/history.json")[1])
    (affine,) = [model for model in history["models"] if model["name"] == "affine"]
    assert affine["rates"][-1] > 0 and affine["latencies_ms"][-1] > 0 and affine["failures"][-1] == 0
    assert not [model for model in history["models"] if model["name"] == "small"]


def test_the_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_server.endpoints.status.history.MAX_MODELS", 2)
    for number in range(4):
        write_model(tmp_path, f"m{number}")
    with serving(tmp_path) as server:
        history = server.server._history

        async def sample() -> int:
            for _ in range(100):
                history.sample()
            return max(len(one.rates) for one in history._series.values())

        assert server.run(sample()) == 60 and len(history._series) == 2


def test_viewers_share_one_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "m")
    threads = []
    usage = "infer_server.endpoints.status.state.ServerState.usage"
    monkeypatch.setattr(usage, lambda self: threads.append(threading.current_thread().name) or {})
    with serving(tmp_path, page_cache_secs=60.0) as server:
        assert get(server, "/status/data.json") == get(server, "/status/data.json")
        assert len(threads) == 1 and threads[0] != "server", "it is made beside the event loop"


def test_the_sampler_ends_with_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        history: History = server.server._history
    assert history._timer.cancelled()


# ---- in a browser
@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    if browser.executable() is None:
        pytest.skip(f"there is none of {', '.join(browser.NAMES)} on this machine")
    with browser.page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine", precision="int8")
    write_model(repository, "a_model_with_a_rather_long_name_for_production_use", shape=[2])
    (repository / HOSTILE / "1").mkdir(parents=True)
    with serving(repository, grpc_front=WORKERS[0]) as running:
        yield running


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_fits_its_window_and_is_live_without_reloading(
        tab: browser.Page, shown: RunningServer, tmp_path: Path, width: int, scheme: str) -> None:
    tab.show(f"http://127.0.0.1:{shown.ports.http}/", width, scheme=scheme)
    row = "[...document.querySelectorAll('#rows tr')].find(row => row.textContent.includes('affine'))"
    tab.wait_for(f"document.readyState === 'complete' && {row} !== undefined")
    tab.evaluate("window.notReloaded = true")
    with triton.InferenceServerClient(f"127.0.0.1:{shown.ports.http}") as client:
        def is_live() -> bool:
            client.infer("affine", [tensor(X)])
            return bool(tab.evaluate(f"/[1-9]/.test({row}.querySelector('.spark span').textContent)"))

        assert eventually(is_live)
    assert tab.evaluate("window.notReloaded") is True
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    text = tab.evaluate(f"{row}.textContent")
    assert "int8" in text and "built" in text and "Ready" in text
    assert tab.evaluate("document.querySelectorAll('img').length") == 0, "a name is text, whatever it is"
    assert HOSTILE in tab.evaluate("document.getElementById('rows').textContent")
    assert tab.evaluate("[...document.querySelectorAll('th')].every(th => th.scope)")
    assert tab.evaluate("[...document.querySelectorAll('table')].every(table => table.caption)")
    assert tab.evaluate("document.querySelectorAll('[aria-live], [role=status]').length") == 1
    assert tab.errors == []
    picture = tmp_path / f"status-{width}-{scheme}.png"
    tab.screenshot(picture)
    assert picture.stat().st_size > 10_000


CONTRASTS = """
(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = rgb(getComputedStyle(element).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll('body *')].filter(element => element.getClientRects().length
    && [...element.childNodes].some(child => child.nodeType === 3 && child.data.trim()));
  return texts.map(element => {
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    return [(a + .05) / (b + .05), element.className || element.tagName];
  }).sort((x, y) => x[0] - y[0])[0];
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_a_contrast_of_at_least_4_5(tab: browser.Page, shown: RunningServer, scheme: str) -> None:
    """The limit is that of https://www.w3.org/TR/WCAG22/#contrast-minimum."""
    tab.show(f"http://127.0.0.1:{shown.ports.http}/", 1280, scheme=scheme)
    tab.wait_for("document.readyState === 'complete' && document.querySelectorAll('#rows tr').length === 3")
    least, where = tab.evaluate(CONTRASTS)
    assert least >= 4.5, where


def test_the_page_says_that_its_server_has_gone(tab: browser.Page, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        tab.show(f"http://127.0.0.1:{server.ports.http}/", 1280)
        tab.wait_for("document.readyState === 'complete' && document.getElementById('state').textContent === 'Ready'")
        assert "no model" in tab.evaluate("document.getElementById('empty').textContent")
    tab.wait_for("document.getElementById('state').textContent.startsWith('No answer')")
