"""The interface of a backend: all that the compiler asks of one. What runs its plans is a Device (device.py)."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from engines.backends.device import GpuInfo
from engines.ir.graph import Graph
from engines.machine.timing_cache import TimingCache
from engines.plan.plan import GeneralKernel, MachinePart, Plan
from engines.plan.roofline import Peaks

Progress = Callable[[int, int, str], None]      # (done, of, what), called as kernels are compiled and timed


class TimedNode(NamedTuple):
    """A node of the graph as a session timed its kernel."""
    name: str
    fuses: tuple[str, ...]      # names of ONNX nodes
    time_us: float              # for one item; 0 where nothing was timed


class Chosen(Protocol):
    """A graph with a kernel chosen for each of its nodes: what a session compares, and makes a plan of."""
    @property
    def graph(self) -> Graph: ...

    @property
    def max_batch(self) -> int: ...

    def times(self) -> Sequence[TimedNode]: ...


class Session(Protocol):
    """Builds for one target. It keeps its kernels and their times, so that a second graph costs only what is new."""
    @property
    def target(self) -> str: ...

    @property
    def processor(self) -> str:
        """What kernels are timed on, if they are; else this machine's CPU."""

    @property
    def arithmetic(self) -> Collection[str]:
        """The precisions that the target computes in; tensors of others are stored so, and sums are in float32."""

    def choose(self, graph: Graph, max_batch: int, opt_batch: int | None = None,
               progress: Progress | None = None) -> Any:
        """A Chosen of this backend: a kernel for each node of a graph whose tensors' stored types are decided.

        opt_batch: the batch that kernels are timed with; None: the backend decides.
        """

    def general(self, graph: Graph, max_batch: int, opt_batch: int | None = None,
                usual: Callable[[], Graph] | None = None) -> Any | None:
        """The same, of kernels that take numbers at run time or that the plan taken over has: only what is missing is
        compiled, and is told what differs from the graph that was lowered before, or from the `usual` one. None: there
        are none of that kind."""

    def counted(self, graph: Graph, max_batch: int, opt_batch: int | None = None) -> Any | None:
        """The same of a graph in which extents are counted (engines.ir.counted). Raises Pinned. None: as above."""

    @property
    def generals(self) -> tuple[tuple[GeneralKernel, ...], tuple[bytes, ...]]:
        """Such kernels as were made so far, and their code."""

    def settle(self, chosen: Any, progress: Progress | None = None) -> Any:
        """The Chosen with what is decided by timing kernels inside the network; itself if there is nothing."""

    def assemble(self, chosen: Any) -> MachinePart:
        """Constants packed, buffers laid out."""

    @property
    def timed(self) -> Mapping[str, Mapping[str, float]]:
        """What timing found, for what takes over from a plan made here: numbers by texts of the backend's own."""

    def take_over(self, plan: Plan) -> None:
        """What is made from now on is of the same model for other shapes: it has what it can of this plan, beside which
        it is loaded."""

    def tuned(self, plan: Plan) -> Plan:
        """The plan with what is decided by timing the whole of it; the plan itself if there is nothing."""


class Backend(Protocol):
    """A way to run plans: its targets, and sessions that build for them."""
    @property
    def name(self) -> str: ...

    @property
    def targets(self) -> Sequence[str]: ...

    @property
    def selects(self) -> bool:
        """Whether what data select is computed in segments of programs; else the host does it all."""

    def session(self, target: str, cache: TimingCache, timing: bool) -> Session:
        """target: "" is this machine's best."""

    def session_here(self, cache: TimingCache, beside: Session) -> Session:
        """Return a session for plans that a build runs itself a few times, as calibration's trials: this machine must
        do. Nothing is timed. beside: the build's own session, with which it shares compiled code where it can."""

    def peaks(self) -> Peaks:
        """What this machine does at best, measured now."""


class BuildsForGpus(Protocol):
    """A backend whose targets are GPUs."""

    def gpus(self) -> Sequence[tuple[GpuInfo, str]]:
        """Those of this machine, each with its target; "": it is older than all that there are. Nothing of a GPU is
        started."""
