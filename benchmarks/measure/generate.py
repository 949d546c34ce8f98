"""Benchmark of a decoder that generates tokens one by one, against ONNX Runtime: each step has a new length.

    python -m benchmarks.measure.generate                       # 8 layers of 1024, weights of float32 and of four bits
    python -m benchmarks.measure.generate --layers 4 --hidden 384 --heads 6 --shared-heads 2 --inner 1024 --words 4000
    python -m benchmarks.measure.generate --capacity 2048       # our caches are updated in place
    python -m benchmarks.measure.generate --served 4 --capacity 2048 --prompt 512   # in a server, four sequences

One thread each; CPU time of the process. Both run each step in turn, on inputs from ONNX Runtime's previous outputs.
With --capacity, only the tokens are ONNX Runtime's; our caches are filled by a prompt.
"first" is the slowest of the first four steps; "new" is the slowest of the others, when kernels are compiled.
With --served the caches are implicit states of sequences, copied from request to request and with use_growable_memory;
the two models take turns of BLOCK steps, and the time is the server's.
"""
from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
from tritonclient.grpc import InferenceServerClient, InferInput

from benchmarks.measure.decoders import Decoder
from benchmarks.measure.mixed_lengths import cpu_s
from benchmarks.reports.document import machine, markdown_table
from benchmarks.serving import serving_folder
from infer_server.engines import build_engine, load_engine
from infer_server.engines.runtime.caches import CacheContext

_FIRST = 4                  # steps
_BLOCK = 25                 # steps of a turn in the server
_PAGE = resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.measure.generate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = Decoder()
    for name in ("layers", "hidden", "heads", "shared_heads", "inner", "words"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(sizes, name))
    parser.add_argument("--bits", type=int, nargs="+", choices=[4, 32], default=[32, 4])
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the first step")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--capacity", type=int, default=0, help="tokens that our caches have room for")
    parser.add_argument("--specialise", default="", help="as load_engine takes it")
    parser.add_argument("--served", type=int, default=0, metavar="SEQUENCES", help="serve so many sequences by turns")
    options = parser.parse_args()
    decoders = [Decoder(options.layers, options.hidden, options.heads, options.shared_heads, options.inner,
                        options.words, bits) for bits in options.bits]
    if options.served:
        print(f"On {machine()}, {options.served} sequences, prompts of {options.prompt} tokens:\n", flush=True)
        print(markdown_table(["weights", "states", "CPU ms a step (quartiles)", "over copied"],
                             [row for decoder in decoders for row in _served(decoder, options)]))
        return
    print(f"On {machine()}, ONNX Runtime {onnxruntime.__version__}:\n", flush=True)
    rows = [_measured(decoder, options) for decoder in decoders]
    print(markdown_table(["weights", "step, ms", "ONNX Runtime", "ours / ONNX Runtime", "first, ms", "new, ms",
                          "largest difference", "RSS loaded, MB", "at the end"], rows))


def _measured(decoder: Decoder, options: argparse.Namespace) -> list[Any]:
    with TemporaryDirectory() as folder:
        model, plan = Path(folder) / "decoder.onnx", Path(folder) / "decoder.plan"
        onnx.save(decoder.model(), model)
        build_engine(model, timing=False, cache=False).save(plan)
        engine = load_engine(plan, threads=1, specialise=options.specialise, cache=False)
        loaded = _resident_mb()
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.log_severity_level = 1, 4
        session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        peer = _resident_mb() - loaded
        names = [output.name for output in session.get_outputs()]
        feeds = decoder.feeds(1, options.prompt, np.random.default_rng(1))
        run = engine.run
        if options.capacity:
            cache, feeds = engine.create_cache(options.capacity), decoder.feeds(
                options.prompt, 0, np.random.default_rng(1))
            run = partial(_run_cached, cache)
            run(feeds)
            feeds = decoder.next_feeds(dict(zip(names, session.run(None, feeds), strict=True)))
        ours, theirs, largest = list[float](), list[float](), 0.0
        for _ in range(options.tokens):
            actual = _timed(ours, partial(run, feeds))
            expected = dict(zip(names, _timed(theirs, partial(session.run, None, feeds)), strict=True))
            largest = max(largest, float(np.abs(actual["logits"] - expected["logits"]).max()
                                         / np.abs(expected["logits"]).max()))
            feeds = decoder.next_feeds(expected)
        middle, other = median(ours), median(theirs)
        return [f"{decoder.bits} bits", middle, other, middle / other, max(ours[:_FIRST]), max(ours[_FIRST:]),
                f"{largest:.1e}", round(loaded), round(_resident_mb() - peer)]


def _served(decoder: Decoder, options: argparse.Namespace) -> list[list[Any]]:
    """Return a row for states that are copied, and one for states that grow in place."""
    times: dict[str, list[float]] = {"copied": [], "in place": []}
    with TemporaryDirectory() as folder:
        plan = build_engine(decoder.model(), timing=False, cache=False)
        for name in times:
            (Path(folder) / name / "1").mkdir(parents=True)
            plan.save(Path(folder) / name / "1" / "model.plan")
            (Path(folder) / name / "config.pbtxt").write_text(_config(decoder, name == "in place", options.capacity))
        with serving_folder(Path(folder), [*times]) as (address, process), InferenceServerClient(address) as client:
            for name in times:
                _run_steps(client, name, options.served, 0, options.prompt, 1)
            for past in range(options.prompt, options.prompt + options.tokens, _BLOCK):
                for name, found in times.items():
                    before = cpu_s(process)
                    _run_steps(client, name, options.served, past, 1, _BLOCK)
                    found.append(1e3 * (cpu_s(process) - before) / _BLOCK / options.served)
    rows = {name: quantiles(found[1:], n=4) for name, found in times.items()}       # the first turn traces
    return [[f"{decoder.bits} bits", name, f"{middle:.2f} ({low:.2f} to {high:.2f})",
             f"{middle / rows['copied'][1]:.2f}"] for name, (low, middle, high) in rows.items()]


def _config(decoder: Decoder, grows: bool, capacity: int) -> str:
    """Return a config.pbtxt whose sequences begin without tokens."""
    heads, depth = decoder.shared_heads, decoder.depth
    states = [f"state {{ input_name: 'past.{layer}.{kind}' output_name: 'present.{layer}.{kind}' data_type: TYPE_FP32 "
              f"dims: [{heads}, -1, {depth}] initial_state {{ name: 'empty' data_type: TYPE_FP32 zero_data: true "
              f"dims: [{heads}, 0, {depth}] }} {'use_growable_memory: true' if grows else ''} }}"
              for layer in range(decoder.layers) for kind in ("key", "value")]
    parameter = f'parameters {{ key: "state_capacity" value {{ string_value: "{capacity}" }} }}'
    return f"sequence_batching {{ max_sequence_idle_microseconds: 600000000 {' '.join(states)} }}" + (
        parameter if grows and capacity else "")


def _run_steps(client: InferenceServerClient, model: str, sequences: int, past: int, new: int, steps: int) -> None:
    """Run steps of `new` tokens of each sequence, the first one behind `past` others and a few of the sequence."""
    for step in range(steps):
        for sequence in range(1, sequences + 1):
            count = new if past else new + sequence
            inputs = []
            for name, tokens in (("input_ids", count), ("attention_mask", count + (past and past + step + sequence))):
                inputs.append(InferInput(name, [1, tokens], "INT64"))
                inputs[-1].set_data_from_numpy(np.ones((1, tokens), np.int64))
            client.infer(model, inputs, sequence_id=sequence, sequence_start=not past + step)


def _run_cached(cache: CacheContext, feeds: dict[str, Any]) -> dict[str, Any]:
    return cache.run({name: array for name, array in feeds.items() if not name.startswith("past.")})


def _timed(times_ms: list[float], run: Callable[[], Any]) -> Any:
    began = time.process_time()
    actual = run()
    times_ms.append((time.process_time() - began) * 1e3)
    return actual


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 1e6


if __name__ == "__main__":
    main()
