#!/usr/bin/env python3
"""build/tests/faults: many seeds without a violation, runs that are replayed from one number or one text, a trace with
the faults, and clear refusals.
usage: faults_test.py FAULTS [SEEDS]"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import trace_rules
from processes import CLEAN, expect, say

PROGRAM = sys.argv[1]
SEEDS = int(sys.argv[2]) if len(sys.argv) > 2 else 250


def run(*words, limit=600):
    done = subprocess.run([PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=limit, env=CLEAN)
    return done.returncode, done.stdout, done.stderr


# Nothing is wrong, and each end of a run is met.
status, out, err = run("--seeds", f"0:{SEEDS}")
expect(status == 0 and not err, out + err)
policies = re.findall(rf"^(\w+): {SEEDS} seeds, 0 violations \((\d+) failed, (?:(\d+) met no fault, )?(\d+) went on\)$", out, re.M)
expect(len(policies) == 25 and len(policies) == len(out.splitlines()), out)
for policy, failed, unmet, went_on in policies:
    expect(min(int(failed), int(went_on)) > SEEDS // 10 and int(unmet or 0) < SEEDS // 4, out)
say(f"{len(policies)} policies")

# A run is told from its seed alone, and from the text of its plan; its trace has the faults.
kinds = set()
with tempfile.TemporaryDirectory(prefix="chorus_faults_") as folder:
    trace = pathlib.Path(folder) / "trace.json"
    for seed in range(12):
        status, told, err = run("--policy", "ddp", "--seed", seed, "--trace", trace)
        expect(status == 0 and not err and told.endswith("no violation\n"), told + err)
        plan = told.splitlines()[0].removeprefix("plan: ")
        kinds.update(re.findall("[a-z]{3,}", plan))
        again = run("--policy", "ddp", "--seed", seed, "--plan", plan)[1]
        expect(again == told, told + again)
        events = json.loads(trace.read_text())["traceEvents"]
        expect(not trace_rules.broken(events), trace_rules.broken(events))
        marks = [event["name"] for event in events if event.get("cat") == "fault"]
        struck = re.findall(r"^[\d.]+ s: (.*)$", told, re.M)
        expect(sorted(marks) == sorted(struck), (marks, struck))
expect({"kill", "hang", "stop", "cut", "slow", "delay"} <= kinds, kinds)
say("replayed")

# The first to fail is named, by all.
status, out, err = run("--policy", "ddp", "--plan", "kill 2 @call 9")
expect(out.count("rank 2 has died") == 3 and "rank 2: 0 steps, until 0.0001" in out and out.count(": killed") == 1, out)
status, out, err = run("--policy", "fsdp", "--plan", "hang 1 @call 30")
expect(len(re.findall(r"until 30\.\d+ s: .*no progress for 30 s, waiting for rank 1", out)) == 3, out)
status, out, err = run("--policy", "ddp", "--plan", "cut 0-3 @byte 1000")
expect(out.count("is lost") == 4, out)
status, out, err = run("--policy", "ddp", "--plan", "stop 1 @call 9 for 29, slow 0-1 x 1000, delay 2-3 up to 0.01")
expect(status == 0 and out.count(": ended\n") == 4 and "until 29.0" in out, out)

# A disk that fails: who writes and the file are named, by all that write together; a rank that dies leaves the old file.
status, out, err = run("--policy", "save_tp", "--plan", "full 2 @file 9")
expect(status == 0 and out.count("rank 2: saving ") == 4 and out.count("No space left on device") == 4, out)
status, out, err = run("--policy", "save_ddp", "--plan", "kill 0 @file 6, part 0 @file 2")
expect(status == 0 and out.count(": killed") == 1 and out.endswith("no violation\n"), out)

for words, wanted in ((("--policy", "dp"), "policy 'dp': expected one of all, ddp"),
                      (("--seeds", "3"), "expected FIRST:COUNT, got '3'"),
                      (("--seed", "3"), "expected --policy P with --seed"),
                      (("--ranks",), "option --ranks: expected"),
                      (("--policy", "ddp", "--plan", "kill 9 @call 1"), "'kill 9 @call 1' with 4 ranks"),
                      (("--policy", "ddp", "--plan", "burn 1"), "'burn 1': expected such as kill 2 @call 17"),
                      (("--policy", "ddp", "--plan", "kill 1-1 @byte 3"), "expected such as"),
                      (("--policy", "save_ddp", "--plan", "full 0 @call 3"), "expected such as"),
                      (("--policy", "ddp", "--plan", "stop 1 @call 3"), "expected such as")):
    status, out, err = run(*words)
    expect(status == 2 and wanted in err and len(err.splitlines()) == 1, (words, status, out, err))
