"""Integer weights: for int8 contractions, and for float contractions of models whose weights are quantised.

    w = s[o] * k                    k int8; s[o] is part of the epilogue
    w = s[o, b] * (k - z[o, b])     four bits with a scale for each block b of the inner axis: MatMulBlocks
    table[i] = s[i] * k[i]          rows that a Gather reads, with a scale for each row

After weight-only quantisation a model's constants lie on a grid, so that storing them as bytes is lossless. A
product of few rows is bound by the memory traffic of its weights, which is a quarter of that of float32.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from infer_server.engines.ir.dtypes import FLOAT
from infer_server.engines.ir.graph import Array, Graph, Node, QParams, TensorType
from infer_server.engines.ir.grid import Blocks, block_params, grid_params
from infer_server.engines.ops.blocks import CENTRE, packed
from infer_server.engines.passes.quantization.storage import computes_by, reading
from infer_server.engines.passes.rewriting.editor import GraphEditor
from infer_server.engines.passes.rewriting.facts import output_axis

LEAST = 1 << 12         # least number of weights that are converted


def with_weights_as_bytes(graph: Graph) -> Graph:
    """Store weights of float32 products, and tables of Gathers, in 8 or 4 bits where that is lossless."""
    graph = _with_tables_of_bytes(_with_blocks(graph))
    chosen = {node.outputs: quant for node in graph.nodes if _is_large_product(graph, node)
              and (quant := _grid(graph.constants[node.anchor.inputs[1]], output_axis(node))) is not None}
    return with_int8_weights(graph, chosen, "fp32")


def _is_large_product(graph: Graph, node: Node) -> bool:
    """Return True for a product of float32 by a constant matrix of at least LEAST elements."""
    if node.anchor.op not in ("MatMul", "Gemm") or node.precision != "fp32" or not computes_by(graph, node):
        return False
    x, weight = graph.types[node.anchor.inputs[0]], graph.constants[node.anchor.inputs[1]]
    return not x.quant and x.dtype == weight.dtype == FLOAT and weight.size >= LEAST


def _grid(weight: Array, axis: int) -> QParams | None:
    first = np.moveaxis(weight, axis, 0)[:1]        # quick test: in a float model not even one channel is on a grid
    return grid_params(weight, axis) if grid_params(first, 0) else None


def _with_blocks(graph: Graph) -> Graph:
    """Replace products by 4-bit block-quantised weights by MatMulBlocks."""
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
    """Let MatMulBlocks nodes read rows as bytes where the model rounds them in blocks of the weights' size.

    Only for targets with kernels for such rows.
    """
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
    """Replace a Gather from a table on a grid by a Gather of bytes times a Gather of scales."""
    editor = GraphEditor(graph)
    for node in graph.nodes:
        if _is_large_table(graph, node) and (quant := _grid(graph.constants[node.inputs[0]], 0)) is not None:
            _gather_bytes(editor, node, quant)
        else:
            editor.nodes.append(node)
    return editor.finish()


def _is_large_table(graph: Graph, node: Node) -> bool:
    """Return True for a Gather of rows from a float32 table of at least LEAST elements."""
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
    """Quantise the weights of the nodes with outputs in `chosen` to int8, and set the nodes' precision."""
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
