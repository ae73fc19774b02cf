#!/usr/bin/env python3
"""Leaves out each barrier of the CUDA kernels in turn, in emulation, and expects that a test sees it: one fails, or its
results are no longer those of the plain order. Prints a table of who sees which.

    tests/cuda/barriers.py build/tests/unit_cuda_emulated

Nothing is compiled anew: the emulation leaves out the barrier that it is told (see emulation/order.h).
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HEADERS = pathlib.Path(__file__).resolve().parents[2] / "include/chorus"
# The tests of each header's kernels, quick ones first.
TESTS = {
    "attention.hpp": ["attention"],
    "attention_tiles.hpp": ["attention"],
    "cumulative.hpp": ["reduction"],
    "index_order.hpp": ["arrays"],
    "indexing.hpp": ["arrays"],
    "lines.hpp": ["functions", "losses", "reduction"],
    "optimizer.hpp": ["graphed", "mixed_precision"],
}
SEEDS = (1, 2)


def barriers():
    """(header, line) of all barriers."""
    for header in sorted(HEADERS.rglob("*.hpp")):
        for number, line in enumerate(header.read_text().splitlines(), 1):
            if re.search(r"\b__sync\w+\(", line.partition("//")[0]):
                yield header, number


def run(program, test, folder, seed, without=""):
    """What is wrong in this order, without this barrier; empty if nothing is."""
    environment = dict(os.environ, CHORUS_EMULATED_RESULTS=f"{folder}/{test}", CHORUS_EMULATED_ORDER=str(seed),
                       CHORUS_EMULATED_WITHOUT=without)
    try:
        done = subprocess.run([program, "-#", f"[#{test}_test]"], env=environment, capture_output=True, text=True,
                              errors="replace", timeout=300)
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode == 0:
        return ""
    failed = re.search(r"^test cases:.*\| *(\d+) failed", done.stdout, re.MULTILINE)
    if failed:
        return f"{failed[1]} test cases"
    return "other results" if "emulated CUDA: expected" in done.stderr else "a crash"


def main():
    program = os.path.abspath(sys.argv[1])
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for test in sorted({test for tests in TESTS.values() for test in tests}):
            for seed in (0, *SEEDS):
                if wrong := run(program, test, folder, seed):
                    sys.exit(f"{test}, order {seed}: expected no failure with all barriers, got {wrong}")
        print(f"{'barrier':28} found by")
        for header, line in barriers():
            place = f"{header.name}:{line}"
            without = f"{header.parent.name}/{place}"
            found = next((f"{test}, order {seed}: {wrong}" for test in TESTS.get(header.name, []) for seed in SEEDS
                          if (wrong := run(program, test, folder, seed, without))), "")
            print(f"{place:28} {found or 'NOTHING'}", flush=True)
            if not found:
                missed.append(place)
    if missed:
        sys.exit(f"expected a test that fails without each barrier, got none for {', '.join(missed)}; write one, or "
                 "take the barrier away")


if __name__ == "__main__":
    main()
