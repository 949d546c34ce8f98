"""What Prometheus reads: Triton's names, and values that fit together."""
from __future__ import annotations

import re
from pathlib import Path

import tritonclient.grpc as triton

from infer_server.endpoints.metrics import MetricsSettings
from tests.infer_server.endpoints.test_serving import infer, scrape
from tests.infer_server.numpy_engine import write_model
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
    with serving(tmp_path, metrics=MetricsSettings(False, False, False, False)) as server:
        text = scrape(server)
    assert "nv_inference_count{" in text
    assert not any(word in text for word in ("duration_us", "summary", "histogram", "nv_cpu"))
