"""Tests of the server with plans for GPUs: instance groups on emulated GPUs, by Triton's client."""
from __future__ import annotations

import base64
import gc
import json
import re
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from infer_server.backend import Engine, load_plan
from infer_server.batching.batch_times import ShortBatches
from infer_server.batching.engine_executor import EngineExecutor
from infer_server.batching.request import Outcome, Request
from infer_server.batching.statistics import BatchExecution
from infer_server.engines.backends.cuda.runtime.sharing import SharedMemory
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.plan.file import write_plan
from infer_server.gpu_tensors import GpuBuffer, GpuTensor
from infer_server.repository.building import Compiler
from scripts.testing.gpu.emulated import EmulatedGpu, install
from tests.engines.compiler.small_models import node, small_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import RunningServer, serving

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(1, 8)
WANTED = np.maximum(X + 1, 0)
CONFIGS = {
    "plain": "",
    "auto": "dynamic_batching { preserve_ordering: true }",
    "second": "instance_group { kind: KIND_GPU gpus: 1 count: 2 }",
    "both": "instance_group { gpus: [ 0, 1 ] count: 2 } instance_group { kind: KIND_CPU }",
    "missing": "instance_group { kind: KIND_GPU gpus: [ 1, 7 ] }",
    "older": "instance_group { kind: KIND_GPU gpus: 2 }",
}


class Served:
    def __init__(self, server: RunningServer, gpus: list[EmulatedGpu], client: InferenceServerClient,
                 engine: Engine) -> None:
        """Start a server with an engine on the second GPU."""
        self.server, self.gpus, self.client, self.engine = server, gpus, client, engine

    def groups(self, model: str) -> list[tuple[int, list[int], int]]:
        config = self.client.get_model_config(model).config
        return [(group.kind, list(group.gpus), group.count) for group in config.instance_group]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    builder = Builder(BuildConfig(target="sm_80", max_batch=4))
    plan = builder.plan(builder.graph(small_model(
        [node("Add", "x one", "s"), node("Relu", "s", "y")], {"x": ["N", 8]}, ["y"], {"one": np.ones(1, np.float32)})))
    for name, config in CONFIGS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        write_plan(plan, folder / name / "1" / "model.plan")
    gpus = [EmulatedGpu(architecture, name=f"card {number}")
            for number, architecture in enumerate(("sm_80", "sm_89", "sm_75"))]
    with pytest.MonkeyPatch.context() as patch:
        install(patch, *gpus)
        engine = load_plan(folder / "second" / "1" / "model.plan", 1, gpu=1)
        with (serving(folder, load_plan, cores=2, allow_client_shm=True) as server,
              InferenceServerClient(server.address) as client):
            yield Served(server, gpus, client, engine)


GPU, CPU = 1, 2         # values of ModelInstanceGroup.Kind


def test_instances_are_on_the_gpus_that_their_groups_name_or_on_all_that_run_the_plan(served: Served) -> None:
    assert served.groups("plain") == [(GPU, [0, 1], 1)]
    assert served.groups("auto") == [(GPU, [0], 1)]         # one instance keeps the order
    assert served.groups("second") == [(GPU, [1], 2)]
    assert served.groups("both") == [(GPU, [0, 1], 2), (CPU, [], 2)]
    # Each of three plans has its constants, each of its contexts an arena; the second one's is loaded once more.
    assert [len(gpu.allocated) for gpu in served.gpus] == [3 + 1 + 1 + 2, 1 + 3 + 1 + 2 + 2, 0]


def test_a_gpu_that_is_not_there_or_too_old_is_an_error_that_names_those_there_are(served: Served) -> None:
    failures = served.server.server.failures()
    assert "there is no GPU 7; this machine has GPU 0 (card 0), GPU 1 (card 1), GPU 2 (card 2)" in failures[
        "missing version 1"]
    assert re.search(r"GPU 2 \(card 2\) does not run the model: built for 'sm_80', but this GPU is sm_75",
                     failures["older version 1"])


def test_every_instance_gives_the_same_and_what_is_said_of_it_names_its_gpu(served: Served) -> None:
    def counted(what: str, model: str) -> dict[str, int]:
        metrics = page(served, served.server.ports.metrics, "metrics")
        found = re.findall(rf'nv_inference_{what}{{(\S*)model="{model}",version="1"}} (\d+)', metrics)
        return {gpu: int(count) for gpu, count in found}

    gpus = {"plain": ['gpu_uuid="GPU-0",', 'gpu_uuid="GPU-1",'], "second": ['gpu_uuid="GPU-1",'],
            "both": ['gpu_uuid="GPU-0",', 'gpu_uuid="GPU-1",', ""]}
    for model in gpus:
        before = counted("exec_count", model)
        for _ in range(6):
            tensor = tritonclient.grpc.InferInput("x", list(X.shape), "FP32")
            tensor.set_data_from_numpy(X)
            np.testing.assert_array_equal(served.client.infer(model, [tensor]).as_numpy("y"), WANTED)
        after = counted("exec_count", model)
        assert list(after) == gpus[model] and sum(after.values()) == sum(before.values()) + 6
    assert list(counted("request_success", "second")) == gpus["second"]
    said = served.client.get_inference_statistics("both").model_stats[0].memory_usage
    assert sorted((each.type, each.id) for each in said) == [("CPU", 0), ("GPU", 0), ("GPU", 1)]
    assert all(each.byte_size for each in said)
    models = json.loads(page(served, served.server.ports.http, "status/data.json"))["models"]
    assert [each["instances"] for each in models if each["name"] == "both"] == [
        "2 on GPU 0 (card 0), 2 on GPU 1 (card 1), 2"]


def test_an_execution_on_a_gpu_never_holds_up_the_event_loop(
        served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[tuple[int | None, threading.Thread]] = []
    execute = EngineExecutor.execute

    def recorded(executor: EngineExecutor, batch: list[Request]) -> tuple[list[Outcome], BatchExecution]:
        outcomes, execution = execute(executor, batch)
        executed.append((execution.gpu, threading.current_thread()))
        return outcomes, execution
    monkeypatch.setattr(EngineExecutor, "execute", recorded)
    monkeypatch.setattr(ShortBatches, "is_short", lambda short, items: True)
    for model in ("plain", "both"):
        tensor = tritonclient.grpc.InferInput("x", list(X.shape), "FP32")
        tensor.set_data_from_numpy(X)
        served.client.infer(model, [tensor])
    assert executed[0][0] is not None and len(executed) == 2
    assert all(f"on GPU {gpu}" in thread.name for gpu, thread in executed if gpu is not None)


def test_a_plan_is_tuned_by_a_process_of_its_own_where_its_configuration_says_so(
        served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    run = Compiler._run

    def recorded(compiler: Compiler, command: list[str]) -> tuple[str, int]:
        commands.append(command)
        return run(compiler, command)
    monkeypatch.setattr(Compiler, "_run", recorded)
    shutil.copytree(served.server.folder / "second", tmp_path / "second")
    (tmp_path / "second" / "config.pbtxt").write_text(
        CONFIGS["second"] + 'parameters { key: "retune" value { string_value: "true" } }')
    with serving(tmp_path, load_plan) as server, InferenceServerClient(server.address) as client:
        tensor = tritonclient.grpc.InferInput("x", list(X.shape), "FP32")
        tensor.set_data_from_numpy(X)
        np.testing.assert_array_equal(client.infer("second", [tensor]).as_numpy("y"), WANTED)
    (command,) = commands
    assert command[2:4] == ["infer_server.cli.relower_plan", str(tmp_path / "second" / "1" / "model.plan")]
    assert command[6:] == ["--cache-dir", str(tmp_path / ".cache"), "--retune", "1"]


def page(served: Served, port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.parametrize("protocol", [tritonclient.grpc, tritonclient.http])
def test_inputs_and_outputs_may_lie_in_memory_of_a_gpu_that_clients_register(served: Served, protocol: Any) -> None:
    gpu, ports = served.gpus[1], served.server.ports
    gpu.use()
    place = gpu.allocate(96)
    handle = base64.b64encode(gpu.share(place))
    port = ports.grpc if protocol is tritonclient.grpc else ports.http
    with protocol.InferenceServerClient(f"127.0.0.1:{port}") as client:
        for name, raw, number, size, why in (
                ("r", handle, 7, 96, "there is no GPU 7; this machine has 0, 1, 2"),
                ("r", handle, 0, 96, "invalid resource handle"),
                ("r", b"aGFuZGxl", 1, 96, "a CUDA IPC handle has 64 bytes, not 6"),
                ("r", handle, 1, 97, "a byte_size of 97; the handle's memory has 96"),
                ("r", handle, 1, 0, "a byte_size of 0")):
            with pytest.raises(InferenceServerException, match=why):
                client.register_cuda_shared_memory(name, raw, number, size)
        assert eventually(lambda: not is_open(gpu))
        client.register_cuda_shared_memory("r", handle, 1, 96)
        with pytest.raises(InferenceServerException, match="'r' already in manager"):
            client.register_cuda_shared_memory("r", handle, 1, 96)
        as_json = {"as_json": True} if protocol is tritonclient.grpc else {}
        assert "'byte_size': " in str(client.get_cuda_shared_memory_status("r", **as_json))
        assert "'r'" not in str(client.get_system_shared_memory_status(**as_json))
        for model, through_the_host in (("second", 0), ("auto", 32), ("plain", None)):     # on it; on another; on both
            gpu.write(place, np.concatenate([X, X * 0], axis=1))
            gpu.cuda.copies.clear()
            client.infer(model, [placed(protocol, 32)], outputs=[wanted(protocol, 32)])
            copies = dict(gpu.cuda.copies)
            np.testing.assert_array_equal(gpu.bytes_at(place + 32, 32).view(np.float32), WANTED[0])
            if through_the_host is not None:
                assert copies == ({"to the host": 32, "from the host": 32} if through_the_host else {"on the GPU": 64})
        with pytest.raises(InferenceServerException, match="Invalid offset"):
            client.infer("plain", [placed(protocol, 32)], outputs=[wanted(protocol, 80)])
        client.unregister_system_shared_memory()
        assert gpu.opened
        client.unregister_cuda_shared_memory("r")
        assert eventually(lambda: not is_open(gpu))
        with pytest.raises(InferenceServerException, match="Unable to find"):
            client.infer("plain", [placed(protocol, 32)])
    gpu.free(place)


def test_a_batch_is_put_together_of_what_lies_on_the_gpu_and_on_the_host(served: Served) -> None:
    """Outputs are split again, those that fit into their buffers on the GPU."""
    gpu, executor = served.gpus[1], EngineExecutor(served.engine.create_context(), ["y"], 4, gpu=1)
    gpu.use()
    memory = SharedMemory(gpu, gpu.share(gpu.allocate(256)))
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    gpu.write(memory.address, x)
    answered: list[Any] = []

    def request(inputs: Any, items: int, *room: int) -> Request:
        rooms = {"y": GpuBuffer(room[0], memory, room[1], room[2], X.dtype)} if room else {}
        nobody: Any = None
        return Request({"x": inputs}, items, None, answered.append, nobody, output_buffers=rooms)

    def there(first: int, items: int) -> GpuTensor:
        return GpuTensor(1, memory, 32 * first, (items, 8), X.dtype)

    batch = [request(x[:1], 1, 1, 128, 32), request(there(1, 2), 2), request(there(3, 1), 1, 1, 160, 31)]
    gpu.cuda.copies.clear()
    executor.execute(batch)
    assert gpu.cuda.copies == {"from the host": 32, "on the GPU": 96 + 32, "to the host": 96}
    first, second, third = (found["y"] for found in answered)
    assert isinstance(first, GpuTensor)
    np.testing.assert_array_equal(
        np.concatenate([gpu.bytes_at(memory.address + 128, 32).view(np.float32).reshape(1, 8), second, third]),
        x + 1)
    np.testing.assert_array_equal(first.array(), x[:1] + 1)
    executor.execute([request(there(0, 4), 4, 0, 128, 128)])        # the room is on another GPU: nothing stays placed
    np.testing.assert_array_equal(answered[-1]["y"], x + 1)
    executor.close()


def is_open(gpu: EmulatedGpu) -> bool:
    gc.collect()            # what an error's frames hold
    return bool(gpu.opened)


def placed(protocol: Any, size: int) -> Any:
    tensor = protocol.InferInput("x", list(X.shape), "FP32")
    tensor.set_shared_memory("r", size)
    return tensor


def wanted(protocol: Any, offset: int) -> Any:
    output = protocol.InferRequestedOutput("y")
    output.set_shared_memory("r", 32, offset=offset)
    return output
