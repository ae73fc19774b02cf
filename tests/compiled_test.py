#!/usr/bin/env python3
"""Trains with train_classifier as a header-only program and as one that links chorus::compiled, under each policy: the
losses and all that is saved, parameters and the optimizer's numbers, are the same.

    compiled_test.py HEADER_ONLY COMPILED
"""
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile


def train(program, policy, folder):
    metrics, saved = pathlib.Path(folder) / "metrics.jsonl", pathlib.Path(folder) / "saved"
    subprocess.run(
        [program, "--policy", policy, "--devices", "1" if policy == "single" else "2", "--model", "toy", "--data", "synthetic",
         "--train-images", "300", "--test-images", "50", "--batch", "64", "--epochs", "1", "--seed", "3", "--lr", "0.05", "--metrics", metrics,
         "--save", saved],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=100)
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    return losses, hashlib.sha256(saved.read_bytes()).hexdigest()


def main():
    header_only, compiled = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("single", "dp", "ddp"):
            expected, got = train(header_only, policy, folder), train(compiled, policy, folder)
            assert len(expected[0]) == 5, expected
            assert expected == got, f"{policy}: header-only {expected}, compiled {got}"
            print(policy, got[1])


main()
