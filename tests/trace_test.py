#!/usr/bin/env python3
"""Runs train_classifier with --trace as a user would: every policy's file obeys the rules, and the rules detect broken
files; killed runs; environment variables; wrong options.
usage: trace_test.py TRAIN_CLASSIFIER TRAIN_GPT CHORUS_RUN"""

import copy
import json
import os
import pathlib
import resource
import signal
import stat
import subprocess
import sys
import tempfile

from processes import CLEAN, children, expect, say, until
from trace_rules import broken, end, ns, read

PROGRAM, TRAIN_GPT, CHORUS_RUN = map(os.path.abspath, sys.argv[1:])
temporary = tempfile.TemporaryDirectory(prefix="chorus_trace_")
FOLDER = pathlib.Path(temporary.name)
SMALL = ["--train-images", "640", "--test-images", "10", "--epochs", "1", "--quiet"]


def run(*options, environment=None, status=0, program=(PROGRAM,)):
    done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=120, cwd=FOLDER,
                          env={**CLEAN, **(environment or {})})
    expect(done.returncode == status, options, "gave", done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def trace(name, *options, **others):
    said = run(*SMALL, "--trace", f"{name}.json", *options, **others)
    expect("trace" not in said, said)
    text = (FOLDER / f"{name}.json").read_text()
    events = read(text)
    expect(broken(events) == [], name, broken(events))
    return json.loads(text)["metadata"], events


def of(events, category, phase="X"):
    return [event for event in events if event["ph"] == phase and event.get("cat") == category]


# Every policy.
whole = {}
for policy, devices in (("single", 1), ("dp", 3), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("parameter_server", 2), ("local_sgd", 2)):
    name = f"{policy}{devices}"
    about, events = trace(name, "--policy", policy, "--devices", str(devices))
    whole[name] = events
    expect((about["policy"], about["devices"], about["first_step"], about["steps"]) == (policy, devices, 5, 3), about)
    expect(len(about["peak"]) == devices and about["peak"][0]["activations"] > 0, about)
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    ranks = policy not in ("single", "dp")
    expect(names == {f"rank {i}" if ranks else f"device cpu:{i}" for i in range(devices)}, names)
    for category in ("step", "loader", "forward", "backward", "optimizer"):
        expect(len(of(events, category)) >= 3, name, "has few spans of", category)
    expect((len(of(events, "comm")) > 0) == ranks and (len(of(events, "copy")) > 0) == (policy == "dp"), name)
    expect((len(of(events, "late", "s")) > 0) == ranks, name, "arrows from who came last")
    expect((len(of(events, "copy", "s")) > 0) == (policy == "dp"), name, "arrows of copies")
    expect(list(FOLDER.glob(f"{name}.json.*")) == [], "files of ranks are left")
# Gathers have a named lane of their own; averages of gradients stay in the other one.
lanes = {event["args"]["name"]: event["tid"] for event in whole["fsdp2"] if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == 1}
for lane, op in (("gathers", "all_gather"), ("communication", "reduce_scatter")):
    calls = [event for event in of(whole["fsdp2"], "comm") if event["tid"] == lanes[lane]]
    expect(op in {event["args"]["op"] for event in calls}, lane, calls)
    expect(all(("unit" in event["args"]) == (lane == "gathers") for event in calls), lane)
# A pipeline waits in bubbles: the last stage for activations, the first one for gradients.
run("--policy", "pp", "--devices", "2", "--steps", "8", "--layers", "2", "--width", "16", "--window", "16", "--batch", "8",
    "--letters", "0", "--quiet", "--trace", "pp.json", program=(TRAIN_GPT,))
events = read((FOLDER / "pp.json").read_text())
expect(broken(events) == [], broken(events))
for rank, waits in ((0, "bubble before backward"), (1, "bubble before forward")):
    names = {event["name"].split(" of ")[0] for event in of(events, "bubble") if event["pid"] == rank + 1}
    expect(names == {waits}, rank, names)
say("every policy's trace keeps the rules")

# Processes are named by their device numbers.
about, events = trace("named", "--policy", "dp", "--device", "1,3")
names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
expect(names == {"device cpu:1", "device cpu:3"} and about["devices"] == 2, names, about)

# The ring, step by step: N - 1 additions and N - 1 copies for each rank and call, with an arrow for each.
about, events = trace("ring", "--policy", "ddp", "--devices", "3", "--all-reduce", "ring", "--trace-ring",
                      "--trace-steps", "2:1")
calls = [event for event in of(events, "comm") if event["args"].get("bucket", -1) >= 0]
steps = [event for event in of(events, "ring") if event["args"]["sequence"] == calls[0]["args"]["sequence"]]
expect({event["args"]["algorithm"] for event in calls} == {"ring"} and about["steps"] == 1, calls, about)
received = [step for step in steps if "from" in step["args"] and step["pid"] == 1]
first = {(step["args"]["from"], step["args"]["offset"]) for step in received}
expect(len(first) >= 3, "rank 0 receives three chunks in an all-reduce of three, some of them twice")
expect(all(isinstance(step["args"]["first"], (int, float)) for step in steps))
expect(len(of(events, "ring", "s")) == len(of(events, "ring", "f")) > 0)
# All ranks end with the same sums: the last value that each stores at an offset is the same.
sums = {}
for step in sorted(steps, key=end):
    if "store" in step["name"] or step["name"] == "receive and store":
        sums.setdefault(step["args"]["offset"], {})[step["pid"]] = step["args"]["first"]
for offset, by_rank in sums.items():
    expect(len(set(by_rank.values())) == 1, "ranks end with other sums at", offset, by_rank)
say("a ring turns, and ends with one sum on all ranks")


def mutated(change):
    events = copy.deepcopy(whole["ddp2"])
    change(events)
    return broken(events)


def spoil(phase, category, key, value):
    def change(events):
        event = next(event for event in events if event["ph"] == phase and event.get("cat", "") == category)
        event[key] = value(event) if callable(value) else value
    return change


def drop(phase):
    return lambda events: events.remove(next(event for event in events if event["ph"] == phase))


for what, change in {
        "a span that outlasts the one around it": lambda events: events.append(
            {**of(events, "forward")[0], "ts": end(of(events, "forward")[0]) / 1000 - 1}),
        "an arrow that begins outside of a span": spoil("s", "late", "ts", lambda event: event["ts"] - 1e7),
        "an arrow that binds to the next span": spoil("f", "late", "bp", "x"),
        "an arrow that ends before it begins": lambda events: [event.update(ts=0.0) for event in events
                                                               if event["ph"] == "f"],
        "a number of an arrow used twice": lambda events: events.append(copy.deepcopy(of(events, "late", "s")[0])),
        "an arrow without an end": drop("f"),
        "a process without a name": lambda events: [events.remove(event) for event in list(events)
                                                    if event["ph"] == "M" and event["pid"] == 2],
        "a thread of number 0": spoil("X", "comm", "tid", 0),
        "an event without a time": spoil("X", "comm", "ts", None)}.items():
    expect(mutated(change) != [], "not noticed:", what)
say("the rules notice what is broken")

# The environment variables work for any program; later launches and other policies ignore them.
run(*SMALL, "--policy", "ddp", "--devices", "2", "--steps", "9",
    environment={"CHORUS_TRACE": "environment.json", "CHORUS_TRACE_STEPS": "3:4"})
events = read((FOLDER / "environment.json").read_text())
expect([event["name"] for event in of(events, "step") if event["pid"] == 1] == [f"step {i}" for i in range(3, 7)])
run(*SMALL, "--policy", "ddp", "--steps", "9", "--trace", "through.json",
    program=(CHORUS_RUN, "--nproc-per-node", "2", PROGRAM))
expect(broken(read((FOLDER / "through.json").read_text())) == [])

# A run that is too short writes the steps that it had.
said = run(*SMALL, "--steps", "6", "--trace", "short.json")
expect("the run has ended after 6 steps: 'short.json' has 1 of the 3 from step 5 on" in said, said)
expect(len(of(read((FOLDER / "short.json").read_text()), "step")) == 1)
said = run(*SMALL, "--steps", "2", "--trace", "none.json")
expect("'none.json' has 0 of the 3 from step 5 on" in said, said)
expect(read((FOLDER / "none.json").read_text()) == [])
said = run(*SMALL, "--policy", "ddp", "--devices", "2", "--steps", "2", "--trace", "none2.json")
expect(said.count("'none2.json' has 0 of the 3") == 1 and read((FOLDER / "none2.json").read_text()) == [], said)
expect(list(FOLDER.glob("none*.json.*")) == [], "parts of ranks are left")

# A device is written to, not replaced; a trace that can't be written is a warning.
device = FOLDER / "device"
device.symlink_to("/dev/null")
for target, said_of in ((device, "it gets what rank 0 records, alone"), ("/dev/full", "No space left on device; the trace ends here")):
    said = run(*SMALL, "--policy", "ddp", "--devices", "2", "--trace", str(target))
    expect(said_of in said and stat.S_ISCHR(os.stat(target).st_mode), said)
expect(list(FOLDER.glob("device*")) == [device] and not list(pathlib.Path("/dev").glob("*.rank*")), "files beside a device")
for policy in ("single", "ddp"):
    path = FOLDER / f"limited_{policy}.json"
    done = subprocess.run([PROGRAM, *SMALL, "--policy", policy, "--devices", "1" if policy == "single" else "2", "--trace", str(path)],
                          capture_output=True, text=True, timeout=120, env=CLEAN,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)))
    expect(done.returncode == 0 and "warning: trace: cannot write" in done.stderr and "File too large" in done.stderr, done)
    expect(list(FOLDER.glob(f".limited_{policy}*")) + list(FOLDER.glob(f"limited_{policy}.json.*")) == [], "something is left")

# A second run with the path of a running one is refused, and the first one's trace is complete.
many = ["--train-images", "200000", "--test-images", "10", "--quiet", "--policy", "ddp", "--devices", "2", "--trace", "shared.json", "--trace-steps", "2:40",
        "--steps", "60"]
first = subprocess.Popen([PROGRAM, *many], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=CLEAN, cwd=FOLDER)
until(lambda: (FOLDER / "shared.json").exists() and (FOLDER / "shared.json").stat().st_size > 5000, "no trace grows", limit=60)
expect("another program is writing it" in run(*many, status=1))
expect(first.wait(120) == 0 and broken(read((FOLDER / "shared.json").read_text())) == [])
expect({event["pid"] for event in of(read((FOLDER / "shared.json").read_text()), "step")} == {1, 2})

# Killed while recording.
for policy in ("single", "ddp"):
    path = FOLDER / f"killed_{policy}.json"
    many = ["--train-images", "200000", "--test-images", "10", "--epochs", "50", "--quiet", "--policy", policy,
            "--devices", "1" if policy == "single" else "2", "--trace", str(path), "--trace-steps", "2:100000"]
    program = subprocess.Popen([PROGRAM, *many], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=CLEAN)
    until(lambda: path.exists() and path.stat().st_size > 100000, "no trace grows", limit=60)
    if policy == "single":
        program.kill()
    else:
        os.kill(children(program.pid)[1], signal.SIGKILL)
    program.wait(60)
    events = read(path.read_text())
    expect(len(of(events, "step")) > 3, policy, "has", len(of(events, "step")), "steps")
    if policy == "ddp":
        expect(broken(events) == [], broken(events))
        expect({event["pid"] for event in of(events, "step")} == {1, 2}, "both ranks' steps are there")
say("a killed run's trace can be read")

# Wrong options and files.
expect("expected FIRST:COUNT" in run("--trace", "x.json", "--trace-steps", "5", status=2))
for policy in ("single", "ddp"):
    said = run(*SMALL, "--policy", policy, "--trace", "no/such/folder.json", status=1)  # by the first rank that fails
    expect("cannot write 'no/such/folder.json" in said and ": No such file or directory" in said, said)
expect("CHORUS_TRACE_STEPS: expected FIRST:COUNT" in run(
    *SMALL, environment={"CHORUS_TRACE": "x.json", "CHORUS_TRACE_STEPS": "many"}, status=2))
expect("CHORUS_TRACE_RING must be 0 or 1" in run(
    *SMALL, environment={"CHORUS_TRACE": "x.json", "CHORUS_TRACE_RING": "yes"}, status=2))
say("wrong options are refused")
