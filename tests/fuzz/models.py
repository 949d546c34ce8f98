"""Damaged model files, from seeds: cut short, altered, or with fields of the ONNX graph edited.

    python -m tests.fuzz.models --count 3000 --seed 1       # thousands; prints what became of each kind

Each is built and run by a worker with two minutes and 2 GB (tests/fuzz/worker.py). It must end in a named error that
is no fault of the compiler, or in an engine whose answers are ONNX Runtime's or the onnx package's, where one of them
runs the file; they are asked in a worker of their own, for damaged models may end them too.
"""
from __future__ import annotations

import argparse
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import CompilerFault, EngineError
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.small_models import node, small_model
from tests.fuzz.worker import Worker

ITEMS = 2                   # items per batch
TOLERANCE = 1e-3            # relative to the largest expected value
HUGE = 1e6                  # weights beyond make nonsense of a gate's last bit: nobody could say what then is right
TEXT = FieldDescriptor.CPPTYPE_STRING
NUMBERS = (0, 1, -1, 2, 3, 4, 5, 7, 10, 11, 16, 17, 64, 255, 1 << 18, 1 << 31, (1 << 31) - 1, 1 << 40, (1 << 63) - 1,
           -(1 << 63))
OPS = ("Relu", "Add", "MatMul", "Gemm", "Conv", "MaxPool", "Softmax", "Concat", "Reshape", "Transpose", "Cast", "Slice",
       "Gather", "ReduceMean", "LSTM", "Pad", "Resize", "Where", "Shape", "Identity", "NonZero", "Loop", "If", "Relux",
       "")
TEXTS = ("", "x", "y", "w", "batch", "com.microsoft", "ai.onnx.ml", "\0", "é" * 300, "SAME_UPPER", "linear", "axis")


# ---- the models that are damaged
def image_model() -> onnx.ModelProto:
    draw = np.random.default_rng(0).standard_normal
    nodes = [node("Conv", "x w b", "c", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
             node("BatchNormalization", "c scale bias mean variance", "n"), node("Relu", "n", "r"),
             node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]), node("GlobalAveragePool", "p", "g"),
             node("Flatten", "g", "f", axis=1), node("Gemm", "f fc fb", "y", transB=1)]
    constants = {"w": draw((8, 3, 3, 3)), "b": draw(8), "scale": draw(8), "bias": draw(8), "mean": draw(8),
                 "variance": np.abs(draw(8)) + 1, "fc": draw((5, 8)), "fb": draw(5)}
    return small_model(nodes, {"x": ["n", 3, 8, 8]}, ["y"], {k: v.astype(np.float32) for k, v in constants.items()})


def attention_model() -> onnx.ModelProto:
    draw = np.random.default_rng(1).standard_normal
    nodes = [node("LayerNormalization", "x g h", "n", axis=-1), node("MatMul", "n w", "q"), node("Add", "q b", "k"),
             node("Transpose", "k", "t", perm=[0, 2, 1]), node("MatMul", "k t", "s"),
             node("Softmax", "s", "p", axis=-1), node("MatMul", "p n", "o"), node("Reshape", "o shape", "m"),
             node("Erf", "m", "e"), node("ReduceMean", "e axes", "y", keepdims=0)]
    constants = {"g": draw(8), "h": draw(8), "w": draw((8, 8)), "b": draw(8)}
    return small_model(nodes, {"x": ["n", 4, 8]}, ["y"], {**{k: v.astype(np.float32) for k, v in constants.items()},
                                                          "shape": np.int64([0, 2, 16]), "axes": np.int64([2])})


def recurrent_model() -> onnx.ModelProto:
    draw = np.random.default_rng(2).standard_normal
    nodes = [node("LSTM", "x w r b", "a h c", hidden_size=4), node("Squeeze", "a axes", "s"),
             node("GRU", "s gw gr", "o last", hidden_size=3, direction="reverse"),
             node("Concat", "last last", "y", axis=0)]
    constants = {"w": draw((1, 16, 6)), "r": draw((1, 16, 4)), "b": draw((1, 32)), "gw": draw((1, 9, 4)),
                 "gr": draw((1, 9, 3))}
    return small_model(nodes, {"x": [5, 2, 6]}, ["y", "h"], {**{k: v.astype(np.float32) for k, v in constants.items()},
                                                             "axes": np.int64([1])})


def quantised_model() -> onnx.ModelProto:
    """Return a quantised model with no sum midway between two steps, where other runtimes round differently."""
    integers = np.random.default_rng(3).integers
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "d"),
             node("DequantizeLinear", "w ws wz", "v", axis=0), node("Conv", "d v", "c"),
             node("Clip", "c low high", "k"), node("QuantizeLinear", "k t z", "o"),
             node("DequantizeLinear", "o t z", "y")]
    constants = {"s": np.float32(0.05), "z": np.uint8(128), "t": np.float32(0.1037), "low": np.float32(-9),
                 "high": np.float32(9), "w": integers(-127, 128, (4, 3, 1, 1)).astype(np.int8),
                 "ws": np.float32([0.01, 0.02, 0.03, 0.04]), "wz": np.zeros(4, np.int8)}
    return small_model(nodes, {"x": ["n", 3, 4, 4]}, ["y"], constants)


def moving_model() -> onnx.ModelProto:
    resize = onnx.helper.make_node("Resize", ["x", "", "scales"], ["z"], mode="linear")
    nodes = [node("Shape", "x", "s"), node("Gather", "s two", "h", axis=0), node("Concat", "minus h", "t", axis=0),
             node("Reshape", "x t", "r"), node("Slice", "r from to minus", "c"), node("Pad", "c pads half", "p"),
             node("Split", "p sizes", "a b", axis=1), node("Cast", "a", "i", to=onnx.TensorProto.INT64),
             node("Cast", "i", "f", to=onnx.TensorProto.FLOAT), node("Less", "f b", "l"), node("Where", "l f b", "w"),
             resize, node("ReduceMax", "z axes", "y", keepdims=0), node("CumSum", "w axis", "v")]
    constants = {"two": [2], "minus": [-1], "from": [1], "to": [4], "axis": 1, "pads": [0, 0, 0, 1],
                 "half": np.float32(0.5), "sizes": [2, 2], "scales": np.float32([1, 1, 2, 2]), "axes": [2, 3]}
    return small_model(nodes, {"x": [2, 3, 4, 4]}, ["y", "v"], constants)


SEEDS: dict[str, Callable[[], onnx.ModelProto]] = {
    "image": image_model, "attention": attention_model, "recurrent": recurrent_model, "quantised": quantised_model,
    "moving": moving_model}


def with_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with a distinct name for each node, which ONNX Runtime requires."""
    for index, proto in enumerate(model.graph.node):
        proto.name = f"{proto.op_type}{index}"
    return model


# ---- kinds of damage: (model, random numbers) -> (what was done, the damaged file)
Kind = Callable[[onnx.ModelProto, random.Random], tuple[str, bytes]]


def cut_short(model: onnx.ModelProto, rng: random.Random) -> tuple[str, bytes]:
    data = model.SerializeToString()
    at = rng.randrange(len(data))
    return f"at {at}", data[:at]


def flipped(model: onnx.ModelProto, rng: random.Random) -> tuple[str, bytes]:
    data = bytearray(model.SerializeToString())
    bits = [rng.randrange(8 * len(data)) for _ in range(rng.choice((1, 1, 2, 4)))]
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    return f"bits {bits}", bytes(data)


def overwritten(model: onnx.ModelProto, rng: random.Random) -> tuple[str, bytes]:
    data = bytearray(model.SerializeToString())
    size = rng.choice((1, 2, 4, 16))
    at, source = (rng.randrange(len(data) - size) for _ in range(2))
    data[at:at + size] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size), data[source:source + size]))
    return f"{size} bytes at {at}", bytes(data)


Place = tuple[Message, FieldDescriptor, int | None]         # a field of a message, and the index of one that repeats


def places(message: Message) -> Iterator[Place]:
    """Yield every field that is set in a message and its submessages."""
    for field, value in message.ListFields():
        repeated = isinstance(getattr(message, field.name), Message) is False and hasattr(value, "append") or hasattr(
            value, "add")
        for at, one in enumerate(value) if repeated else ((None, value),):
            yield message, field, at
            if isinstance(one, Message):
                yield from places(one)


def field_edited(model: onnx.ModelProto, rng: random.Random) -> tuple[str, bytes]:
    damaged = onnx.ModelProto.FromString(model.SerializeToString())
    done = [_edit(damaged, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    return "; ".join(done), damaged.SerializeToString()


def _edit(model: onnx.ModelProto, rng: random.Random) -> str:
    # As likely to be any field as any other: a model has fifty numbers of dims, and one opset.
    every = list(places(model))
    if not every:
        return "nothing left"
    name = rng.choice(sorted({field.full_name for _, field, _ in every}))
    message, field, at = rng.choice([place for place in every if place[1].full_name == name])
    value = getattr(message, field.name)
    where = f"{name.removeprefix('onnx.')}{'' if at is None else [at]}"
    if at is not None and rng.random() < 0.3:
        return f"{where} {_rearranged(value, at, rng)}"
    if rng.random() < 0.1:
        message.ClearField(field.name)
        return f"{where} left out"
    old = value if at is None else value[at]
    if isinstance(old, Message):
        twin = rng.choice([m for m, f, i in every if f.full_name == name])
        other = getattr(twin, field.name)
        old.CopyFrom(rng.choice(other) if at is not None else other)
        return f"{where} is another's"
    new = _another(model, field, old, rng)
    try:
        if at is None:
            setattr(message, field.name, new)
        else:
            value[at] = new
    except (ValueError, TypeError):         # more than the field holds
        return f"{where} stays"
    return f"{where}: {old!r} -> {new!r}"[:120]


def _rearranged(values: Any, at: int, rng: random.Random) -> str:
    """Duplicate, remove or move one element of a repeated field."""
    turn, elements = rng.randrange(3), list(values)
    one = elements.pop(at)
    if turn < 2:
        elements.insert(rng.randrange(len(elements) + 1), one)
    if turn == 0:
        elements.insert(rng.randrange(len(elements) + 1), one)
    copies = [type(e).FromString(e.SerializeToString()) if isinstance(e, Message) else e for e in elements]
    del values[:]
    values.extend(copies)
    return ("twice", "moved", "left out")[turn]


def _another(model: onnx.ModelProto, field: FieldDescriptor, old: Any, rng: random.Random) -> Any:
    if isinstance(old, bytes):
        return rng.choice((old[:-1], old + b"\0", b"", old[:len(old) // 2], bytes(len(old)), _shuffled(old, rng)))
    if isinstance(old, str):
        names = [text for n in model.graph.node for text in (*n.input, *n.output, n.name)]
        return rng.choice(OPS if field.name == "op_type" and rng.random() < 0.8 else (*names, *TEXTS))
    if isinstance(old, float):
        return rng.choice((0.0, -1.0, 1e30, -1e-30, float("inf"), float("nan"), old * 2))
    return rng.choice((old + 1, old - 1, -old, old * 2, *NUMBERS))


def _shuffled(data: bytes, rng: random.Random) -> bytes:
    """Permute the four-byte words, which keeps the weights' magnitudes and so lets outputs be compared."""
    words = [data[at:at + 4] for at in range(0, len(data), 4)]
    return b"".join(rng.sample(words, len(words)))


KINDS: dict[str, Kind] = {"cut short": cut_short, "flipped": flipped, "overwritten": overwritten, "field": field_edited}
WEIGHTS = {"flipped": 2, "field": 7}


def damaged(count: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield (kind, description, file) of damaged models, each from its own seed."""
    kinds = [kind for kind in KINDS for _ in range(WEIGHTS.get(kind, 1))]
    models = {name: with_names(make()) for name, make in SEEDS.items()}
    for case in range(count):
        rng = random.Random(f"{seed}/{case}")
        name, kind = rng.choice(sorted(models)), kinds[case % len(kinds)]
        done, data = KINDS[kind](models[name], rng)
        yield kind, f"{name}, seed {seed}, case {case}: {done}", data


# ---- what becomes of it
def feeds_of(plan: Plan) -> dict[str, Any]:
    drawn = np.random.default_rng(0).integers(-4, 5, 997)
    items = min(ITEMS, plan.max_batch or 1)
    feeds = {}
    for io in plan.inputs:
        values = (drawn / 4 if io.dtype.startswith("float") else drawn).astype(
            "uint16" if io.dtype == "bfloat16" else io.dtype)
        feeds[io.name] = np.resize(values, [items if isinstance(extent, str) else extent for extent in io.shape])
    return feeds


BUILDERS: dict[str, Builder] = {}           # one for each worker: it keeps the kernels that it compiled


def outcome(path: str, answers: str) -> str:
    """Return "refused: ...", "fault: ..." or "built"; in the last case `answers` gets feeds and outputs."""
    builder = BUILDERS.setdefault("", Builder(BuildConfig(timing=False)))
    try:
        engine = Engine(builder.plan(builder.graph(path)))
        feeds = feeds_of(engine.plan)
        made = engine.run(feeds)
    except CompilerFault as error:
        return f"FAULT: {error}"
    except EngineError as error:
        return f"refused: {type(error).__name__}: {error}"
    np.savez(answers, **{f"in/{name}": array for name, array in feeds.items()},
             **{f"out/{io.name}": made[io.name] for io in engine.outputs})
    return "built"


def judged(path: str, answers: str) -> str:
    """Return "right", the fault, or "unjudged" if no other runtime runs the model, or weights are huge."""
    warnings.simplefilter("ignore")
    with np.load(answers) as arrays:
        feeds = {name[3:]: arrays[name] for name in arrays if name.startswith("in/")}
        made = {name[4:]: arrays[name] for name in arrays if name.startswith("out/")}
    said = []
    for oracle in (_onnx_runtime, _onnx_package):
        try:
            expected = oracle(path, feeds)
        except Exception:       # a damaged model: whatever they raise
            continue
        said.append("; ".join(filter(None, (_difference(name, made[name], expected[name]) for name in made))))
        if not said[-1]:
            return "right"
    if (largest := _largest_constant(path)) > HUGE:
        return f"unjudged: constants up to {largest:.0e}"
    return f"WRONG: {said[0]}" if said else "unjudged"


def _largest_constant(path: str) -> float:
    arrays = [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]
    return max((float(np.abs(array[np.isfinite(array)]).max(initial=0)) for array in arrays if array.dtype.kind == "f"),
               default=0.0)


def _onnx_runtime(path: str, feeds: dict[str, Any]) -> dict[str, Any]:
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _onnx_package(path: str, feeds: dict[str, Any]) -> dict[str, Any]:
    from onnx.reference import ReferenceEvaluator
    evaluator = ReferenceEvaluator(path)
    return dict(zip(evaluator.output_names, evaluator.run(None, feeds), strict=True))


def _difference(name: str, made: Any, expected: Any) -> str:
    if made.shape != expected.shape or made.dtype != expected.dtype:
        return f"'{name}' is {made.dtype}{list(made.shape)}, not {expected.dtype}{list(expected.shape)}"
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=0)
    near = np.isclose(made, expected, rtol=TOLERANCE, atol=TOLERANCE * float(scale) or TOLERANCE)
    if np.all(near | np.isnan(expected)):       # a maximum of no number and a number is either, as each machine has it
        return ""
    return f"'{name}' is {made.ravel()[:4]}, not {expected.ravel()[:4]}"


def fuzz(count: int, seed: int, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, description, outcome) of each damaged model."""
    target, answers = str(folder / "damaged.onnx"), str(folder / "answers.npz")
    with Worker(outcome) as ours, Worker(judged) as oracle:
        for kind, done, data in damaged(count, seed):
            Path(target).write_bytes(data)
            result = ours.ask(target, answers)
            if result == "built":
                result = oracle.ask(target, answers)
                if result.startswith(("CRASH", "HANG", "TRACEBACK")):
                    result = f"unjudged: {result}"
            yield kind, done, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tally: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for kind, done, result in fuzz(options.count, options.seed, Path(folder)):
            word = result.split(":")[0]
            tally[kind, word] += 1
            if word not in ("refused", "right", "unjudged"):
                print(f"{kind}: {done}: {result}", flush=True)
    for (kind, word), number in sorted(tally.items()):
        print(f"{kind:12} {word:10} {number}")


if __name__ == "__main__":
    main()
