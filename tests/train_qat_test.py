#!/usr/bin/env python3
"""Runs examples/train_qat in a small form: float, quantisation-aware training on two ranks, integers; one table and two files.
usage: train_qat_test.py PROGRAM"""

import json
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

PROGRAM = sys.argv[1]
SMALL = ["--devices", "2", "--width", "8", "--train-images", "192", "--test-images", "96", "--epochs", "1",
         "--qat-epochs", "2", "--batch", "32"]


def run(*options, folder=None):
    return subprocess.run([PROGRAM, *options], capture_output=True, text=True, timeout=280, cwd=folder)


def header(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + length])


with tempfile.TemporaryDirectory(prefix="chorus_qat_") as folder:
    folder = pathlib.Path(folder)
    done = run(*SMALL, "--save", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {name: [float(number) for number in re.findall(r"[\d.]+(?= )", rest + " ")]
            for name, rest in re.findall(r"^(float|fake-quantised|int8) (.*)$", done.stdout, re.MULTILINE)}
    assert list(rows) == ["float", "fake-quantised", "int8"], done.stdout
    fake, int8 = rows["fake-quantised"][0], rows["int8"][0]
    assert fake == int8, done.stdout  # all integers are the same
    names = header(folder / "model.int8.safetensors")
    assert names["conv1.weight"]["dtype"] == "I8" and names["fc.weight_scale"]["dtype"] == "F32", names
    sizes = [(folder / f"model.{kind}.safetensors").stat().st_size for kind in ("int8", "float")]
    assert sizes[0] < 0.4 * sizes[1], sizes  # such a narrow model has many scales for its weights

    # From files: the float model continues training, and the integer model is evaluated.
    alone = run("--int8", str(folder / "model.int8.safetensors"), "--test-images", "96")
    assert alone.returncode == 0 and f"{int8:.2f} %" in alone.stdout, alone.stdout + alone.stderr
    empty = folder / "empty"
    empty.mkdir()
    done = run(*SMALL[2:], "--load", str(folder / "model.float.safetensors"), folder=empty)
    assert done.returncode == 0 and f"{rows['float'][0]:.2f} %" in done.stdout, done.stdout + done.stderr
    assert not list(empty.iterdir()), "files were written that nobody asked for"
    done = run("--model", "toy", "--train-images", "64", "--test-images", "64", "--epochs", "1", folder=empty)
    rates = re.findall(r"^(?:fake-quantised|int8) +([\d.]+) %", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and len(rates) == 2 and rates[0] == rates[1], done.stdout + done.stderr
    done = run("--model", "lenet")
    assert done.returncode != 0 and "--model: expected resnet or toy, got 'lenet'" in done.stderr, done.stderr

    done = run(*SMALL, "--data", "/nonexistent")
    assert done.returncode != 0 and "/nonexistent" in done.stderr, done.stderr
print("train_qat: as it should be")
