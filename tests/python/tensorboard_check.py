"""Reads what train_classifier writes for TensorBoard with TensorBoard's own code, and compares it with the JSON lines.

usage: tensorboard_check.py TRAIN_CLASSIFIER"""

import csv
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    subprocess.run(
        [sys.argv[1], "--epochs", "2", "--train-images", "200", "--test-images", "50", "--quiet",
         "--metrics", folder / "lines", "--csv", folder / "table.csv", "--tensorboard", folder / "curves"],
        check=True)
    lines = [json.loads(line) for line in open(folder / "lines")]
    steps = [line for line in lines if line["event"] == "step"]
    epochs = [line for line in lines if line["event"] == "epoch"]
    assert len(steps) == 8 and len(epochs) == 2, lines

    curves = EventAccumulator(str(folder / "curves"), size_guidance={"scalars": 0})
    curves.Reload()

    def single(number):
        return struct.unpack("f", struct.pack("f", number))[0]

    def compare(tag, events, step, value):
        points = curves.Scalars(tag)
        expected = [(event[step], single(event[value])) for event in events]
        assert [(p.step, p.value) for p in points] == expected, f"{tag}: expected {expected}, got {points}"

    assert sorted(curves.Tags()["scalars"]) == ["accuracy/test", "loss/step", "loss/train"], curves.Tags()
    compare("loss/step", steps, "step", "loss")
    compare("loss/train", epochs, "epoch", "train_loss")
    compare("accuracy/test", epochs, "epoch", "test_accuracy")

    rows = list(csv.DictReader(open(folder / "table.csv")))
    for row, epoch in zip(rows, epochs, strict=True):
        assert {key: float(row[key]) for key in row} == {key: float(epoch[key]) for key in row}, (row, epoch)
print("tensorboard_check: 8 steps and 2 epochs read back")
