"""load-test by every way to infer-server itself, and two ways beside each other."""
from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from clients.load.arguments import parse
from clients.load.cli import CANNOT_RUN, FAILED, FINE, main
from clients.load.transports import over_shared_memory, split_url
from tests.infer_server.numpy_engine import write_model
from tests.infer_server.serving import RunningServer, serving

FAST = ["--duration", "0.2", "--warmup", "0"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "affine")
    write_model(folder, "picky", kind="fails_on_negative")
    with serving(folder, allow_client_shm=True) as running:
        yield running


def urls(server: RunningServer) -> dict[str, str]:
    return {"grpc": server.address, "http": f"http://127.0.0.1:{server.ports.http}", "shm": f"shm://{server.address}"}


@pytest.mark.parametrize("way", ["grpc", "http", "shm"])
def test_every_way_sends_the_data_and_counts_what_fails(server: RunningServer, tmp_path: Path, way: str,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", x=np.array([[1, 2, 3, 4], [5, 6, 7, -8]], np.float32))
    arguments = ["-m", "picky", "-u", urls(server)[way], *FAST,
                 "--input-data", str(tmp_path / "x.npz"), "--json", str(tmp_path / "r.json")]
    assert main(arguments) == FAILED
    (level,) = json.loads((tmp_path / "r.json").read_text())["levels"]
    assert set(level["errors"]) == {"INTERNAL"}     # of the second request alone
    assert abs(level["requests"] - level["errors"]["INTERNAL"]) <= 2 and level["server"]["executions"] > 0
    assert "a negative value" in capsys.readouterr().out
    assert main(["-m", "nobody", "-u", urls(server)[way]]) == CANNOT_RUN
    assert "nobody" in capsys.readouterr().err


def test_two_ways_are_measured_under_the_same_loads_and_compared(
        server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    http, shm = urls(server)["http"], urls(server)["shm"]
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "csv", "plot")}
    assert main(["-m", "affine", "-u", http, "--against", shm, *FAST, "--concurrency", "2",
                 *(part for kind, path in files.items() for part in (f"--{kind}", str(path)))]) == FINE
    assert f"A: {http}, B: {shm}" in capsys.readouterr().out
    first = json.loads(files["json"].read_text())
    assert [len(each["levels"]) for each in (first, first["against"])] == [1, 1]
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [(row["url"], row["concurrency"]) for row in rows] == [(http, "2"), (shm, "2")]
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


def test_shared_memory_is_asked_for_where_tensors_lie_and_given_back(
        server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SharedMemory] = []

    def make(*arguments: object) -> SharedMemory:
        made.append(SharedMemory(*arguments))       # type: ignore[arg-type]
        return made[-1]

    seen: list[bytes] = []
    monkeypatch.setattr(over_shared_memory, "SharedMemory", make)
    monkeypatch.setattr(SharedMemory, "unlink", lambda region, unlink=SharedMemory.unlink: (
        seen.append(Path("/dev/shm", region.name).read_bytes()), unlink(region)))
    np.savez(tmp_path / "x.npz", x=np.array([[1, 2, 3, 4]], np.float32))
    assert main(["-m", "affine", "-u", urls(server)["shm"], *FAST, "--input-data", str(tmp_path / "x.npz")]) == FINE
    assert [np.frombuffer(region[:16], np.float32).tolist() for region in seen] == [[1, 2, 3, 4], [3, 5, 7, 9]]
    assert not any(Path("/dev/shm", region.name).exists() for region in made)
    with triton.InferenceServerClient(server.address) as client:
        assert not client.get_system_shared_memory_status().regions


def test_a_name_that_grpc_resolves_is_an_address() -> None:
    for scheme, name in (("grpc", "unix:/run/s.sock"), ("grpc", "unix:///run/s.sock"), ("grpc", "dns:///localhost:8001"),
                         ("shm", "unix:///run/s.sock")):
        url = name if scheme == "grpc" else f"{scheme}://{name}"
        assert split_url(parse(["-m", "m", "-u", url]).url) == (scheme, name)


@pytest.mark.parametrize("url", ["localhost", "ftp://localhost:21", "localhost:http", "http://unix:/run/s.sock"])
def test_an_address_that_is_none_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["-m", "m", "-u", url])
    assert refused.value.code == CANNOT_RUN and "is not HOST:PORT" in capsys.readouterr().err
