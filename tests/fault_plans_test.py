#!/usr/bin/env python3
"""The plans of build/tests/faults on real processes, into which tests/fault_shim.cpp is preloaded. Each job ends
with the undisturbed bits, or fails in time and names a rank that has failed, or the file. Its checkpoint is then one
that was saved, and a run that resumes from it ends with the undisturbed bits.
usage: fault_plans_test.py FAULTS SHIM TRAIN_CLASSIFIER TRAIN_GPT SURVIVE [--seeds FIRST:COUNT] [--only KIND]"""

import argparse
import collections
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

from processes import CLEAN, expect, say, shared_memory

options = argparse.ArgumentParser()
for name in ("faults", "shim", "train_classifier", "train_gpt", "survive"):
    options.add_argument(name, type=pathlib.Path)
options.add_argument("--seeds", default="0:4")
options.add_argument("--only", default="")
options = options.parse_args()
first, count = map(int, options.seeds.split(":"))
TIMEOUT = 2.0
PATIENCE = 12  # seconds for the start, and for the grace of those that are stopped
COMMON = ["--timeout", str(TIMEOUT), "--grace", "0.3"]
IMAGES = [options.train_classifier, "--train-images", "96", "--test-images", "16", "--epochs", "2", "--batch", "24",
          "--workers", "0", "--quiet", "--save-every", "2", *COMMON]
LETTERS = [options.train_gpt, "--policy", "pp", "--devices", "3", "--steps", "4", "--epochs", "1", "--batch", "12",
           "--width", "16", "--heads", "2", "--layers", "4", "--window", "16", "--letters", "0", "--quiet", *COMMON]
# By name: the command, the simulated policy that gives its plans, whether it can resume.
KINDS = {"ddp": ([*IMAGES, "--policy", "ddp", "--devices", "3", "--canonical-shares", "4"], "save_ddp", True),
         "fsdp": ([*IMAGES, "--policy", "fsdp", "--devices", "3"], "save_fsdp", True),
         "tp": ([*IMAGES, "--policy", "tp", "--devices", "2"], "save_tp", True),
         "pipeline": (LETTERS, "save_pipeline", False),
         "elastic": ([options.survive, "--devices", "3", "--images", "640", "--epochs", "2", *COMMON], "save_elastic", False)}


def plan_of(policy, ranks, seed):
    """The plan of that seed, with the deadline of these runs instead of 30 s."""
    out = subprocess.run([options.faults, "--policy", policy, "--ranks", str(ranks), "--seed", str(seed)], text=True,
                         capture_output=True, timeout=60, check=True).stdout
    plan = re.match("plan: (.*)", out)[1]
    plan = re.sub(r"for ([\d.e-]+)", lambda stop: f"for {float(stop[1]) * TIMEOUT / 30:.4f}", plan)
    if seed % 2 == 1:  # while the ranks meet: the store's messages
        plan = re.sub(r"@call (\d+)", lambda at: f"@call {1 + int(at[1]) % 12}", plan)
        plan = re.sub(r"@byte (\d+)", lambda at: f"@byte {1 + int(at[1]) % 600}", plan)
    return plan


def job(command, saved, plan=""):
    """Status, messages, seconds."""
    environment = {**CLEAN, "LD_PRELOAD": str(options.shim.resolve()), "CHORUS_FAULT_PLAN": plan, "CHORUS_BACKEND": "tcp"}
    begun = time.monotonic()
    with subprocess.Popen([*map(str, command), "--save", str(saved)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=environment, start_new_session=True) as process:
        try:
            out, errors = process.communicate(timeout=60)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
                left = True
            except ProcessLookupError:
                left = False
    return process.returncode, out + errors, time.monotonic() - begun, left


def names(text, plan, saved):
    """Whether a job's messages say who has failed, or what."""
    guilty = re.findall(r"(?:kill|hang|stop|cut|full|bad) (\d+)", plan)
    if "cut" in plan:  # on a link of its rank, whoever the peer is
        return "rank " in text
    return any(re.search(rf"rank {rank}\b", text) for rank in guilty) or (re.search("full|bad", plan) and str(saved) in text)


def check(kind, seed, right, folder):
    command, policy, resumes = KINDS[kind]
    ranks = int(command[command.index("--devices") + 1])
    plan = plan_of(policy, ranks, seed)
    saved = folder / "run.safetensors"
    told = f"{kind}, seed {seed}: {plan}: "
    status, text, seconds, left = job(command, saved, plan)
    stops = sum(float(stop) for stop in re.findall(r"for ([\d.]+)", plan))
    expect(seconds < PATIENCE + stops + 2 * TIMEOUT, told, f"took {seconds:.1f} s", text)
    expect(not left, told, "processes are left", text)
    expect("terminate" not in text and "Sanitizer" not in text, told, text)
    if status == 0:
        expect(saved.read_bytes() == right, told, "other bits", text)
        return "went on"
    expect(re.search("kill|hang|cut|full|bad|stop", plan), told, "failed without a reason", text)
    expect(names(text, plan, saved), told, "names nobody that has failed", text)
    if saved.exists() and resumes:
        status, text, *_ = job([*command, "--resume", saved], saved)
        expect(status == 0, told, "the checkpoint is not loaded:", text)
        expect(saved.read_bytes() == right, told, "the resumed run has other bits")
        expect(len(list(folder.iterdir())) == 1, told, "files are left:", list(folder.iterdir()))
    elif saved.exists():
        expect(len(saved.read_bytes()) == len(right), told, "a part of a file")
    return "failed"


before = shared_memory()
for kind, (command, _, _) in KINDS.items():
    if options.only not in kind:
        continue
    ends = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="fault_plans.") as folder:
        folder = pathlib.Path(folder)
        saved = folder / "run.safetensors"
        status, text, *_ = job(command, saved)
        expect(status == 0, kind, text)
        right = saved.read_bytes()
        for seed in range(first, first + count):
            for file in folder.iterdir():
                file.unlink()
            ends[check(kind, seed, right, folder)] += 1
    say(f"{kind}: {count} plans, " + ", ".join(f"{times} {end}" for end, times in sorted(ends.items())))
expect(shared_memory() == before, "shared memory is left:", shared_memory() - before)
