"""IR builder for GPUs: kernels, thread indices, shared memory, barriers and warp shuffles."""
from __future__ import annotations

from infer_server.engines.codegen.ir_builder import Function, Module, Value
from infer_server.engines.codegen.types import DOUBLE, I1, I32, I64, pointer, vector

GLOBAL, SHARED = pointer(1), pointer(3)
ALL_LANES = -1      # mask of all lanes of a warp


class GpuModule(Module):
    """Module of kernels and their dynamic shared memory, the symbol `shared`."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[str, int] = {}       # kernel -> threads per block
        self.min_blocks: dict[str, int] = {}        # kernel -> minimum of resident blocks per multiprocessor

    def text(self) -> str:
        said = [(name, word, number) for word, numbers in (("maxntidx", self.threads), ("minctasm", self.min_blocks))
                for name, number in numbers.items()]
        notes = [f'!{i} = !{{ptr @{name}, !"{word}", i32 {number}}}' for i, (name, word, number) in enumerate(said)]
        notes.append(f"!nvvm.annotations = !{{{', '.join(f'!{i}' for i in range(len(notes)))}}}")
        return "\n".join(['target triple = "nvptx64-nvidia-cuda"',
                          "@shared = external addrspace(3) global [0 x i8], align 1024", super().text(), *notes])


def begin_kernel(module: GpuModule, name: str, threads: int, operands: int) -> tuple[Function, list[Value], Value]:
    """Begin a kernel with blocks of `threads` threads.

    Returns
    -------
    f : Function
        The kernel.
    operands : list of Value
        Addresses of its operands.
    rows : Value
        Number of rows of its grid (i32), the bound to check row indices against.
    """
    keys = [f"operand{i}" for i in range(operands)]
    f = module.function(name, internal=False, **dict.fromkeys(keys, GLOBAL), rows=I32)
    parameters = ", ".join([*(f"{GLOBAL} noalias align 1 %{key}" for key in keys), f"{I32} %rows"])
    f.head = f"define ptx_kernel void @{name}({parameters}) nounwind {{\nentry:"
    module.threads[name] = threads
    return f, [f.parameters[key] for key in keys], f.parameters["rows"]


def special_register(f: Function, register: str) -> Value:
    """Read a special register: tid.x, ctaid.x or ctaid.y."""
    return f.call(I32, f"llvm.nvvm.read.ptx.sreg.{register}", hint=register)


def shared(f: Function) -> Value:
    """Return the address of the block's dynamic shared memory."""
    return Value(f, SHARED, "@shared")


def barrier(f: Function) -> None:
    """Synchronise the block and make shared-memory stores visible to all of its threads."""
    f.run("llvm.nvvm.barrier0")


def shuffle_xor(value: Value, distance: int) -> Value:
    """Return the value of the lane whose number differs in bit `distance`. All lanes of the warp must take part."""
    f = value.f
    if value.type == I1:
        return f.cast("trunc", shuffle_xor(f.cast("zext", value, I32, "bit"), distance), I1, "other")
    if value.type == DOUBLE:
        return f.cast("bitcast", shuffle_xor(f.cast("bitcast", value, I64, "bits"), distance), DOUBLE, "other")
    if value.type == I64:
        halves = f.cast("bitcast", value, vector(2, I32), "halves")
        others = [shuffle_xor(half, distance) for half in elements(halves)]
        return f.cast("bitcast", vector_of(others), value.type, "other")
    bits = value if value.type == I32 else f.cast("bitcast", value, I32, "bits")
    mask, offset, whole = (f.constant(number, I32) for number in (ALL_LANES, distance, 31))
    other = f.call(I32, "llvm.nvvm.shfl.sync.bfly.i32", mask, bits, offset, whole, hint="other")
    return other if value.type == I32 else f.cast("bitcast", other, value.type, "other")


def opaque_address(address: Value) -> Value:
    """Return an opaque copy of a global address, which keeps LLVM from hoisting its loads out of a loop."""
    return address.f.op(GLOBAL, f'call {GLOBAL} asm sideeffect "mov.u64 $0, $1;", "=l,l"({address})', "again")


def pick_bytes(a: Value, b: Value, order: int) -> Value:
    """Assemble a word from bytes of a (0..3) and b (4..7): the lowest hex digit of `order` selects the lowest byte."""
    return a.f.call(I32, "llvm.nvvm.prmt", a, b, a.f.constant(order, I32), hint="bytes")


def wide(value: Value) -> Value:
    """Zero-extend an i32 to i64, for use as an offset."""
    return value.f.cast("zext", value, I64, "wide")


def number_if(test: Value, number: int) -> Value:
    """Return the i32 `number` if the i1 `test` holds, else 0."""
    assert test.type == I1
    return test.f.select(test, test.f.constant(number, I32), test.f.constant(0, I32), "number")


# ---- several registers in one value
def struct(type_: str, count: int) -> str:
    """Return the type of a struct of `count` equal members."""
    return f"{{{', '.join([type_] * count)}}}"


def fields(value: Value) -> list[Value]:
    """Extract the members of a struct."""
    types = value.type.strip("{}").split(", ")
    return [value.f.op(type_, f"extractvalue {value}, {i}", "part") for i, type_ in enumerate(types)]


def elements(value: Value) -> list[Value]:
    """Extract the elements of a vector."""
    count, type_ = value.type.strip("<>").split(" x ")
    return [value.f.op(type_, f"extractelement {value}, i32 {i}", "element") for i in range(int(count))]


def vector_of(values: list[Value]) -> Value:
    """Pack values of one type into a vector."""
    f, type_ = values[0].f, f"<{len(values)} x {values[0].type}>"
    result = Value(f, type_, "poison")
    for i, value in enumerate(values):
        result = f.op(type_, f"insertelement {result}, {value}, i32 {i}", "packed")
    return result
