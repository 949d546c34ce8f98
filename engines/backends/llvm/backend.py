"""CPU backend: kernels emitted as LLVM IR for the instruction sets of codegen/isa.py. LLVM is imported on first use."""
from __future__ import annotations

from infer_server.engines.backends.base import Backend, Session
from infer_server.engines.backends.llvm.codegen.isa import ALL, best_isa
from infer_server.engines.errors import ConfigError
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.roofline import Peaks


class LlvmBackend:
    """CPU backend, whose targets are instruction sets."""
    name = "llvm"
    targets = tuple(isa.name for isa in ALL)
    selects = True

    def session(self, target: str, cache: TimingCache, timing: bool) -> Session:
        return self._session(target, cache, timing)

    def session_here(self, cache: TimingCache, sibling: Session) -> Session:
        return self._session("", cache, timing=False, short_lived=True, sibling=sibling)

    def _session(self, target: str, cache: TimingCache, timing: bool, short_lived: bool = False,
                 sibling: Session | None = None) -> Session:
        target = target or best_isa(detect().features).name
        try:
            from infer_server.engines.backends.llvm.session import LlvmSession
        except ImportError as error:
            raise ConfigError(f"cannot build for '{target}': llvmlite is not installed ({error}); install llvmlite, or "
                              "build for the target 'numpy'") from error
        return LlvmSession(target, cache, timing, short_lived, sibling if isinstance(sibling, LlvmSession) else None)

    def peaks(self) -> Peaks:
        from infer_server.engines.backends.llvm.tuning.peaks import measure_peaks
        return measure_peaks()


BACKEND: Backend = LlvmBackend()
