"""A context with caches in place computes what the model computes with caches that are copied."""
from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from infer_server.engines import build_engine, load_engine
from infer_server.engines.backends.device import SupportsInPlace
from infer_server.engines.errors import CapacityError, ConfigError, InputError
from infer_server.engines.frontend.onnx_file import read_model
from infer_server.engines.ir.graph import Array
from infer_server.engines.passes.caches import Cache, caches_of
from infer_server.engines.plan.arena import ChangingArray
from infer_server.engines.plan.extents import CACHE_CAPACITY
from infer_server.engines.runtime.caches import CacheContext
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.open_models import growing_net, node, random
from tests.engines.compiler.small_models import small_model

CAPACITY, HEADS, SHARED, DEPTH = 24, 4, 2, 8
MARK = 77.0             # value of elements that no step may touch


def queries_net() -> onnx.ModelProto:
    """Return a decoder step with GroupQueryAttention, whose queries, keys and values are inputs."""
    attention = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "past_k", "past_v", "lengths", "total", "cos", "sin"],
        ["y", "present_k", "present_v"], domain="com.microsoft", num_heads=HEADS, kv_num_heads=SHARED, do_rotary=1)
    angles = np.arange(64)[:, None] * 0.3 ** np.arange(DEPTH // 2)
    model = small_model(
        [node("ReduceSum", "mask last", "tokens", keepdims=0), node("Sub", "tokens one", "before"),
         node("Cast", "before", "lengths", to=6), node("Shape", "mask", "s"), node("Gather", "s one", "count"),
         node("Cast", "count", "total", to=6), attention],
        {**{name: ["N", "S", heads * DEPTH] for name, heads in (("q", HEADS), ("k", SHARED), ("v", SHARED))},
         **{name: ["N", SHARED, "P", DEPTH] for name in ("past_k", "past_v")}, "mask": ["N", "T"]},
        ["y", "present_k", "present_v"],
        {"last": np.array([1]), "one": np.array(1), "cos": np.cos(angles).astype(np.float32),
         "sin": np.sin(angles).astype(np.float32)})
    next(value for value in model.graph.input if value.name == "mask").type.tensor_type.elem_type = TensorProto.INT64
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


PASTS = {"keys": "keys_out", "values": "values_out", "past_k": "present_k", "past_v": "present_v"}


def built(model: onnx.ModelProto, folder: Path, threads: int = 1) -> Engine:
    build_engine(model, timing=False, cache=False).save(folder / "m.plan")
    return load_engine(folder / "m.plan", threads=threads, specialise="off", cache=False)


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return built(growing_net(), tmp_path_factory.mktemp("growing"))


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return built(queries_net(), tmp_path_factory.mktemp("queries"))


def query_feeds(new: int, lengths: list[int], seed: int) -> dict[str, Array]:
    """Return inputs for `new` tokens of items that have these lengths with them."""
    shape = len(lengths), new
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    return {"q": random(*shape, HEADS * DEPTH, seed=seed), "k": random(*shape, SHARED * DEPTH, seed=seed + 1),
            "v": random(*shape, SHARED * DEPTH, seed=seed + 2), "mask": mask}


class Both:
    """A context with caches in place, and the engine with caches that are copied."""

    def __init__(self, engine: Engine, items: int, heads: int, depth: int, capacity: int = CAPACITY) -> None:
        self.engine, self.context = engine, engine.create_cache(capacity)
        self.pasts = {io.name: np.zeros((items, heads, 0, depth), np.float32)
                      for io in engine.inputs if io.name in PASTS}

    def run(self, feeds: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the outputs of both, without those of the caches."""
        wanted = self.engine.run({**feeds, **self.pasts})
        self.pasts = {name: wanted.pop(PASTS[name]) for name in self.pasts}
        return self.context.run(feeds), wanted


def arrays_of(context: CacheContext) -> dict[str, Array]:
    return context._arrays


def test_tokens_are_appended_to_the_caches_of_a_concat(growing: Engine) -> None:
    both = Both(growing, 2, 4, 4)
    for step in range(5):
        ours, wanted = both.run({"x": random(2, 1, 16, seed=step)})
        assert ours.keys() == {"y"} and both.context.length == step + 1
        np.testing.assert_allclose(ours["y"], wanted["y"], 1e-5, 1e-6)
        for name, array in arrays_of(both.context).items():
            np.testing.assert_allclose(array[:, :, :step + 1], both.pasts[name], 1e-5, 1e-6)
            assert not array[:, :, step + 1:].any()


@pytest.mark.parametrize("lengths", [[5, 5], [5, 3]])
def test_tokens_are_appended_to_the_caches_of_a_group_query_attention(queries: Engine, lengths: list[int]) -> None:
    both = Both(queries, 2, SHARED, DEPTH)
    for step, new in enumerate((5, 1, 1, 1)):
        ours, wanted = both.run(query_feeds(new, lengths, 10 * step))
        assert both.context.length == max(lengths)
        for item, length in enumerate(lengths):
            np.testing.assert_allclose(ours["y"][item, :length], wanted["y"][item, :length], 1e-4, 1e-5)
            for name, array in arrays_of(both.context).items():
                np.testing.assert_allclose(array[item, :, :length], both.pasts[name][item, :, :length], 1e-5, 1e-6)
        lengths = [length + 1 for length in lengths]


@pytest.mark.parametrize("capacity", [8, 10, 11, 24])
def test_a_prompt_of_most_of_the_capacity_leaves_the_rest(queries: Engine, capacity: int) -> None:
    both = Both(queries, 1, SHARED, DEPTH, capacity)
    for new, length in ((7, 7), (1, 8)):
        ours, wanted = both.run(query_feeds(new, [length], length))
        assert both.context.length == length
        np.testing.assert_allclose(ours["y"], wanted["y"], 1e-4, 1e-5)


def test_several_tokens_follow_others(queries: Engine) -> None:
    both = Both(queries, 1, SHARED, DEPTH)
    for step, (new, length) in enumerate(((4, 4), (3, 7), (1, 8))):
        ours, wanted = both.run(query_feeds(new, [length], 10 * step))
        np.testing.assert_allclose(ours["y"], wanted["y"], 1e-4, 1e-5)


def test_a_step_writes_its_own_tokens_only(growing: Engine, queries: Engine) -> None:
    """Nothing is copied: other elements may have any value, and the kernels work in the caches' memory."""
    for engine, feeds in ((growing, {"x": random(2, 1, 16)}), (queries, query_feeds(1, [7, 7], 0))):
        context = engine.create_cache(CAPACITY)
        context.run({"x": random(2, 1, 16)} if engine is growing else query_feeds(6, [6, 6], 0))
        context.length = 6
        arrays = arrays_of(context)
        for array in arrays.values():
            array[:, :, 6:] = MARK
        before = {name: (array.ctypes.data, array.copy()) for name, array in arrays.items()}
        context.run(feeds)
        assert arrays_of(context).keys() == before.keys()
        for name, (address, old) in before.items():
            now = arrays_of(context)[name]
            assert now.ctypes.data == address
            np.testing.assert_array_equal(now[:, :, :6], old[:, :, :6])
            assert (now[:, :, 6] != MARK).all() and (now[:, :, 7:] == MARK).all()


def test_kernels_work_in_the_memory_of_the_caches(growing: Engine, queries: Engine) -> None:
    for engine, extents in ((growing, {"P": 6}), (queries, {"S": 1, "P": 6, "T": 7})):
        context = engine.executor.caching({**extents, CACHE_CAPACITY: CAPACITY}).create_context()
        execution = context.execution
        assert isinstance(execution, SupportsInPlace)
        caches = [view for view in context.plan.machine.inputs if view.name in PASTS]
        assert len(caches) == 2
        for view in caches:
            array = np.zeros((1, *view.shape), np.float32).view(ChangingArray)
            assert execution.set_in_place_buffer(view, array)
        assert execution.release_buffers()


def test_a_full_cache_is_an_error_and_takes_tokens_again_after_a_reset(growing: Engine,
                                                                     queries: Engine) -> None:
    context = growing.create_cache(2)
    x = {"x": random(1, 1, 16)}
    first, _ = context.run(x)["y"], context.run(x)
    with pytest.raises(InputError, match="the caches have 2 of 2 tokens: the next one does not fit"):
        context.run(x)
    context.reset(1)
    assert context.length == 1
    context.reset()
    np.testing.assert_array_equal(context.run({"x": np.concatenate([x["x"]] * 2)})["y"][1:], first)
    with pytest.raises(InputError, match="the cache has 1 tokens, 2 of which cannot be kept"):
        context.reset(2)
    filled = queries.create_cache(5)
    filled.run(query_feeds(5, [5], 0))
    assert filled.length == 5
    with pytest.raises(CapacityError, match="the caches have 0 of 4 tokens: .*no room for 5 tokens"):
        queries.create_cache(4).run(query_feeds(5, [5], 0))


def test_tokens_beyond_the_capacity_are_refused_without_a_trace(queries: Engine,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    context = queries.create_cache(8)
    context.compile()
    context.run(query_feeds(3, [3], 0))
    monkeypatch.setattr(queries.executor, "caching", None)
    for new in (6, 12):
        with pytest.raises(CapacityError, match=f"the caches have 3 of 8 tokens: no room for {3 + new} tokens"):
            context.run(query_feeds(new, [3 + new], 0))
    assert context.length == 3


def test_caches_start_with_given_tokens(growing: Engine, queries: Engine) -> None:
    both = Both(growing, 2, 4, 4)
    both.pasts = {name: random(2, 4, 3, 4, seed=seed) for seed, name in enumerate(both.pasts)}
    for _ in range(2):                      # start replaces the tokens of the first turn
        both.context.start(both.pasts)
        assert both.context.length == 3
        pasts = both.pasts
        ours, wanted = both.run({"x": random(2, 1, 16)})
        np.testing.assert_allclose(ours["y"], wanted["y"], 1e-5, 1e-6)
        both.pasts = pasts
    both.context.start({name: past[:, :, :0] for name, past in both.pasts.items()})
    assert both.context.length == 0
    keys, values = both.pasts.values()
    for pasts, reason in (({"keys": keys}, "expected arrays for the caches keys, values, got keys"),
                          ({"keys": keys, "values": values[:, :, :2]}, "'P' is one extent"),
                          ({"keys": keys, "values": values.astype(np.float64)}, "'values' is float64"),
                          ({"keys": keys[:, :2], "values": values[:, :2]}, "the model takes .batch, 4, P, 4"),
                          ({name: random(1, 4, CAPACITY + 1, 4) for name in both.pasts}, "no room for 25 tokens")):
        with pytest.raises(InputError, match=reason):
            both.context.start(pasts)


@pytest.mark.skipif(sys.platform != "linux", reason="mincore tells the pages of a mapping")
def test_memory_grows_with_the_tokens(growing: Engine, queries: Engine) -> None:
    context, heads = growing.create_cache(1 << 16), 4
    in_a_page = mmap.PAGESIZE // 16         # tokens of a head: 4 numbers of 4 bytes

    def pages(context: CacheContext) -> int:
        """Return the pages of the caches that take memory."""
        count = 0
        for array in arrays_of(context).values():
            states = (ctypes.c_ubyte * -(-array.nbytes // mmap.PAGESIZE))()
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(array.address), ctypes.c_size_t(array.nbytes), states) == 0
            count += sum(state & 1 for state in states)
        return count

    context.start({name: random(1, heads, in_a_page - 1, 4) for name in ("keys", "values")})
    for more in (1, 2, 2):
        context.run({"x": random(1, 1, 16)})
        assert pages(context) == 2 * heads * more
    prompted = queries.create_cache(1 << 16)
    for new, length in ((9, 9), (3, 12)):
        prompted.run(query_feeds(new, [length], 0))
        assert pages(prompted) == 2 * SHARED


@pytest.mark.parametrize(("model", "reason"), [
    (small_model([node("Relu", "x", "y")], {"x": ["N", "T"]}, ["y"]), "no output is an input"),
    (small_model([node("Concat", "past x", "y", axis=1)], {"past": ["N", 4, 8], "x": ["N", 1, 8]}, ["y"]),
     "its shapes are fixed"),
    (small_model([node("NonZero", "x", "y")], {"x": ["N", "T"]}, ["y"]), "it is a program"),
], ids=["no output that grows", "fixed shapes", "a program"])
def test_plans_without_caches_say_which_have_them(model: onnx.ModelProto, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"keeps no caches: {reason}.* one graph with an output that is an input of "
                                          "an open extent with further tokens"):
        built(model, tmp_path).create_cache(8)


def test_several_threads_copy_the_caches(tmp_path: Path) -> None:
    both = Both(built(growing_net(), tmp_path, threads=2), 1, 4, 4)
    for step in range(3):
        ours, wanted = both.run({"x": random(1, 1, 16, seed=step)})
        np.testing.assert_allclose(ours["y"], wanted["y"], 1e-5, 1e-6)


def test_caches_are_found_by_their_operators() -> None:
    assert caches_of(read_model(growing_net())) == (Cache("keys", "keys_out", 2), Cache("values", "values_out", 2))
    assert caches_of(read_model(queries_net())) == (
        Cache("past_k", "present_k", 2, True), Cache("past_v", "present_v", 2, True))
