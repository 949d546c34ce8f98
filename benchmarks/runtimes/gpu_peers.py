"""Peers on this machine's GPU: cuBLAS for single products, torch.compile with CUDA graphs for networks."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Log = Callable[[str, Any], None]
CALLS, WARM_UP = 20, 5
# M at batch 128, N, K: products of ResNet-50 and of MiniLM, and one that is bound by arithmetic.
PRODUCTS = ((401408, 64, 576), (401408, 256, 64), (100352, 128, 1152), (25088, 256, 2304), (6272, 512, 4608),
            (6272, 2048, 512), (16384, 1536, 384), (4096, 4096, 4096))


def peers(log: Log, models: Sequence[str], batches: Sequence[int]) -> None:
    """Measure the peers. Raises ImportError if torch is not installed."""
    import torch
    for m, n, k in PRODUCTS:
        a, b = (torch.randint(-8, 8, shape, dtype=torch.int8, device="cuda") for shape in ((m, k), (n, k)))
        int8 = _seconds(torch, partial(torch._int_mm, a, b.t()))
        fp16 = _seconds(torch, partial(torch.matmul, a.half(), b.half().t()))
        log(f"cuBLAS {m}x{n}x{k}", {name: [round(seconds * 1e6, 1), f"{2e-12 * m * n * k / seconds:.0f} TOP/s"]
                                    for name, seconds in (("int8", int8), ("fp16", fp16))})
    for name in models:
        if (built := _network(torch, name)) is None:
            continue
        network, feed = built
        compiled = torch.compile(network, mode="reduce-overhead")       # with CUDA graphs
        for batch in batches:
            x = feed(batch)
            with torch.inference_mode():
                seconds = _seconds(torch, partial(compiled, x))
            log(f"torch.compile fp16 {name}, batch {batch}", {"items/s": round(batch / seconds),
                                                             "ms": round(seconds * 1e3, 4)})


def _network(torch: Any, name: str) -> tuple[Any, Callable[[int], Any]] | None:
    """Return a float16, channels-last network with random weights, and a function that makes its input."""
    if name == "minilm":
        from transformers import BertConfig, BertModel
        config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        network = BertModel(config).eval().half().cuda()
        return network, lambda batch: torch.randint(0, 30000, (batch, 128), device="cuda")
    import torchvision
    if not hasattr(torchvision.models, name):
        return None
    network = getattr(torchvision.models, name)().eval().half().cuda().to(memory_format=torch.channels_last)
    return network, lambda batch: torch.randn(batch, 3, 224, 224, dtype=torch.half, device="cuda").to(
        memory_format=torch.channels_last)


def _seconds(torch: Any, work: Callable[[], Any]) -> float:
    for _ in range(WARM_UP):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / CALLS
