"""Weights as whole numbers: for contractions in int8, and kept so for those in float whose model has them so.

    w = s[o] * k                    s[o] is a part of the epilogue, so that a kernel multiplies by k as it does by w
    w = s[o, b] * (k - z[o, b])     of four bits, a scale for each block b of the inner axis: MatMulBlocks
    rows of a table that a Gather takes are bytes times a scale for each row

A model with weights quantised alone is a float model whose constants lie on a grid: its numbers lose nothing as bytes,
and a product of few rows, which takes as long as its weights take to read, takes a quarter of it.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from engines.ir.dtypes import FLOAT
from engines.ir.graph import Array, Graph, Node, QParams, TensorType
from engines.ir.grid import Blocks, block_params, grid_params
from engines.ops.blocks import CENTRE, packed
from engines.passes.quantization.storage import computes_by, reading
from engines.passes.rewriting.editor import GraphEditor
from engines.passes.rewriting.facts import output_axis

LEAST = 1 << 12         # weights of a product whose bytes matter


def with_weights_as_bytes(graph: Graph) -> Graph:
    """The graph whose products in float32 have their weights in int8 where that loses nothing of them."""
    graph = _with_tables_of_bytes(_with_blocks(graph))
    chosen = {node.outputs: quant for node in graph.nodes if _is_large_product(graph, node)
              and (quant := _grid(graph.constants[node.anchor.inputs[1]], output_axis(node))) is not None}
    return with_int8_weights(graph, chosen, "fp32")


def _is_large_product(graph: Graph, node: Node) -> bool:
    """Whether it multiplies floats by a matrix whose bytes matter."""
    if node.anchor.op not in ("MatMul", "Gemm") or node.precision != "fp32" or not computes_by(graph, node):
        return False
    x, weight = graph.types[node.anchor.inputs[0]], graph.constants[node.anchor.inputs[1]]
    return not x.quant and x.dtype == weight.dtype == FLOAT and weight.size >= LEAST


def _grid(weight: Array, axis: int) -> QParams | None:
    first = np.moveaxis(weight, axis, 0)[:1]        # of a float model not even one channel is on a grid
    return grid_params(weight, axis) if grid_params(first, 0) else None


def _with_blocks(graph: Graph) -> Graph:
    """The products by weights of four bits as MatMulBlocks."""
    editor = GraphEditor(graph)
    for node in graph.nodes:
        if _is_large_product(graph, node):
            weight = np.moveaxis(graph.constants[node.anchor.inputs[1]], output_axis(node), 0)
            if (blocks := block_params(weight)) is not None:
                node = _by_blocks(editor, node, blocks)
        editor.nodes.append(node)
    return editor.finish()


def _by_blocks(editor: GraphEditor, node: Node, blocks: Blocks) -> Node:
    x, weight, *bias = node.anchor.inputs
    offsets = ""
    if np.any(blocks.zeros != CENTRE):
        offsets = editor.add_constant(f"{weight}.offsets", -blocks.zeros.astype(np.float32) * blocks.scales)
    inputs = (x, editor.add_constant(f"{weight}.bits", packed(blocks.numbers)),
              editor.add_constant(f"{weight}.scales", blocks.scales), offsets, *bias)
    anchor = replace(node.anchor, op="MatMulBlocks", inputs=inputs,
                     attrs={"block": blocks.block, "depth": blocks.numbers.shape[1]})
    return node.with_body((anchor, *node.body[1:]))


def with_rounded_rows(graph: Graph) -> Graph:
    """The graph whose products by weights of four bits read bytes where the model lets their rows be rounded, by blocks
    like those of the weights: for targets with kernels for it."""
    editor, made = GraphEditor(graph), dict[str, str]()
    for node in graph.nodes:
        product = node.anchor
        maker = graph.producer.get(product.inputs[0]) if product.op == "MatMulBlocks" else None
        if maker is not None and maker.op == "FakeQuantizeBlocks" and maker.attrs["block"] == product.attrs["block"]:
            if (name := made.get(product.inputs[0])) is None:
                name = made[product.inputs[0]] = editor.add(
                    f"{product.inputs[0]}.bytes", "QuantizeBlocks", maker.inputs, maker.attrs, maker.origin)
            node = reading(node, {product.inputs[0]: name})
        editor.nodes.append(node)
    return editor.finish() if made else graph


def _with_tables_of_bytes(graph: Graph) -> Graph:
    """A Gather of rows on a grid: of their bytes, times what it gathers of their scales."""
    editor = GraphEditor(graph)
    for node in graph.nodes:
        if _is_large_table(graph, node) and (quant := _grid(graph.constants[node.inputs[0]], 0)) is not None:
            _gather_bytes(editor, node, quant)
        else:
            editor.nodes.append(node)
    return editor.finish()


def _is_large_table(graph: Graph, node: Node) -> bool:
    """Whether it gathers rows of floats whose bytes matter."""
    table = graph.constants.get(node.inputs[0]) if node.op == "Gather" and node.attrs["axis"] == 0 else None
    return (table is not None and table.ndim == 2 and table.dtype == FLOAT and table.size >= LEAST
            and graph.types[node.outputs[0]].quant is None)


def _gather_bytes(editor: GraphEditor, node: Node, quant: QParams) -> None:
    (table, index), (y,), whole = node.inputs, node.outputs, QParams((1.0,), (128,), "uint8")
    numbers, scales = editor.graph.constants[table], np.array(quant.scale, np.float32)[:, None]
    stored = editor.add_constant(f"{table}.bytes", (np.rint(numbers / scales) + 128).astype(np.uint8))
    editor.types[stored] = TensorType(FLOAT, numbers.shape, whole)
    rows = editor.add_tensor(f"{y}.bytes", replace(editor.graph.types[y], quant=whole))
    editor.make(rows, "Gather", [stored, index], node.attrs, node.origin)
    units = editor.add(f"{y}.scales", "Gather", [editor.add_constant(f"{table}.scales", scales), index], node.attrs,
                       node.origin)
    editor.make(y, "Mul", [rows, units], {}, node.origin)


def with_int8_weights(graph: Graph, chosen: Mapping[tuple[str, ...], QParams], precision: str) -> Graph:
    """The nodes that make `chosen` outputs read int8 weights, quantised so, and compute in this precision."""
    editor = GraphEditor(graph)
    for node in graph.nodes:
        if (quant := chosen.get(node.outputs)) is not None:
            source = node.anchor.inputs[1]
            weight = graph.constants[source]
            assert quant.axis is not None
            along = [-1 if axis == quant.axis else 1 for axis in range(weight.ndim)]
            steps = weight / np.array(quant.scale, np.float32).reshape(along)
            name = editor.add_constant(
                f"{source}.int8", np.clip(np.rint(steps, out=steps), -128, 127, out=steps).astype(np.int8))
            editor.types[name] = TensorType(FLOAT, weight.shape, quant)
            node = replace(reading(node, {source: name}), precision=precision)
        editor.nodes.append(node)
    return editor.finish()
