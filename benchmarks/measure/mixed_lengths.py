"""Throughput of an encoder for requests of mixed lengths: executed one by one, and padded to buckets.

    python -m benchmarks.measure.mixed_lengths                          # 4 layers of 256, 32 clients, 8 to 256 tokens
    python -m benchmarks.measure.mixed_lengths --model encoder.onnx     # inputs of int64 [N, T]

One server has the model twice, with `ragged: "pad"` and without, one instance and one thread each, both with
dynamic_batching. Clients on one event loop send one request after the other over gRPC; the two models take turns. CPU
time is the server's, per request.
"""
from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.reports.document import machine, markdown_table
from benchmarks.serving import serving_folder
from infer_server.clients.aio import AsyncInferenceClient
from infer_server.engines import build_engine

_VOCABULARY, _HEADS = 1000, 4
_TICKS_PER_S = 100
_BATCHING = "dynamic_batching { max_queue_delay_microseconds: 1000 }\n"
_CONFIGS = {"alone": _BATCHING,
            "padded": _BATCHING + 'parameters { key: "ragged" value { string_value: "pad" } }\n'}


def encoder(layers: int, width: int) -> onnx.ModelProto:
    """Return an encoder: ids, mask int64 [N, T] -> embedding float32 [N, width], the mean over the mask."""
    random, nodes = np.random.default_rng(0), list[onnx.NodeProto]()
    constants = {"table": random.standard_normal((_VOCABULARY, width)), "one": np.ones(()), "far": np.array(-1e4),
                 "scale": np.ones(width), "root": np.array((width // _HEADS) ** -0.5)}
    integers = {"heads": np.array([0, 0, _HEADS, width // _HEADS]), "merged": np.array([0, 0, width]),
                "keys": np.array([1, 2]), "first": np.array([1]), "last": np.array([2])}

    def node(op: str, inputs: str, **attributes: Any) -> str:
        name = f"{op}_{len(nodes)}"
        nodes.append(helper.make_node(op, inputs.split(), [name], name, **attributes))
        return name

    def product(x: str, rows: int, columns: int) -> str:
        name = f"weight_{len(nodes)}"
        constants[name] = random.standard_normal((rows, columns)) / rows ** 0.5
        return node("MatMul", f"{x} {name}")

    def heads(x: str, order: list[int]) -> str:
        return node("Transpose", node("Reshape", f"{product(x, width, width)} heads"), perm=order)

    x, mask = node("Gather", "table ids"), node("Cast", "mask", to=TensorProto.FLOAT)
    hidden = node("Unsqueeze", f"{node('Mul', node('Sub', f'one {mask}') + ' far')} keys")
    for _ in range(layers):
        scores = node("Mul", node("MatMul", f"{heads(x, [0, 2, 1, 3])} {heads(x, [0, 2, 3, 1])}") + " root")
        shares = node("Softmax", node("Add", f"{scores} {hidden}"), axis=-1)
        mixed = node("Transpose", node("MatMul", f"{shares} {heads(x, [0, 2, 1, 3])}"), perm=[0, 2, 1, 3])
        change = product(node("Reshape", f"{mixed} merged"), width, width)
        x = node("LayerNormalization", node("Add", f"{x} {change}") + " scale", axis=-1)
        inner = product(node("Relu", product(x, width, 4 * width)), 4 * width, width)
        x = node("LayerNormalization", node("Add", f"{x} {inner}") + " scale", axis=-1)
    total = node("ReduceSum", node("Mul", f"{x} {node('Unsqueeze', f'{mask} last')}") + " first", keepdims=0)
    node("Div", f"{total} {node('ReduceSum', f'{mask} first', keepdims=1)}")
    nodes[-1].output[0] = "embedding"
    arrays = [*((name, array.astype(np.float32)) for name, array in constants.items()), *integers.items()]
    graph = helper.make_graph(
        nodes, "encoder", [helper.make_tensor_value_info(name, TensorProto.INT64, ["N", "T"])
                           for name in ("ids", "mask")],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["N", width])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


async def turn(address: str, model: str, names: list[str], lengths: list[int], clients: int,
               seconds: float) -> tuple[float, int]:
    """Return the tokens per second of a turn, and its number of requests."""
    end, tokens, requests = time.monotonic() + seconds, 0, 0
    began = time.monotonic()

    async def client(number: int) -> None:
        nonlocal tokens, requests
        random = np.random.default_rng(number)
        async with AsyncInferenceClient(address) as connection:
            while time.monotonic() < end:
                length = int(random.choice(lengths))
                await connection.infer(model, {name: np.ones((1, length), np.int64) for name in names})
                tokens, requests = tokens + length, requests + 1

    await asyncio.gather(*map(client, range(clients)))
    return tokens / (time.monotonic() - began), requests


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.measure.mixed_lengths", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs=2, default=[8, 256], metavar=("LEAST", "MOST"))
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--specialise", default="background", help="the parameter of both models")
    options = parser.parse_args()
    model = onnx.load(options.model) if options.model else encoder(options.layers, options.width)
    names = [value.name for value in model.graph.input]
    least, most = options.lengths
    lengths = np.unique(np.linspace(least, most, 45).astype(int)).tolist()
    results_of: dict[str, list[tuple[float, float]]] = {name: [] for name in _CONFIGS}
    with TemporaryDirectory() as folder:
        for name, config in _CONFIGS.items():
            (Path(folder) / name / "1").mkdir(parents=True)
            build_engine(model, timing=False, cache=False).save(Path(folder) / name / "1" / "model.plan")
            (Path(folder) / name / "config.pbtxt").write_text(
                config + f'parameters {{ key: "specialise" value {{ string_value: "{options.specialise}" }} }}\n')
        with serving_folder(Path(folder), [*_CONFIGS]) as (address, process):
            for number in range(options.turns + 1):
                for name, results in results_of.items():
                    before = cpu_s(process)
                    speed, requests = asyncio.run(turn(address, name, names, lengths, options.clients, options.seconds))
                    if number:                  # the first turn of each traces and compiles
                        results.append((speed, 1e3 * (cpu_s(process) - before) / requests))
    print(f"On {machine()}, {options.clients} clients, {least} to {most} tokens:\n")
    print(markdown_table(["requests", "tokens/s", "CPU ms a request"], [
        [name, round(median(speed for speed, _ in results)), median(ms for _, ms in results)]
        for name, results in results_of.items()]))
    ratios = [padded[0] / alone[0] for alone, padded in zip(results_of["alone"], results_of["padded"], strict=True)]
    print(f"\npadded / alone: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
