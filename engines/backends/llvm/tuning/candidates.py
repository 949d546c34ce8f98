"""Candidates for problems, and their machine code: compiled alone, as in a plan, or together with others to be timed.

When they are timed, tactics that differ only in their outer loops are one module: they share micro-kernels.
"""
from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import Kernel
from infer_server.engines.backends.llvm.runtime.elf import functions_of
from infer_server.engines.codegen.compiler_pool import CompilerPool, Source
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.version import COMPILER_VERSION, compiler_digest


@dataclass(frozen=True)
class Candidate:
    """Kernel and tactic for a problem: the unit that is compiled and timed."""
    kernel: Kernel[Any]
    tactic: Any


@dataclass(frozen=True)
class Choice:
    """Candidate that was chosen for a problem, and its machine code.

    symbol: unique to the kernel, the tactic and the instruction set.
    time_us: microseconds for one item, 0 if it was not timed.
    further_item: time of each further item of a batch relative to that, if a larger batch was timed.
    parameters: values of the run-time parameters of a dynamic kernel, its last operand.
    """
    kernel: Kernel[Any]
    tactic: Any
    symbol: str
    code: bytes
    time_us: float
    further_item: float
    parameters: tuple[int, ...] | None = None


def packing(one: Candidate | Choice) -> Any:
    """Return a key of how the constants of a candidate's problem are packed."""
    return type(one.kernel), one.kernel.packing(one.tactic)


class CandidateCode:
    """Compiler of candidates for one instruction set; each is compiled once."""

    def __init__(self, isa: Isa) -> None:
        self._isa = isa
        self.reused: dict[str, bytes] = {}                  # symbol -> code from other sessions
        self._alone: dict[Candidate, bytes] = {}            # code of each candidate alone
        self._timed_code: dict[Candidate, bytes] = {}       # code to time: each candidate alone, or with others

    def take_over(self, objects: Iterable[bytes]) -> None:
        """Reuse the code that other sessions compiled."""
        self.reused |= {name: code for code in objects for name in functions_of(code)}

    def alone(self, pool: CompilerPool, candidates: Collection[Candidate],
              done: Callable[[], None] = lambda: None) -> Mapping[Candidate, bytes]:
        """Return the code of each candidate alone.

        done is called for each candidate, whether it is compiled now or was before.
        """
        self._alone |= {one: self.reused[symbol] for one in candidates
                        if self.reused and (symbol := self.symbol(one)) in self.reused}
        missing = [one for one in dict.fromkeys(candidates) if one not in self._alone]
        for _ in range(len(candidates) - len(missing)):
            done()
        code = pool.compile((self._source([one]) for one in missing), done)
        self._alone |= dict(zip(missing, code, strict=True))
        return self._alone

    def compile_each(self, pool: CompilerPool, groups: Sequence[Sequence[Candidate]],
                     done: Callable[[], None]) -> Mapping[Candidate, bytes]:
        """Compile candidates with different tiles each alone, as in a plan. done() is called for each group."""
        every = [one for some in groups for one in some]
        ends, count = {*accumulate(map(len, groups))}, itertools.count(1)
        code = self.alone(pool, every, lambda: done() if next(count) in ends else None)
        self._timed_code |= {one: code[one] for one in every}
        return self._timed_code

    def compile_groups(self, pool: CompilerPool, groups: Sequence[Sequence[Candidate]],
                       done: Callable[[], None]) -> Mapping[Candidate, bytes]:
        """Compile candidates that share their tiles as one module for each group, unless compiled before.

        done() is called for each group.
        """
        missing = [some for some in groups if any(one not in self._timed_code for one in some)]
        for _ in range(len(groups) - len(missing)):
            done()
        for some, code in zip(missing, pool.compile(map(self._source, missing), done), strict=True):
            self._timed_code |= dict.fromkeys(some, code)
        return self._timed_code

    def symbol(self, candidate: Candidate) -> str:
        return f"{candidate.kernel.problem.family}_{self.digest(candidate)[:16]}"

    def digest(self, candidate: Candidate) -> str:
        """Return a digest of all that decides on the code of a candidate."""
        text = repr((COMPILER_VERSION, self._isa.name, candidate))
        return hashlib.sha256(text.encode()).hexdigest()

    def _source(self, candidates: Sequence[Candidate]) -> Source:
        identity = (compiler_digest(), *map(self.digest, candidates))
        return Source(repr(identity), partial(self._text, candidates))

    def _text(self, candidates: Sequence[Candidate]) -> str:
        """Return the module of some candidates for one problem."""
        module = Module()
        for candidate in candidates:
            candidate.kernel.emit(module, self.symbol(candidate), self._isa, candidate.tactic)
        return module.text()
