"""Every ONNX form of a node, from opset 9 on -> the one canonical form that engines.ops defines.

What an opset passes as a small constant input (axes, pads, sizes, bounds) becomes an attribute; what depends on shapes
(auto_pad, -1 and 0 in targets, equal splits) is resolved; operators that are others in disguise (Dropout, Upsample,
Sum, CastLike, ...) are replaced. A rule takes a Call and returns the nodes that stand for it; an operator without a
rule is canonical as it is.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from engines.errors import GraphError, UnknownTensorError
from engines.ir import Array, Dim, Node, TensorType
from engines.ops import op_of
from engines.ops.fallback import as_onnx
from engines.ops.movement import FAR
from engines.ops.recurrent import ACTIVATIONS, DEFAULTS, PARAMETERS
from engines.ops.window import Window
from engines.shapes import Extent, broadcast, dim, extent, fixed, normal_axis, product, text


@dataclass(frozen=True)
class Call:
    """A node as the file has it, in an opset, on inputs of which this much is known."""
    node: Node
    opset: int
    types: Sequence[TensorType | None]
    values: Sequence[Array | None]
    read: set[str] = field(default_factory=set)     # the attributes that the rule asked for


    def has(self, index: int) -> bool:
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def type(self, index: int = 0) -> TensorType:
        kind = self.types[index] if self.has(index) else None
        if kind is None:
            raise GraphError(f"input {index} is missing")
        return kind

    @property
    def rank(self) -> int:
        return len(self.type().shape)

    def value(self, index: int) -> list[Any] | None:
        """The elements of an input that must be known before run time (ints, floats or Extents); None if absent."""
        if not self.has(index):
            return None
        array = self.values[index]
        if array is None:
            raise UnknownTensorError(f"input '{self.node.inputs[index]}' depends on data; "
                                     "it must follow from constants and shapes", self.node.inputs[index:index + 1])
        return list(np.ravel(array).tolist())

    def ints(self, index: int) -> tuple[int, ...] | None:
        """The same, as ints that do not depend on the batch."""
        found = self.value(index)
        if found is not None and any(isinstance(v, Extent) for v in found):
            raise GraphError(f"input '{self.node.inputs[index]}' depends on the batch")
        return None if found is None else tuple(int(v) for v in found)

    def option(self, name: str, index: int, since: int) -> tuple[int, ...] | None:
        """Integers that are an attribute before opset `since` and an input from then on."""
        if self.opset >= since:
            return self.ints(index)
        found = self.attr(name)
        return None if found is None else tuple(found)

    def node_with(self, inputs: int = 1, **attrs: Any) -> list[Node]:
        """The node with its first `inputs` inputs and these attributes only; None leaves one out."""
        return [replace(self.node, inputs=self.node.inputs[:inputs],
                        attrs={k: v for k, v in attrs.items() if v is not None})]

    def attr(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return self.node.attrs.get(name, default)

    def keep(self, *names: str) -> dict[str, Any]:
        """Those of the node's attributes."""
        self.read.update(names)
        return {name: self.node.attrs[name] for name in names if name in self.node.attrs}

    def ignore(self, *names: str) -> None:
        """Attributes that change nothing here; the rule says why."""
        self.read.update(names)

    @property
    def unread(self) -> list[str]:
        """Attributes that nobody has asked for, so far: what the node means would be lost without them."""
        return sorted(set(self.node.attrs) - self.read)


class Beyond(Exception):
    """Why a node that is right has no canonical form: it is left as ONNX has it, for the onnx package to evaluate."""


Rule = Callable[[Call], list[Node]]
RULES: dict[str, Rule] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function
    return register


def normalise(call: Call) -> list[Node]:
    """The canonical nodes. Raises GraphError: what the rule needs to know is not known, or makes no sense; Beyond."""
    return RULES.get(call.node.op, _as_it_is)(call)


def _as_it_is(call: Call) -> list[Node]:
    return call.node_with(len(call.node.inputs), **call.keep(*op_of(call.node.op).attributes))


def identity(call: Call) -> list[Node]:
    return [replace(call.node, op="Identity", inputs=call.node.inputs[:1], outputs=call.node.outputs[:1], attrs={})]


# ---- constants
@rule("Constant")
def _constant(call: Call) -> list[Node]:
    kinds = {"value": None, "value_float": np.float32, "value_floats": np.float32, "value_int": np.int64,
             "value_ints": np.int64}
    given = call.keep(*call.node.attrs)
    if len(given) != 1:
        raise GraphError(f"a constant has one value; this one has {len(given)}")
    (name, value), = given.items()
    if name not in kinds:
        raise GraphError(f"a constant given as {name} is not supported")
    return call.node_with(0, value=np.asarray(value, kinds[name]))


@rule("ConstantOfShape")
def _constant_of_shape(call: Call) -> list[Node]:
    return call.node_with(0, shape=_dims(call.value(0)), value=np.asarray(call.attr("value", np.zeros(1, np.float32))))


# ---- pointwise
@rule("Clip")
def _clip(call: Call) -> list[Node]:
    if call.opset < 11:
        return call.node_with(1, **call.keep("min", "max"))
    bounds = [call.values[i] if call.has(i) else None for i in (1, 2)]
    if any(bound is not None and bound.size != 1 for bound in bounds):
        raise GraphError("its bounds are no numbers, but tensors")
    if all(bound is not None or not call.has(i) for i, bound in enumerate(bounds, 1)):
        low, high = (None if bound is None else bound.item() for bound in bounds)
        return call.node_with(1, min=low, max=high)
    chain, last = [], call.node.inputs[0]
    for op, index in (("Max", 1), ("Min", 2)):
        if call.has(index):
            output = f"{call.node.outputs[0]}.{op.lower()}"
            chain.append(replace(call.node, op=op, inputs=(last, call.node.inputs[index]), outputs=(output,), attrs={}))
            last = output
    return [*chain[:-1], replace(chain[-1], outputs=call.node.outputs)]


@rule("Sum", "Max", "Min", "Mean")
def _variadic(call: Call) -> list[Node]:
    """A chain of binary nodes."""
    node, op = call.node, {"Sum": "Add", "Mean": "Add"}.get(call.node.op, call.node.op)
    if len(node.inputs) == 1:
        return identity(call)
    mean = node.op == "Mean"
    names = [f"{node.outputs[0]}.{i}" for i in range(1, len(node.inputs) - (not mean))]
    names += [] if mean else [node.outputs[0]]
    firsts = [node.inputs[0], *names]
    chain = [replace(node, op=op, inputs=pair, outputs=(name,), attrs={})
             for *pair_, name in zip(firsts, node.inputs[1:], names, strict=False) for pair in [tuple(pair_)]]
    if mean:
        count = f"{node.outputs[0]}.count"
        chain.append(Node("Constant", (), (count,), {"value": np.array(len(node.inputs), call.type().dtype)}))
        chain.append(replace(node, op="Div", inputs=(names[-1], count), attrs={}))
    return chain


@rule("Cast", "CastLike")
def _cast(call: Call) -> list[Node]:
    to = call.type(1).dtype if call.node.op == "CastLike" else dtype_of(call.attr("to"))
    if is_rare(to) or is_rare(call.type().dtype):
        raise Beyond(f"a cast of {call.type().dtype} to {to}")
    call.ignore("saturate", "round_mode")       # they are about the types of eight bits and less
    return [replace(node, op="Cast") for node in call.node_with(1, to=to.name)]


def is_rare(dtype: np.dtype[Any]) -> bool:
    """A type that NumPy does not have, but for bfloat16: floats of eight bits and fewer, integers of four and two."""
    return dtype.isbuiltin != 1 and dtype.name != "bfloat16"


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.isbuiltin == 1 and dtype.kind == "f" or dtype.name == "bfloat16"


def dtype_of(number: int) -> np.dtype[Any]:
    """The dtype that an attribute means by a TensorProto.DataType."""
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(number))
    except (KeyError, TypeError, ValueError) as error:
        raise GraphError(f"{number} is no type of elements that ONNX knows") from error


@rule("Dropout")
def _dropout(call: Call) -> list[Node]:
    """Without training nothing is dropped: the mask is true everywhere."""
    call.ignore("ratio", "seed")
    ratio, training = call.value(1), call.value(2)
    if training and training[0] and (ratio is None or ratio[0]):
        raise GraphError("it is in training mode; export the model for inference")
    made = identity(call)
    if len(call.node.outputs) > 1:
        true = np.ones(1, np.bool_ if call.opset >= 10 else call.type().dtype)
        made.append(replace(call.node, op="ConstantOfShape", inputs=(), outputs=call.node.outputs[1:],
                            attrs={"shape": call.type().shape, "value": true}))
    return made


@rule("Celu")
def _celu(call: Call) -> list[Node]:
    if not (alpha := call.attr("alpha", 1.0)):
        raise GraphError("it divides by alpha, which is 0")
    return call.node_with(1, alpha=alpha)


@rule("LpNormalization")
def _lp_normalization(call: Call) -> list[Node]:
    if (p := call.attr("p", 2)) not in (1, 2):
        raise GraphError(f"its p is {p}; ONNX has 1 and 2")
    return call.node_with(1, p=p, axis=normal_axis(call.attr("axis", -1), call.rank))


@rule("BatchNormalization")
def _batch_normalization(call: Call) -> list[Node]:
    if call.attr("training_mode", 0) or (len(call.node.outputs) > 1 and call.opset >= 14):
        raise GraphError("it is in training mode; export the model for inference")
    call.ignore("momentum")         # of training
    return [replace(node, outputs=node.outputs[:1]) for node in call.node_with(5, epsilon=call.attr("epsilon", 1e-5))]


@rule("LayerNormalization")
def _layer_normalization(call: Call) -> list[Node]:
    plain_sums(call)
    return call.node_with(3, axis=normal_axis(call.attr("axis", -1), call.rank), epsilon=call.attr("epsilon", 1e-5))


def plain_sums(call: Call) -> None:
    """stash_type: the precision of the inner sums, float32 where it is not said. It is float32 here."""
    if dtype_of(call.attr("stash_type", TensorProto.FLOAT)) != np.float32:
        raise Beyond("inner sums in another type than float32")


@rule("Range")
def _range(call: Call) -> list[Node]:
    call.ignore("stash_type")       # it is computed while the engine is built, in double precision
    return call.node_with(3)


@rule("Softmax", "LogSoftmax")
def _softmax(call: Call) -> list[Node]:
    """Before opset 13 all axes from `axis` on (default 1) are one."""
    node, shape = call.node, call.type().shape
    if call.opset >= 13:
        return call.node_with(1, axis=normal_axis(call.attr("axis", -1), call.rank))
    axis = normal_axis(call.attr("axis", 1), call.rank)
    if all(d == 1 for d in shape[axis + 1:]):
        return call.node_with(1, axis=axis)
    flat, result = (f"{node.outputs[0]}.{part}" for part in ("flat", "softmax"))
    return [replace(node, op="Flatten", outputs=(flat,), attrs={"axis": axis}),
            replace(node, inputs=(flat,), outputs=(result,), attrs={"axis": 1}),
            replace(node, op="Reshape", inputs=(result,), attrs={"shape": shape})]


@rule("QuantizeLinear")
def _quantize_linear(call: Call) -> list[Node]:
    return _quantised(call, 3, 2)


@rule("DequantizeLinear")
def _dequantize_linear(call: Call) -> list[Node]:
    return _quantised(call, 3, 2)


def _quantised(call: Call, inputs: int, zero_point: int) -> list[Node]:
    number, scale = call.attr("output_dtype", 0), call.type(1).dtype
    wanted = dtype_of(number) if number else None
    kinds = [t.dtype for t in call.types if t is not None]
    if any(map(is_rare, kinds)) or wanted and is_rare(wanted):
        raise Beyond("a quantised type of which NumPy knows nothing")
    if call.node.op == "DequantizeLinear" and wanted and wanted != scale:
        raise Beyond(f"a result in another type than the scale's, {scale}")
    if call.attr("precision", 0):
        raise Beyond("a division in another precision than the input's")
    if (known := call.values[1]) is not None and not np.all(np.isfinite(known)):
        raise GraphError("its scale is no finite number")
    call.ignore("saturate")         # of types of eight bits and fewer that are floats
    attrs: dict[str, Any] = call.keep("block_size")
    axis = call.attr("axis", 1)
    if call.type(1).shape not in ((), (1,)):
        attrs["axis"] = normal_axis(axis, call.rank)
    made = call.node_with(inputs, **attrs)
    if call.node.op == "QuantizeLinear" and not call.has(zero_point) and wanted:
        name = f"{call.node.outputs[0]}.zero_point"
        zeros = np.zeros(fixed(call.type(1).shape), wanted)
        return [Node("Constant", (), (name,), {"value": zeros}),
                *(replace(node, inputs=(*node.inputs[:2], name)) for node in made)]
    return made


# ---- axes
@rule("Squeeze", "Unsqueeze")
def _squeeze(call: Call) -> list[Node]:
    axes = call.option("axes", 1, since=13)
    rank = call.rank
    if call.node.op == "Unsqueeze":
        if axes is None:
            raise GraphError("it has no axes")
        rank += len(axes)
    elif axes is None:
        if any(isinstance(d, str) for d in call.type().shape):
            raise GraphError(f"which axes of {text(call.type().shape)} it removes depends on whether the batch is 1")
        axes = tuple(i for i, d in enumerate(call.type().shape) if d == 1)
    return call.node_with(1, axes=tuple(sorted(normal_axis(a, rank) for a in axes)))


@rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
      "ReduceLogSum", "ReduceLogSumExp")
def _reduce(call: Call) -> list[Node]:
    axes = call.option("axes", 1, since=13 if call.node.op == "ReduceSum" else 18)
    nothing, keepdims = call.attr("noop_with_empty_axes", 0), call.attr("keepdims", 1)
    if not axes and nothing:
        return _of_each(call)
    axes = tuple(sorted(normal_axis(a, call.rank) for a in axes or range(call.rank)))
    return call.node_with(1, axes=axes, keepdims=keepdims)


def _of_each(call: Call) -> list[Node]:
    """A reduction over no axes: what is done to an element before its sum is taken, and to the sum after."""
    op = {"ReduceL1": "Abs", "ReduceL2": "Abs", "ReduceLogSum": "Log", "ReduceSumSquare": "Mul"}.get(call.node.op)
    x = call.node.inputs[0]
    return [replace(call.node, op=op, inputs=(x, x) if op == "Mul" else (x,), attrs={})] if op else identity(call)


@rule("ArgMax", "ArgMin")
def _arg(call: Call) -> list[Node]:
    return call.node_with(1, axis=normal_axis(call.attr("axis", 0), call.rank), keepdims=call.attr("keepdims", 1),
                          **call.keep("select_last_index"))


@rule("CumSum")
def _cumulative(call: Call) -> list[Node]:
    (axis,) = call.ints(1) or (0,)
    return call.node_with(1, axis=normal_axis(axis, call.rank), exclusive=call.attr("exclusive", 0),
                          reverse=call.attr("reverse", 0))


@rule("TopK")
def _top_k(call: Call) -> list[Node]:
    (k,) = call.option("k", 1, since=10) or (call.attr("k"),)
    call.ignore("sorted")       # what is not asked to be sorted may be
    return call.node_with(1, k=k, axis=normal_axis(call.attr("axis", -1), call.rank), largest=call.attr("largest", 1))


@rule("Concat", "Gather", "GatherElements")
def _axis(call: Call) -> list[Node]:
    if not call.rank:
        raise GraphError("its first input has no axes")
    axis = normal_axis(call.attr("axis", 0), call.rank)
    return call.node_with(len(call.node.inputs), axis=axis)


@rule("Scatter")
def _scatter(call: Call) -> list[Node]:
    """ScatterElements under its first name."""
    return [as_onnx(replace(call.node, op="ScatterElements", attrs=call.keep("axis")), 11)]


@rule("Transpose")
def _transpose(call: Call) -> list[Node]:
    return call.node_with(1, perm=tuple(call.attr("perm", range(call.rank)[::-1])))


# ---- shapes
@rule("Reshape")
def _reshape(call: Call) -> list[Node]:
    shape = call.type().shape
    target: list[Any] = call.value(1) or []
    if not call.attr("allowzero", 0):
        if any(_is(t, 0) and i >= len(shape) for i, t in enumerate(target)):
            raise GraphError(f"its target {target} copies an extent that the input does not have")
        target = [extent(shape[i]) if _is(t, 0) else t for i, t in enumerate(target)]
    if any(_is(t, -1) for t in target):
        rest = math.prod((t for t in target if not _is(t, -1)), start=1)
        left = 0 if _is(rest, 0) else product(shape) // rest
        target = [left if _is(t, -1) else t for t in target]
    return call.node_with(1, shape=_dims(target))


def _is(value: Any, number: int) -> bool:
    return not isinstance(value, Extent) and value == number


@rule("Expand")
def _expand(call: Call) -> list[Node]:
    """To the shape that comes of it: the target may have fewer axes, or 1 where the input has more."""
    return call.node_with(1, shape=broadcast(call.type().shape, _dims(call.value(1))))


@rule("Tile")
def _tile(call: Call) -> list[Node]:
    return call.node_with(1, repeats=_dims(call.value(1)))


@rule("Split")
def _split(call: Call) -> list[Node]:
    node, axis = call.node, normal_axis(call.attr("axis", 0), call.rank)
    sizes: tuple[Dim, ...] | None = call.attr("split") if call.opset < 13 else None
    if call.opset >= 13 and call.has(1):
        sizes = _dims(call.value(1))
    if sizes is None:
        (size,) = fixed(call.type().shape[axis:axis + 1])
        parts = call.attr("num_outputs", len(node.outputs))
        if parts != len(node.outputs):
            raise GraphError(f"num_outputs is {parts}, but it has {len(node.outputs)} outputs")
        each = -(-size // parts)        # the last part may be smaller
        sizes = tuple(min(each, size - start) for start in range(0, each * parts, each))
    if len(sizes) != len(node.outputs):
        raise GraphError(f"it cuts {len(sizes)} parts, but has {len(node.outputs)} outputs")
    return call.node_with(1, axis=axis, split=tuple(sizes))


@rule("Slice")
def _slice(call: Call) -> list[Node]:
    shape = call.type().shape
    if call.opset < 10:
        starts, ends = list(call.attr("starts")), list(call.attr("ends"))
        axes, steps = call.attr("axes"), None
    else:
        starts, ends = call.value(1) or [], call.value(2) or []
        axes, steps = call.ints(3), call.ints(4)
    axes = tuple(normal_axis(a, len(shape)) for a in (range(len(starts)) if axes is None else axes))
    cut_steps = tuple(steps or (1,) * len(starts))
    if {len(starts), len(ends), len(cut_steps), len(set(axes))} != {len(axes)} or 0 in cut_steps:
        raise GraphError(f"{len(starts)} starts, {len(ends)} ends and steps {list(cut_steps)} for axes {list(axes)}")
    ends = [FAR if isinstance(e, Extent) and e == extent(shape[a]) else e for e, a in zip(ends, axes, strict=True)]
    if any(isinstance(v, Extent) for v in (*starts, *ends)):
        raise GraphError("it cuts at a place that depends on the batch")
    return call.node_with(1, axes=axes, starts=tuple(map(int, starts)), ends=tuple(map(int, ends)), steps=cut_steps)


@rule("Pad")
def _pad(call: Call) -> list[Node]:
    if call.opset < 11:
        return call.node_with(1, **call.keep("pads", "mode", "value"))
    pads, fill = call.ints(1) or (), call.value(2)
    axes = [normal_axis(a, call.rank) for a in call.ints(3) or range(call.rank)]
    if len(pads) != 2 * len(axes):
        raise GraphError(f"{len(pads)} pads for {len(axes)} axes")
    widths = [0] * 2 * call.rank
    for i, axis in enumerate(axes):
        widths[axis], widths[axis + call.rank] = pads[i], pads[i + len(axes)]
    return call.node_with(1, pads=tuple(widths), mode=call.attr("mode", "constant"), value=fill[0] if fill else None)


# ---- recurrent layers
@rule("LSTM", "GRU", "RNN")
def _recurrent(call: Call) -> list[Node]:
    """Every attribute is said, and every activation has its alpha and beta."""
    op, direction = call.node.op, call.attr("direction", "forward")
    count = 2 if direction == "bidirectional" else 1
    known = {name.lower(): name for name in ACTIVATIONS}
    names = tuple(known.get(name.lower(), name) for name in call.attr("activations") or DEFAULTS[op] * count)
    if unknown := set(names) - set(ACTIVATIONS):
        raise GraphError(f"unknown activation '{min(unknown)}'; ONNX has {', '.join(ACTIVATIONS)}")
    if len(names) != count * len(DEFAULTS[op]) or direction not in ("forward", "reverse", "bidirectional"):
        raise GraphError(f"{len(names)} activations for direction '{direction}'")
    if call.attr("clip", 1.0) <= 0:
        raise GraphError(f"clip is {call.attr('clip')}, which leaves nothing; it is above 0, or not there")
    if call.attr("hidden_size", size := fixed(call.type(2).shape)[-1]) != size:
        raise GraphError(f"hidden_size is {call.attr('hidden_size')}, but its weights are for {size}")
    given = {key: iter(call.attr(key) or ()) for key in ("activation_alpha", "activation_beta")}
    # The given values are for those functions that have such a parameter, in their order.
    parameters = {key: tuple(float(next(given[key], PARAMETERS[name][i])) if len(PARAMETERS.get(name, ())) > i else 0.0
                             for name in names) for i, key in enumerate(given)}
    return call.node_with(8, direction=direction, layout=call.attr("layout", 0), clip=float(call.attr("clip", 0.0)),
                          activations=" ".join(names), **parameters, input_forget=call.attr("input_forget", 0),
                          linear_before_reset=call.attr("linear_before_reset", 0))


# ---- images
@rule("Conv", "ConvTranspose")
def _convolution(call: Call) -> list[Node]:
    kernel = fixed(call.type(1).shape[2:])
    if (given := tuple(call.attr("kernel_shape") or kernel)) != kernel:
        raise GraphError(f"kernel_shape is {given}, but the weights have {kernel}")
    attrs = {"kernel_shape": kernel, "group": call.attr("group", 1), **_steps(call, len(kernel))}
    if call.node.op == "Conv":
        attrs["pads"] = _same_pads(call, kernel, attrs) or attrs["pads"]
        return call.node_with(3, **attrs)
    extra = tuple(call.attr("output_padding", (0,) * len(kernel)))
    wanted = call.attr("output_shape", kernel)[-len(kernel):]       # batch and channels may stand before it
    for name, numbers in (("output_padding", extra), ("output_shape", wanted)):
        if len(numbers) != len(kernel):
            raise GraphError(f"{name} is {tuple(numbers)}; it has {len(kernel)} numbers")
    return call.node_with(3, **attrs | {"output_padding": extra, "pads": _transposed_pads(call, kernel, attrs, extra)})


@rule("MaxPool", "AveragePool", "LpPool")
def _pool(call: Call) -> list[Node]:
    kernel = tuple(call.attr("kernel_shape"))
    if min(kernel, default=0) < 1:
        raise GraphError(f"kernel_shape is {kernel}; it has numbers from 1 on")
    attrs = {"kernel_shape": kernel, **_steps(call, len(kernel)), **call.keep("p", "count_include_pad")}
    attrs["pads"] = _same_pads(call, kernel, attrs) or attrs["pads"]
    if call.attr("ceil_mode", 0):
        attrs |= _without_ceil(call, attrs)
    order = call.keep("storage_order")      # of the indices that are the second output
    return call.node_with(1, **attrs | (order if len(call.node.outputs) > 1 else {}))


def _steps(call: Call, rank: int) -> dict[str, Any]:
    """strides, dilations and pads, one or two numbers for each axis behind batch and channels."""
    if rank + 2 != call.rank or rank < 1:
        raise GraphError(f"its window has {rank} axes, its input {call.rank}: two more, with batch and channels, it "
                         "should have")
    default = {"strides": (1,) * rank, "dilations": (1,) * rank, "pads": (0,) * 2 * rank}
    found = {name: tuple(call.attr(name) or value) for name, value in default.items()}
    for name, numbers in found.items():
        if len(numbers) != len(default[name]) or min(numbers) < min(default[name]):
            raise GraphError(f"{name} are {numbers}, not {len(default[name])} numbers from {min(default[name])} on")
    return found


def _same_pads(call: Call, kernel: tuple[int, ...], attrs: dict[str, Any]) -> tuple[int, ...] | None:
    """The pads that auto_pad stands for: outputs are ceil(size / stride), the odd pixel of padding at one end."""
    mode = call.attr("auto_pad", "NOTSET")
    if mode == "NOTSET":
        return None
    if mode == "VALID":
        return (0,) * 2 * len(kernel)
    spans = Window(kernel, attrs["strides"], attrs["dilations"], ()).spans
    totals = [max((-(-size // stride) - 1) * stride + span - size, 0) for size, stride, span in
              zip(fixed(call.type().shape[2:]), attrs["strides"], spans, strict=True)]
    return _ends(totals, upper=mode == "SAME_UPPER")


def _ends(totals: Iterable[int], upper: bool) -> tuple[int, ...]:
    """Padding divided between the beginning and the end of each axis; the end gets the odd pixel if `upper`."""
    small, large = zip(*((total // 2, total - total // 2) for total in totals), strict=True)
    return (*small, *large) if upper else (*large, *small)


def _transposed_pads(call: Call, kernel: tuple[int, ...], attrs: dict[str, Any],
                     extra: tuple[int, ...]) -> tuple[int, ...]:
    """ConvTranspose's pads follow from a wanted output_shape, or from auto_pad's size * stride."""
    mode, wanted = call.attr("auto_pad", "NOTSET"), call.attr("output_shape")
    if wanted is None and mode in ("NOTSET", "VALID"):
        return tuple(attrs["pads"])
    sizes = fixed(call.type().shape[2:])
    targets = wanted or [size * stride for size, stride in zip(sizes, attrs["strides"], strict=True)]
    spans = Window(kernel, attrs["strides"], attrs["dilations"], ()).spans
    totals = [(size - 1) * stride + more + span - target for size, stride, more, span, target in
              zip(sizes, attrs["strides"], extra, spans, targets[-len(sizes):], strict=True)]
    return _ends(totals, upper=mode == "SAME_UPPER")


def _without_ceil(call: Call, attrs: dict[str, Any]) -> dict[str, Any]:
    """ceil_mode as more padding at the end; not where an AveragePool counts its padding, but not this one."""
    if attrs.get("count_include_pad"):
        return {"ceil_mode": 1}
    sizes = fixed(call.type().shape[2:])
    probe = replace(call.node, attrs=attrs)
    window = Window.of(probe, len(sizes))
    ends = [max((count - 1) * stride + span - size - before, after) for count, stride, span, size, (before, after) in
            zip(window.outputs(sizes, ceil=True), window.strides, window.spans, sizes, window.pads, strict=True)]
    return {"pads": (*(before for before, _ in window.pads), *ends)}


@rule("Upsample")
def _upsample(call: Call) -> list[Node]:
    scales = call.attr("scales") or call.value(1)
    mode = call.attr("mode", "nearest")
    return [replace(node, op="Resize") for node in call.node_with(
        1, scales=tuple(scales or ()), mode="linear" if mode in ("linear", "bilinear") else mode,
        coordinate_transformation_mode="asymmetric", nearest_mode="floor")]


@rule("Resize")
def _resize(call: Call) -> list[Node]:
    attrs: dict[str, Any] = {
        "mode": call.attr("mode", "nearest"),
        "coordinate_transformation_mode": call.attr("coordinate_transformation_mode", "half_pixel"),
        "nearest_mode": call.attr("nearest_mode", "round_prefer_floor"),
        **call.keep("cubic_coeff_a", "exclude_outside", "extrapolation_value", "antialias")}
    call.ignore("keep_aspect_ratio_policy")     # of sizes, where there are any
    if call.opset < 11:
        attrs |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return call.node_with(1, scales=tuple(call.value(1) or ()), **attrs)
    shape = call.type().shape
    axes = [normal_axis(a, len(shape)) for a in call.attr("axes", range(len(shape)))]
    sizes, scales = call.value(3), call.value(2)
    if attrs["coordinate_transformation_mode"] == "tf_crop_and_resize":
        roi = call.value(1) or []
        starts, ends = dict(zip(axes, roi, strict=False)), dict(zip(axes, roi[len(axes):], strict=False))
        every = range(len(shape))
        attrs["roi"] = (*(starts.get(i, 0.0) for i in every), *(ends.get(i, 1.0) for i in every))
    if len(given := sizes or scales or ()) != len(axes):
        raise GraphError(f"{len(given)} {'sizes' if sizes else 'scales'} for {len(axes)} axes")
    if sizes:
        sizes = _kept_ratio(call, sizes, axes)
        wanted = dict(zip(axes, sizes, strict=True))
        every_size = tuple(dim(wanted[i]) if i in wanted else d for i, d in enumerate(shape))
        return call.node_with(1, sizes=every_size, **attrs)
    if not all(np.isfinite(scale) and scale > 0 for scale in scales or ()):
        raise GraphError(f"its scales are {scales}: finite numbers above 0")
    factors = dict(zip(axes, scales or [], strict=True))
    exact = [factors.get(i, 1.0) * size for i, size in enumerate(shape) if isinstance(size, int)]
    if attrs["coordinate_transformation_mode"] == "align_corners" and any(size != round(size) for size in exact):
        raise GraphError("its scales make a fraction of a pixel, of which align_corners means one thing in ONNX and "
                         "another in ONNX Runtime; give it sizes")
    return call.node_with(1, scales=tuple(float(factors.get(i, 1.0)) for i in range(len(shape))), **attrs)


def _kept_ratio(call: Call, sizes: list[Any], axes: list[int]) -> list[Any]:
    """`sizes` as limits that an image must not exceed, or must reach, without changing its proportions."""
    policy = call.attr("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return sizes
    image = fixed(call.type().shape[a] for a in axes)
    if policy not in ("not_larger", "not_smaller"):
        raise GraphError(f"unknown keep_aspect_ratio_policy '{policy}'; ONNX has stretch, not_larger, not_smaller")
    limit = min if policy == "not_larger" else max
    scale = limit(s / d for s, d in zip(sizes, image, strict=True))
    return [math.floor(scale * d + 0.5) for d in image]


def _dims(values: Iterable[Any] | None) -> tuple[Dim, ...]:
    return tuple(dim(v) for v in values or ())
