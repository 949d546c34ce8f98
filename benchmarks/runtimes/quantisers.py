"""INT8 quantisers of the peers, each run in a process of its own.

    python -m benchmarks.runtimes.quantisers NAME MODEL.onnx ITEMS.npz OUTPUT

ITEMS.npz holds calibration items as `save_items` writes them. The process isolates side effects of quantisers: they
start threads that a cycle counter opened later would not see, change global settings, and may crash on a model.
"""
from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runtimes.runtimes import OPENVINO, ORT, Feed

PER_CHANNEL_OPSET = 13      # first opset whose QuantizeLinear has an axis
TARGET_OPSET = 17
RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
ORT_STRIDE = 8              # items whose tensors ONNX Runtime keeps until it updates its histograms: 64 can take 13 GB


@dataclass(frozen=True)
class Quantiser:
    """Quantiser of a peer: make(model, items, output) writes a model with this suffix for these runtimes."""
    name: str
    make: Callable[[Path, Sequence[Feed], Path], None]
    suffix: str
    runtimes: tuple[str, ...]
    only: str = ""                      # trait of models that it is tried for, see `traits`; "": all models


def save_items(path: Path, items: Sequence[Feed]) -> None:
    arrays: dict[str, Any] = {f"{i}:{name}": array for i, item in enumerate(items) for name, array in item.items()}
    np.savez(path, **arrays)


def load_items(path: Path) -> list[Feed]:
    items: dict[int, dict[str, Any]] = {}
    with np.load(path) as archive:
        for key in archive:
            index, _, name = key.partition(":")
            items.setdefault(int(index), {})[name] = archive[key]
    return [items[index] for index in sorted(items)]


def traits(model: Path) -> set[str]:
    """Return "attention" if a MatMul reads a Softmax, and "recurrence" if the model has recurrent layers."""
    import onnx
    nodes = onnx.load(model, load_external_data=False).graph.node
    weights = {output for node in nodes if node.op_type == "Softmax" for output in node.output}
    attention = any(node.op_type == "MatMul" and weights.intersection(node.input) for node in nodes)
    recurrence = any(node.op_type in RECURRENT for node in nodes)
    return {name for name, is_present in (("attention", attention), ("recurrence", recurrence)) if is_present}


def _nncf(model: Path, items: Sequence[Feed], output: Path, transformer: bool = False) -> None:
    """Quantise by NNCF's post-training quantisation with its defaults (docs.openvino.ai)."""
    import nncf
    import openvino as ov

    network = ov.Core().read_model(model)
    quantised = nncf.quantize(network, nncf.Dataset([dict(item) for item in items]), subset_size=len(items),
                              model_type=nncf.ModelType.TRANSFORMER if transformer else None)
    ov.save_model(quantised, output, compress_to_fp16=False)


def _nncf_transformer(model: Path, items: Sequence[Feed], output: Path) -> None:
    _nncf(model, items, output, transformer=True)


def _ort(model: Path, items: Sequence[Feed], output: Path, operators: Sequence[str] | None = None) -> None:
    """Quantise by ONNX Runtime: static Q/DQ, percentile ranges and weights per channel, after its pre-processing."""
    import onnx
    from onnxruntime import quantization as ort
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(ort.CalibrationDataReader):    # type: ignore[misc]    # the package has no types
        def __init__(self) -> None:
            self.set_range(0, len(items))

        def __len__(self) -> int:
            return len(items)

        def set_range(self, start_index: int, end_index: int) -> None:
            self._items = iter(items[start_index:end_index])

        def get_next(self) -> Feed | None:
            return next(self._items, None)

    loaded, prepared = onnx.load(model), output.with_suffix(".prepared.onnx")
    if any(opset.domain == "" and opset.version < PER_CHANNEL_OPSET for opset in loaded.opset_import):
        loaded = onnx.version_converter.convert_version(loaded, TARGET_OPSET)
    onnx.save(loaded, prepared)
    # Its symbolic shape inference fails on some graphs that onnx's shape inference handles.
    quant_pre_process(prepared, prepared, skip_symbolic_shape=True)
    ort.quantize_static(prepared, output, Reader(), quant_format=ort.QuantFormat.QDQ, per_channel=True,
                        activation_type=ort.QuantType.QUInt8, weight_type=ort.QuantType.QInt8,
                        calibrate_method=ort.CalibrationMethod.Percentile, op_types_to_quantize=operators,
                        extra_options={"CalibStridedMinMax": math.gcd(len(items), ORT_STRIDE)})
    prepared.unlink()


def _ort_products(model: Path, items: Sequence[Feed], output: Path) -> None:
    _ort(model, items, output, ("MatMul", "Gemm", "Conv"))


def _ort_dynamic(model: Path, items: Sequence[Feed], output: Path) -> None:
    """Quantise dynamically with 8-bit weights, as ONNX Runtime advises for recurrent layers."""
    from onnxruntime import quantization as ort
    ort.quantize_dynamic(model, output, per_channel=True, weight_type=ort.QuantType.QInt8)


QUANTISERS: Mapping[str, Quantiser] = {quantiser.name: quantiser for quantiser in (
    Quantiser("nncf", _nncf, ".xml", (OPENVINO,)),
    Quantiser("nncf-transformer", _nncf_transformer, ".xml", (OPENVINO,), "attention"),
    Quantiser("ort-percentile", _ort, ".onnx", (OPENVINO, ORT)),
    Quantiser("ort-percentile-products", _ort_products, ".onnx", (OPENVINO, ORT), "attention"),
    Quantiser("ort-dynamic", _ort_dynamic, ".onnx", (ORT,), "recurrence"))}


def main(arguments: Sequence[str]) -> None:
    name, model, items, output = arguments
    try:
        QUANTISERS[name].make(Path(model), load_items(Path(items)), Path(output))
    except BaseException:
        Path(output).unlink(missing_ok=True)        # an incomplete file
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
