#!/usr/bin/env python3
"""Kills ranks of examples/survive at random moments, and the process that supervises them: each run ends with the bits of
one device, and leaves no process.
usage: survive_test.py PROGRAM CHORUS_RUN [--runs N] [--first SEED]"""

import argparse
import os
import pathlib
import random
import signal
import statistics
import subprocess
import tempfile
import time

from processes import CLEAN, alive, children, expect, free_port, until

options = argparse.ArgumentParser()
options.add_argument("program")
options.add_argument("chorus_run")
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


def name_of(process):
    try:
        return pathlib.Path(f"/proc/{process}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def stand_by_of(supervisor):
    """The process that stands by, when it is there."""
    found = []
    until(lambda: found.extend(child for child in children(supervisor) if name_of(child) == "stand-by") or found, "nobody stands by")
    return found[0]


def ranks_of(job):
    return [child for child in children(job.pid) if name_of(child) != "stand-by"]


def ranks_in(log):
    """Those that step."""
    return sorted({step[1] for step in steps_in(log)[-8:] if alive(step[1])})


def left_of(seed):
    """All living processes of a run."""
    mark = f"SURVIVE={folder}/{seed}".encode()
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0") and alive(process):
                found.append(int(process))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass
    return found


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


def start(seed, *launcher):
    log = folder / f"{seed}.txt"
    words = launcher or (options.program, "--devices", "4")
    job = subprocess.Popen([*words, *TRAINING, "--log", str(log)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           env={**CLEAN, "SURVIVE": f"{folder}/{seed}"})
    return job, log


def begin(seed, *launcher):
    """A run that has made its first step."""
    job, log = start(seed, *launcher)
    until(lambda: steps_in(log) or job.poll() is not None, "no step")
    return job, log


def ends_right(job, seed, status=-signal.SIGKILL):
    """Returns what was said on stderr."""
    out, errors = job.communicate(timeout=100)  # all that write there have ended
    expect(job.returncode == status, seed, "status", job.returncode, out, errors)
    lines = (line.partition("] ")[2] if line.startswith("[rank ") else line for line in out.splitlines())
    expect(hash_in("\n".join(lines)) == right, seed, "other bits", out, errors)
    until(lambda: not left_of(seed), seed, "has left processes")
    return errors


def supervisor_is_killed(seed, *launcher):
    """And a rank after it."""
    chance = random.Random(seed)
    job, log = begin(seed, *launcher)
    successor = stand_by_of(job.pid)
    time.sleep(chance.random() * length / 3)
    job.kill()
    time.sleep(chance.random() * length / 3)
    ranks = ranks_in(log)
    victim = chance.choice(ranks) if ranks else -1
    if ranks:
        os.kill(victim, signal.SIGKILL)
    errors = ends_right(job, seed)
    expect(f"(pid {job.pid}) was killed; process {successor} takes its place" in errors, seed, errors)
    replaced = f"(pid {victim}) was killed; the others continue, and another process takes its place" in errors
    expect(replaced or not ranks, seed, errors)


def all_supervisors_are_killed(seed):
    """The ranks go on alone."""
    job, log = begin(seed)
    successor = stand_by_of(job.pid)
    job.send_signal(signal.SIGSTOP)  # it starts no other one
    for process in (successor, job.pid):
        os.kill(process, signal.SIGKILL)
    os.kill(ranks_in(log)[0], signal.SIGKILL)
    expect(ends_right(job, seed) == "", seed)


def each_has_a_successor(seed):
    """One that stands by is replaced, as is one that has taken over. A signal to the last one ends the job."""
    job, log = begin(seed)
    first = stand_by_of(job.pid)
    os.kill(first, signal.SIGKILL)
    until(lambda: stand_by_of(job.pid) != first, "no other one stands by")
    second = stand_by_of(job.pid)
    job.kill()
    third = stand_by_of(second)
    os.kill(second, signal.SIGKILL)
    stand_by_of(third)  # it has taken over
    os.kill(third, signal.SIGTERM)
    _, errors = job.communicate(timeout=20)
    until(lambda: not left_of(seed), seed, "has left processes")
    expect("SIGTERM: stopping 4 ranks" in errors, errors)


def one_is_killed_early(seed):
    """Before the ranks have met, all start again."""
    job, _ = start(seed)
    until(lambda: len(ranks_of(job)) == 4, "no ranks")
    *others, victim = ranks_of(job)
    os.kill(victim, signal.SIGSTOP)
    until(lambda: len(os.listdir(f"/proc/{others[0]}/task")) > 2, "it has no threads")  # those of elastic::Processes
    os.kill(victim, signal.SIGKILL)
    errors = ends_right(job, seed, status=0)
    expect("was killed by SIGKILL; stopping the other 3 ranks\nchorus: the ranks had not met: all start again\n" in errors, errors)


def machines_come():
    """The second of two is let in without a restart; the third waits until the second is lost, and is then let in."""
    words = ["--images", "640", "--epochs", "24", "--log", str(folder / "machines.txt")]
    one = subprocess.run([options.program, "--devices", "1", *words[:4]], capture_output=True, text=True).stdout
    port = free_port()
    launchers = []

    def add():
        launchers.append(subprocess.Popen(
            [options.chorus_run, "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf",
             "join_timeout=60,last_call_timeout=0.1", "--nproc-per-node", "2", options.program, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**CLEAN, "CHORUS_TOKEN": "a secret of this test", "SURVIVE": f"{folder}/machines-{len(launchers)}"}))
        return launchers[-1]

    sizes = lambda: [step[3] for step in steps_in(folder / "machines.txt")]
    first = add()
    until(lambda: 2 in sizes(), "the first machine makes no step")
    second = add()
    until(lambda: 4 in sizes(), "the second machine's ranks are not let in")
    third = add()
    expect("the job runs on 2 machines: waiting for a place" in third.stderr.readline(), "the third machine")
    second.send_signal(signal.SIGSTOP)
    for process in [*(process for process in left_of("machines-1") if process != second.pid), second.pid]:
        os.kill(process, signal.SIGKILL)
    ends = [launcher.communicate(timeout=100) for launcher in launchers]
    expect([launcher.returncode for launcher in launchers] == [0, -signal.SIGKILL, 0], ends)
    expect("starting 2 ranks that join it" in ends[2][1], ends)
    expect(sizes()[-1] == 4 and "stopping" not in ends[0][1], sizes()[-8:], ends)
    expect(ends[0][0].splitlines() == one.splitlines() and one, "other bits", one, ends)
    until(lambda: not any(left_of(f"machines-{i}") for i in range(3)), "processes are left")


begun = time.monotonic()
right = hash_in(subprocess.run([options.program, "--devices", "1", *TRAINING], capture_output=True, text=True).stdout)
undisturbed = subprocess.run([options.program, "--devices", "4", *TRAINING], capture_output=True, text=True, timeout=100)
length = min(0.95, (time.monotonic() - begun) / 2)
assert hash_in(undisturbed.stdout) == right, undisturbed.stdout + undisturbed.stderr
gaps = []
for seed in range(options.first, options.first + options.runs):
    gaps.append(run(seed, kills=2 if seed % 5 == 4 else 1))
gaps = sorted(gap for gap in gaps if gap is not None)
for seed in range(options.first, options.first + max(1, options.runs // 6)):
    supervisor_is_killed(f"launch-{seed}")
    supervisor_is_killed(f"chorus-run-{seed}", options.chorus_run, "--nproc-per-node", "4", "--max-restarts", "9", "--prefix", options.program)
all_supervisors_are_killed("alone")
each_has_a_successor("successors")
one_is_killed_early("early")
machines_come()
print(f"{options.runs} of {options.runs} runs ended with {right[:12]}; seconds from a kill to the next step: "
      f"median {statistics.median(gaps):.3f}, most {gaps[-1]:.3f}" if gaps else "no kill met a run")
