"""Benchmark of a decoder that generates tokens one by one, against ONNX Runtime: each step has a new length.

    python -m benchmarks.measure.generate                       # 8 layers of 1024, weights of float32 and of four bits
    python -m benchmarks.measure.generate --layers 4 --hidden 384 --heads 6 --shared-heads 2 --inner 1024 --words 4000
    python -m benchmarks.measure.generate --capacity 2048       # our caches are updated in place

One thread each; CPU time of the process. Both run each step in turn, on inputs from ONNX Runtime's previous outputs.
With --capacity, only the tokens are ONNX Runtime's; our caches are filled by a prompt.
"first" is the slowest of the first four steps; "new" is the slowest of the others, when kernels are compiled.
"""
from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime

from benchmarks.measure.decoders import Decoder
from benchmarks.reports.document import machine, markdown_table
from infer_server.engines import build_engine, load_engine
from infer_server.engines.runtime.caches import CacheContext

_FIRST = 4                  # steps
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
    options = parser.parse_args()
    print(f"On {machine()}, ONNX Runtime {onnxruntime.__version__}:\n", flush=True)
    rows = [_measured(Decoder(options.layers, options.hidden, options.heads, options.shared_heads, options.inner,
                              options.words, bits), options) for bits in options.bits]
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
