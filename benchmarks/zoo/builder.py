"""Builder for writing the CNNs of the literature as ONNX models with seeded random weights.

An architecture is a function from a Net and the image tensor to the output tensors, a line a layer:

    @architecture(size=224)                             # architecture.py
    def plain(net, x):
        x = net.conv_bn_act(x, net.scaled(64), 3, stride=2, name="stem")
        return net.linear(net.flatten(net.global_avg_pool(x)), net.classes, name="fc")

    model = plain(width=0.25, size=32, classes=10, opset=13, batch="N")     # an onnx.ModelProto

Names are those of a PyTorch export: node "/layer1.0/conv1/Conv", its output ".../Conv_output_0", its weight
"layer1.0.conv1.weight". Weights follow He et al. 2015 and each BatchNormalization holds the statistics of what reaches
it (statistics.py), so that activations keep their range in deep networks, and quantisation errors are representative.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Pads = int | tuple[int, int] | tuple[int, int, int, int]    # all sides | (rows, columns) | top, left, bottom, right
Kernel = int | tuple[int, int]
Activation = str | None
# The mean before an activation, in standard deviations. At 0, BN and ReLU amplify noise against the signal by 1.47 a
# layer (Yang et al. 2019), so INT8 fails after a dozen; trained networks do not have this property.
ACTIVE = 1.5
LARGE = np.iinfo(np.int64).max                              # "to the end" of a Slice


@dataclass(frozen=True)
class Tensor:
    """Value by its name; `shape` omits the leading extent: (channels, rows, columns) or (features,)."""
    name: str
    shape: tuple[int, ...]
    leading: str | int = ""             # first dimension, if it is not the batch
    integers: bool = False

    @property
    def channels(self) -> int:
        return self.shape[0]


def pair(kernel: Kernel) -> tuple[int, int]:
    return (kernel, kernel) if isinstance(kernel, int) else kernel


def four_pads(pads: Pads) -> tuple[int, int, int, int]:
    if isinstance(pads, int):
        return (pads, pads, pads, pads)
    return pads if len(pads) == 4 else (*pads, *pads)


def windows(shape: tuple[int, ...], kernel: Kernel, stride: int, pads: Pads, dilation: int = 1,
            ceil_mode: bool = False) -> tuple[int, int]:
    """Return the number of windows in rows and columns, by ONNX's formula."""
    top, left, bottom, right = four_pads(pads)
    rounded = math.ceil if ceil_mode else math.floor
    rows, cols = (rounded((extent + pad - dilation * (k - 1) - 1) / stride) + 1 for extent, pad, k
                  in zip(shape[1:], (top + bottom, left + right), pair(kernel), strict=True))
    return rows, cols


class Net:
    """Builder of an ONNX model. Layers whose operators changed are written in the form of `opset`."""

    def __init__(self, name: str, shape: tuple[int, ...], *, width: float = 1.0, classes: int = 1000, opset: int = 17,
                 batch: str | int = "N", seed: int = 0) -> None:
        self.name, self.width, self.classes, self.opset, self.batch = name, width, classes, opset, batch
        self.input = Tensor("input", shape)
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._scope: list[str] = []
        self._uses: Counter[str] = Counter()
        self._feeds: list[onnx.ValueInfoProto] = []
        self._below: dict[str, int] = {}

    def scaled(self, channels: int, multiple: int = 4) -> int:
        """Return `channels` times the width multiplier, rounded to a multiple."""
        return max(multiple, round(channels * self.width / multiple) * multiple)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of nodes added inside the block by `name`, like the layers of a submodule."""
        self._scope.append(name)
        yield
        self._scope.pop()

    # ---- the graph
    def feed(self, name: str, *shape: int, below: int = 0, batched: bool = True) -> Tensor:
        """Add an input instead of the picture: floats, or integers from 0 to `below` - 1.

        The bound is recorded in the model's metadata for pictures.feeds_for.
        """
        kind = TensorProto.INT64 if below else TensorProto.FLOAT
        self._feeds.append(helper.make_tensor_value_info(name, kind, [*[self.batch] * batched, *shape]))
        self._below |= {name: below} if below else {}
        return Tensor(name, shape)

    def op(self, op: str, *inputs: Tensor | str, shape: tuple[int, ...], name: str = "", **attrs: Any) -> Tensor:
        """Add a node with one output."""
        return self.ops(op, *inputs, shapes=[shape], name=name, **attrs)[0]

    def ops(self, op: str, *inputs: Tensor | str, shapes: Sequence[tuple[int, ...]], name: str = "",
            **attrs: Any) -> list[Tensor]:
        """Add a node with len(shapes) outputs."""
        path = "/" + "/".join([*self._scope, *([name] if name else []), op])
        self._uses[path] += 1
        path += f"_{self._uses[path] - 1}" if self._uses[path] > 1 else ""
        names = [f"{path}_output_{index}" for index in range(len(shapes))]
        operands = [tensor.name if isinstance(tensor, Tensor) else tensor for tensor in inputs]
        self._nodes.append(helper.make_node(op, operands, names, name=path, **attrs))
        return [Tensor(output, shape) for output, shape in zip(names, shapes, strict=True)]

    def constant(self, value: NDArray[Any], name: str = "") -> str:
        """Add an initialiser and return its name."""
        full = ".".join([*self._scope, name]) if name else f"onnx::Const_{len(self._initializers)}"
        if full in self._initializers:
            raise ValueError(f"{self.name}: two initialisers named '{full}'")
        self._initializers[full] = numpy_helper.from_array(value, full)
        return full

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def model(self, outputs: dict[str, Tensor]) -> onnx.ModelProto:
        """Return the finished model, whose BatchNormalization statistics are still 0 and 1."""
        for public, tensor in outputs.items():
            self._nodes.append(helper.make_node("Identity", [tensor.name], [public], name=f"/{public}"))
        results = [self._value(public, tensor) for public, tensor in outputs.items()]
        graph = helper.make_graph(self._nodes, self.name, self._feeds or [self._value("input", self.input)],
                                  results, list(self._initializers.values()))
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets),
                                  producer_name="zoo")
        helper.set_model_props(model, {name: str(below) for name, below in self._below.items()})
        return model

    def _value(self, name: str, tensor: Tensor) -> onnx.ValueInfoProto:
        kind = TensorProto.INT64 if tensor.integers else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, [tensor.leading or self.batch, *tensor.shape])

    # ---- layers with weights
    def conv(self, x: Tensor, out: int, kernel: Kernel, *, stride: int = 1, pads: Pads | None = None, groups: int = 1,
             dilation: int = 1, bias: bool = False, name: str) -> Tensor:
        """Add a Conv with random weights; pads=None keeps the extents at stride 1."""
        rows, cols = pair(kernel)
        if pads is None:
            pads = (dilation * (rows // 2), dilation * (cols // 2))
        with self.scope(name):
            fan_in = x.channels // groups * rows * cols
            weight = self._he((out, x.channels // groups, rows, cols), fan_in)
            operands = [self.constant(weight, "weight")]
            if bias:
                operands.append(self.constant(self.draw(out) * 0.1, "bias"))
            return self.op("Conv", x, *operands, shape=(out, *windows(x.shape, kernel, stride, pads, dilation)),
                           dilations=[dilation] * 2, group=groups, kernel_shape=[rows, cols], pads=four_pads(pads),
                           strides=[stride] * 2)

    def conv_transpose(self, x: Tensor, out: int, kernel: int, *, stride: int = 2, pads: int = 0,
                       output_padding: int = 0, name: str) -> Tensor:
        with self.scope(name):
            weight = self._he((x.channels, out, kernel, kernel), x.channels * kernel * kernel // stride ** 2)
            rows, cols = ((extent - 1) * stride - 2 * pads + kernel + output_padding for extent in x.shape[1:])
            return self.op("ConvTranspose", x, self.constant(weight, "weight"),
                           self.constant(self.draw(out) * 0.1, "bias"), shape=(out, rows, cols),
                           kernel_shape=[kernel] * 2, pads=[pads] * 4, strides=[stride] * 2,
                           output_padding=[output_padding] * 2)

    def bn(self, x: Tensor, *, gain: float = 1.0, shift: float = 0.0, name: str) -> Tensor:
        """Add batch normalisation: each channel has about standard deviation `gain` and mean `shift`.

        A `gain` below 1 on a residual branch keeps the sum's variance from doubling.
        """
        with self.scope(name):
            gamma = gain * self._random.uniform(0.7, 1.3, x.channels).astype(np.float32)
            operands = {"weight": gamma, "bias": shift + self.draw(x.channels) * 0.2,
                        "running_mean": np.zeros_like(gamma), "running_var": np.ones_like(gamma)}
            return self.op("BatchNormalization", x, *(self.constant(v, n) for n, v in operands.items()), shape=x.shape,
                           epsilon=1e-5, momentum=0.9)

    def bn_act(self, x: Tensor, act: Activation = "relu", *, name: str) -> Tensor:
        return self.act(self.bn(x, shift=ACTIVE, name=name), act)

    def conv_bn(self, x: Tensor, out: int, kernel: Kernel, *, gain: float = 1.0, name: str, **options: Any) -> Tensor:
        return self.bn(self.conv(x, out, kernel, name=name, **options), gain=gain, name=f"{name}_bn")

    def conv_bn_act(self, x: Tensor, out: int, kernel: Kernel, *, act: Activation = "relu", name: str,
                    **options: Any) -> Tensor:
        return self.bn_act(self.conv(x, out, kernel, name=name, **options), act, name=f"{name}_bn")

    def linear(self, x: Tensor, out: int, *, name: str) -> Tensor:
        with self.scope(name):
            weight = self.draw(out, x.channels) / np.float32(math.sqrt(x.channels))
            return self.op("Gemm", x, self.constant(weight, "weight"), self.constant(self.draw(out) * 0.1, "bias"),
                           shape=(out,), alpha=1.0, beta=1.0, transB=1)

    def draw(self, *shape: int) -> NDArray[np.float32]:
        """Draw standard normal numbers."""
        return self._random.standard_normal(shape, np.float32)

    def _he(self, shape: tuple[int, ...], fan_in: int) -> NDArray[np.float32]:
        return self.draw(*shape) * np.float32(math.sqrt(2 / fan_in))

    # ---- pointwise
    def act(self, x: Tensor, kind: Activation) -> Tensor:
        """Add an activation by its name; the hard ones have a name for each form that exporters write."""
        match kind:
            case None:
                return x
            case "relu" | "sigmoid" | "tanh" | "elu" | "softplus" | "hardswish":
                spelled = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "elu": "Elu", "softplus": "Softplus",
                           "hardswish": "HardSwish"}
                return self.op(spelled[kind], x, shape=x.shape)
            case "relu6":
                return self.clip(x, 0, 6)
            case "leaky":
                return self.op("LeakyRelu", x, shape=x.shape, alpha=0.1)
            case "prelu":
                slope = self.constant(self._random.uniform(0.05, 0.4, (x.channels, 1, 1)).astype(np.float32))
                return self.op("PRelu", x, slope, shape=x.shape)
            case "silu":
                return self.mul(x, self.act(x, "sigmoid"))
            case "hardsigmoid":
                return self.op("HardSigmoid", x, shape=x.shape, alpha=1 / 6, beta=0.5)
            case "hardswish_by_hardsigmoid":
                return self.mul(x, self.act(x, "hardsigmoid"))
            case "hardsigmoid_by_clip":
                return self.op("Div", self.clip(self.add(x, self.scalar(3)), 0, 6), self.scalar(6), shape=x.shape)
            case "hardswish_by_clip":
                clipped = self.clip(self.add(x, self.scalar(3)), 0, 6)
                return self.op("Div", self.mul(x, clipped), self.scalar(6), shape=x.shape)
            case "mish":
                return self.mul(x, self.act(self.act(x, "softplus"), "tanh"))
            case "gelu":
                erf = self.op("Erf", self.op("Div", x, self.scalar(math.sqrt(2)), shape=x.shape), shape=x.shape)
                return self.mul(self.mul(x, self.add(erf, self.scalar(1))), self.scalar(0.5))
        raise ValueError(f"unknown activation '{kind}'")

    def clip(self, x: Tensor, low: float, high: float) -> Tensor:
        if self.opset < 11:
            return self.op("Clip", x, shape=x.shape, min=float(low), max=float(high))
        return self.op("Clip", x, self.scalar(low), self.scalar(high), shape=x.shape)

    def add(self, x: Tensor, y: Tensor | str) -> Tensor:
        return self.op("Add", x, y, shape=x.shape)

    def mul(self, x: Tensor, y: Tensor | str) -> Tensor:
        return self.op("Mul", x, y, shape=x.shape)

    def softmax(self, x: Tensor) -> Tensor:
        return self.op("Softmax", x, shape=x.shape, axis=1)

    def dropout(self, x: Tensor) -> Tensor:
        if self.opset < 12:
            return self.op("Dropout", x, shape=x.shape, ratio=0.5)
        return self.op("Dropout", x, self.scalar(0.5), shape=x.shape)

    # ---- windows without weights
    def max_pool(self, x: Tensor, kernel: int, stride: int, pads: Pads = 0, *, ceil_mode: bool = False) -> Tensor:
        return self._pool("MaxPool", x, kernel, stride, pads, ceil_mode)

    def avg_pool(self, x: Tensor, kernel: int, stride: int, pads: Pads = 0, *, ceil_mode: bool = False,
                 count_include_pad: bool = True) -> Tensor:
        return self._pool("AveragePool", x, kernel, stride, pads, ceil_mode, count_include_pad=int(count_include_pad))

    def _pool(self, op: str, x: Tensor, kernel: int, stride: int, pads: Pads, ceil_mode: bool,
              **attrs: Any) -> Tensor:
        shape = (x.channels, *windows(x.shape, kernel, stride, pads, ceil_mode=ceil_mode))
        top, left, bottom, right = four_pads(pads)
        if ceil_mode and self.opset >= 10:
            attrs["ceil_mode"] = 1
        elif ceil_mode:
            bottom, right = bottom + stride - 1, right + stride - 1     # as many windows as with ceil_mode
        return self.ops(op, x, shapes=[shape], kernel_shape=[kernel] * 2, pads=[top, left, bottom, right],
                        strides=[stride] * 2, **attrs)[0]

    def global_avg_pool(self, x: Tensor) -> Tensor:
        return self.op("GlobalAveragePool", x, shape=(x.channels, 1, 1))

    def mean(self, x: Tensor, *, keepdims: bool) -> Tensor:
        """Add the mean over rows and columns as ReduceMean, as newer exporters do."""
        shape = (x.channels, 1, 1) if keepdims else (x.channels,)
        if self.opset < 18:
            return self.op("ReduceMean", x, shape=shape, axes=[2, 3], keepdims=int(keepdims))
        return self.op("ReduceMean", x, self.integers(2, 3), shape=shape, keepdims=int(keepdims))

    def lrn(self, x: Tensor) -> Tensor:
        return self.op("LRN", x, shape=x.shape, size=5, alpha=1e-4, beta=0.75, bias=1.0)

    def pad(self, x: Tensor, pads: Pads, value: float = 0.0) -> Tensor:
        """Add explicit padding of rows and columns, before a layer without pads."""
        top, left, bottom, right = four_pads(pads)
        shape = (x.channels, x.shape[1] + top + bottom, x.shape[2] + left + right)
        amounts = [0, 0, top, left, 0, 0, bottom, right]
        if self.opset < 11:
            return self.op("Pad", x, shape=shape, mode="constant", pads=amounts, value=value)
        return self.op("Pad", x, self.integers(*amounts), self.scalar(value), shape=shape, mode="constant")

    def resize(self, x: Tensor, scale: int, mode: str = "nearest") -> Tensor:
        """Resize by a factor: mode "nearest" as PyTorch exports it, or "linear" with half pixels."""
        shape = (x.channels, x.shape[1] * scale, x.shape[2] * scale)
        scales = self.constant(np.array([1, 1, scale, scale], np.float32))
        if self.opset < 10:
            return self.op("Upsample", x, scales, shape=shape, mode=mode)
        if self.opset < 11:
            return self.op("Resize", x, scales, shape=shape, mode=mode)
        roi = "" if self.opset >= 13 else self.constant(np.zeros(0, np.float32))
        how = ({"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"} if mode == "nearest" else
               {"coordinate_transformation_mode": "pytorch_half_pixel"})
        return self.op("Resize", x, roi, scales, shape=shape, mode=mode, **how)

    # ---- data movement
    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate along the channels."""
        return self.op("Concat", *parts, shape=(sum(p.channels for p in parts), *parts[0].shape[1:]), axis=1)

    def split(self, x: Tensor, parts: int) -> list[Tensor]:
        """Split the channels into equal parts."""
        size = x.channels // parts
        shapes = [(size, *x.shape[1:])] * parts
        if self.opset < 13:
            return self.ops("Split", x, shapes=shapes, axis=1, split=[size] * parts)
        return self.ops("Split", x, self.integers(*[size] * parts), shapes=shapes, axis=1)

    def slice(self, x: Tensor, axis: int, start: int, stop: int = LARGE, step: int = 1) -> Tensor:
        """Slice x[start:stop:step] along `axis`, which counts the batch as 0."""
        shape = list(x.shape)
        shape[axis - 1] = len(range(*slice(start, min(stop, x.shape[axis - 1]), step).indices(x.shape[axis - 1])))
        if self.opset < 10:
            if step != 1:
                raise ValueError("Slice has steps from opset 10 on")
            return self.op("Slice", x, shape=tuple(shape), axes=[axis], starts=[start], ends=[stop])
        bounds = [self.integers(value) for value in (start, stop, axis, step)]
        return self.op("Slice", x, *bounds, shape=tuple(shape))

    def reshape(self, x: Tensor, *shape: int) -> Tensor:
        """Reshape to [batch, *shape]; the batch is -1 if it is symbolic, else its number."""
        batch = self.batch if isinstance(self.batch, int) else -1
        return self.op("Reshape", x, self.integers(batch, *shape), shape=shape)

    def transpose(self, x: Tensor, *order: int) -> Tensor:
        """Permute the axes; the batch, axis 0, stays in front."""
        return self.op("Transpose", x, shape=tuple(x.shape[axis - 1] for axis in order), perm=[0, *order])

    def channel_shuffle(self, x: Tensor, groups: int) -> Tensor:
        """Transpose the channels as [groups, channels / groups] (Zhang et al. 2018)."""
        channels, rows, cols = x.shape
        x = self.transpose(self.reshape(x, groups, channels // groups, rows, cols), 2, 1, 3, 4)
        return self.reshape(x, channels, rows, cols)

    def flatten(self, x: Tensor) -> Tensor:
        return self.op("Flatten", x, shape=(math.prod(x.shape),), axis=1)

    def flatten_by_shape(self, x: Tensor) -> Tensor:
        """Flatten as exporters write x.view(x.size(0), -1): Shape, Gather, Unsqueeze, Concat, Reshape."""
        batch = self.op("Gather", self.op("Shape", x, shape=()), self.constant(np.array(0, np.int64)), shape=(), axis=0)
        if self.opset < 13:
            batch = self.op("Unsqueeze", batch, shape=(), axes=[0])
        else:
            batch = self.op("Unsqueeze", batch, self.integers(0), shape=())
        target = self.op("Concat", batch, self.integers(-1), shape=(), axis=0)
        return self.op("Reshape", x, target, shape=(math.prod(x.shape),))

    # ---- small compositions that several families share
    def squeeze_excite(self, x: Tensor, squeezed: int, *, act: str = "relu", gate: str = "sigmoid",
                       name: str) -> Tensor:
        """Add squeeze-and-excite, x * gate(W2 act(W1 mean(x))) (Hu et al. 2018)."""
        with self.scope(name):
            y = self.act(self.conv(self.global_avg_pool(x), squeezed, 1, bias=True, name="fc1"), act)
            return self.mul(x, self.act(self.conv(y, x.channels, 1, bias=True, name="fc2"), gate))

    def classify(self, x: Tensor, *, name: str = "fc") -> Tensor:
        """Add a global average pool, Flatten and a linear layer."""
        return self.linear(self.flatten(self.global_avg_pool(x)), self.classes, name=name)
