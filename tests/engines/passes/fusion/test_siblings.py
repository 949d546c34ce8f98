"""Layers that read one tensor become one wide layer and a Split."""
from infer_server.engines.passes.fusion.siblings import MAX_CHANNELS, merge_siblings
from tests.engines.passes.build import Build, keeps, ops


def branches(*after: str, channels: tuple[int, int] = (4, 6)) -> Build:
    net = Build()
    x = net.input("x", 3, 8, 8)
    ends = [net.conv(x, count, 1, name=f"conv{i}") for i, count in enumerate(channels)]
    ends = [net(op, end) if op else end for op, end in zip(after, ends, strict=True)]
    net("Concat", *ends, name="y", axis=1)
    return net


def test_convolutions_of_one_tensor_are_one_convolution_and_a_split() -> None:
    after = keeps(merge_siblings, branches("", "").graph("y"))
    assert ops(after) == ["Conv", "Split", "Concat"]
    assert after.nodes[0].origin == ("conv0", "conv1") and after.nodes[1].attrs["split"] == (4, 6)


def test_what_follows_every_branch_goes_before_the_split() -> None:
    after = keeps(merge_siblings, branches("Sigmoid", "Sigmoid").graph("y"))
    assert ops(after) == ["Conv", "Sigmoid", "Split", "Concat"]


def test_what_follows_one_branch_stays_behind_the_split() -> None:
    assert ops(keeps(merge_siblings, branches("Sigmoid", "").graph("y"))) == ["Conv", "Split", "Sigmoid", "Concat"]


def test_a_branch_that_is_a_graph_output_is_left_alone_and_a_note_says_why() -> None:
    log: list[object] = []
    graph = branches("", "").graph("y", "conv0")
    assert str(merge_siblings(graph, log)) == str(graph)        # type: ignore[arg-type]
    assert "a branch is a graph output" in str(log)


def test_branches_too_wide_for_the_cache_stay_apart() -> None:
    graph = branches("", "", channels=(MAX_CHANNELS, 1)).graph("y")
    assert ops(merge_siblings(graph)) == ["Conv", "Conv", "Concat"]
