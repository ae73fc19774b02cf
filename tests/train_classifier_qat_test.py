#!/usr/bin/env python3
"""Runs train_classifier --qat and --int8 as a user would: policies, an integer model and its file, a pretrained float
model, resuming, and refusals.
usage: train_classifier_qat_test.py PROGRAM"""

import json
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

PROGRAM = pathlib.Path(sys.argv[1]).resolve()
temporary = tempfile.TemporaryDirectory(prefix="chorus_qat_")
FOLDER = pathlib.Path(temporary.name)
SMALL = ["--train-images", "500", "--test-images", "200", "--epochs", "2", "--batch", "48", "--seed", "3",
         "--warmup", "0", "--lr", "0.1"]
TINY = ["--train-images", "16", "--test-images", "8", "--batch", "8", "--quiet"]
ACCURACY = re.compile(r"^test accuracy: ([\d.]+) % in float, ([\d.]+) % with the rounding of 8 bits, ([\d.]+) % in "
                      r"integers$", re.MULTILINE)


def run(*options, fails=False):
    done = subprocess.run([PROGRAM, *map(str, options)], capture_output=True, text=True, timeout=120, cwd=FOLDER)
    assert (done.returncode != 0) == fails, f"{options}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def train(*options):
    """The losses of the steps, the last line of the metrics, and the output."""
    said = run(*SMALL, "--quiet", *options, "--metrics", FOLDER / "metrics")
    log = [json.loads(line) for line in (FOLDER / "metrics").read_text().splitlines()]
    return [event["loss"] for event in log if event["event"] == "step"], log[-1], said


def accuracies(said):
    found = ACCURACY.search(said)
    assert found, said
    in_float, rounded, in_integers = map(float, found.groups())
    assert rounded == in_integers, said  # all integers are the same
    return in_float, in_integers


def dtypes(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return {name: entry["dtype"] for name, entry in json.loads(data[8:8 + length]).items() if name != "__metadata__"}


# The same steps under every policy, and the same integers as the fake-quantised model.
runs = {}
for policy, devices in (("single", 1), ("dp", 2), ("ddp", 2), ("ddp", 3), ("fsdp", 2)):
    saved = FOLDER / f"{policy}{devices}.st"
    losses, done, said = train("--qat", "--int8", "--policy", policy, "--devices", devices, "--save", saved)
    runs[f"{policy}{devices}"] = losses, done
    worst = max(abs(a - b) for a, b in zip(losses, runs["single1"][0], strict=True))
    in_float, in_integers = accuracies(said)
    print(f"{policy} on {devices}: losses within {worst:.1e} of one device's; {in_float} % in float, {in_integers} "
          "% in integers")
    assert done["policy"] == policy and done["devices"] == devices, done
    # A sum in another order may round to the next of 256 levels.
    assert worst < 2e-2, f"{policy} on {devices}: {losses}"
    assert in_integers > 25 and abs(in_float - in_integers) <= 8, said  # of ten classes, after 22 steps
    integers = FOLDER / f"{policy}{devices}.int8.st"
    assert dtypes(integers)["conv1.weight"] == "I8" and dtypes(saved)["conv1.weight"] == "F32", dtypes(integers)
    assert dtypes(saved)["quantization.phases"] == "I64", dtypes(saved)
    assert f"{integers}: 0.0" in said and integers.stat().st_size < 0.2 * saved.stat().st_size, said  # with momentum
assert runs["single1"][0] != train()[0], "--qat trains without rounding"
assert len(train("--qat", "--accumulate", "2")[0]) == 2 * 6, "of 11 batches in an epoch"

# Stopped and resumed, also in the last epoch, in which the ranges are fixed: same result as without a stop.
for policy, devices, steps in (("single", 1, 7), ("ddp", 2, 15)):
    options = ("--qat", "--policy", policy, "--devices", devices)
    first = train(*options, "--steps", steps, "--save", FOLDER / "stopped")[0]
    rest, done, _ = train(*options, "--resume", FOLDER / "stopped")
    assert first + rest == runs[f"{policy}{devices}"][0], f"{policy}: a resumed run differs"
    assert done["parameters_sha256"] == runs[f"{policy}{devices}"][1]["parameters_sha256"], policy
# A run resumes from another policy's checkpoint, and is evaluated without a step.
accuracies(run(*SMALL, "--quiet", "--qat", "--int8", "--policy", "fsdp", "--devices", "2", "--resume", "ddp3.st"))
print("a resumed run goes on as if it had not stopped")

# Starts from a trained float model.
run(*SMALL, "--quiet", "--save", "float.st")
for policy, devices in (("single", 1), ("fsdp", 2)):
    losses = train("--qat", "--load", "float.st", "--lr", "0.001", "--policy", policy, "--devices", devices)[0]
    assert sum(losses[:8]) < sum(runs["single1"][0][:8]) - 0.5, (losses, runs["single1"][0])
files = set(FOLDER.iterdir())
for model in ("mlp", "resnet18"):
    accuracies(run(*TINY, "--epochs", "1", "--qat", "--int8", "--model", model))
assert set(FOLDER.iterdir()) == files, "a file was written that nobody asked for"
assert "Conv2d" in run(*SMALL, "--qat", "--steps", "1"), "no summary"

expected = "--qat: expected --policy single, dp, ddp or fsdp, under which the ranges of numbers are the whole batch's"
for policy in ("tp", "mesh:2x2", "parameter_server", "local_sgd"):
    assert f"{expected}, got {policy}" in run(*TINY, "--qat", "--policy", policy, fails=True), policy
assert "--qat: expected --model toy, mlp or resnet18, got resnet50" in run(*TINY, "--qat", "--model", "resnet50", fails=True)
assert "--qat: not with --canonical-shares, got 4: " in run(*TINY, "--qat", "--canonical-shares", "4", fails=True)
assert "--int8 requires --qat" in run(*TINY, "--int8", fails=True)
assert "--load requires --qat" in run(*TINY, "--load", "float.st", fails=True)
for part in ("--qat", "--int8", "--load", "X.int8.st", "batch norm's statistics stay"):
    assert part in run("--help"), part
(FOLDER / "taken.int8.st").mkdir()
part = json.dumps({"fc3.bias": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}}).encode()
(FOLDER / "part.st").write_bytes(struct.pack("<Q", len(part)) + part + bytes(40))
for policy, devices in (("single", 1), ("ddp", 2)):
    named = ("--qat", "--int8", "--policy", policy, "--devices", devices)
    for options, part in ((("--load", "/nonexistent/m"), "/nonexistent/m"),
                          (("--load", "float.st", "--model", "resnet18"), "the file doesn't fit the model"),
                          (("--load", "part.st"), "--load part.st: expected a file of --model toy, got other tensors: "
                                                  "missing: conv1.weight, conv1.bias, "),
                          (("--epochs", "0"), "'conv1.input' has no range yet"),
                          (("--save", "taken.st"), "taken.int8.st")):
        text = run(*TINY, *named, *options, fails=True)
        assert part in text and "terminate" not in text, f"{options}: the message doesn't say {part}: {text}"
assert not (FOLDER / "taken.st").exists()
print("train_classifier --qat: as it should be")
