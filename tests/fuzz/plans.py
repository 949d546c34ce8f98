"""Damaged plan files, from seeds: cut short, altered, or edited with their checksums made right again.

    python -m tests.fuzz.plans --count 3000 --seed 1        # thousands; prints what became of each kind

Each is loaded, read whole and run by a worker with two minutes and 2 GB (tests/fuzz/worker.py). It must end in a
PlanError, or in the answers of the plan that it was made of. Machine code and weights are not edited under a right
checksum: nobody could say what then is right.

"as compiled" is what a faulty compiler might write: an edited field, and a fingerprint made of it. Nobody knows its
right answers, nor what its kernels do with wrong addresses; so it is only loaded and given memory, or run if it has no
kernels. It must end in a PlanError or in any answer.
"""
from __future__ import annotations

import argparse
import copy
import json
import random
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from infer_server.engines.backends.llvm.tuning.item_major import run_item_major
from infer_server.engines.errors import PlanError
from infer_server.engines.ir.graph import Node, QParams
from infer_server.engines.ir.serialize import node_to_json
from infer_server.engines.loading import load_engine
from infer_server.engines.plan.checksums import PAGE, page_sums, strong
from infer_server.engines.plan.file import fingerprint_of, read_plan, write_plan
from infer_server.engines.plan.plan import Buffer, Fallback, IoTensor, ItemMajorRun, MachinePart, Plan, Step, TensorView
from infer_server.engines.plan.sections import summed
from tests.engines.compiler.zoo_engines import compiled
from tests.engines.tiny import executor, halo_plan, mix_plan, with_weights
from tests.fuzz.worker import Worker
from tests.zoo import TINY

HEADER = struct.Struct("<8sIIQQ16sQQ")
NUMBERS = (0, 1, -1, 2, 3, 7, 64, 255, 4096, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 62, (1 << 63) - 1,
           -(1 << 63), 1 << 64, 10**30, 0.5, -0.0, 1e300, float("inf"), float("nan"))
WORDS = ("", "x", "y", "int64x", "object", "float16", "int8", "O", "<i4", "i4,i4", "batch", "\0", "é" * 300,
         "constants")
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [1, 2, 3], {"a": 1}, *NUMBERS, *WORDS)


def checksum(section: str, content: bytes) -> str:
    return (page_sums if summed(section) else strong)(content)


@dataclass(frozen=True)
class File:
    """Parsed plan file, which can be written with other parts and correct checksums."""
    manifest: dict[str, Any]
    sections: dict[str, bytes]

    @staticmethod
    def read(data: bytes) -> File:
        _, _, _, offset, size, *_ = HEADER.unpack_from(data)
        manifest = json.loads(zlib.decompress(data[offset:offset + size]))
        return File(manifest, {name: data[r["offset"]:r["offset"] + r["bytes"]]
                               for name, r in manifest["sections"].items()})

    def write(self, version: int) -> bytes:
        """Return the file's bytes; records of sections are updated only if they are objects."""
        manifest, body = self.manifest, bytearray(PAGE)
        for name, content in self.sections.items():
            record = manifest["sections"].get(name) if isinstance(manifest.get("sections"), dict) else None
            if isinstance(record, dict):
                body += bytes(-len(body) % 64)
                record |= {"offset": len(body), "bytes": len(content), "checksum": checksum(name, content)}
                body += content
        return self.sealed(bytes(body) + bytes(-len(body) % 64), version)

    def sealed(self, body: bytes, version: int) -> bytes:
        """Return header, body and the manifest unchanged."""
        packed = zlib.compress(json.dumps(self.manifest, separators=(",", ":")).encode())
        header = HEADER.pack(b"\x93INFPLAN", version, 0, len(body), len(packed), bytes.fromhex(strong(packed)),
                             len(body) + len(packed), 0)
        return header + body[HEADER.size:] + packed


FINE = ("refused", "right", "loaded")       # outcomes that are not failures
Feed = dict[str, Any]                       # arrays by name
Places = list[tuple[Any, Any]]      # (container, key) of each value in a document


def places(document: Any) -> Places:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    found: Places = []
    for key, value in items:
        found.append((document, key))
        if isinstance(value, dict | list):
            found += places(value)
    return found


def edit(document: Any, rng: random.Random) -> str:
    """Change one value of a JSON document and describe the change."""
    every = places(document)
    if not every:
        document["x"] = 1
        return "x added"
    # As likely to be any leaf's field as any other's: a plan has a thousand numbers of reaches, and one batch.
    key = rng.choice(sorted({str(key) for _, key in every}))
    holder, at = rng.choice([place for place in every if str(place[1]) == key])
    old = holder[at]
    turn = rng.random()
    if isinstance(holder, dict) and turn < 0.05:
        del holder[at]
        return f"{at} left out"
    if isinstance(holder, dict) and turn < 0.08:
        holder[f"{at}x"] = old
        return f"{at}x added"
    if isinstance(holder, list) and turn < 0.15:
        if rng.random() < 0.5:
            holder.insert(at, copy.deepcopy(rng.choice(holder)))
            return f"[{at}] twice"
        del holder[at]
        return f"[{at}] left out"
    if isinstance(old, list) and len(old) > 1 and turn < 0.4:
        rng.shuffle(old)
        return f"{at} in another order"
    if turn < 0.5:
        same = [h[k] for h, k in every if str(k) == key]
        holder[at] = copy.deepcopy(rng.choice(same))
        return f"{at}: {old!r} -> {holder[at]!r}, another's"[:160]
    if isinstance(old, int) and not isinstance(old, bool) and turn < 0.8:
        holder[at] = rng.choice((old + 1, old - 1, -old, old * 2, old // 2, old + 64, old + 4096, *NUMBERS))
    elif isinstance(old, str) and turn < 0.8:
        holder[at] = rng.choice((old[:-1], old + "x", old.upper(), *WORDS))
    else:
        holder[at] = rng.choice(OTHERS)
    return f"{at}: {old!r} -> {holder[at]!r}"[:160]


# ---- kinds of damage: (file's bytes, its format version, random numbers) -> (what was done, the damaged bytes)
Kind = Callable[[bytes, int, random.Random], tuple[str, bytes]]


def cut_short(data: bytes, version: int, rng: random.Random) -> tuple[str, bytes]:
    at = rng.randrange(len(data))
    return f"at {at}", data[:at] + (bytes(len(data) - at) if rng.random() < 0.3 else b"")


def flipped(data: bytes, version: int, rng: random.Random) -> tuple[str, bytes]:
    changed, bits = bytearray(data), [rng.randrange(8 * len(data)) for _ in range(rng.choice((1, 1, 2, 8)))]
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return f"bits {bits}", bytes(changed)


def overwritten(data: bytes, version: int, rng: random.Random) -> tuple[str, bytes]:
    size = min(rng.choice((8, 64, 512, 4096)), len(data) // 2)
    at, source = (rng.randrange(0, len(data) - size, 8) for _ in range(2))
    changed = bytearray(data)
    if rng.random() < 0.5:
        changed[at:at + size], changed[source:source + size] = data[source:source + size], data[at:at + size]
        return f"{size} bytes at {at} and {source} exchanged", bytes(changed)
    changed[at:at + size] = rng.choice((bytes(size), rng.randbytes(size), data[source:source + size]))
    return f"{size} bytes at {at}", bytes(changed)


def header_edited(data: bytes, version: int, rng: random.Random) -> tuple[str, bytes]:
    fields = list(HEADER.unpack_from(data))
    at = rng.choice((1, 2, 3, 4, 6, 7))
    fields[at] = rng.choice((0, 1, 63, 64, len(data), len(data) - 1, 1 << 31, (1 << 32) - 1)) if at < 3 else \
        rng.choice((0, 1, 64, fields[at] + 1, max(fields[at] - 1, 0), len(data), 1 << 40, (1 << 64) - 1))
    return f"field {at} = {fields[at]}", HEADER.pack(*fields) + data[HEADER.size:]


def field_edited(data: bytes, version: int, rng: random.Random) -> tuple[str, bytes]:
    file = File.read(data)
    done = [edit(file.manifest["plan"], rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    return "; ".join(done), file.write(version)


def field_compiled(data: bytes, version: int, rng: random.Random) -> tuple[str, bytes]:
    file = File.read(data)
    done = [edit(file.manifest["plan"], rng) for _ in range(rng.choice((1, 1, 2)))]
    file.manifest["plan"]["fingerprint"] = fingerprint_of(file.manifest)
    return "; ".join(done), file.write(version)


def manifest_edited(data: bytes, version: int, rng: random.Random) -> tuple[str, bytes]:
    file = File.read(data)
    body = data[:HEADER.unpack_from(data)[3]]
    rest = {key: value for key, value in file.manifest.items() if key != "plan"}
    done = edit(rest, rng)
    return done, File({**rest, "plan": file.manifest["plan"]}, {}).sealed(body, version)


def sections_moved(data: bytes, version: int, rng: random.Random) -> tuple[str, bytes]:
    """Reorder, duplicate or overlap sections."""
    file, body = File.read(data), data[:HEADER.unpack_from(data)[3]]
    records = file.manifest["sections"]
    one, other = rng.sample(sorted(records), 2)
    turn = rng.random()
    if turn < 0.3:      # this is the same plan
        names = sorted(file.sections, key=lambda name: rng.random())
        return "in another order", File(file.manifest, {name: file.sections[name] for name in names}).write(version)
    if turn < 0.6:
        records[one] = dict(records[other])
        return f"'{one}' is '{other}'", file.sealed(body, version)
    records[one]["offset"] += rng.choice((-64, -1, 1, 64, 4096))
    view = body[max(records[one]["offset"], 0):][:records[one]["bytes"]]
    records[one]["checksum"] = checksum(one, view)
    return f"'{one}' moved", file.sealed(body, version)


def document_edited(data: bytes, version: int, rng: random.Random) -> tuple[str, bytes]:
    """Edit the graph, which is read only on demand."""
    file = File.read(data)
    document = json.loads(zlib.decompress(file.sections["graph"]))
    done = edit(document, rng)
    packed = rng.choice((json.dumps(document).encode(), json.dumps(document).encode()[:-1], b"[" * 200_000,
                         b"\xff\xfe")) if rng.random() < 0.1 else json.dumps(document).encode()
    content = zlib.compress(packed) if rng.random() > 0.05 else zlib.compress(bytes(1 << 27))
    return done, replace(file, sections={**file.sections, "graph": content}).write(version)


KINDS: dict[str, Kind] = {
    "cut short": cut_short, "flipped": flipped, "overwritten": overwritten, "header": header_edited,
    "field": field_edited, "as compiled": field_compiled, "manifest": manifest_edited, "sections": sections_moved,
    "document": document_edited}
WEIGHTS = {"field": 4, "as compiled": 6}


def damaged(plans: list[bytes], count: int, seed: int) -> Iterator[tuple[int, str, str, bytes]]:
    """Yield (plan, kind, description, file) of damaged plans, each from its own seed."""
    kinds = [kind for kind in KINDS for _ in range(WEIGHTS.get(kind, 1))]
    for case in range(count):
        rng = random.Random(f"{seed}/{case}")
        which, kind = rng.randrange(len(plans)), kinds[case % len(kinds)]
        done, data = KINDS[kind](plans[which], int.from_bytes(plans[which][8:12], "little"), rng)
        yield which, kind, f"seed {seed}, case {case}: {done}", data


# ---- what becomes of it
def feeds_of(plan: Plan, items: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {io.name: rng.integers(-5, 6, [items if isinstance(extent, str) else extent for extent in io.shape]).astype(
        "uint16" if io.dtype == "bfloat16" else io.dtype) for io in plan.inputs}


def answers(path: str, feeds: Sequence[Feed]) -> list[Feed]:
    """Read everything in a plan, then run it on the feeds."""
    engine = load_engine(path, on_target_mismatch="refuse")
    dict(engine.plan.graph), dict(engine.plan.weights)
    return [engine.run(feed) for feed in feeds]


def outcome(path: str, feeds: Sequence[Feed], wanted: Sequence[Feed]) -> str:
    """Return "refused: ...", "right", or the fault."""
    try:
        found = answers(path, feeds)
    except PlanError as error:
        return f"refused: {type(error).__name__}: {error}"
    for got, want in zip(found, wanted, strict=True):
        if got.keys() != want.keys() or any(got[name].dtype != array.dtype or not np.array_equal(got[name], array)
                                            for name, array in want.items()):
            return "WRONG: other answers"
    return "right"


def loaded(path: str, *_: Any) -> str:
    """Return "refused: ..." or "loaded"."""
    try:
        engine = load_engine(path, on_target_mismatch="refuse")
        context = engine.create_context()
        for batch in (1, engine.plan.batch_slots):
            for io in engine.inputs:
                context.input(io.name, batch)[...] = 1
            if not any(step.symbol for step in engine.plan.machine.steps):
                context.execute(batch)
    except PlanError as error:
        return f"refused: {type(error).__name__}: {error}"
    return "loaded"


def what_becomes(kind: str, *question: Any) -> str:
    return loaded(*question) if kind == "as compiled" else outcome(*question)


# ---- plans to damage
def reference_plan() -> Plan:
    """Return a plan for uint8 [3] times a constant, plus a constant, both on the reference."""
    quants = [QParams((scale,), (zero,), dtype) for scale, zero, dtype in ((0.5, 128, "uint8"), (0.25, 0, "int8"))]
    x = TensorView("x", "uint8", (3,), 0, 0, (1,), 3, quant=quants[0])
    y, z = (TensorView(name, "float32", (2,), buffer, 0, (4,), 8) for name, buffer in (("y", 1), ("z", 2)))
    product = Fallback(node_to_json(Node("MatMul", ("x", "w"), ("y",))), (x, "w"), (y,), (None, quants[1]))
    total = Fallback(node_to_json(Node("Add", ("y", "b"), ("z",))), (y, "b"), (z,))
    machine = MachinePart(
        "llvm", "", (x,), (z,), (Buffer("x", 6, -1, 0), Buffer("y", 16, 0, 1), Buffer("z", 16, 1, 2)),
        (Step("", (), 1, fallback=product), Step("", (), 1, depends=(0,), fallback=total)), code=(executor(),))
    tensors = ((IoTensor("x", "uint8", ("batch", 3)),), (IoTensor("z", "float32", ("batch", 2)),))
    plan = Plan("m", "int8", 2, *tensors, machine)
    return with_weights(plan, {"w": np.array([[4, -4], [8, 0], [0, 12]], np.int8), "b": np.ones(2, np.float32)})


def seeds(folder: Path) -> list[Path]:
    """Write small plans of different kinds into a folder."""
    reads = [(0, 0), (0, 1), (2, 1), (1, 3), (4, 0)]
    network = compiled(TINY["mobilenet_v2"](), folder).plan
    plans = {"halo": halo_plan(), "item_major": run_item_major(mix_plan(reads, [3, 5]), [ItemMajorRun(1, 4)]),
             "reference": reference_plan(), "network": network}
    for name, plan in plans.items():
        write_plan(plan, folder / f"{name}.plan")
    return [folder / f"{name}.plan" for name in plans]


def fuzz(paths: list[Path], count: int, seed: int, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, description, outcome) of each damaged plan."""
    plans = [path.read_bytes() for path in paths]
    cases = []
    for path in paths:
        plan = read_plan(path)
        feeds = [feeds_of(plan, items) for items in (1, max(plan.max_batch, 1))]
        engine = load_engine(path)
        cases.append((feeds, [engine.run(feed) for feed in feeds]))
    target = folder / "damaged.plan"
    with Worker(what_becomes) as worker:
        for which, kind, done, data in damaged(plans, count, seed):
            target.write_bytes(data)
            yield kind, f"{paths[which].stem}, {done}", worker.ask(kind, str(target), *cases[which])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", type=Path, help="plans to damage (default: small ones made here)")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally: Counter[tuple[str, str]] = Counter()
        for kind, done, result in fuzz(options.plans or seeds(Path(folder)), options.count, options.seed, Path(folder)):
            word = result.split(":")[0]
            tally[kind, word] += 1
            if word not in FINE:
                print(f"{kind}: {done}: {result}", flush=True)
    for (kind, word), number in sorted(tally.items()):
        print(f"{kind:12} {word:10} {number}")


if __name__ == "__main__":
    main()
