"""Maximum batch of a plan that does not say one."""
from __future__ import annotations

from infer_server.engines.capacity import bytes_of, memory_limit
from infer_server.engines.ir.graph import BATCH, Graph

DEFAULT_MAX_BATCH, MOST_SMALL = 32, 1024    # default maximum batch; models whose activations fit L2 get up to the 2nd
SMALL_BYTES = 1 << 20       # activations of a batch that fit the L2 cache
MEMORY_SHARE = 0.25         # share of this machine's memory that the tensors of one node may take by default


def usual_max_batch(graph: Graph, is_open: bool) -> int:
    """Return the default maximum batch: what fits into memory, and more if all tensors stay in the L2 cache.

    Larger batches run in slices. is_open: the model has open extents, so that items may be larger at other shapes and
    the limit is not raised.
    """
    if graph.dependence:
        return DEFAULT_MAX_BATCH
    items = fitting(graph, DEFAULT_MAX_BATCH)
    if items == DEFAULT_MAX_BATCH and not is_open:
        small = sum(_of_an_item(graph).values())
        while items < MOST_SMALL and 2 * items * small <= SMALL_BYTES:
            items *= 2
    return items


def fitting(graph: Graph, most: int) -> int:
    """Return `most`, halved until the tensors of each node fit into MEMORY_SHARE of the memory."""
    batched, room, items = _of_an_item(graph), int(MEMORY_SHARE * memory_limit()), most
    for node in graph.nodes:        # each node separately, so that a symbolic plan's guards hold whenever all are small
        size = sum(batched.get(name, 0) for name in {*node.inputs, *node.outputs})
        while items > 1 and items * size > room:
            items //= 2
    return items


def _of_an_item(graph: Graph) -> dict[str, int]:
    """Return the bytes of one item of each tensor with a batch axis."""
    return {name: bytes_of(kind) for name, kind in graph.types.items() if kind.shape[:1] == (BATCH,)}
