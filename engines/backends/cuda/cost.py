"""Peak rates of GPUs, and a cost model that ranks tactics where no GPU can time them.

A contraction's blocks are spread over the multiprocessors. It takes as long as the slowest of

    arithmetic      tensor-core throughput, shared-memory traffic, instructions of the epilogue
    L2              every block reads its pixels and couts for all of K
    memory          x, operands and weights once, y once

The last wave of blocks takes as long as a full one. A block's epilogue is hidden only by other resident blocks. The
constants come from data sheets and publications; none was measured by this project.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

SHARED_RATE = 128           # bytes per cycle of a multiprocessor's shared memory
L2_PORT = 64                # bytes per cycle from L2 to a multiprocessor
ISSUE = 128                 # lanes that can issue an instruction per cycle
EPILOGUE, OPERAND = 7, 3    # SASS instructions per output: requantise a sum; add an operand's byte
PLAIN = 4                   # instructions per scalar product: two loads, the product, address arithmetic
START, LAUNCH = 1200, 2e-6  # cycles before a block's first product; seconds between kernels of a graph
LATENCY = 6e-7              # latency of a load from memory, in seconds
REGISTERS, BASE_REGISTERS = 65536, 90  # per multiprocessor; per thread in addition to its sums
MOST_REGISTERS = 250                # per thread before it spills
THREADS = 2048                      # per multiprocessor


@dataclass(frozen=True)
class Card:
    """Peak rates of a GPU model.

    `products` are multiply-adds per cycle and multiprocessor by precision, with mma.sync, dp4a or fma.
    """
    name: str
    multiprocessors: int
    hertz: float
    products: Mapping[str, int]
    l2: float                   # bytes per second
    memory: float
    shared: int                 # bytes per multiprocessor
    grouped: float = 1          # speed-up of wgmma over mma.sync

    def copy_seconds(self, size: int) -> float:
        """Return the seconds of a launch that only moves `size` bytes."""
        return size / self.memory + LAUNCH

    def read_seconds(self, size: int, threads: int, each: int) -> float:
        """Return the seconds of a launch that reads `size` bytes, with `each` bytes in flight per thread."""
        waiting = min(threads, self.multiprocessors * THREADS // 2) * each
        return max(size / self.memory, size / waiting * LATENCY) + LAUNCH

    def scalar_seconds(self, macs: int, threads: int) -> float:
        """Return the seconds of a launch whose threads multiply one by one."""
        return PLAIN * macs / min(threads, ISSUE * self.multiprocessors) / self.hertz + LAUNCH

    def tensor_core_seconds(self, precision: str, macs: int, blocks: int) -> float:
        """Return the seconds of a launch whose warps use tensor cores."""
        return macs / (self.products[precision] * min(blocks, self.multiprocessors)) / self.hertz + LAUNCH


# The card assumed for each architecture where no GPU is present.
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
class BlockTraffic:
    """Blocking and memory traffic of a contraction, the input of its cost model."""
    pixels: int                 # pixels of all items
    couts: int
    depth: int                  # padded bytes of K
    tile: tuple[int, int]       # pixels and couts per block
    warp: tuple[int, int]       # pixels and couts per warp
    threads: int
    shared_bytes: int
    operands: int
    moved: int                  # bytes between memory and the GPU, each counted once
    grouped: bool


def contraction_seconds(work: BlockTraffic, card: Card, precision: str, element: int) -> float:
    """Return the estimated seconds of a launch of a contraction; infinite if a block does not fit.

    Parameters
    ----------
    work : BlockTraffic
        Blocking of the contraction.
    card : Card
        GPU to estimate for.
    precision : str
        A key of `card.products`.
    element : int
        Bytes of an element of K.
    """
    (pixels, couts), (rows, columns) = work.tile, work.warp
    blocks = -(-work.pixels // pixels) * -(-work.couts // couts)
    registers = rows * columns // 32 + BASE_REGISTERS
    resident = min(REGISTERS // (registers * work.threads), card.shared // max(work.shared_bytes, 1),
                   THREADS // work.threads)
    if resident < 1 or registers > MOST_REGISTERS:
        return math.inf
    rate = card.products[precision] * (card.grouped if work.grouped else 1)
    products = pixels * couts * work.depth / element / rate
    reads = work.threads / 32 * work.depth * (rows + columns)                       # ldmatrix
    if work.grouped:
        reads = work.threads / 128 * work.depth * (64 + couts)                      # wgmma reads shared memory itself
    writes = (pixels + couts) * work.depth
    loop = max(products, (reads + writes) / SHARED_RATE)
    ends = pixels * couts * (EPILOGUE + OPERAND * work.operands) / ISSUE
    turns = math.ceil(blocks / card.multiprocessors)
    hidden = ends if resident == 1 else max(ends - loop * (resident - 1), ends / resident)
    arithmetic = (turns * (loop + hidden) + START * math.ceil(turns / resident)) / card.hertz
    l2 = blocks * (pixels + couts) * work.depth / card.l2
    return max(arithmetic, l2, work.moved / card.memory) + LAUNCH
