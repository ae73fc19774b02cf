#!/usr/bin/env python3
"""Runs a small program of each kind (tests/programs/recipes): it learns equally under single, dp and ddp.
usage: recipes_test.py PROGRAM"""

import json
import math
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import zlib

PROGRAM = sys.argv[1]
temporary = tempfile.TemporaryDirectory(prefix="chorus_recipes_")
FOLDER = pathlib.Path(temporary.name)
POLICIES = (["single"], ["dp", "--devices", "2"], ["ddp", "--devices", "2"], ["ddp", "--devices", "3"])
random.seed(3)


def run(name, *options, status=0):
    done = subprocess.run([PROGRAM, name, "--seed", "5", *options], capture_output=True, text=True, timeout=200)
    assert status in (done.returncode, None), f"{name} {options}: status {done.returncode}\n{done.stdout}{done.stderr}"
    assert status != 0 or not done.stderr, done.stderr
    return done.stdout + done.stderr


def numbers(text):
    """The numbers after the first word of each line, by that word."""
    out = {}
    for line in text.splitlines():
        word, *rest = line.split()
        if word != "left":
            out.setdefault(word, []).extend(float(number) for number in rest)
    return out


def under_all(name, *options):
    """Its output on one device; checks that other devices give the same up to rounding."""
    one = None
    for policy in POLICIES:
        own = numbers(run(name, "--policy", *policy, *options))
        one = one or own
        assert {word: len(values) for word, values in own.items()} == {word: len(values) for word, values in one.items()}
        worst = max(abs(a - b) for word in one for a, b in zip(one[word], own[word]))
        assert worst <= 1e-5, f"{name} under {policy} differs by {worst}"
        print(f"{name} {' '.join(policy)}: within {worst:.1e} of one device")
    return one


def mean_of(values):
    return sum(values) / len(values)


def write_weights(path, tensors):
    """Writes a safetensors file of floats, like Python's package."""
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        begin = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_weights(path):
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    out = {}
    for name, entry in json.loads(content[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + at for at in entry["data_offsets"])
            out[name] = struct.unpack(f"<{(end - begin) // 4}f", content[begin:end])
    return out


losses = under_all("vae")["loss"]
assert mean_of(losses[-6:]) < 0.65 * losses[0], losses

losses = under_all("masked_transformer")["loss"]
assert mean_of(losses[-5:]) < 0.6 * losses[0], losses

table = FOLDER / "prices.csv"
rows = [(random.randint(20, 200), random.randint(1, 6), random.randint(0, 80)) for _ in range(100)]
table.write_text("area,rooms,age,price\n" + "".join(
    f"{area},{rooms},{age},{3000 * area + 9000 * rooms - 800 * age + random.gauss(0, 9000):.2f}\n"
    for area, rooms, age in rows))
out = under_all("csv_regression", "--data", str(table))
assert out["unexplained"][0] < 0.1, out
table.write_text(table.read_text() + "90,three,8,1\n")
for policy in ("single", "ddp"):
    said = run("csv_regression", "--policy", policy, "--data", str(table), status=1)
    assert "line 102, column 2 (rooms): expected a number of F32, got 'three'" in said, said



def png(path, pixels):
    """Writes rows of (red, green, blue)."""
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    data = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in pixels)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 2, 0, 0, 0))
                     + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b""))


def stripes(down, height, width):
    color, back = [[random.randint(low, low + 80) for _ in range(3)] for low in (170, 0)]
    period, offset = random.randint(5, 8), random.randint(0, 7)
    return [[color if ((x if down else y) + offset) % period < period // 2 else back for x in range(width)] for y in range(height)]


pictures = FOLDER / "pictures"
for part, count in (("train", 30), ("val", 12)):
    for k in range(count):
        png(pictures / part / ("down", "right")[k % 2] / f"{k}.png", stripes(k % 2 == 0, *random.choices(range(24, 36), k=2)))
said = run("image_folder", "--policy", "single", "--data", str(pictures), status=None)
if "built without libpng" in said:
    print("image_folder: SKIPPED: built without libpng")
else:
    out = under_all("image_folder", "--data", str(pictures))
    assert mean_of(out["loss"][-4:]) < 0.75 * out["loss"][0] and out["accuracy"][0] > 0.9, out
    (pictures / "train/down/0.png").write_bytes((pictures / "train/down/0.png").read_bytes()[:-9])
    for policy in ("single", "dp", "ddp"):
        said = run("image_folder", "--policy", policy, "--data", str(pictures), status=1)
        assert f"{pictures}/train/down/0.png: reading the PNG file failed: the file is cut short" in said, said

losses = under_all("own_function")["loss"]
assert mean_of(losses[-6:]) < 0.7 * losses[0], losses

out = under_all("pinn")
assert mean_of(out["loss"][-5:]) < 0.005 * out["loss"][0] and out["error"][0] < 0.02, out

out = under_all("dqn")
assert out["action"] == [1, 1, 1, 1, 1], out  # to the right in each cell

out = under_all("gan")
far = [math.hypot(x - 2, y + 1) for x, y in zip(out["mean_x"], out["mean_y"])]
assert min(far) < 0.35 * far[0], far  # it gets close, and circles

out = under_all("ppo")
assert out["turns_back"][0] > 0.3 and max(out["turns_back"][-4:]) < 0.05, out["turns_back"]

out = under_all("diffusion")
assert mean_of(out["loss"][-20:]) < 0.5 * out["loss"][0] and out["off"][0] < 0.3, out

losses = under_all("vit")["loss"]
assert mean_of(losses[-5:]) < 0.8 * losses[0], losses

losses = under_all("mixture_of_experts")["loss"]
assert mean_of(losses[-4:]) < 0.1 * losses[0], losses

out = under_all("seq2seq")
assert mean_of(out["loss"][-3:]) < 0.2 * out["loss"][0] and out["written"] == [1, 6, 3, 4, 2, 1], out  # 2 4 3 6 backwards

out = under_all("graph_network")
assert mean_of(out["loss"][-3:]) < 0.05 * out["loss"][0] and out["accuracy"][0] > 0.8, out

out = under_all("k_fold")
assert out["samples"] == [23, 23, 22, 22] and max(out["error"]) < 0.2, out

losses = under_all("maml")["loss"]
assert mean_of(losses[-3:]) < 0.3 * losses[0], losses

losses = under_all("contrastive")["loss"]
assert losses[-1] < losses[0], losses

out = under_all("distillation")
teacher, student = out["accuracy"]
assert mean_of(out["loss"][-4:]) < 0.6 * out["loss"][0] and teacher > 0.9 and student > 0.85, out

weights, tuned = FOLDER / "pretrained.safetensors", FOLDER / "tuned.safetensors"
encoder = {"encoder.0.weight": ([16, 2], [random.uniform(-2, 2) for _ in range(32)]),
           "encoder.0.bias": ([16], [random.uniform(-2, 2) for _ in range(16)])}
write_weights(weights, encoder | {"head.weight": ([10, 16], [0.0] * 160), "head.bias": ([10], [0.0] * 10)})
out = under_all("fine_tune", "--weights", str(weights), "--save", str(tuned))
assert mean_of(out["loss"][-4:]) < 0.6 * out["loss"][0] and out["accuracy"][0] > 0.8, out
said = run("fine_tune", "--weights", str(weights), "--save", str(tuned))
assert "left mismatched: head.weight (expected F32 [3, 16], got F32 [10, 16])" in said, said
saved = read_weights(tuned)
for name, (_, values) in encoder.items():  # frozen
    assert saved[name] == struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values)), name

# Pieces of one's own (include/chorus/parallel/own_policies.md).
for devices in ("1", "2", "3"):
    models, *weights_of_line = run("own_policy", "--devices", devices).split()
    assert models == "one", models
    assert all(abs(float(is_) - right) < 0.1 for is_, right in zip(weights_of_line, (1, -2, 0), strict=True)), weights_of_line
losses = numbers(run("own_hook", "--devices", "2"))["loss"]
assert losses[-1] < losses[0], losses
losses, of_ranks = (numbers(run("own_optimizer", "--policy", *policy))["loss"] for policy in (POLICIES[0], POLICIES[3]))
assert losses[-1] < losses[0] and max(abs(a - b) for a, b in zip(losses, of_ranks, strict=True)) < 1e-2, (losses, of_ranks)
layers = [4 * (8 * 32 + 32), 4 * (32 * 32 + 32), 4 * (32 * 4 + 4)]
buckets = numbers(run("own_buckets", "--devices", "2"))["bucket"]  # large parameters are aligned to 64 bytes
assert all(0 <= is_ - right < 64 for is_, right in zip(buckets, layers[::-1], strict=True)), buckets

questions = FOLDER / "questions.csv"
points = [(random.uniform(-2, 2), random.uniform(-2, 2)) for _ in range(37)]
questions.write_text("x,y\n" + "".join(f"{x},{y}\n" for x, y in points))
answers = under_all("inference", "--weights", str(tuned), "--data", str(questions))["answer"]
for i, point in enumerate(points):
    hidden = [math.tanh(saved["encoder.0.weight"][2 * k] * point[0] + saved["encoder.0.weight"][2 * k + 1] * point[1] +
                        saved["encoder.0.bias"][k]) for k in range(16)]
    scores = [math.exp(sum(saved["head.weight"][16 * c + k] * hidden[k] for k in range(16)) + saved["head.bias"][c])
              for c in range(3)]
    for c in range(3):
        assert abs(answers[3 * i + c] - scores[c] / sum(scores)) < 1e-5, (i, answers[3 * i:3 * i + 3], scores)
assert len(answers) == 3 * len(points), len(answers)
for policy in ("single", "ddp"):
    said = run("inference", "--policy", policy, "--weights", str(weights), "--data", str(questions), status=1)
    assert "head.weight (expected F32 [3, 16], got F32 [10, 16])" in said, said
