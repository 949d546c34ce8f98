"""Models that are programs, or whose inputs decide by their values, behind the server."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from engines import build_engine
from engines.ir.graph import Array
from infer_server.backend import load_plan
from tests.engines.compiler.open_models import by_onnx_runtime, random
from tests.engines.compiler.program_models import chosen_rows
from tests.engines.compiler.test_deciding_inputs import branching, rated
from tests.infer_server.serving import serving

TYPES = {"float32": "FP32", "int64": "INT64"}


def answer(client: triton.InferenceServerClient, model: str, feeds: dict[str, Array]) -> Array:
    tensors = []
    for name, array in feeds.items():
        tensors.append(triton.InferInput(name, list(array.shape), TYPES[array.dtype.name]))
        tensors[-1].set_data_from_numpy(array)
    found: Array = client.infer(model, tensors).as_numpy("y")
    return found


def test_results_have_as_many_rows_as_the_data_say(tmp_path: Path) -> None:
    models = {"rows": chosen_rows(), "rates": branching()}
    for name, model in models.items():
        (tmp_path / name / "1").mkdir(parents=True)
        build_engine(model, timing=False, cache=False).save(tmp_path / name / "1" / "model.plan")
    feeds = [("rows", {"x": random(9, 6)}), ("rows", {"x": random(5, 6, seed=8)}), ("rates", rated(1, 8000)),
             ("rates", rated(1, 16000))]
    with serving(tmp_path, load_plan) as server, triton.InferenceServerClient(server.address) as client:
        (output,) = client.get_model_metadata("rows").outputs
        assert list(output.shape)[-1:] in ([4], [-1])
        for name, feed in feeds:
            np.testing.assert_allclose(answer(client, name, feed), by_onnx_runtime(models[name], feed)["y"], rtol=1e-4,
                                       atol=1e-4, strict=True)
