#!/usr/bin/env python3
"""Runs a small form of an example program: it learns equally under three policies, and its errors name mistakes.
usage: examples_test.py PROGRAM"""

import json
import pathlib
import subprocess
import sys
import tempfile

PROGRAM = sys.argv[1]
NAME = pathlib.Path(PROGRAM).name
temporary = tempfile.TemporaryDirectory(prefix="chorus_examples_")
FOLDER = pathlib.Path(temporary.name)
TEXT = FOLDER / "text"
TEXT.write_text("abcabcabd " * 400)

LANGUAGE = dict(
    small=["--data", str(TEXT), "--batch", "16", "--window", "16", "--dropout", "0.1", "--letters", "20"],
    steps=40, least_fall=0.4,
    mistakes=[(["--data", "/nonexistent"], "/nonexistent"), (["--data", str(FOLDER)], str(FOLDER)),
              (["--batch", "100000"], "expected at least one batch of 100000"), (["--window", "0"], "--window")])
EXAMPLES = {
    "train_gpt": LANGUAGE | dict(
        small=LANGUAGE["small"] + ["--width", "32", "--layers", "2"],
        mistakes=LANGUAGE["mistakes"] + [(["--heads", "5"], "--heads 5 do not divide --width 32")]),
    "train_lstm": LANGUAGE | dict(small=LANGUAGE["small"] + ["--hidden", "32", "--layers", "2", "--lr", "0.02"]),
    "train_autoencoder": dict(
        small=["--train-images", "300", "--batch", "32", "--code", "16", "--lr", "0.004"], steps=60, least_fall=0.25,
        mistakes=[(["--data", "/nonexistent"], "/nonexistent"), (["--code", "0"], "--code")]),
    "train_wgan": dict(
        small=["--batch", "48", "--width", "24"], steps=60, least_fall=0.5, mistakes=[(["--penalty", "-1"], "--penalty")]),
}
EXAMPLE = EXAMPLES[NAME]


def run(*options, fails=False):
    done = subprocess.run([PROGRAM, *options], capture_output=True, text=True, timeout=200)
    assert (done.returncode != 0) == fails, f"{options}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def events(*options, steps):
    path = FOLDER / "metrics.jsonl"
    run(*EXAMPLE["small"], "--quiet", "--steps", str(steps), *options, "--metrics", str(path))
    log = [json.loads(line) for line in path.read_text().splitlines()]
    return [event["loss"] for event in log if event["event"] == "step"], log[-1]


losses, done = events("--epochs", "100", steps=EXAMPLE["steps"]) if NAME != "train_wgan" else events(steps=EXAMPLE["steps"])
assert len(losses) == EXAMPLE["steps"], len(losses)
assert done["policy"] == "single" and len(done["parameters_sha256"]) == 64, done
fall = sum(losses[:5]) / 5 - sum(losses[-5:]) / 5
print(f"loss {losses[0]:.3f} ... {losses[-1]:.3f}")
assert fall > EXAMPLE["least_fall"], f"the loss fell by {fall} only: {losses}"

MESHES = [("tp", 2), ("pp", 2), ("mesh:2x2x2", 8)] if NAME == "train_gpt" else []
for policy, devices in (("dp", 2), ("ddp", 2), ("ddp", 3), *MESHES):
    own, done = events("--policy", policy, "--devices", str(devices), steps=8)
    assert done["policy"] == policy and done["devices"] == devices and min(done["bytes_sent_per_device"]) > 0, done
    worst = max(abs(a - b) for a, b in zip(own, losses[:8], strict=True))
    print(f"{policy} on {devices} devices: losses within {worst:.1e} of one device's")
    assert worst < 2e-3, f"{policy} leaves the single device's trajectory: {own} and {losses[:8]}"

if NAME == "train_wgan":
    text = run(*EXAMPLE["small"], "--steps", "1", "--canonical-shares", "4", fails=True)
    assert "--canonical-shares" in text, text
else:  # the same bits on any number of devices
    ends = {events("--policy", policy, "--devices", str(devices), "--canonical-shares", "4", steps=4)[1]["parameters_sha256"]
            for policy, devices in (("single", "1"), ("dp", "3"), ("ddp", "2"), ("fsdp", "2"), *MESHES[:2])}
    assert len(ends) == 1, ends

if NAME == "train_gpt":  # the same steps, dropout included, in less memory
    plain, most = events("--layers", "6", steps=8)
    again, less = events("--layers", "6", "--checkpoint", steps=8)
    assert again == plain and less["parameters_sha256"] == most["parameters_sha256"], (again, plain)
    peaks = [log["peak_memory_bytes_per_device"][0] for log in (most, less)]
    print(f"peak memory {peaks[0]} bytes, with checkpoints {peaks[1]}")
    assert peaks[1] < 0.7 * peaks[0], peaks

text = run(*EXAMPLE["small"], "--steps", "2")
if "--letters" in EXAMPLE["small"]:
    assert len(text.rsplit("\n\n", 1)[-1]) >= 20 or len(text) > 20, text
if NAME == "train_autoencoder":
    pairs = FOLDER / "pairs.pgm"
    run(*EXAMPLE["small"], "--steps", "2", "--images", str(pairs))
    header, size, _, pixels = pairs.read_bytes().split(b"\n", 3)
    width, height = map(int, size.split())
    assert header == b"P5" and len(pixels) == width * height > 0, size
    assert "/nonexistent/p" in run(*EXAMPLE["small"], "--steps", "1", "--images", "/nonexistent/p", fails=True)

with open("/dev/full", "w") as full:
    for options in ([*EXAMPLE["small"], "--steps", "1"], ["--help"]):
        done = subprocess.run([PROGRAM, *options], stdout=full, stderr=subprocess.PIPE, text=True, timeout=200)
        assert done.returncode == 1 and "standard output: not all of it could be written" in done.stderr, done

help_text = run("--help")
assert "--policy" in help_text and NAME + " --" in help_text, help_text
for options, part in (*EXAMPLE["mistakes"], (["--nonsense"], "nonsense"), (["--batch", "x"], "a whole number, 1 to 16777216, got 'x'"),
                      (["--policy", "pipeline"], "pipeline"),
                      (["--batch", "\x1b[2J"], "got '\\x1b[2J'"), (["--policy", "\x1b[2J"], "\\x1b[2J"),
                      (["--devices", "2"], "--policy single"), (["--metrics", "/nonexistent/m"], "/nonexistent/m")):
    text = run(*EXAMPLE["small"], "--steps", "1", *options, fails=True)
    assert part in text, f"{options}: the message doesn't say {part}: {text}"
