"""What Prometheus reads: Triton's names, and values that fit together."""
from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tritonclient.grpc as triton

from infer_server.endpoints.metrics import Metrics, MetricsSettings
from infer_server.observing.gpus import Gpus
from tests.infer_server.endpoints.test_serving import infer, scrape
from tests.infer_server.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.serving import serving

TAGS = r'metric_tags { key: "team-1" value: "a \"b\"\n" }'
LABELS = r'model="m",version="1",team_1="a \"b\"\n"'


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
    assert int(found[f"nv_cache_num_hits_per_model{{{LABELS}}}"]) == 0
    families = re.findall(r"^# TYPE (\S+) ", text, re.M)
    assert len(families) == len(set(families))


def test_families_can_be_left_out(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    with serving(tmp_path, metrics=MetricsSettings(False, False, False, False, False)) as server:
        text = scrape(server)
    assert "nv_inference_count{" in text
    assert not any(word in text for word in ("duration_us", "summary", "histogram", "nv_cpu"))


class Nvml(ModuleType):
    """NVIDIA's management library on a machine with two GPUs, one of which does not tell its power."""
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
    found = samples(rendered(Metrics(gpus=Gpus(TIMEOUT_SECS))))
    assert {name: value for name, value in found.items() if "gpu_uuid" in name} == {
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
        assert caplog.text.count("until their driver answers") == 1
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
        found = []
        for _ in range(3):
            nvml.answers.clear()
            found.append(len(await gpus.gauges()))
            nvml.answers.set()
            await gpus._reading
        return found

    assert asyncio.run(scrapes()) == [0, 6, 6]
    assert caplog.text.count("until their driver answers") == 1
