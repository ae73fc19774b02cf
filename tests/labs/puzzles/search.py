#!/usr/bin/env python3
"""Searches the plans of a puzzle for the fastest that keeps its limits: how the references here were found.
usage: search.py PUZZLE_PROGRAM PUZZLE.json [COUNT]"""

import itertools
import json
import subprocess
import sys
import tempfile

PROGRAM, FILE = sys.argv[1:3]
COUNT = int(sys.argv[3]) if len(sys.argv) > 3 else 5
puzzle = json.load(open(FILE))
most = puzzle["at_most"]
plan_file = tempfile.NamedTemporaryFile("w", suffix=".json")
known = {}


def numbers(plan):
    """Step, sent and held, or None where the plan is refused."""
    text = json.dumps(plan, sort_keys=True)
    if text not in known:
        plan_file.seek(0)
        plan_file.truncate()
        plan_file.write(text)
        plan_file.flush()
        done = subprocess.run([PROGRAM, FILE, plan_file.name], capture_output=True, text=True)
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("step,", "a rank "))]
        known[text] = None if done.returncode == 2 else tuple(
            float(row[row.index(unit) + 1]) for row, unit in zip(rows, ("ms", "GB", "GB")))
    return known[text]


def keeps(got):
    return all(number <= limit for number, limit in zip(got, (most["step_ms"], most["sent_gb"], most["held_gb"])))


def powers(most):
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def plans():
    ranks = puzzle["ranks"]
    for pipe, tensor in itertools.product(powers(ranks), repeat=2):
        if ranks % (pipe * tensor):
            continue
        shares = ranks // pipe // tensor
        if pipe > 1 and "pipe" not in puzzle["axes"] or tensor > 1 and "tensor" not in puzzle["axes"]:
            continue
        for axis, count, again in itertools.product(("data", "shard"), powers(puzzle["samples"] // shares), (False, True)):
            if axis == "shard" and shares == 1 or axis not in puzzle["axes"] and shares > 1:
                continue
            for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1") if pipe > 1 else ("1f1b",):
                for keep in (False, True) if axis == "shard" and pipe == 1 else (False,):
                    mesh = {"pipe": pipe, axis: shares, "tensor": tensor}
                    mesh = {name: size for name, size in mesh.items() if size > 1}
                    yield {"mesh": mesh, "micro_batches": count,
                           "schedule": schedule, "recompute": again, "keep_parameters": keep}


def refined(plan):
    caps = (5, 10, 17, 25, 50, 100, 400, 1e6)
    if "shard" in plan["mesh"]:
        for cap in (4, 16, 32, 64, 90, 128, 180, 256, 512, 1024, 2048, 1e6):
            yield {**plan, "unit_cap": cap}
    for first, cap, how in itertools.product((1, *caps), caps, ("auto", "ring", "hierarchical")):
        if "data" in plan["mesh"]:
            yield {**plan, "first_bucket_cap": first, "bucket_cap": cap, "all_reduce": how}


tried = [(got, plan) for plan in plans() if (got := numbers(plan))]
near = [(got, plan) for got, plan in tried if got[1] <= 2 * most["sent_gb"] and got[2] <= 1.2 * most["held_gb"]]
near.sort(key=lambda one: one[0])
for got, plan in near[:10]:
    for other in refined(plan):
        if found := numbers(other):
            tried.append((found, other))
good = sorted((one for one in tried if keeps(one[0])), key=lambda one: one[0])
print(f"{len(tried)} plans, {len(good)} keep all limits")
for got, plan in good[:COUNT]:
    print(got, json.dumps(plan))
if not good:
    for got, plan in near[:COUNT]:
        print("near:", got, json.dumps(plan))
