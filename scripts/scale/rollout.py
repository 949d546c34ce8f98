"""Count the calls that a plain client loses while each of three servers is terminated and started again.

    python -m scripts.scale rollout                             # libnghttp2, grpcio, and two frontend workers
    python -m scripts.scale rollout --front grpcio --open-at-once

The client is grpcio's channel with round_robin over the three addresses: no health checks, no retries, no proxy. The
model is a Python model that takes two seconds to load. Limit: no call is lost.
"""
from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from infer_server.protos import inference
from scripts.scale._process import ServerProcess

MODEL = "echo"
DEADLINE_SECS = 10.0
_CONFIG = """backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }"""
_CODE = """
import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, arguments):
        time.sleep(2)
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor(
            "y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())]) for request in requests]
"""
_SETTLING_SECS = 2.0            # time in which the client finds a server that is back
FRONTS = {"nghttp2": (), "grpcio": ("--grpc-front", "grpcio"), "workers": ("--workers", "2")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--front", choices=FRONTS, action="append", help="how servers serve gRPC; can be repeated")
    parser.add_argument("--concurrency", type=int, default=6, metavar="N")
    parser.add_argument("--open-at-once", action="store_true", help="servers listen while they load, as by default")


def run(arguments: argparse.Namespace) -> int:
    lost = 0
    for front in arguments.front or FRONTS:
        options = (*FRONTS[front], f"--listen-when-ready={'false' if arguments.open_at_once else 'true'}")
        ends = _rollout(options, arguments.concurrency)
        lost += ends.total() - ends["OK"]
        print(f"{front}: {ends.total() - ends['OK']} of {ends.total()} calls lost; bar 0. {json.dumps(ends)}",
              flush=True)
    return 1 if lost else 0


def _rollout(options: tuple[str, ...], concurrency: int) -> Counter[str]:
    """Return the number of calls by outcome during a rollout over three servers."""
    with TemporaryDirectory() as folder:
        models = Path(folder, "models")
        (models / MODEL / "1").mkdir(parents=True)
        (models / MODEL / "config.pbtxt").write_text(_CONFIG)
        (models / MODEL / "1" / "model.py").write_text(_CODE)
        servers = [ServerProcess(str(models), Path(folder, f"log{number}"), *options) for number in range(3)]
        try:
            for server in servers:
                server.start()
            with _load([server.address for server in servers], concurrency) as ends:
                time.sleep(_SETTLING_SECS)
                for server in servers:
                    if status := server.terminate():
                        ends[f"exit status {status}"] += 1
                    server.start()
                    time.sleep(_SETTLING_SECS)
            return ends
        finally:
            for server in servers:
                server.terminate()


@contextmanager
def _load(addresses: list[str], concurrency: int) -> Iterator[Counter[str]]:
    """Call the model in a closed loop until the block ends; yields a count of how calls ended."""
    ends, is_over = Counter[str](), threading.Event()
    request = inference.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(bytes(16))
    data = request.SerializeToString()
    config = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
    channel = grpc.insecure_channel(f"ipv4:{','.join(addresses)}", [
        ("grpc.service_config", config), ("grpc.use_local_subchannel_pool", 1)])
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    def repeat() -> None:
        while not is_over.is_set():
            try:
                call(data, timeout=DEADLINE_SECS)
                ends["OK"] += 1
            except grpc.RpcError as error:
                ends[f"{error.code().name}: {error.details()[:100]}"] += 1
                time.sleep(0.002)

    grpc.channel_ready_future(channel).result(DEADLINE_SECS)
    threads = [threading.Thread(target=repeat) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    try:
        yield ends
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        channel.close()
