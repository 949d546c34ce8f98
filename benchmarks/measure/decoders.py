"""Decoders with random weights, as exporters write them: grouped queries, rotary embeddings, a cache that grows."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]

BLOCK = 32                  # number of four-bit weights that share a scale
_MAX_TOKENS = 4096
_MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder. bits: 32 for float32 weights, 4 for MatMulNBits (accuracy level 4)."""
    layers: int = 8
    hidden: int = 1024
    heads: int = 16
    shared_heads: int = 4           # heads of keys and values
    inner: int = 2816               # width of the feed-forward layers
    words: int = 32_000
    bits: int = 32

    @property
    def depth(self) -> int:
        return self.hidden // self.heads

    def feeds(self, new: int, past: int, random: np.random.Generator) -> dict[str, Array]:
        """Return inputs for `new` tokens after `past` cached ones."""
        feeds: dict[str, Array] = {"input_ids": random.integers(0, self.words, (1, new)),
                                   "attention_mask": np.ones((1, new + past), np.int64)}
        for layer in range(self.layers):
            for kind in ("key", "value"):
                feeds[f"past.{layer}.{kind}"] = random.standard_normal(
                    (1, self.shared_heads, past, self.depth), dtype=np.float32)
        return feeds

    def next_feeds(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Return the inputs of the step that follows one with these outputs."""
        past = outputs["present.0.key"].shape[2]
        return {"input_ids": outputs["logits"][:, -1:].argmax(-1), "attention_mask": np.ones((1, past + 1), np.int64),
                **{f"past.{layer}.{kind}": outputs[f"present.{layer}.{kind}"]
                   for layer in range(self.layers) for kind in ("key", "value")}}

    def model(self, seed: int = 0) -> onnx.ModelProto:
        """Return the ONNX model: input_ids [B, S], attention_mask [B, T], past.*.* [B, heads, P, depth]."""
        return _Writer(self, seed).model()


class _Writer:
    def __init__(self, decoder: Decoder, seed: int) -> None:
        self._of, self._random = decoder, np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        of = self._of
        angles = np.arange(_MAX_TOKENS)[:, None] / 10_000 ** (np.arange(0, of.depth, 2) / of.depth)
        for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
            self._constant(name, table.astype(np.float32))
        self._constant("one", np.array([1]))
        self._constant("last", np.array(1))
        self._node("ReduceSum", "attention_mask one", "tokens", keepdims=0)
        self._node("Sub", "tokens last", "tokens.less")
        self._node("Cast", "tokens.less", "lengths", to=TensorProto.INT32)
        self._node("Shape", "attention_mask", "mask.shape")
        self._node("Gather", "mask.shape last", "mask.tokens")
        self._node("Cast", "mask.tokens", "total", to=TensorProto.INT32)
        self._constant("embedding", 0.02 * self._random.standard_normal((of.words, of.hidden), dtype=np.float32))
        x = self._node("Gather", "embedding input_ids", "embedded")
        for layer in range(of.layers):
            x = self._layer(x, layer)
        self._product(self._norm(x, "norm"), "logits", of.hidden, of.words, "logits")
        caches = [(layer, kind) for layer in range(of.layers) for kind in ("key", "value")]

        def cache(name: str, tokens: str) -> onnx.ValueInfoProto:
            return _float(name, ["B", of.shared_heads, tokens, of.depth])

        integers = [helper.make_tensor_value_info(name, TensorProto.INT64, ["B", extent])
                    for name, extent in (("input_ids", "S"), ("attention_mask", "T"))]
        graph = helper.make_graph(
            self._nodes, "decoder", [*integers, *(cache(f"past.{layer}.{kind}", "P") for layer, kind in caches)],
            [_float("logits", ["B", "S", of.words]),
             *(cache(f"present.{layer}.{kind}", "T") for layer, kind in caches)],
            self._constants)
        return helper.make_model(graph, ir_version=10, opset_imports=[
            helper.make_opsetid("", 21), helper.make_opsetid(_MICROSOFT, 1)])

    def _layer(self, x: str, layer: int) -> str:
        of, name = self._of, f"layer.{layer}"
        width = of.shared_heads * of.depth
        y = self._norm(x, f"{name}.norm.1")
        q, k, v = (self._product(y, f"{name}.{part}", of.hidden, columns)
                   for part, columns in (("q", of.hidden), ("k", width), ("v", width)))
        self._nodes.append(helper.make_node(
            "GroupQueryAttention",
            [q, k, v, f"past.{layer}.key", f"past.{layer}.value", "lengths", "total", "cos", "sin"],
            [f"{name}.attention", f"present.{layer}.key", f"present.{layer}.value"], domain=_MICROSOFT,
            num_heads=of.heads, kv_num_heads=of.shared_heads, do_rotary=1))
        x = self._node("Add", f"{x} {self._product(f'{name}.attention', f'{name}.o', of.hidden, of.hidden)}",
                       f"{name}.sum.1")
        y = self._norm(x, f"{name}.norm.2")
        gate = self._product(y, f"{name}.gate", of.hidden, of.inner)
        self._node("Sigmoid", gate, f"{name}.sigmoid")
        self._node("Mul", f"{gate} {name}.sigmoid", f"{name}.silu")
        up = self._product(y, f"{name}.up", of.hidden, of.inner)
        inner = self._node("Mul", f"{name}.silu {up}", f"{name}.inner")
        return self._node("Add", f"{x} {self._product(inner, f'{name}.down', of.inner, of.hidden)}", f"{name}.sum.2")

    def _norm(self, x: str, name: str) -> str:
        self._constant(f"{name}.scale", 1 + 0.1 * self._random.standard_normal(self._of.hidden, dtype=np.float32))
        return self._node("SimplifiedLayerNormalization", f"{x} {name}.scale", name, axis=-1, epsilon=1e-5,
                          stash_type=1)

    def _product(self, x: str, name: str, rows: int, columns: int, output: str = "") -> str:
        weight = self._random.standard_normal((rows, columns), dtype=np.float32) / np.float32(rows ** 0.5)
        output = output or f"{name}.out"
        if self._of.bits == 32:
            self._constant(f"{name}.weight", weight)
            return self._node("MatMul", f"{x} {name}.weight", output)
        bits, scales = four_bits(weight)
        self._constant(f"{name}.bits", bits)
        self._constant(f"{name}.scales", scales)
        self._nodes.append(helper.make_node(
            "MatMulNBits", [x, f"{name}.bits", f"{name}.scales"], [output], domain=_MICROSOFT, K=rows, N=columns,
            bits=4, block_size=BLOCK, accuracy_level=4))
        return output

    def _node(self, op: str, inputs: str, output: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(op, inputs.split(), [output], **attributes))
        return output

    def _constant(self, name: str, array: Array) -> None:
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))


def four_bits(weight: Array) -> tuple[Array, Array]:
    """Return weights [K, N] as MatMulNBits takes them.

    Returns
    -------
    uint8 [N, K / BLOCK, BLOCK / 2], two numbers a byte, and float32 scales [N * K / BLOCK].

    References
    ----------
    https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits
    """
    blocks = weight.T.reshape(weight.shape[1], -1, BLOCK)
    scales = np.maximum(np.abs(blocks).max(-1, keepdims=True) / 7, np.float32(1e-8))
    numbers = (np.clip(np.rint(blocks / scales), -8, 7) + 8).astype(np.uint8)
    return numbers[..., ::2] | numbers[..., 1::2] << 4, scales.reshape(-1).astype(np.float32)


def _float(name: str, shape: list[str | int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
