"""Benchmark of import and load times of a plan, measured in a fresh process; prints JSON.

    python -m benchmarks.loading model.plan
"""
from __future__ import annotations

import json
import sys
import time

LOADS = 8


def main() -> None:
    start, start_cpu = time.perf_counter(), time.process_time()
    from infer_server.engines import load_engine
    imported, imported_cpu = time.perf_counter() - start, time.process_time() - start_cpu
    seconds = []
    for _ in range(LOADS):
        begin = time.perf_counter()
        load_engine(sys.argv[1], on_target_mismatch="refuse")
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"import_ms": imported * 1e3, "import_cpu_ms": imported_cpu * 1e3,
                      "first_load_ms": seconds[0] * 1e3, "load_ms": min(seconds) * 1e3}))


if __name__ == "__main__":
    main()
