#!/usr/bin/env python3
"""Loads a quantised model that chorus wrote with Python's safetensors, and computes in NumPy what it computes, to the bit.

usage: quantized_check.py TOOL

The file says all: weights (I8), scales and biases (F32), zero points (U8) by name, and the steps in its metadata.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
from safetensors import safe_open
from safetensors.numpy import load_file

F = numpy.float32


def fail(message):
    print(f"quantized_check: {message}")
    sys.exit(1)


class Levels:
    def __init__(self, tensors, name, integers):
        self.scale = F(tensors[name + ".scale"][()])
        self.zero_point = int(tensors[name + ".zero_point"][()])
        self.least, self.most = integers

    def level(self, x, least=None):
        q = numpy.rint(x * (F(1) / self.scale)) + F(self.zero_point)
        return numpy.clip(q, self.least if least is None else least, self.most).astype(numpy.int64)

    def number(self, q):
        return (q - self.zero_point).astype(F) * self.scale


def windows(x, size, stride, padding, dilation, fill, ends=(0, 0)):
    """[batch, channels, out_h, out_w, size_h, size_w]; `ends`: what is added behind the padding."""
    pads = [(0, 0), (0, 0)] + [(p, p + end) for p, end in zip(padding, ends)]
    x = numpy.pad(x, pads, constant_values=fill)
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], size, stride, dilation)]
    rows = numpy.arange(out[0])[:, None] * stride[0] + numpy.arange(size[0]) * dilation[0]
    columns = numpy.arange(out[1])[:, None] * stride[1] + numpy.arange(size[1]) * dilation[1]
    return x[:, :, rows[:, None, :, None], columns[None, :, None, :]]


def multiply(step, q, x, y, tensors):
    name = step["name"]
    weight = tensors[name + ".weight"].astype(numpy.int64)
    if tensors[name + ".weight"].dtype != numpy.int8:
        fail(f"{name}.weight is not I8")
    if step["kind"] == "linear":
        sums = (q - x.zero_point) @ weight.T
        shape = (1, -1)
    else:
        parts = windows(q - x.zero_point, weight.shape[2:], step["stride"], step["padding"], step["dilation"], 0)
        groups, inputs, outputs = step["groups"], weight.shape[1], weight.shape[0] // step["groups"]
        sums = numpy.concatenate(
            [numpy.einsum("bchwij,ocij->bohw", parts[:, g * inputs:(g + 1) * inputs], weight[g * outputs:(g + 1) * outputs])
             for g in range(groups)], axis=1)
        shape = (1, -1, 1, 1)
    unit = x.scale * tensors[name + ".weight_scale"]
    bias = tensors[name + ".bias"] / unit if name + ".bias" in tensors else numpy.zeros_like(unit)
    steps = (sums.astype(F) + bias.reshape(shape)) * (unit / y.scale).reshape(shape)
    q = numpy.rint(steps) + F(y.zero_point)
    return numpy.clip(q, y.zero_point if step["relu"] else y.least, y.most).astype(numpy.int64)


def mean(step, q, x, y):
    ones = windows(numpy.ones_like(q), step["window"], step["stride"], step["padding"], (1, 1), int(step["count_include_pad"]))
    sums = windows(q - x.zero_point, step["window"], step["stride"], step["padding"], (1, 1), 0).sum((4, 5))
    return y.level(sums.astype(F) * (x.scale / ones.sum((4, 5)).astype(F)))


def run(path, images):
    tensors = load_file(path)
    with safe_open(path, "numpy") as file:
        program = json.loads(file.metadata()["chorus.int8"])
    levels = [Levels(tensors, "input", program["integers"])]
    values = [levels[0].level(images)]
    for step in program["steps"]:
        q, x = values[step["inputs"][0]], levels[step["inputs"][0]]
        kind = step["kind"]
        y = x if kind in ("max_pool2d", "flatten") else Levels(tensors, step["name"], step["integers"])
        if kind in ("conv2d", "linear"):
            out = multiply(step, q, x, y, tensors)
        elif kind == "add":
            other = step["inputs"][1]
            out = y.level(x.number(q) + levels[other].number(values[other]), y.zero_point if step["relu"] else None)
        elif kind == "relu":
            out = y.level(x.number(q), y.zero_point)
        elif kind == "max_pool2d":
            out = windows(q, step["window"], step["stride"], step["padding"], step["dilation"], 0).max((4, 5))
        elif kind == "avg_pool2d":
            out = mean(step, q, x, y)
        elif kind == "flatten":
            out = q.reshape(q.shape[0], -1)
        else:
            fail(f"a step {kind}, which the model has not")
        values.append(out)
        levels.append(y)
    return levels[-1].number(values[-1])


def main():
    with tempfile.TemporaryDirectory(prefix="chorus_quantized_") as folder:
        model, batch = pathlib.Path(folder) / "model.safetensors", pathlib.Path(folder) / "batch.safetensors"
        subprocess.run([sys.argv[1], model, batch], check=True, timeout=60)
        numbers = load_file(batch)
        own = run(model, numbers["x"])
        if own.shape != numbers["y"].shape or not numpy.array_equal(own, numbers["y"]):
            fail(f"other numbers: {own} for {numbers['y']}")
        if len(numpy.unique(own)) < 10:
            fail("the model's numbers are all the same")
    print("quantized_check: a model of 9 steps, read and computed in NumPy: the same bits")


main()
