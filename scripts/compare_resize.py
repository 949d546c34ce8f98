"""Compare random Resize nodes with ONNX Runtime: the NumPy reference, or the kernels for this CPU.

    python -m scripts.compare_resize --cases 5000
    python -m scripts.compare_resize --cases 200 --kernels --dtypes uint8,int32

The script prints the first differing cases of each family of modes, and counts; it exits with 1 if any case differs.
Results of mode "nearest" and integers must be equal (integers with antialias within 1), others within 1e-5.
tests/engines/compiler/test_resize.py is a shorter version.
"""
from __future__ import annotations

import argparse
import sys

from scripts.testing.resize_cases import FAMILIES, by_kernels, by_reference, fault, onnx_runtime, sampled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="of each family")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--dtypes", default="float32", help="names of NumPy types, with commas")
    parser.add_argument("--kernels", action="store_true", help="by an engine for this CPU instead of the reference")
    parser.add_argument("--show", type=int, default=5, help="of each family: cases that differ")
    options = parser.parse_args()
    total = 0
    for family in FAMILIES:
        refused, faults = 0, []
        for seed in range(options.seed, options.seed + options.cases):
            case = sampled(seed, family, options.dtypes.split(","))
            if (right := onnx_runtime(case)) is None:
                refused += 1
            elif problem := fault(case, (by_kernels if options.kernels else by_reference)(case), right):
                faults.append(problem)
        print(*faults[:options.show], sep="\n", end="\n" * bool(faults))
        print(f"{family}: {options.cases} cases, {refused} refused by ONNX Runtime, {len(faults)} differ")
        total += len(faults)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
