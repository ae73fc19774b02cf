#!/usr/bin/env python3
"""Kills ranks of examples/survive at random moments: each run ends with the bits of one device.
usage: survive_test.py PROGRAM [--runs N] [--first SEED]"""

import argparse
import os
import pathlib
import random
import signal
import statistics
import subprocess
import tempfile
import time

options = argparse.ArgumentParser()
options.add_argument("program")
options.add_argument("--runs", type=int, default=6)
options.add_argument("--first", type=int, default=0)
options = options.parse_args()
folder = pathlib.Path(tempfile.mkdtemp(prefix="survive."))
TRAINING = ["--images", "640", "--epochs", "6"]
STEPS = 60


def hash_in(text):
    lines = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    assert lines.get("steps") == str(STEPS), text
    return lines["parameters_sha256"]


def ranks_of(job):
    """The supervisor's children that live."""
    children = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return [int(child) for child in children]


def steps_in(log):
    """Time, process, rank, ranks, epoch, step."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(float(line[0]), *map(int, line[1:])) for line in lines if len(line) == 6]


def run(seed, kills=1, how=signal.SIGKILL):
    """Returns the seconds from the kill to the next step, if there was one."""
    chance = random.Random(seed)
    log = folder / f"{seed}.txt"
    saved = folder / f"{seed}.safetensors"
    command = [options.program, "--devices", "4", *TRAINING, "--log", str(log), "--save", str(saved)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not steps_in(log) and job.poll() is None:  # before the ranks have met there is no run that could go on
        time.sleep(0.002)
    time.sleep(chance.random() * length)
    victims = ranks_of(job) if job.poll() is None else []
    struck = time.clock_gettime(time.CLOCK_MONOTONIC)
    for victim in chance.sample(victims, min(kills, len(victims))):
        os.kill(victim, how)
    out, errors = job.communicate(timeout=100)
    assert job.returncode == 0, f"seed {seed}: status {job.returncode}\n{out}{errors}"
    assert hash_in(out) == right, f"seed {seed}: other bits\n{out}{errors}"
    assert saved.exists(), f"seed {seed}: nothing was saved"
    steps = steps_in(log)
    later = [step[0] for step in steps if step[0] > struck]
    # Each rank makes a step once: one that was lost in it makes it again, and logs only what counts.
    for process in {step[1] for step in steps}:
        own = [step[5] for step in steps if step[1] == process]
        assert own == sorted(set(own)), f"seed {seed}: process {process} has made steps {own}"
    return min(later) - struck if later and victims else None


begun = time.monotonic()
right = hash_in(subprocess.run([options.program, "--devices", "1", *TRAINING], capture_output=True, text=True).stdout)
undisturbed = subprocess.run([options.program, "--devices", "4", *TRAINING], capture_output=True, text=True, timeout=100)
length = min(0.95, (time.monotonic() - begun) / 2)
assert hash_in(undisturbed.stdout) == right, undisturbed.stdout + undisturbed.stderr
gaps = []
for seed in range(options.first, options.first + options.runs):
    gaps.append(run(seed, kills=2 if seed % 5 == 4 else 1))
gaps = sorted(gap for gap in gaps if gap is not None)
print(f"{options.runs} of {options.runs} runs ended with {right[:12]}; seconds from a kill to the next step: "
      f"median {statistics.median(gaps):.3f}, most {gaps[-1]:.3f}" if gaps else "no kill met a run")
