"""Interface between the compiler and a backend. The interface that runs plans is in device.py."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from infer_server.engines.backends.device import GpuInfo
from infer_server.engines.ir.graph import Graph
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.plan import MachinePart, Plan
from infer_server.engines.plan.roofline import Peaks
from infer_server.engines.plan.symbolic.plans import CompiledKernel

Progress = Callable[[int, int, str], None]      # (done, total, label), called as kernels are compiled and timed


class TimedNode(NamedTuple):
    """Time of the kernel that a session chose for a node of the graph."""
    name: str
    fuses: tuple[str, ...]      # names of ONNX nodes
    time_us: float              # per item; 0 if nothing was timed


class Chosen(Protocol):
    """Graph with a kernel chosen for each of its nodes. Sessions compare these and assemble plans from them."""
    @property
    def graph(self) -> Graph: ...

    @property
    def max_batch(self) -> int: ...

    def times(self) -> Sequence[TimedNode]: ...


class Session(Protocol):
    """Compiler for one target. It keeps kernels and their times, so a second graph pays only for what is new."""
    @property
    def target(self) -> str: ...

    @property
    def processor(self) -> str:
        """Name of the processor that kernels are timed on, or this machine's CPU if none are timed."""

    @property
    def arithmetic(self) -> Collection[str]:
        """Precisions that the target computes in. Tensors of other precisions are only stored, and sums are float32."""

    def choose(self, graph: Graph, max_batch: int, opt_batch: int | None = None,
               progress: Progress | None = None) -> Any:
        """Choose a kernel for each node of a graph.

        Parameters
        ----------
        graph : Graph
            Graph whose tensors have their stored types.
        max_batch : int
            Largest batch of the plan.
        opt_batch : int, optional
            Batch to time kernels with; None leaves it to the backend.
        progress : Progress, optional
            Called as kernels are compiled and timed.

        Returns
        -------
        Chosen
            Kernel choices, of the backend's own class.
        """

    def choose_symbolic(self, graph: Graph, max_batch: int, opt_batch: int | None = None) -> Any | None:
        """Choose dynamic kernels, which read symbolic sizes (infer_server.engines.ir.symbolic) at run time.

        Kernels of the plan of `take_over` are reused, and only missing ones are compiled. Without symbolic sizes the
        graph is for one shape.

        Returns
        -------
        Chosen or None
            None if the backend has no dynamic kernels.

        Raises
        ------
        NotSymbolic
            A symbolic size has to be a known number.
        """

    @property
    def dynamic_kernels(self) -> Sequence[CompiledKernel] | None:
        """Dynamic kernels of `take_over` and those compiled since; None if the backend has none."""

    def settle(self, chosen: Any, progress: Progress | None = None) -> Any:
        """Decide between close tactics by timing them inside the network.

        Returns `chosen` itself if there is nothing to decide.
        """

    def assemble(self, chosen: Any) -> MachinePart:
        """Pack constants, lay out buffers and return the machine part of the plan."""

    @property
    def timed(self) -> Mapping[str, Mapping[str, float]]:
        """Measured times for sessions that start from a plan of this one, under keys private to the backend."""

    def take_over(self, plan: Plan, dynamic: Sequence[CompiledKernel] = ()) -> None:
        """Reuse the constants, code and timings of a plan of the same model, and dynamic kernels of its symbolic plans.

        Plans that are assembled later are for other shapes, and are loaded next to this plan.
        """

    def tuned(self, plan: Plan) -> Plan:
        """Return the plan with the decisions that need timing of the whole plan, or `plan` if there are none."""


class Backend(Protocol):
    """Compiler for a family of targets, and what the rest of the project has to know of it."""
    @property
    def name(self) -> str: ...

    @property
    def targets(self) -> Sequence[str]: ...

    @property
    def selects(self) -> bool:
        """True if program segments may hold operators with data-dependent output shapes; else they run on the host."""

    def session(self, target: str, cache: TimingCache, timing: bool) -> Session:
        """Return a session that builds for a target.

        Parameters
        ----------
        target : str
            One of `targets`, or "" for the best target of this machine.
        cache : TimingCache
            Kernel times of earlier builds.
        timing : bool
            Time kernels on this machine, if it can run them.
        """

    def session_here(self, cache: TimingCache, sibling: Session) -> Session:
        """Return a session for plans that the build itself runs on this machine, such as calibration trials.

        Nothing is timed.

        Parameters
        ----------
        cache : TimingCache
            Kernel times of earlier builds.
        sibling : Session
            Session of the build; compiled code is shared with it where the targets agree.
        """

    def peaks(self) -> Peaks:
        """Return the peak throughput and bandwidths of this machine."""


class BuildsForGpus(Protocol):
    """Backend whose targets are GPU architectures."""

    def gpus(self) -> Sequence[tuple[GpuInfo, str]]:
        """Return this machine's GPUs and the target of each, without initialising a GPU.

        The target is "" for a GPU that is older than every known target.
        """
