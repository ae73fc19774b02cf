#!/usr/bin/env python3
"""Mends a program of the bug hunt by a diff, which may add five lines.
usage: apply.py PROGRAM.cpp FIX.diff MENDED.cpp"""

import pathlib
import sys

program, fix, mended = sys.argv[1:]
text = open(program).read()
lines = open(fix).read().splitlines(keepends=True)
hunks = []
for line in lines[2:]:
    if line.startswith("@@"):
        hunks.append([])
    else:
        hunks[-1].append(line)
added = sum(line[0] == "+" for hunk in hunks for line in hunk)
assert 0 < added <= 5, f"{fix}: {added} lines"
for hunk in hunks:
    old = "".join(line[1:] for line in hunk if line[0] in " -")
    assert text.count(old) == 1, f"{fix} does not fit {program}:\n{old}"
    text = text.replace(old, "".join(line[1:] for line in hunk if line[0] in " +"))
pathlib.Path(mended).parent.mkdir(exist_ok=True)
with open(mended, "w") as out:
    out.write(text)
