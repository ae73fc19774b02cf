#!/usr/bin/env python3
"""The bug hunt: each program as given is wrong, each one with its fix is right, and what is no fix is told.
usage: bugs_test.py GIVEN MENDED CHEATS"""

import re
import subprocess
import sys

from processes import CLEAN, expect

GIVEN, MENDED, CHEATS = sys.argv[1:]
COUNT = 10


def run(program, *words):
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=60, env=CLEAN)


def numbers_of(out):
    return re.findall(r"^bug (\d+): ", out, re.M)


given, mended = run(GIVEN, "all"), run(MENDED, "all")
expect(given.returncode == 1 and mended.returncode == 0, given, mended)
for out in (given.stdout, mended.stdout):
    expect(sorted(map(int, numbers_of(out))) == list(range(1, COUNT + 1)), out)
expect(given.stdout.count("WRONG") == COUNT and " right\n" not in re.sub(r"\d of 3 right", "", given.stdout), given.stdout)
expect("3 of 3" not in given.stdout and "has changed" not in given.stdout, given.stdout)
expect(mended.stdout.count("3 of 3 right") == COUNT and "WRONG" not in mended.stdout, mended.stdout)

# A program of its own says the same as among all.
expect(run(GIVEN, 5).stdout == given.stdout[given.stdout.index("bug 5"):given.stdout.index("bug 6")], given.stdout)

constant, both, stops = (run(CHEATS, number) for number in (1, 2, 3))
expect(constant.returncode == 1 and "0.090944983   right" in constant.stdout and "has changed" in constant.stdout, constant)
expect(both.returncode == 1 and "WRONG" in both.stdout and "has changed" in both.stdout, both)
expect(stops.returncode == 2 and "no such sample" in stops.stderr, stops)
expect(run(GIVEN, 11).returncode == 2 and run(GIVEN).returncode == 2, "a number that there is not")
