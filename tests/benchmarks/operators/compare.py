#!/usr/bin/env python3
"""Runs operators and PyTorch by turns and names what is slower here: compare.py OPERATORS [REGEX] [--threads N]
[--rounds N] [--seconds S] [--below X] [--python PYTHON] [--torch SCRIPT], where PYTHON has torch 2.15 (pip install
torch). `compare.py MODELS --torch models/torch_models.py` does the same with whole models.
A line a case: name, threads, microseconds of both, PyTorch's over ours (the median of rounds); last all below X."""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys


def ours(program, case, threads, seconds):
    line = subprocess.run([program, str(threads), "--seconds", str(seconds), case], capture_output=True, text=True)
    found = re.search(r" us=([\d.]+)", line.stdout)
    if not found:
        sys.exit(f"compare.py: {program} {case}: {line.stdout}{line.stderr}")
    return float(found[1])


class Torch:
    def __init__(self, python, script):
        self.process = subprocess.Popen([python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, case, threads, seconds):
        self.process.stdin.write(json.dumps({"case": case, "threads": threads, "budget": seconds}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            sys.exit(f"compare.py: PyTorch, {case}: {answer['error']}")
        return None if "missing" in answer else answer["wall"] * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators")
    parser.add_argument("regex", nargs="?", default=".")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--below", type=float, default=1.0)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--torch", default=pathlib.Path(__file__).parent / "torch_operators.py",
                        help="PyTorch's side: a script that reads requests as torch_operators.py does")
    o = parser.parse_args()
    if subprocess.run([o.python, "-c", "import torch"], capture_output=True).returncode:
        sys.exit(f"SKIPPED: {o.python} has no torch, so that nothing was compared; --python names one that has")
    names = subprocess.run([o.operators], capture_output=True, text=True, check=True).stdout.split()
    torch, slower = Torch(o.python, o.torch), []
    for name in filter(re.compile(o.regex).search, names):
        if torch(name, o.threads, 0) is None:
            print(f"{name:44} not compared: {o.torch} lacks it", flush=True)
            continue
        pairs = [(ours(o.operators, name, o.threads, o.seconds), torch(name, o.threads, o.seconds))
                 for _ in range(o.rounds)]
        mine, theirs = (statistics.median(column) for column in zip(*pairs))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{name:44} threads={o.threads} us={mine:.1f} torch_us={theirs:.1f} ratio={ratio:.2f}", flush=True)
        if ratio < o.below:
            slower.append((ratio, name))
    print(f"\n{len(slower)} below {o.below}:")
    for ratio, name in sorted(slower):
        print(f"{ratio:.2f} {name}")


if __name__ == "__main__":
    main()
