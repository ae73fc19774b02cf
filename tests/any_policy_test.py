#!/usr/bin/env python3
"""A program whose policy is a command-line option: the same losses under each policy, to 1e-4.
usage: any_policy_test.py PROGRAM"""

import subprocess
import sys

PROGRAM = sys.argv[1]


def run(*options, status=0):
    done = subprocess.run([PROGRAM, "--seed", "5", *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == status, f"{options}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stderr if status else [float(number) for number in done.stdout.split()]


one = run()
assert len(one) == 20 and one[17] < 0.8 * one[0], one
for options in (["single"], ["dp", "--devices", "2"], ["ddp", "--devices", "2"], ["ddp", "--devices", "3"],
                ["fsdp", "--devices", "2"]):
    other = run("--policy", *options)
    assert len(other) == len(one), other
    worst = max(abs(a - b) for a, b in zip(one, other))
    print(f"{' '.join(options)}: the largest difference is {worst:.1e}")
    assert worst <= 1e-4, (one, other)
message = run("--policy", "zero", status=2)
assert "option --policy: expected one of single, dp, ddp, fsdp, got 'zero'" in message, message
