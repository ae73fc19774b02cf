#!/usr/bin/env python3
"""Runs int8_inference and PyTorch by turns, each on one thread: ResNet-18 in float and in 8-bit integers.

usage: int8_inference.py [--rounds 5] [--side 32] [--python PYTHON] INT8_INFERENCE

PYTHON is an interpreter that has torch 2.15 (pip install torch). A line for each batch: milliseconds of both programs,
and PyTorch's over ours, all medians over the rounds. Without torch the exit status is 77."""

import argparse
import pathlib
import re
import statistics
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("program")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--side", type=int, default=32)
parser.add_argument("--python", default=sys.executable)
options = parser.parse_args()
if subprocess.run([options.python, "-c", "import torch"], capture_output=True).returncode:
    print(f"SKIPPED: {options.python} has no torch, so that nothing was compared; --python names one that has")
    sys.exit(77)

PEER = pathlib.Path(__file__).with_name("int8_inference_torch.py")


def run(*command):
    """The first line of a program, and for each batch: milliseconds in float and in integers."""
    done = subprocess.run([*command, str(options.side)], capture_output=True, text=True)
    found = re.findall(r"^batch +(\d+): float +([\d.]+) ms, int8 +([\d.]+) ms", done.stdout, re.MULTILINE)
    if done.returncode != 0 or not found:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()[0], {int(batch): (float(f), float(i)) for batch, f, i in found}


rounds = [(run(options.program), run(options.python, str(PEER))) for _ in range(options.rounds)]
(ours, _), (theirs, _) = rounds[0]
print(f"{ours}; {theirs}; {options.rounds} rounds")
for batch in rounds[0][0][1]:
    for column, name in enumerate(("float", "int8")):
        pairs = [(mine[batch][column], other[batch][column]) for (_, mine), (_, other) in rounds]
        here, there = (statistics.median(part) for part in zip(*pairs))
        ratio = sorted(b / a for a, b in pairs)
        print(f"batch {batch:2}, {name:5}: chorus {here:8.2f} ms, PyTorch {there:8.2f} ms, "
              f"{statistics.median(ratio):.2f} times as fast ({ratio[0]:.2f} - {ratio[-1]:.2f})")
