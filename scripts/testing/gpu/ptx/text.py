"""Parser of PTX text into kernels."""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

Operand = str | tuple[str, ...]


class Fault(Exception):
    """Invalid operation of a kernel, with its position."""


@dataclass(frozen=True)
class Instruction:
    text: str
    op: tuple[str, ...]                 # the words between the dots
    operands: tuple[Operand, ...]       # a tuple for {a, b}
    guard: str = ""                     # %p1 or !%p1

    def one(self, index: int) -> str:
        """Return an operand that is not a list."""
        operand = self.operands[index]
        assert isinstance(operand, str), self.text
        return operand

    def several(self, index: int) -> tuple[str, ...]:
        """Return an operand as a list, which may have one element."""
        operand = self.operands[index]
        return operand if isinstance(operand, tuple) else (operand,)


@dataclass(frozen=True)
class Kernel:
    """Parsed entry function."""
    name: str
    parameters: dict[str, str]          # name -> type
    registers: dict[str, str]           # beginning of a register's name -> type
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    threads: int                        # maximum number of threads of a block; 0: unlimited
    unread: frozenset[str]              # registers that occur once: unused results of vector loads


def parse(text: str) -> dict[str, Kernel]:
    """Return the entry functions of a module by name."""
    return {match[1]: _kernel(*match.groups())
            for match in re.finditer(r"\.entry (\w+)\(([^)]*)\)([^{]*)\{(.*?)\n\}", text, re.S)}


def _kernel(name: str, head: str, directives: str, body: str) -> Kernel:
    parameters = {part.split()[-1]: part.split(".param .")[1].split()[0] for part in head.split(",") if part.strip()}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    body = re.sub(r"//[^\n]*", "", body)
    body = re.sub(r"\{\s+(\.reg [^{}]*\{[^{}]*\}[^{}]*)\}", r"\1", body)        # a line that has a register of its own
    for line in re.split(r";|(?<=:)\s*\n", body):
        _parse_line(" ".join(line.split()), code, labels, registers)
    limit = re.search(r"\.maxntid (\d+)", directives)
    named = Counter(register for instruction in code for register in re.findall(r"%\w+", instruction.text))
    return Kernel(name, parameters, registers, tuple(code), labels, int(limit[1]) if limit else 0,
                  frozenset(register for register, times in named.items() if times == 1))


def _parse_line(line: str, code: list[Instruction], labels: dict[str, int], registers: dict[str, str]) -> None:
    if line.endswith(":"):
        labels[line[:-1]] = len(code)
    elif line.startswith(".reg"):
        _, type_, names = line.split()
        if registers.setdefault(names.partition("<")[0], type_[1:]) != type_[1:]:
            raise Fault(f"'{line}' and a register of that name and another type are not known here")
    elif line.startswith((".pragma ", ".loc ", ".file ")):
        return
    elif line.startswith("."):
        raise Fault(f"'{line}' is not known here")
    elif line:
        code.append(_instruction(line))


def _instruction(line: str) -> Instruction:
    text, guard = line, ""
    if line.startswith("@"):
        guard, line = line[1:].split(" ", 1)
    word, _, rest = line.partition(" ")
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
    operands = tuple(tuple(p.strip() for p in part[1:-1].split(",")) if part[0] == "{" else part for part in parts)
    return Instruction(text, tuple(word.split(".")), operands, guard)
