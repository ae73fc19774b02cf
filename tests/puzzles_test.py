#!/usr/bin/env python3
"""The puzzles: naive plans break the limits that are named here, references keep all, and scores are these numbers.
usage: puzzles_test.py PUZZLE ROOT"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import trace_rules
from processes import CLEAN, expect

PROGRAM, ROOT = sys.argv[1], pathlib.Path(sys.argv[2])
FOLDER, REFERENCES = ROOT / "examples/lessons/puzzles", ROOT / "tests/labs/puzzles/references"
temporary = tempfile.TemporaryDirectory(prefix="puzzles_")
PLAN = pathlib.Path(temporary.name) / "plan.json"

# Of the reference: milliseconds of a step, GB that a rank sends and holds; and what the naive plan has too much of.
SCORES = {
    1: (1605.233, 35.302, 79.512, "holds"),
    2: (314.084, 2.794, 32.212, "step"),
    3: (5122.521, 9.195, 24.696, "holds"),
    4: (4322.23, 88.111, 56.689, "step sends holds"),
    5: (808.877, 43.651, 34.413, "step sends holds"),
    6: (3296.306, 3.758, 21.475, "step holds"),
    7: (4105.439, 19.168, 41.416, "sends holds"),
    8: (81311.239, 535.611, 72.777, "step sends holds"),
}


def run(number, plan, *words):
    return subprocess.run([PROGRAM, FOLDER / f"{number}.json", plan, *words], capture_output=True, text=True, timeout=60,
                          env=CLEAN)


def rows(out):
    return re.findall(r"^(step|a rank sends|a rank holds), \w+ +([\d.]+) +[\d.]+ *(too much)?$", out, re.M)


text = (FOLDER / "README.md").read_text()
for number, (*score, broken) in SCORES.items():
    puzzle = json.loads((FOLDER / f"{number}.json").read_text())
    reference, naive = run(number, REFERENCES / f"{number}.json"), run(number, FOLDER / f"plans/{number}.json")
    expect(reference.returncode == 0 and "\nsolved." in reference.stdout, number, reference)
    expect([float(row[1]) for row in rows(reference.stdout)] == score, number, score, reference.stdout)
    expect(naive.returncode == 1 and "\nnot solved." in naive.stdout, number, naive)
    expect([row[0].split()[-1] for row in rows(naive.stdout) if row[2]] == broken.split(), number, naive.stdout)
    expect(puzzle["best_ms"] == score[0], number, puzzle)
    # The text has the limits and the best known score.
    line = "| " + " | ".join([str(number), puzzle["title"], *map(str, puzzle["at_most"].values()), f"{score[0]:.3f}"]) + " |"
    expect(line in text, line)

trace = pathlib.Path(temporary.name) / "trace.json"
for number, ranks in ((1, 8), (8, 16)):
    done = run(number, REFERENCES / f"{number}.json", "--trace", trace, "reference")
    expect(done.returncode == 0 and trace.stat().st_size < 2**23, number, done)
    events = trace_rules.read(trace.read_text())
    expect(not trace_rules.broken(events), number, trace_rules.broken(events)[:3])
    expect({event["pid"] for event in events} == set(range(1, ranks + 1)), number)

for plan, said in (
    ({}, "mesh: expected it, got nothing"),
    ([], "expected a JSON object"),
    ({"mesh": {"data": 4}}, "mesh: expected 8 ranks, as the puzzle has, got 4"),
    ({"mesh": {"pipe": 8}}, 'mesh: expected data, shard; got pipe'),
    ({"mesh": {"data": 2, "shard": 4}}, "data and shard together"),
    ({"mesh": {"data": 8.5}}, "data: expected a whole number from 1 to 64, got 8.5"),
    ({"mesh": {"data": 8}, "micro_batches": 3}, "64 samples in 8 shares of 3 micro-batches"),
    ({"mesh": {"data": 8}, "micro_batches": 0}, "micro_batches: expected a whole number from 1"),
    ({"mesh": {"data": 8}, "schedule": "gpip"}, 'schedule: expected gpipe, 1f1b, interleaved, zb-h1; got "gpip"'),
    ({"mesh": {"data": 8}, "recompute": 1}, "recompute: expected true or false, got 1"),
    ({"mesh": {"data": 8}, "bucket_cap": "big"}, 'bucket_cap: expected a number from 0 to 1e+06, got "big"'),
    ({"mesh": {"data": 8}, "recomput": True}, 'got recomput'),
):
    PLAN.write_text(json.dumps(plan))
    done = run(1, PLAN)
    expect(done.returncode == 2 and said in done.stderr and not done.stdout, plan, said, done)
expect(run(1, FOLDER / "none.json").returncode == 2, "no such plan")
PLAN.write_text(json.dumps({"mesh": {"pipe": 8}, "schedule": "zb-h1", "micro_batches": 8, "recompute": True}))
expect("recomputing with a backward in two parts" in run(6, PLAN).stderr, run(6, PLAN))
