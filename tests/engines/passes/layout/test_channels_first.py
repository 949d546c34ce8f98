"""Nodes that run as well on channels-first images stay so, unless a neighbour needs channels last."""
from __future__ import annotations

from typing import Any

import pytest

from infer_server.engines.passes.layout.channels_last import to_channels_last
from tests.engines.passes.build import Build, keeps, ops

CHANNELS, SIZE = 4, 24
ALONE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "mean": ("GlobalAveragePool", {}, ["Reshape", "ReduceMean", "Reshape"]),
    "maximum": ("GlobalMaxPool", {}, ["Reshape", "ReduceMax", "Reshape"]),
    "to depth": ("SpaceToDepth", {"blocksize": 2}, ["Reshape", "Transpose", "Reshape"]),
    "to depth, columns first": ("SpaceToDepth", {"blocksize": 2, "mode": "CRD"}, ["Reshape", "Transpose", "Reshape"]),
    "to space": ("DepthToSpace", {"blocksize": 2, "mode": "DCR"}, ["Reshape", "Transpose", "Reshape"]),
    "to space, columns first": ("DepthToSpace", {"blocksize": 2, "mode": "CRD"}, ["Reshape", "Transpose", "Reshape"]),
    "repeated pixels": ("Resize", {"mode": "nearest", "scales": (1.0, 1.0, 2.0, 3.0)},
                        ["Reshape", "Expand", "Reshape"]),
    "pixels chosen": ("Resize", {"mode": "nearest", "scales": (1.0, 1.0, 1.5, 2.0)},
                      ["Transpose", "Resize", "Transpose"]),
    "channels chosen": ("Resize", {"mode": "nearest", "scales": (1.0, 1.5, 2.0, 2.0)},
                        ["Transpose", "Resize", "Transpose"]),
    "a pool by ones": ("MaxPool", {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}, ["MaxPool"]),
    "a pool that cuts": ("AveragePool", {"kernel_shape": (2, 2), "strides": (2, 2)}, ["AveragePool"]),
    "a pool by twos": ("MaxPool", {"kernel_shape": (3, 3), "strides": (2, 2)}, ["Transpose", "MaxPool", "Transpose"]),
    "a mean beside padding": ("AveragePool", {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)},
                              ["Transpose", "AveragePool", "Transpose"]),
}


@pytest.mark.parametrize("op, attrs, expected", ALONE.values(), ids=ALONE)
def test_alone_it_is_computed_where_it_lies(op: str, attrs: dict[str, Any], expected: list[str]) -> None:
    net = Build()
    graph = net.graph(net(op, net.input("x", CHANNELS, SIZE, SIZE), **attrs))
    assert ops(keeps(to_channels_last, graph)) == expected


def test_a_depthwise_convolution_alone_slides_along_rows_if_it_goes_by_single_columns() -> None:
    made = []
    for size, stride in ((SIZE, 1), (SIZE, 2), (SIZE // 2, 1)):
        net = Build()
        graph = net.graph(net.conv(net.input("x", CHANNELS, size, size), CHANNELS, 3, group=CHANNELS, stride=stride))
        made.append("Transpose" in ops(keeps(to_channels_last, graph)))
    assert made == [False, True, True]


def test_a_depthwise_convolution_of_many_taps_takes_vectors_of_channels() -> None:
    made = []
    for taps in (3, 5, 7, 9):
        net = Build()
        graph = net.graph(net.conv(net.input("x", CHANNELS, SIZE + taps, SIZE + taps), CHANNELS, taps, group=CHANNELS))
        made.append("Transpose" in ops(keeps(to_channels_last, graph)))
    assert made == [False, True, True, False]


def test_a_depthwise_convolution_of_a_quantised_image_takes_vectors_of_channels() -> None:
    net = Build()
    x = net("FakeQuantize", net.input("x", CHANNELS, SIZE, SIZE), scale=0.5, zero_point=128, low=0, high=255)
    graph = net.graph(net.conv(x, CHANNELS, 3, group=CHANNELS))
    assert ops(keeps(to_channels_last, graph)) == ["Transpose", "FakeQuantize", "Conv", "Transpose"]


def test_beside_convolutions_it_takes_their_images() -> None:
    net = Build()
    x = net("MaxPool", net.input("x", CHANNELS, SIZE, SIZE), kernel_shape=(3, 3), pads=(1, 1, 1, 1))
    x = net.conv(net.conv(x, CHANNELS, 3, group=CHANNELS), CHANNELS)
    graph = net.graph(net("GlobalAveragePool", net("SpaceToDepth", x, blocksize=2)))
    assert ops(keeps(to_channels_last, graph)) == ["Transpose", "MaxPool", "Conv", "Conv", "SpaceToDepth",
                                                   "GlobalAveragePool", "Reshape"]


@pytest.mark.parametrize("channels", [3, 20])
def test_samples_are_taken_of_an_image_as_it_lies(channels: int) -> None:
    """GridSample between convolutions is channels last; alone it is channels first, for any number of channels."""
    for layers, expected in ((False, ["GridSample"]), (True, ["Transpose", "Conv", "GridSample", "Conv", "Transpose"])):
        net = Build()
        x, grid = net.input("x", channels, 7, 6), net.input("grid", 4, 5, 2)
        x = net.conv(x, channels, 3) if layers else x
        y = net("GridSample", x, grid, mode="linear", padding_mode="reflection")
        assert ops(keeps(to_channels_last, net.graph(net.conv(y, channels) if layers else y))) == expected


def test_what_is_sampled_as_it_was_made_with_its_channels_last_is_not_turned() -> None:
    """Deformable attention samples values [items, pixels, channels]."""
    net = Build()
    values, grid = net.input("x", 42, 20), net.input("grid", 4, 5, 2)
    image = net("Reshape", net("Transpose", values, perm=(0, 2, 1)), shape=("batch", 20, 7, 6))
    graph = net.graph(net("GridSample", image, grid, mode="linear"))
    assert ops(keeps(to_channels_last, graph)) == ["Reshape", "GridSample", "Transpose"]
