#!/usr/bin/env python3
"""What a unit that includes everything brings into a program: no definition that a second such unit would repeat, and
no state of its own, which the units of a program would have to share.
usage: one_definition.py NM OBJECT"""

import subprocess
import sys

# Said once for each unit: that it was compiled for the same processor and version as the others, and with optimization.
OF_EACH_UNIT = {f"chorus::detail::(anonymous namespace)::{name}" for name in ("only_packet", "only_version", "said_unoptimized")}

NM, OBJECT = sys.argv[1:]
lines = subprocess.run([NM, "-C", "--defined-only", OBJECT], capture_output=True, text=True, check=True).stdout.splitlines()
symbols = [(kind, name) for _, kind, name in (line.split(" ", 2) for line in lines)]
repeated = [name for kind, name in symbols if kind in "TDBRSGC" and name != "main"]
apart = [name for kind, name in symbols if kind in "bdsg" and "chorus::" in name and name not in OF_EACH_UNIT]
for name in repeated:
    print("not inline:", name)
for name in apart:
    print("each unit has one of its own:", name)
print(f"{len(symbols)} symbols, {len(repeated) + len(apart)} problems")
shared = any(kind in "VWu" and name.startswith("chorus::trace::detail::counters(") for kind, name in symbols)
sys.exit(0 if shared and not repeated and not apart else 1)
