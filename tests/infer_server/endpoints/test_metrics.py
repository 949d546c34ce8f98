"""Metrics have Triton's names, and their values are consistent with each other."""
from __future__ import annotations

import asyncio
import math
import queue
import re
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from infer_server.endpoints.metrics import Metrics, MetricsSettings
from infer_server.lifecycle import StartUp
from infer_server.observing.custom_metrics import CustomMetrics, MetricsOwner
from infer_server.observing.gpus import Gpus
from infer_server.workers import PeriodicValue
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import infer, scrape
from tests.infer_server.python_backend.test_python_models import HEAD, python_model
from tests.infer_server.serving import serving

TAGS = r'metric_tags { key: "team-1" value: "a \"b\"\n" }'
LABELS = r'model="m",team_1="a \"b\"\n",version="1"'


def samples(text: str) -> dict[str, str]:
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_histograms_summaries_and_gauges_fit_the_counters(tmp_path: Path) -> None:
    write_model(tmp_path, "m", config=TAGS)
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        for _ in range(3):
            infer(client)
        text = scrape(server)
    found = samples(text)
    buckets = [int(found[name]) for name in found if name.startswith("nv_inference_first_response_histogram_ms_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == 3
    assert found[f"nv_inference_first_response_histogram_ms_count{{{LABELS}}}"] == "3"
    for phase in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        low, high = (float(found[f'nv_inference_{phase}_summary_us{{{LABELS},quantile="{share}"}}'])
                     for share in ("0.5", "0.999"))
        assert 0 < low <= high
        assert found[f"nv_inference_{phase}_summary_us_count{{{LABELS}}}"] == "3"
    assert found[f"nv_inference_{phase}_summary_us_sum{{{LABELS}}}"] == found[
        f"nv_inference_{phase}_duration_us{{{LABELS}}}"]
    assert 0 <= float(found["nv_cpu_utilization"]) <= 1
    assert 0 < int(found["nv_cpu_memory_used_bytes"]) < int(found["nv_cpu_memory_total_bytes"])
    assert float(found[f"nv_model_load_duration_secs{{{LABELS}}}"]) > 0
    families = re.findall(r"^# TYPE (\S+) ", text, re.M)
    assert len(families) == len(set(families))


SLOW_TO_END = HEAD + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, y = request.get_response_sender(), pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
            while not os.path.exists(os.path.join(pb_utils.get_model_dir(), "go_on")):
                time.sleep(0.001)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TENSORS = " ".join(f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: 4 }}'
                   for kind, name in (("input", "x"), ("output", "y")))
AROUND = TENSORS + """ensemble_scheduling { step { model_name: "slow_to_end"
    input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }"""


def test_the_histogram_of_first_responses_ends_with_the_first_of_a_decoupled_model(tmp_path: Path) -> None:
    python_model(tmp_path, "slow_to_end", SLOW_TO_END, TENSORS + ' backend: "python" '
                 'model_transaction_policy { decoupled: true }')
    (tmp_path / "around" / "1").mkdir(parents=True)
    (tmp_path / "around" / "config.pbtxt").write_text(AROUND)
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        tensor = triton.InferInput("x", [4], "FP32")
        tensor.set_data_from_numpy(np.zeros(4, np.float32))
        came: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        client.start_stream(lambda result, error: came.put(error))
        client.async_stream_infer("around", [tensor])
        assert came.get(timeout=TIMEOUT_SECS) is None
        time.sleep(0.2)             # between the server's sending the first response and its having the last
        (tmp_path / "slow_to_end" / "1" / "go_on").touch()
        client.stop_stream()
        actual = samples(scrape(server))
    assert came.empty()
    for model in ("around", "slow_to_end"):
        labels = f'{{model="{model}",version="1"}}'
        assert actual[f"nv_inference_first_response_histogram_ms_count{labels}"] == "1"
        first_ms = float(actual[f"nv_inference_first_response_histogram_ms_sum{labels}"])
        assert 0 < first_ms < int(actual[f"nv_inference_request_duration_us{labels}"]) / 1000 - 199


def test_metrics_of_the_cache_are_there_where_a_model_has_one(tmp_path: Path) -> None:
    write_model(tmp_path, "m", config="response_cache { enable: true }")
    write_model(tmp_path, "other")
    with (serving(tmp_path, explicit_control=True, load_models=["other"]) as server,
          triton.InferenceServerClient(server.address) as client):
        assert "nv_cache" not in scrape(server)
        client.load_model("m")
        for _ in range(3):
            infer(client)
        actual = {name: value for name, value in samples(scrape(server)).items() if name.startswith("nv_cache")}
    of_model = '{model="m",version="1"}'
    for kind, count in (("hit", "2"), ("miss", "1")):
        assert actual[f"nv_cache_num_{'hits' if kind == 'hit' else 'misses'}_per_model{of_model}"] == count
        assert actual[f"nv_cache_{kind}_summary_us_count{of_model}"] == count
        assert actual[f"nv_cache_{kind}_summary_us_sum{of_model}"] == actual[
            f"nv_cache_{kind}_duration_per_model{of_model}"]
        assert float(actual[f'nv_cache_{kind}_summary_us{of_model[:-1]},quantile="0.5"}}']) > 0
    assert not any("other" in name for name in actual)


def test_no_tag_of_a_model_makes_a_line_that_nobody_can_read(tmp_path: Path) -> None:
    tags = {"quantile": "q", "le": "l", "reason": "r", "team-1": "a", "team.1": "b", "model": "other", "version": "9"}
    write_model(tmp_path, "m", config="".join(
        f'metric_tags {{ key: "{name}" value: "{value}" }}' for name, value in tags.items()))
    with serving(tmp_path) as server, triton.InferenceServerClient(server.address) as client:
        infer(client)
        actual = samples(scrape(server))
    of_model = [re.findall(r'(\w+)="', name) for name in actual if 'model="m"' in name]
    assert any("quantile" in names for names in of_model) and any("le" in names for names in of_model)
    assert all(len(set(names)) == len(names) for names in of_model), "each label stands once"
    labels = '_le="l",_quantile="q",model="m",reason="r",team_1="b",version="1"'
    assert actual[f"nv_inference_request_success{{{labels}}}"] == "1"
    assert 'other' not in "".join(actual)


def test_the_state_of_the_server_and_its_start_are_told(tmp_path: Path) -> None:
    write_model(tmp_path, "m", seconds=0.01)
    (tmp_path / "broken" / "1").mkdir(parents=True)
    with serving(tmp_path, max_inflight_bytes=1 << 30) as server:
        server.server._inflight.held_bytes += 12345
        actual = samples(scrape(server))
        server.server._inflight.held_bytes -= 12345
    assert actual["infer_server_inflight_bytes"] == "12345"
    assert actual["infer_server_inflight_limit_bytes"] == str(1 << 30)
    assert actual['infer_server_state{state="ready"}'] == "1" and actual['infer_server_state{state="starting"}'] == "0"
    assert actual['infer_server_model_versions{state="READY"}'] == "1"
    assert actual['infer_server_model_versions{state="UNAVAILABLE"}'] == "1"
    warmup = float(actual['infer_server_model_warmup_duration_secs{model="m",version="1"}'])
    assert 0.01 < warmup <= float(actual['nv_model_load_duration_secs{model="m",version="1"}'])
    phases = {phase: float(actual[f'infer_server_startup_duration_secs{{phase="{phase}"}}'])
              for phase in ("listening", "loading", "warm_up")}
    assert phases["loading"] >= phases["warm_up"] > 0.01


def test_a_start_that_goes_on_is_told_as_such(tmp_path: Path) -> None:
    startup = StartUp()
    startup.took("importing", 1.5)
    with startup.phase("loading"):
        begun = startup.durations()
        time.sleep(0.001)
        assert startup.durations()["loading"] > begun["loading"] >= 0
    assert startup.durations() == startup.durations() and startup.durations()["importing"] == 1.5


def test_a_page_is_made_on_a_thread_and_given_out_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "m")
    made_on = []
    text = Metrics._text

    def noted(self: Metrics, *arguments: Any) -> str:
        made_on.append(threading.current_thread().name)
        return text(self, *arguments)

    monkeypatch.setattr(Metrics, "_text", noted)
    with serving(tmp_path, page_cache_secs=60.0) as server:
        assert scrape(server) == scrape(server)
        assert len(made_on) == 1 and made_on[0] not in ("server", threading.current_thread().name)


def test_what_is_cached_is_made_once_for_all_who_wait_and_anew_later() -> None:
    created = []

    async def ask() -> None:
        gate = asyncio.Event()

        async def make() -> int:
            created.append(0)
            await gate.wait()
            if len(created) == 2:
                raise ValueError("the second time")
            return len(created)

        cached = PeriodicValue(make, 0.02)
        requested = [asyncio.ensure_future(cached.get()) for _ in range(3)]
        await asyncio.sleep(0)
        requested[0].cancel()                   # who leaves takes nothing from the others
        gate.set()
        assert await asyncio.gather(*requested[1:]) == [1, 1] and await cached.get() == 1
        await asyncio.sleep(0.03)
        with pytest.raises(ValueError, match="the second time"):
            await cached.get()
        assert await cached.get() == 3

    asyncio.run(ask())


def test_families_can_be_left_out(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    with serving(tmp_path, metrics=MetricsSettings(False, False, False, False, False)) as server:
        text = scrape(server)
    assert "nv_inference_count{" in text
    assert not any(word in text for word in ("duration_us", "summary", "histogram", "nv_cpu"))


def test_what_a_model_measures_is_shown_however_small_it_is() -> None:
    custom, owner = CustomMetrics(), MetricsOwner()
    custom.make(owner, "learning_rate", "gauge", "", {})
    metrics = Metrics(MetricsSettings(gpu=False), custom=custom)
    for value, shown in ((3e-9, "3e-09"), (1 / 3, "0.3333333333333333"), (5.0, "5.0"), (math.nan, "NaN")):
        custom.change("learning_rate", {}, "set", value)
        assert samples(rendered(metrics))["learning_rate"] == shown


MEASURES = HEAD + """
class TritonPythonModel:
    def initialize(self, args):
        rows = pb_utils.MetricFamily("rows", "Rows", pb_utils.MetricFamily.KIND).Metric()
        rows.increment(1)
        assert rows.value() == EXPECTED

    def execute(self, requests):
        pass
"""


def test_metrics_of_a_model_that_fails_to_load_go_with_it(tmp_path: Path) -> None:
    python_model(tmp_path, "m", MEASURES.replace("KIND", "COUNTER").replace("EXPECTED", "7"), TENSORS)
    with (serving(tmp_path, explicit_control=True, load_models=None) as server,
          triton.InferenceServerClient(server.address) as client):
        assert not client.is_model_ready("m")
        (tmp_path / "m" / "1" / "model.py").write_text(MEASURES.replace("KIND", "GAUGE").replace("EXPECTED", "1"))
        client.load_model("m")
        assert samples(scrape(server))["rows"] == "1.0"


class Nvml(ModuleType):
    """Stand-in for NVIDIA's management library with two GPUs, one of which does not report its power."""
    class NVMLError(Exception):
        pass

    has_driver = True

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()

    def nvmlInit(self) -> None:                                                         # noqa: N802  (NVIDIA's names)
        self.asked.set()
        assert self.answers.wait(TIMEOUT_SECS)
        if not self.has_driver:
            raise self.NVMLError("NVML Shared Library Not Found")

    def __getattr__(self, name: str) -> object:
        assert self.answers.wait(TIMEOUT_SECS)

        def power(gpu: int) -> int:
            if gpu:
                raise self.NVMLError("Not Supported")
            return 70_500
        return {
            "nvmlDeviceGetCount": lambda: 2, "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=50),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=80, used=20 + gpu),
            "nvmlDeviceGetPowerUsage": power, "nvmlDeviceGetPowerManagementLimit": lambda gpu: 700_000,
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 1_500}[name]


def rendered(metrics: Metrics) -> str:
    return asyncio.run(metrics.render([]))


def test_gpus_have_metrics_where_there_are_some(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    actual = samples(rendered(Metrics(gpus=Gpus(TIMEOUT_SECS))))
    assert {name: value for name, value in actual.items() if "gpu_uuid" in name} == {
        'nv_gpu_utilization{gpu_uuid="GPU-0"}': "0.5", 'nv_gpu_utilization{gpu_uuid="GPU-1"}': "0.5",
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-0"}': "80", 'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"}': "80",
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-0"}': "20", 'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"}': "21",
        'nv_gpu_power_usage{gpu_uuid="GPU-0"}': "70.5",
        'nv_gpu_power_limit{gpu_uuid="GPU-0"}': "700.0", 'nv_gpu_power_limit{gpu_uuid="GPU-1"}': "700.0",
        'nv_energy_consumption{gpu_uuid="GPU-0"}': "1.5", 'nv_energy_consumption{gpu_uuid="GPU-1"}': "1.5"}
    assert "nv_gpu" not in rendered(Metrics(MetricsSettings(gpu=False)))
    nvml.has_driver = False
    with caplog.at_level("INFO"):
        metrics = Metrics(gpus=Gpus(TIMEOUT_SECS))
        assert not any("gpu" in rendered(metrics) for _ in range(2))
    assert caplog.text.count("NVML Shared Library Not Found") == 1


def test_a_driver_that_hangs_holds_up_no_event_loop_and_is_waited_for_once(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    nvml = Nvml()
    nvml.answers.clear()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    async def scrapes() -> tuple[int, int]:
        gpus = Gpus(patience_secs=0.01)
        assert [await gpus.gauges() for _ in range(3)] == [(), (), ()]
        assert caplog.text.count("until the driver answers") == 1
        gpus.patience_secs = TIMEOUT_SECS
        both = asyncio.gather(gpus.gauges(), gpus.gauges())
        await asyncio.to_thread(nvml.asked.wait)        # the loop goes on while the driver hangs
        nvml.answers.set()
        first, second = await both
        return len(first), len(second)

    assert asyncio.run(scrapes()) == (6, 6)


def test_what_a_slow_driver_says_too_late_is_what_the_next_scrape_gets(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    async def scrapes() -> list[int]:
        gpus = Gpus(patience_secs=0.01)
        actual = []
        for _ in range(3):
            nvml.answers.clear()
            actual.append(len(await gpus.gauges()))
            nvml.answers.set()
            await gpus._reading
        return actual

    assert asyncio.run(scrapes()) == [0, 6, 6]
    assert caplog.text.count("until the driver answers") == 1
