#!/usr/bin/env python3
"""Seconds until LeNet names 97 % of MNIST's test images right, epoch after epoch, evaluation included, start-up not:
train_classifier under each policy, and beside it, run in turn with it, the same training in PyTorch.

usage: to_accuracy.py [--target 0.97] [--seeds 3] [--epochs 20] [--python PYTHON] TRAIN_CLASSIFIER DIR

DIR holds MNIST's IDX files. One line a run; then the median of each over the seeds. PYTHON is an interpreter that has
torch; without one, PyTorch is left out and the exit status is 77."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

PEER = pathlib.Path(__file__).with_name("to_accuracy_torch.py")
TRAINING = ["--batch", "64", "--lr", "0.02", "--momentum", "0.9"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("program")
parser.add_argument("folder")
parser.add_argument("--target", type=float, default=0.97)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--epochs", type=int, default=20, help="give up after so many")
parser.add_argument("--python", default="python3")
options = parser.parse_args()


def epochs_of(command, metrics):
    """The epochs of a run: (test accuracy, seconds)."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(e["test_accuracy"], e["seconds"]) for e in events if e["event"] == "epoch"]


def chorus(*policy):
    return [options.program, "--model", "toy", "--data", options.folder, "--warmup", "0", "--quiet", *policy]


def torch(*how):
    return [options.python, str(PEER), "--data", options.folder, "--target", str(options.target), *how]


runs = {
    "chorus, single": chorus("--policy", "single"),
    "chorus, dp, 2 devices": chorus("--policy", "dp", "--devices", "2"),
    "chorus, ddp, 2 ranks": chorus("--policy", "ddp", "--devices", "2"),
}
has_torch = subprocess.run([options.python, "-c", "import torch"], capture_output=True).returncode == 0
if has_torch:
    runs |= {
        "PyTorch, 1 thread": torch("--threads", "1"),
        "PyTorch, 2 threads": torch("--threads", "2"),
        "PyTorch, DDP over gloo, 2 ranks": torch("--ranks", "2"),
    }

results = {name: [] for name in runs}
with tempfile.TemporaryDirectory() as folder:
    metrics = pathlib.Path(folder) / "metrics"
    for seed in range(1, options.seeds + 1):
        for name, command in runs.items():
            seconds = 0.0
            epochs = epochs_of(
                [*command, *TRAINING, "--epochs", str(options.epochs), "--seed", str(seed), "--metrics", str(metrics)], metrics)
            for number, (accuracy, duration) in enumerate(epochs, 1):
                seconds += duration
                if accuracy >= options.target:
                    results[name].append((seconds, number))
                    print(f"{name}: seed {seed}, {accuracy:.2%} after {number} epochs, {seconds:.2f} s", flush=True)
                    break
            else:
                best = max(accuracy for accuracy, _ in epochs)
                print(f"{name}: seed {seed}, not reached in {len(epochs)} epochs: {best:.2%}", flush=True)

for name, reached in results.items():
    if reached:
        seconds, epochs = (statistics.median(part) for part in zip(*reached))
        print(f"median of {len(reached)}: {name}: {seconds:.2f} s, {epochs:g} epochs, {seconds / epochs:.3f} s an epoch")
if not has_torch:
    print(f"to_accuracy: {options.python} has no torch: nothing to compare with", file=sys.stderr)
    sys.exit(77)
