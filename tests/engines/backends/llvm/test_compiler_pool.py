"""Modules compiled in other processes equal those compiled in this one."""
from __future__ import annotations

from pathlib import Path

import pytest

from infer_server.engines.backends.llvm.codegen.compile import compile_object
from infer_server.engines.backends.llvm.codegen.compile import compiler_pool as pool_of
from infer_server.engines.backends.llvm.codegen.isa import PORTABLE
from infer_server.engines.codegen import compiler_pool
from infer_server.engines.codegen.compiler_pool import CompilerPool, Source
from infer_server.engines.machine.object_cache import VARIABLE, ObjectCache, using

TEXTS = [f"define i64 @f{n}(i64 %x) {{\n  %y = add i64 %x, {n}\n  ret i64 %y\n}}\n" for n in range(7)]
INVALID = "define i64 @f(i64 %x) {\n  ret i64 %y\n}\n"


@pytest.fixture(params=[False, True], ids=["here", "in workers"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CompilerPool:
    monkeypatch.setenv(VARIABLE, "off")
    monkeypatch.setattr(compiler_pool, "ENOUGH", 1 if request.param else 1 << 60)
    monkeypatch.setattr(compiler_pool.os, "sched_getaffinity", lambda process: {0, 1})
    return pool_of(PORTABLE)


def test_objects_come_in_the_order_of_their_texts(pool: CompilerPool) -> None:
    done = []
    with pool:
        for _ in range(2):      # a pool may be used again
            assert pool.compile(iter(TEXTS), lambda: done.append(1)) == [compile_object(t, PORTABLE) for t in TEXTS]
        assert pool.compile([]) == []
    assert len(done) == 2 * len(TEXTS)


def test_what_is_no_ir_is_refused_with_llvms_words_and_the_pool_goes_on(pool: CompilerPool) -> None:
    with pool:
        with pytest.raises(RuntimeError, match="use of undefined value '%y'"):
            pool.compile([*TEXTS, INVALID])
        assert pool.compile(TEXTS[:1]) == [compile_object(TEXTS[0], PORTABLE)]


def test_only_what_the_object_cache_lacks_is_compiled(pool: CompilerPool, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    expected, done = [compile_object(text, PORTABLE) for text in TEXTS], []
    monkeypatch.delenv(VARIABLE)
    cache = ObjectCache(tmp_path)
    with pool, using(cache):
        assert pool.compile(TEXTS[1::2]) == expected[1::2]
        assert pool.compile(iter(TEXTS), lambda: done.append(1)) == expected
        assert (cache.hits, cache.misses) == (3, 7)
        monkeypatch.setattr(CompilerPool, "_start", lambda self: pytest.fail("all is in the cache"))
        assert pool_of(PORTABLE).compile(iter(TEXTS)) == expected
    assert len(done) == len(TEXTS)
    assert cache.hits == 10


def test_a_source_is_written_only_if_its_object_is_not_cached(pool: CompilerPool, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    expected, written = [compile_object(text, PORTABLE) for text in TEXTS], []
    sources = [Source(f"the text {i}", lambda text=text: written.append(text) or text) for i, text in enumerate(TEXTS)]
    with pool, using(ObjectCache(tmp_path)):
        assert pool.compile(sources) == expected and written == TEXTS       # VARIABLE disables the cache
        monkeypatch.delenv(VARIABLE)
        assert [pool.compile(sources) for _ in range(2)] == [expected] * 2
        assert written == 2 * TEXTS
        for entry in tmp_path.iterdir():            # entries of texts, to which the entries of sources refer
            if b"ELF" in entry.read_bytes():
                entry.unlink()
        assert pool.compile(sources) == expected and written == 3 * TEXTS


def test_a_worker_that_dies_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    monkeypatch.setattr(compiler_pool, "ENOUGH", 1)
    monkeypatch.setattr(compiler_pool.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(compiler_pool.sys, "executable", "/bin/false")
    with pool_of(PORTABLE) as pool, pytest.raises(RuntimeError, match="compiler process ended with status 1"):
        pool.compile(TEXTS)
