"""THE order of passes: every graph goes through `simplify`, `optimise`, and then the choice of stored types.

INFER_DEBUG=passes prints the graph after each pass that changed it.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from engines.debug import debugging
from engines.ir.graph import Graph, verify
from engines.passes.dependence import with_dependence
from engines.passes.dynamic_quantization import write_out_dynamic
from engines.passes.fold_constants import fold_constants
from engines.passes.fusion.attention import fuse_attention
from engines.passes.fusion.recurrent import split_recurrent
from engines.passes.fusion.recurrent_steps import write_out_recurrent
from engines.passes.fusion.siblings import merge_siblings
from engines.passes.fusion.vertical import fuse_pointwise
from engines.passes.half_precision import widen_floats
from engines.passes.layout.channels_last import to_channels_last
from engines.passes.layout.conv1d import conv1d_to_conv2d
from engines.passes.layout.separate_batch import check_batch, separate_batch
from engines.passes.outputs import make_constant_outputs
from engines.passes.rewriting import rewrite
from engines.passes.rewriting.common import merge_common
from engines.passes.rewriting.notes import Note
from engines.passes.rewriting.rewrite import Rule
from engines.passes.rules import activations
from engines.passes.rules.batchnorm import BatchNormConv, BatchNormToPointwise, LinearBatchNorm
from engines.passes.rules.border import PaddedPointwiseConv
from engines.passes.rules.expand import EXPANDS
from engines.passes.rules.gather import GatherOfOne
from engines.passes.rules.gemm import CanonicalGemm, GemmOfComputed, MatMulToGemm
from engines.passes.rules.instance_norm import InstanceNorm
from engines.passes.rules.lookups import LOOKUPS
from engines.passes.rules.masks import MASKS
from engines.passes.rules.noop import RemoveNoOp
from engines.passes.rules.norm import NORMS
from engines.passes.rules.one_hot import ONE_HOT
from engines.passes.rules.pad import PadAveragePool, PadConv, PadMaxPool
from engines.passes.rules.pooling import GlobalPoolOfRows, SpatialReduce, WholeImagePool
from engines.passes.rules.quantised import ALONE, PAIRS, RoundRecurrent
from engines.passes.rules.reduction import ReductionOfPowers, SumOfIntegers
from engines.passes.rules.reshape import MergeReshapes, MergeTransposes, ToReshape, TransposeOfOnes
from engines.passes.rules.resize import ResizeOfChannelsLast
from engines.passes.rules.scale import LinearScale, ScaleDepthwise, ScaleLinear
from engines.passes.rules.scatter import ScatterOfColumns, ScatterOfRows
from engines.passes.rules.shuffle import ChannelShuffle
from engines.passes.rules.softmax import AlongInnermost
from engines.passes.rules.tables import TABLES

Pass = Callable[[Graph], Graph]
SCALES = (LinearScale(), ScaleLinear(), ScaleDepthwise())
IMAGES = (GlobalPoolOfRows(), WholeImagePool(), SpatialReduce(), ResizeOfChannelsLast())
VIEWS = (ToReshape(), TransposeOfOnes(), MergeReshapes(), MergeTransposes())


def simplify(graph: Graph, log: list[Note] | None = None, dependence: str | None = None) -> Graph:
    """The same, equal in float, in fewer and canonical nodes. dependence: of the items, where other shapes told it."""
    return _run(graph, (
        # what computes then computes on float32, which all below takes floats to be
        ("widen_floats", lambda g: widen_floats(g, log)),
        # shape arithmetic becomes attributes and constants, which all patterns below ask for
        ("fold_constants", fold_constants),
        # which tensors the model quantises, before any pattern is looked for around them
        ("quantised", _rules(log, *PAIRS)),
        ("merge_common", merge_common),
        ("quantised_alone", _rules(log, *ALONE)),
        ("dynamic_quantization", lambda g: write_out_dynamic(g, log)),
        # what stands between two nodes that belong together goes first
        ("remove_no_ops", _rules(log, RemoveNoOp())),
        # one spelling each, so that a pattern need not know several
        ("canonical", _rules(log, *VIEWS, *activations.CANONICAL, CanonicalGemm(), GemmOfComputed(), MatMulToGemm(),
                             ScatterOfRows(), ScatterOfColumns(), *IMAGES)),
        # in few nodes: what attention is recognised by, later
        ("masks", _rules(log, *LOOKUPS, *ONE_HOT, *MASKS, *EXPANDS)),
        # what an Expand was moved behind is computed from constants alone
        ("fold_constants", fold_constants),
        # before views are merged further: its Reshapes must still be apart
        ("channel_shuffle", _rules(log, ChannelShuffle())),
        # names for what exporters wrote as arithmetic, while every step of it is still a node
        ("named_activations", _rules(log, *activations.NAMED)),
        # likewise; a reduction that is part of no norm is then written by commoner ones
        ("named_norms", _rules(log, *NORMS)),
        ("reductions", _rules(log, ReductionOfPowers(), SumOfIntegers())),
        # twins merge before anything is folded into one of them alone
        ("merge_common", merge_common),
        # scales and shifts into weights; no-ops again, as some become x * 1
        ("fold_into_weights", _rules(log, LinearBatchNorm(), BatchNormConv(), *SCALES)),
        # only a batch norm that found no layer becomes arithmetic of its own, which may still find one
        ("batch_norm_as_pointwise", _rules(log, BatchNormToPointwise())),
        # once channels are found by other means than being axis 1; what it leaves of Reshapes goes below
        ("separate_batch", lambda g: separate_batch(g, log)),
        ("remove_no_ops", _rules(log, RemoveNoOp(), *VIEWS)),
        ("fold_into_weights", _rules(log, *SCALES)),
        # a Pad is zero before and after a batch norm folded past it, so it comes after those
        ("pads", _rules(log, PadConv(), PadAveragePool(), PadMaxPool())),
        # once all padding is known
        ("borders", _rules(log, PaddedPointwiseConv())),
        # what is folded into layers by then was written for signals as for images
        ("conv1d_to_conv2d", conv1d_to_conv2d),
        ("fold_constants", fold_constants),
        ("remove_no_ops", _rules(log, RemoveNoOp(), *VIEWS)),
        ("merge_common", merge_common),
        # while nodes are ONNX's, one by one: what follows only groups and moves them
        ("dependence", lambda g: with_dependence(g, log, dependence)),
    ))


def optimise(graph: Graph, log: list[Note] | None = None) -> Graph:
    """The graph that calibration watches and a backend receives: channels last, wide siblings, Fused nodes."""
    return _run(graph, (
        # while products, scales and masks are still nodes, and in the layout that patterns know
        ("fuse_attention", lambda g: fuse_attention(g, log)),
        # while layers are still ONNX's: their Transposes then take part in what follows
        # those whose weights no kernel can pack at the build
        ("write_out_recurrent", lambda g: write_out_recurrent(g, log)),
        ("split_recurrent", lambda g: split_recurrent(g, log)),
        # the products of those, too, once Transposes around them are nodes
        ("tables", _rules(log, *TABLES)),
        # before all groupings: it moves and removes nodes that they would otherwise stop at
        ("to_channels_last", to_channels_last),
        # what moving left behind; norms and means over what are now rows and columns; what a split layer makes, rounded
        # there
        ("views", _rules(log, RemoveNoOp(), AlongInnermost(), *VIEWS, GatherOfOne(), InstanceNorm(),
                         SpatialReduce(channels_last=True), RoundRecurrent())),
        # the same Transpose wanted by several readers
        ("merge_common", merge_common),
        # before vertical fusion, which would give each sibling a body of its own
        ("merge_siblings", lambda g: merge_siblings(g, log)),
        # nothing looks into a body after this
        ("fuse_pointwise", fuse_pointwise),
        # what no pass could take apart, no backend can
        ("check_batch", check_batch),
        # last: before it, what is constant is to be known as such
        ("make_constant_outputs", make_constant_outputs),
    ))


def _rules(log: list[Note] | None, *rules: Rule) -> Pass:
    return lambda graph: rewrite.apply(graph, rules, log)


def _run(graph: Graph, passes: Sequence[tuple[str, Pass]]) -> Graph:
    debug = debugging("passes")
    for name, run in passes:
        before, graph = graph, verify(run(graph))
        if debug and str(graph) != str(before):
            print(f"--- after {name}\n{graph}", file=sys.stderr)
    return graph
