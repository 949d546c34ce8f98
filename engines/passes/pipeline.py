"""Order of the passes: every graph goes through `simplify`, `optimise`, and then the choice of stored types.

INFER_DEBUG=passes prints the graph after each pass that changed it.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from infer_server.engines.debug import debugging
from infer_server.engines.ir.graph import Graph, verify
from infer_server.engines.passes.dependence import with_dependence
from infer_server.engines.passes.dynamic_quantization import write_out_dynamic
from infer_server.engines.passes.fold_constants import fold_constants
from infer_server.engines.passes.fusion.attention import fuse_attention
from infer_server.engines.passes.fusion.recurrent import split_recurrent
from infer_server.engines.passes.fusion.recurrent_steps import write_out_recurrent
from infer_server.engines.passes.fusion.siblings import merge_siblings
from infer_server.engines.passes.fusion.vertical import fuse_pointwise
from infer_server.engines.passes.half_precision import widen_floats
from infer_server.engines.passes.layout.channels_last import to_channels_last
from infer_server.engines.passes.layout.conv1d import conv1d_to_conv2d
from infer_server.engines.passes.layout.separate_batch import check_batch, separate_batch
from infer_server.engines.passes.outputs import make_constant_outputs
from infer_server.engines.passes.rewriting import rewrite
from infer_server.engines.passes.rewriting.common import merge_common
from infer_server.engines.passes.rewriting.notes import Note
from infer_server.engines.passes.rewriting.rewrite import Rule
from infer_server.engines.passes.rules import activations
from infer_server.engines.passes.rules.batchnorm import BatchNormConv, BatchNormToPointwise, LinearBatchNorm
from infer_server.engines.passes.rules.border import PaddedPointwiseConv
from infer_server.engines.passes.rules.expand import EXPANDS
from infer_server.engines.passes.rules.gather import GatherOfOne
from infer_server.engines.passes.rules.gemm import CanonicalGemm, GemmOfComputed, MatMulToGemm
from infer_server.engines.passes.rules.instance_norm import InstanceNorm
from infer_server.engines.passes.rules.lookups import LOOKUPS
from infer_server.engines.passes.rules.masks import MASKS
from infer_server.engines.passes.rules.noop import RemoveNoOp
from infer_server.engines.passes.rules.norm import NORMS
from infer_server.engines.passes.rules.one_hot import ONE_HOT
from infer_server.engines.passes.rules.pad import PadAveragePool, PadConv, PadMaxPool
from infer_server.engines.passes.rules.pooling import GlobalPoolOfRows, SpatialReduce, WholeImagePool
from infer_server.engines.passes.rules.quantised import ALONE, PAIRS, RoundRecurrent
from infer_server.engines.passes.rules.reduction import ReductionOfPowers, SumOfIntegers
from infer_server.engines.passes.rules.reshape import MergeReshapes, MergeTransposes, ToReshape, TransposeOfOnes
from infer_server.engines.passes.rules.resize import ResizeOfChannelsLast
from infer_server.engines.passes.rules.scale import LinearScale, ScaleDepthwise, ScaleLinear
from infer_server.engines.passes.rules.scatter import ScatterOfColumns, ScatterOfRows
from infer_server.engines.passes.rules.shuffle import ChannelShuffle
from infer_server.engines.passes.rules.softmax import AlongInnermost
from infer_server.engines.passes.rules.tables import TABLES

Pass = Callable[[Graph], Graph]
SCALES = (LinearScale(), ScaleLinear(), ScaleDepthwise())
IMAGES = (GlobalPoolOfRows(), WholeImagePool(), SpatialReduce(), ResizeOfChannelsLast())
VIEWS = (ToReshape(), TransposeOfOnes(), MergeReshapes(), MergeTransposes())


def simplify(graph: Graph, log: list[Note] | None = None, dependence: str | None = None) -> Graph:
    """Return an equivalent graph, in canonical nodes. `dependence` is `known` of `with_dependence`."""
    return _run(graph, (
        # first: all passes below assume that floats are float32
        ("widen_floats", lambda g: widen_floats(g, log)),
        # shape arithmetic becomes attributes and constants, which all patterns below require
        ("fold_constants", fold_constants),
        # marks the tensors that the model quantises, before other patterns are matched around them
        ("quantised", _rules(log, *PAIRS)),
        ("merge_common", merge_common),
        ("quantised_alone", _rules(log, *ALONE)),
        ("dynamic_quantization", lambda g: write_out_dynamic(g, log)),
        # removes nodes that would stand between the nodes of a pattern
        ("remove_no_ops", _rules(log, RemoveNoOp())),
        # one canonical form per operation, so that a pattern needs no variants
        ("canonical", _rules(log, *VIEWS, *activations.CANONICAL, CanonicalGemm(), GemmOfComputed(), MatMulToGemm(),
                             ScatterOfRows(), ScatterOfColumns(), *IMAGES)),
        # masks of few nodes, by which fuse_attention recognises attention
        ("masks", _rules(log, *LOOKUPS, *ONE_HOT, *MASKS, *EXPANDS)),
        # operands of an Expand that was moved past a node are now computed from constants alone
        ("fold_constants", fold_constants),
        # before more views are merged: its Reshapes must still be separate
        ("channel_shuffle", _rules(log, ChannelShuffle())),
        # operators for activations that exporters wrote as arithmetic, while each step is still a node
        ("named_activations", _rules(log, *activations.NAMED)),
        # norms in the same way; a reduction that is part of no norm is then rewritten by commoner ones
        ("named_norms", _rules(log, *NORMS)),
        ("reductions", _rules(log, ReductionOfPowers(), SumOfIntegers())),
        # equal nodes merge before anything is folded into one of them alone
        ("merge_common", merge_common),
        # folds scales and shifts into weights
        ("fold_into_weights", _rules(log, LinearBatchNorm(), BatchNormConv(), *SCALES)),
        # a batch norm that was not folded into a layer becomes pointwise arithmetic, which may still be folded
        ("batch_norm_as_pointwise", _rules(log, BatchNormToPointwise())),
        # after the passes that expect channels at axis 1; the Reshapes that it leaves are removed below
        ("separate_batch", lambda g: separate_batch(g, log)),
        ("remove_no_ops", _rules(log, RemoveNoOp(), *VIEWS)),
        ("fold_into_weights", _rules(log, *SCALES)),
        # after batch norms: a Pad is zero before a folded batch norm and after it
        ("pads", _rules(log, PadConv(), PadAveragePool(), PadMaxPool())),
        # after all padding is part of its layer
        ("borders", _rules(log, PaddedPointwiseConv())),
        # after the rules that fold into layers, which cover signals and images alike
        ("conv1d_to_conv2d", conv1d_to_conv2d),
        ("fold_constants", fold_constants),
        ("remove_no_ops", _rules(log, RemoveNoOp(), *VIEWS)),
        ("merge_common", merge_common),
        # while each node is one ONNX operator: later passes only group and move them
        ("dependence", lambda g: with_dependence(g, log, dependence)),
    ))


def optimise(graph: Graph, log: list[Note] | None = None) -> Graph:
    """Return the graph that calibration observes and a backend receives: channels last, merged siblings, Fused nodes.

    Parameters
    ----------
    graph : Graph
        A graph that `simplify` returned.
    log : list of Note, optional
        Receives the reasons why passes left nodes as they are.

    Raises
    ------
    ModelError
        If a tensor has an axis that depends on the batch and is not the batch axis.
    """
    return _run(graph, (
        # while products, scales and masks are still separate nodes in ONNX's layout
        ("fuse_attention", lambda g: fuse_attention(g, log)),
        # recurrent layers while they are ONNX's, so that later passes move their Transposes; first those whose run-time
        # weights cannot be packed at the build
        ("write_out_recurrent", lambda g: write_out_recurrent(g, log)),
        ("split_recurrent", lambda g: split_recurrent(g, log)),
        # after the recurrent layers, so that it sees their products and Transposes
        ("tables", _rules(log, *TABLES)),
        # before all grouping: it moves and removes nodes that would end a group
        ("to_channels_last", to_channels_last),
        # views that the layout left; norms and means over what are now rows and columns; rounding of recurrent results
        ("views", _rules(log, RemoveNoOp(), AlongInnermost(), *VIEWS, GatherOfOne(), InstanceNorm(),
                         SpatialReduce(channels_last=True), RoundRecurrent())),
        # equal Transposes of several readers
        ("merge_common", merge_common),
        # before vertical fusion, which would give each sibling a body of its own
        ("merge_siblings", lambda g: merge_siblings(g, log)),
        # no pattern looks into a Fused body after this
        ("fuse_pointwise", fuse_pointwise),
        # refuses merged batch axes that separate_batch could not split
        ("check_batch", check_batch),
        # last: passes before it must see which outputs are constants
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
