"""Maximum batch of a plan: the option's, or a default that fits into memory."""
from __future__ import annotations

from infer_server.engines.capacity import bytes_of, memory_limit
from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.graph import BATCH, Graph

DEFAULT_MAX_BATCH, MOST_SMALL = 32, 1024    # default maximum batch; models whose activations fit L2 get up to the 2nd
SMALL_BYTES = 1 << 20       # activations of a batch that fit the L2 cache
MEMORY_SHARE = 0.25         # share of this machine's memory that the tensors of one node may take by default


def has_batch(graph: Graph) -> bool:
    """Return True if an input of the graph has a symbolic batch axis."""
    return any(graph.shape(name)[:1] == (BATCH,) for name in graph.inputs)


def max_batch_of(graph: Graph, asked: int | None, is_open: bool, fewer: bool) -> int:
    """Return the maximum batch of a plan; 0 if the model has no batch axis.

    Parameters
    ----------
    graph : Graph
    asked : int, optional
        The maximum batch of the options.
    is_open : bool
        The model has open extents.
    fewer : bool
        Take fewer than `asked` if items are large.

    Raises
    ------
    ConfigError
        Several items are asked for, and the model has no batch axis.
    """
    if has_batch(graph):
        if asked and (graph.dependence or not fewer):
            return asked
        return fitting(graph, asked) if asked else usual_max_batch(graph, is_open)
    if (asked or 1) > 1:
        raise ConfigError(f"--max-batch {asked}: the model's inputs have no symbolic batch axis, so it takes exactly "
                          "the shape it declares; export it with a dynamic batch axis, or say --batch-first if the "
                          "leading extents that it leaves open are the batch")
    return 0


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
