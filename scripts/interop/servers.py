"""Models for the peers, and servers of them in their own processes."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnx import TensorProto, helper

from infer_server.engines import build_engine
from scripts.interop.peers import Target, program
from scripts.stress import Running, serving

ECHO = "echo"                       # y = x, of any length
SLOW = "slow"                       # in Python: y = x after SLOW_SECS
COUNTED = "counted"                 # in Python, decoupled: x[0, 0] responses, numbered
SLOW_SECS = 1.0
LARGE = 5 << 18                     # floats of 5 MiB
COMMAND = (sys.executable, "-c", "import sys; from infer_server.cli.serve import main; sys.exit(main())")

_TENSORS = """ max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }"""
_SLOW = f"""
import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        time.sleep({SLOW_SECS})
        return [pb_utils.InferenceResponse([pb_utils.Tensor(
            "y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())]) for request in requests]
"""
_COUNTED = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0, 0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full((1, 1), i, np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_repository(folder: Path) -> None:
    """Write the models of the checks into a repository."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", "L"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], ECHO, tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / ECHO / "1").mkdir(parents=True)
    build_engine(model, max_batch=1, timing=False, cache=False).save(folder / ECHO / "1" / "model.plan")
    for name, code, more in ((SLOW, _SLOW, ""), (COUNTED, _COUNTED, " model_transaction_policy { decoupled: true }")):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(code)
        (folder / name / "config.pbtxt").write_text(f'backend: "python" {_TENSORS}{more}')


def write_certificate(folder: Path) -> Path:
    """Write the PEM files of a certificate for 127.0.0.1 and of its key; returns the former. Raises AbsentError."""
    command = [program("openssl", "apt install openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt",
               "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost", "-addext",
               "subjectAltName=IP:127.0.0.1,DNS:localhost", "-days", "2", "-keyout", folder / "server.key", "-out",
               folder / "server.pem"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "server.pem"


@contextmanager
def server(repository: Path, *options: str, certificate: Path | None = None) -> Iterator[tuple[Running, Target]]:
    """Run a server, both of its ports encrypted if there is a certificate."""
    for each in ("grpc", "http") if certificate else ():
        key = str(certificate.with_suffix(".key"))
        options += (f"--{each}-use-ssl", f"--{each}-server-cert", str(certificate), f"--{each}-server-key", key)
    with serving(repository, "--cores", "1", "--drain-grace-secs", "0", *options, command=COMMAND) as running:
        yield running, Target(running.address, *(f"127.0.0.1:{port}" for port in (
            running.http_port, running.metrics_port)), certificate)
