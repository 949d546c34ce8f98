"""Loader of relocatable ELF objects into this process, without LLVM or a linker: the code that execution.py runs.

An object that LLVM emits for a self-contained module (position-independent, small code model) needs little: its
sections next to each other in memory, a few relocations, and the addresses of its functions.

References: the System V ABI, chapter 4 (object files); its AMD64 supplement, table 4.9; ELF for the Arm 64-bit
Architecture (AAELF64), section 5.7.
"""
from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infer_server.engines.errors import PlanCorruptError, PlanTargetError

_MACHINES = {62: "x86_64", 183: "aarch64"}
_ALIASES = {"AMD64": "x86_64", "arm64": "aarch64"}
_SYMTAB, _RELA, _NOBITS = 2, 4, 8                   # sh_type
_WRITE, _ALLOC = 1, 2                               # sh_flags
_PAGE = 4096

# Relocation types. Their results use S, the symbol's address, A, the addend, and P, the address that is patched.
_X86_ABS64, _X86_PC32, _X86_PLT32, _X86_PC64 = 1, 2, 4, 24
_ARM_ABS64, _ARM_PREL64, _ARM_PREL32 = 257, 260, 261
_ARM_ADR_PAGE, _ARM_ADD_LOW = 275, 277
_ARM_JUMP26, _ARM_CALL26 = 282, 283
_ARM_LOAD_LOW = {278: 0, 284: 1, 285: 2, 286: 3, 299: 4}        # LDST{8,16,32,64,128}_ABS_LO12_NC -> log2 of the size


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    flags: int
    offset: int         # offset in the object
    size: int
    link: int
    info: int
    alignment: int


@dataclass(frozen=True)
class _Symbol:
    name: str
    section: int        # 0: undefined
    value: int
    bound: bool         # True if it is visible outside its object


class _Object:
    """Parsed object. Raises PlanCorruptError if it is invalid, PlanTargetError if it is for another machine."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._check_header()
        self.sections = self._sections()
        self.symbols = self._symbols()
        self.loaded = tuple(self._loaded())

    def _check_header(self) -> None:
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise PlanCorruptError("an object of the code section is not a little-endian 64-bit ELF file; build the "
                                   "plan again")
        kind, machine = struct.unpack_from("<HH", self.data, 16)
        if kind != 1:
            raise PlanCorruptError(f"an object of the code section has ELF type {kind}, not 1 (relocatable); build the "
                                   "plan again")
        here = platform.machine()
        if _MACHINES.get(machine) != _ALIASES.get(here, here):
            raise PlanTargetError(f"the code is for {_MACHINES.get(machine, f'ELF machine {machine}')}, but this is "
                                  f"{here}; build the plan here, or load it with on_target_mismatch='relower'")
        self.machine = _MACHINES[machine]

    def _sections(self) -> list[_Section]:
        table, = struct.unpack_from("<Q", self.data, 40)
        size, count, names = struct.unpack_from("<HHH", self.data, 58)
        raw = [struct.unpack_from("<IIQQQQIIQQ", self.data, table + i * size) for i in range(count)]
        strings = raw[names][4]
        return [_Section(self._string(strings + h[0]), h[1], h[2], h[4], h[5], h[6], h[7], max(h[8], 1)) for h in raw]

    def _symbols(self) -> list[_Symbol]:
        found = []
        for section in self.sections:
            if section.type == _SYMTAB:
                strings = self.sections[section.link].offset
                table = self.data[section.offset:section.offset + section.size]
                for name, info, _, index, value, _ in struct.iter_unpack("<IBBHQQ", table):
                    bound = info >> 4 != 0      # only these are looked up by name
                    found.append(_Symbol(self._string(strings + name) if bound else "", index, value, bound))
        return found

    def _string(self, at: int) -> str:
        end = self.data.find(b"\0", at)
        if end < 0:
            raise IndexError("a name without an end")
        return self.data[at:end].decode()

    def _loaded(self) -> Iterator[tuple[int, _Section]]:
        """Yield the sections that running code needs.

        Nothing unwinds through kernels, so .eh_frame is not among them.
        """
        for index, section in enumerate(self.sections):
            if section.flags & _ALLOC and section.size and not section.name.startswith(".eh_frame"):
                if section.flags & _WRITE or section.type == _NOBITS:
                    raise PlanCorruptError(f"section {section.name} of a code object is writable: code of a plan "
                                           "must not have variables of its own; build the plan again")
                if section.offset + section.size > len(self.data) or section.alignment > _PAGE:
                    raise PlanCorruptError(f"section {section.name} of a code object is cut short or garbled; "
                                           "build the plan again")
                yield index, section

    def relocations(self, of: int) -> Iterator[tuple[int, int, _Symbol, int]]:
        """Yield (offset in the section, type, symbol, addend) of a loaded section."""
        for section in self.sections:
            if section.type == _RELA and section.info == of:
                for offset, info, addend in struct.iter_unpack(
                        "<QQq", self.data[section.offset:section.offset + section.size]):
                    yield offset, info & 0xFFFFFFFF, self.symbols[info >> 32], addend


def functions_of(data: bytes) -> list[str]:
    """Return the names that an object defines."""
    return [symbol.name for symbol in _Object(data).symbols if symbol.bound and symbol.section]


class LoadedCode:
    """Objects in memory, ready to be called. The code is valid as long as this object lives.

    addresses: function name -> address. Local functions (micro-kernels) are not listed.
    """

    def __init__(self, objects: Sequence[bytes]) -> None:
        """Load objects.

        Raises
        ------
        PlanCorruptError
            An object is garbled or not self-contained.
        PlanTargetError
            An object is for another machine, or this system forbids executable memory.
        """
        self._objects = tuple(objects)          # keeps them, whose identities are a key of LoadedPlan's table
        try:
            self._load(objects)
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise PlanCorruptError(f"an object of the code section is cut short or garbled ({error}); "
                                   "build the plan again") from error
        self._make_executable()

    def _load(self, objects: Sequence[bytes]) -> None:
        parsed = [_Object(bytes(data)) for data in objects]
        layouts: list[dict[int, int]] = []       # section index -> offset in the mapping, for each object
        size = 0
        for item in parsed:
            layouts.append({})
            for index, section in item.loaded:
                size = -(-size // section.alignment) * section.alignment
                layouts[-1][index] = size
                size += section.size
        self._map = mmap.mmap(-1, max(-(-size // _PAGE) * _PAGE, _PAGE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                              mmap.PROT_READ | mmap.PROT_WRITE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.addresses: dict[str, int] = {}
        for item, offsets in zip(parsed, layouts, strict=True):
            self._copy(item, offsets)
            self._publish(item, offsets)
            self._relocate(item, offsets)

    def _copy(self, item: _Object, offsets: dict[int, int]) -> None:
        for index, section in item.loaded:
            content = item.data[section.offset:section.offset + section.size]
            self._map[offsets[index]:offsets[index] + section.size] = content

    def _publish(self, item: _Object, offsets: dict[int, int]) -> None:
        for symbol in item.symbols:
            if symbol.bound and symbol.section in offsets:
                if symbol.name in self.addresses:
                    raise PlanCorruptError(f"two code objects define '{symbol.name}'; build the plan again")
                self.addresses[symbol.name] = self._base + offsets[symbol.section] + symbol.value

    def _relocate(self, item: _Object, offsets: dict[int, int]) -> None:
        patch = _patch_x86 if item.machine == "x86_64" else _patch_arm
        for index, section in item.loaded:
            for offset, kind, symbol, addend in item.relocations(index):
                if symbol.section not in offsets:
                    raise PlanCorruptError(f"code calls or reads '{symbol.name}', which none of the plan's objects "
                                           "defines: kernels must be self-contained; build the plan again")
                if not 0 <= offset <= section.size - 4:
                    raise PlanCorruptError(f"a relocation of {section.name} lies outside it; build the plan again")
                target = self._base + offsets[symbol.section] + symbol.value + addend
                if not patch(self._map, offsets[index] + offset, kind, target, self._base + offsets[index] + offset):
                    raise PlanCorruptError(f"relocation type {kind} ({item.machine}) against '{symbol.name}' is not "
                                           "known to this loader; build the plan again")

    def _make_executable(self) -> None:
        """Make the code executable and read-only. On ARM, Linux also synchronises the instruction caches here."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self._base), ctypes.c_size_t(len(self._map)), mmap.PROT_READ | mmap.PROT_EXEC):
            raise PlanTargetError(f"this system does not allow the process to make memory executable (mprotect: errno "
                                  f"{ctypes.get_errno()}); allow it for this process (SELinux: execmem)")


def _patch_x86(memory: mmap.mmap, at: int, kind: int, target: int, place: int) -> bool:
    if kind in (_X86_PC32, _X86_PLT32):
        struct.pack_into("<i", memory, at, target - place)
    elif kind == _X86_ABS64:
        struct.pack_into("<Q", memory, at, target)
    elif kind == _X86_PC64:
        struct.pack_into("<q", memory, at, target - place)
    else:
        return False
    return True


def _patch_arm(memory: mmap.mmap, at: int, kind: int, target: int, place: int) -> bool:
    def field(value: int, low: int, width: int) -> None:
        """Set bits low..low+width-1 of the instruction."""
        mask = ((1 << width) - 1) << low
        word, = struct.unpack_from("<I", memory, at)
        struct.pack_into("<I", memory, at, word & ~mask | value << low & mask)

    if kind in (_ARM_CALL26, _ARM_JUMP26):
        field(target - place >> 2, 0, 26)
    elif kind == _ARM_ADR_PAGE:
        pages = (target >> 12) - (place >> 12)
        field(pages, 29, 2)
        field(pages >> 2, 5, 19)
    elif kind == _ARM_ADD_LOW:
        field(target & 0xFFF, 10, 12)
    elif kind in _ARM_LOAD_LOW:
        field((target & 0xFFF) >> _ARM_LOAD_LOW[kind], 10, 12)
    elif kind == _ARM_ABS64:
        struct.pack_into("<Q", memory, at, target)
    elif kind == _ARM_PREL64:
        struct.pack_into("<q", memory, at, target - place)
    elif kind == _ARM_PREL32:
        struct.pack_into("<i", memory, at, target - place)
    else:
        return False
    return True
