"""What a GPU does at best, and so what a tactic costs where nothing can be timed.

A multiprocessor works on its share of the blocks; a contraction takes as long as its slowest part, of

    arithmetic      products at the tensor cores' rate, shared memory's traffic, the epilogue's instructions
    L2              every block reads its pixels and couts for all of K
    memory          x, operands and weights once, y once

The last wave of blocks is as long as a full one. Nothing hides the epilogue of a block but another block beside it.
No constant here has been measured by this project: they come from data sheets and from what others published.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

SHARED_RATE = 128           # bytes a cycle of a multiprocessor's shared memory
L2_PORT = 64                # ... of what comes from the second level of cache
ISSUE = 128                 # lanes that may issue an instruction in a cycle
EPILOGUE, OPERAND = 7, 3    # instructions for each output, counted in SASS: sum -> byte; an operand's byte -> its part
PLAIN = 4                   # instructions for a product of a thread: two loads, the product, where the next ones are
START, LAUNCH = 1200, 2e-6  # cycles until a block's first product; seconds from a kernel to the next in a graph
LATENCY = 6e-7              # seconds from a load to what it brings from memory
REGISTERS, BESIDE = 65536, 90       # of a multiprocessor; of a thread beside its sums
MOST_REGISTERS = 250                # of a thread, before it spills
THREADS = 2048                      # of a multiprocessor


@dataclass(frozen=True)
class Card:
    """`products`: multiply-adds a cycle of a multiprocessor by precision, by mma.sync or dp4a or fma."""
    name: str
    multiprocessors: int
    hertz: float
    products: Mapping[str, int]
    l2: float                   # bytes a second
    memory: float
    shared: int                 # bytes of a multiprocessor
    grouped: float = 1          # times as many products by wgmma

    def moving(self, size: int) -> float:
        """Seconds of a launch that only moves so many bytes."""
        return size / self.memory + LAUNCH

    def reading(self, size: int, threads: int, each: int) -> float:
        """Seconds of a launch that reads so many bytes, of which every thread waits for `each` at once."""
        waiting = min(threads, self.multiprocessors * THREADS // 2) * each
        return max(size / self.memory, size / waiting * LATENCY) + LAUNCH

    def by_thread(self, macs: int, threads: int) -> float:
        """Seconds of a launch whose threads multiply each by itself."""
        return PLAIN * macs / min(threads, ISSUE * self.multiprocessors) / self.hertz + LAUNCH

    def together(self, precision: str, macs: int, blocks: int) -> float:
        """Seconds of a launch whose warps multiply together."""
        return macs / (self.products[precision] * min(blocks, self.multiprocessors)) / self.hertz + LAUNCH


# By architecture, the card that plans are made for where none is at hand.
CARDS: Mapping[str, Card] = {
    "sm_61": Card("P40", 30, 1.3e9, {"int8": 512, "fp16": 128, "bf16": 128, "fp32": 128}, 1.0e12, 0.28e12, 96 << 10),
    "sm_70": Card("V100", 80, 1.4e9, {"int8": 256, "fp16": 512, "bf16": 64, "fp32": 64}, 2.0e12, 0.8e12, 96 << 10),
    "sm_75": Card("T4", 40, 1.1e9, {"int8": 512, "fp16": 256, "bf16": 64, "fp32": 64}, 1.0e12, 0.25e12, 64 << 10),
    "sm_80": Card("A100", 108, 1.41e9, {"int8": 2048, "fp16": 1024, "bf16": 1024, "fp32": 64}, 3.5e12, 1.4e12,
                  163 << 10),
    "sm_86": Card("A10", 72, 1.5e9, {"int8": 1024, "fp16": 512, "bf16": 512, "fp32": 128}, 2.0e12, 0.5e12, 99 << 10),
    "sm_89": Card("L4", 58, 1.6e9, {"int8": 1024, "fp16": 512, "bf16": 512, "fp32": 128}, 2.5e12, 0.26e12, 99 << 10),
    "sm_90": Card("H200", 132, 1.75e9, {"int8": 2540, "fp16": 1270, "bf16": 1270, "fp32": 128}, 5.5e12, 4.3e12,
                  227 << 10),
    "sm_90a": Card("H200", 132, 1.75e9, {"int8": 2540, "fp16": 1270, "bf16": 1270, "fp32": 128}, 5.5e12, 4.3e12,
                   227 << 10, 1.45),
    "sm_100": Card("B200", 148, 1.8e9, {"int8": 2048, "fp16": 1024, "bf16": 1024, "fp32": 128}, 6.0e12, 7.0e12,
                   227 << 10),
    "sm_120": Card("RTX 5090", 170, 2.4e9, {"int8": 1024, "fp16": 512, "bf16": 512, "fp32": 128}, 5.0e12, 1.6e12,
                   99 << 10),
}


@dataclass(frozen=True)
class Blocks:
    """A contraction as its model sees it: how it is cut, and what moves."""
    pixels: int                 # of all items
    couts: int
    depth: int                  # bytes of K, filled up
    tile: tuple[int, int]       # pixels and couts of a block
    warp: tuple[int, int]       # ... and of a warp
    threads: int
    shared_bytes: int
    operands: int
    moved: int                  # bytes from and to memory, each once
    grouped: bool


def contraction_seconds(work: Blocks, card: Card, precision: str, element: int) -> float:
    """Of one launch; infinite where a block does not fit. element: bytes of one."""
    (pixels, couts), (rows, columns) = work.tile, work.warp
    blocks = -(-work.pixels // pixels) * -(-work.couts // couts)
    registers = rows * columns // 32 + BESIDE
    beside = min(REGISTERS // (registers * work.threads), card.shared // max(work.shared_bytes, 1),
                 THREADS // work.threads)
    if beside < 1 or registers > MOST_REGISTERS:
        return math.inf
    rate = card.products[precision] * (card.grouped if work.grouped else 1)
    products = pixels * couts * work.depth / element / rate
    reads = work.threads / 32 * work.depth * (rows + columns)                       # ldmatrix
    if work.grouped:
        reads = work.threads / 128 * work.depth * (64 + couts)                      # the tensor cores' own
    writes = (pixels + couts) * work.depth
    loop = max(products, (reads + writes) / SHARED_RATE)
    ends = pixels * couts * (EPILOGUE + OPERAND * work.operands) / ISSUE
    turns = math.ceil(blocks / card.multiprocessors)
    hidden = ends if beside == 1 else max(ends - loop * (beside - 1), ends / beside)
    arithmetic = (turns * (loop + hidden) + START * math.ceil(turns / beside)) / card.hertz
    l2 = blocks * (pixels + couts) * work.depth / card.l2
    return max(arithmetic, l2, work.moved / card.memory) + LAUNCH
