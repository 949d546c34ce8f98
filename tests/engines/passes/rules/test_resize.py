"""Images that are channels last in the model are resized as images."""
import pytest

from infer_server.engines.passes.pipeline import optimise, simplify
from tests.engines.passes.build import Build, keeps, ops

ROI = (0.0, 0.1, 0.2, 0.0, 1.0, 0.9, 0.7, 1.0)      # the first and the last place of each axis


def resized(**attrs):
    """Return the optimised graph of a Resize of a batch of 6 x 5 pixels with 3 channels."""
    net = Build()
    return keeps(lambda graph: optimise(simplify(graph)), net.graph(net("Resize", net.input("x", 6, 5, 3), **attrs)))


@pytest.mark.parametrize("attrs", [
    {"scales": (1.0, 2.0, 3.0, 1.0)},
    {"mode": "nearest", "sizes": ("batch", 3, 5, 3)},
    {"mode": "cubic", "sizes": ("batch", 4, 11, 3), "scales": (1.0, 0.7, 2.2, 1.0)},
    {"sizes": ("batch", 4, 11, 3), "coordinate_transformation_mode": "tf_crop_and_resize", "roi": ROI},
], ids=str)
def test_the_middle_axes_are_resized_without_a_transpose(attrs):
    after = resized(**{"mode": "linear", **attrs})
    assert ops(after) == ["Resize"] and after.nodes[0].anchor.attrs["channels_last"]


@pytest.mark.parametrize("scales", [(1.0, 2.0, 1.0, 2.0), (1.0, 1.0, 2.0, 1.0)], ids=str)
def test_what_is_no_image_with_its_channels_last_stays_as_it_is(scales):
    after = resized(mode="linear", scales=scales)
    assert [node.anchor.attrs["scales"] for node in after.nodes if node.anchor.op == "Resize"] == [scales]
