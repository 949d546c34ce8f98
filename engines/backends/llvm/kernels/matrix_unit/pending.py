"""The pending tile of a matrix-unit contraction: the record that describes it, and its sums in scratch memory."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.codegen.extents import TABLE
from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.types import PTR

LINE = 64           # bytes of a cache line


class StoredSums(Sequence[Value]):
    """Accumulators of a pixel in scratch memory; indexing loads one."""

    def __init__(self, isa: Isa, address: Value, vectors: int, exact: bool) -> None:
        self._isa, self._address, self._vectors, self._exact = isa, address, vectors, exact

    def __len__(self) -> int:
        return self._vectors

    def __getitem__(self, v: Any) -> Any:
        if v >= self._vectors:
            raise IndexError(v)
        isa, at = self._isa, self._address + v * LINE
        if not self._exact:
            return at.f.load(isa.floats, at, LINE, "sum")
        return isa.to_float(at.f.load(isa.ints, at, LINE, "sum"))


class Pending:
    """Record of the pending tile, followed by the scratch memory."""

    def __init__(self, record: Value, operands: int) -> None:
        self.record = record
        self.names = ("constants", "y", *(f"operand{n}" for n in range(operands)))

    @property
    def size(self) -> int:
        """Return the bytes of the record, in whole cache lines."""
        return -(-8 * (2 + len(self.names)) // LINE) * LINE

    @property
    def scratch(self) -> Value:
        return self.record + self.size

    @property
    def finish(self) -> Value:
        return self.record.f.load(PTR, self.record, 8, "finish")

    @finish.setter
    def finish(self, function: Value) -> None:
        self.record.f.store(function, self.record, 8)

    @property
    def configuration(self) -> Value:
        """Return the address of the current configuration of the tile registers."""
        return self.record.f.load(PTR, self.record + 8, 8, "configuration")

    @configuration.setter
    def configuration(self, address: Value) -> None:
        self.record.f.store(address, self.record + 8, 8)

    def addresses(self) -> dict[str, Value]:
        return {name: self.record.f.load(PTR, self.record + 8 * n, 8, f"pending {name}")
                for n, name in enumerate(self.names, 2)}

    def remember(self, addresses: Mapping[str, Value]) -> None:
        for n, name in enumerate(self.names, 2):
            self.record.f.store(addresses[name], self.record + 8 * n, 8)

    def run(self) -> None:
        """Call the pending epilogue, if there is one."""
        f, finish = self.record.f, self.finish
        with f.when(finish.compare("ne", Value(f, PTR, "null"))):
            table = f", {PTR} %{TABLE}" if f.module.trace else ""
            f.write(f"call void {finish.name}({self.record}{table})")
