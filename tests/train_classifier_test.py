#!/usr/bin/env python3
"""Runs train_classifier as a user would: three policies, one trajectory; the metrics file; a repeat; a resume; errors.
usage: train_classifier_test.py PROGRAM"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile

PROGRAM = sys.argv[1]
temporary = tempfile.TemporaryDirectory(prefix="chorus_train_")
FOLDER = pathlib.Path(temporary.name)
SMALL = ["--train-images", "500", "--test-images", "100", "--epochs", "2", "--batch", "48", "--seed", "3", "--quiet"]


def run(*options, fails=False):
    done = subprocess.run([PROGRAM, *options], capture_output=True, text=True, timeout=120)
    assert (done.returncode != 0) == fails, f"{options}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def events(name, *options):
    path = FOLDER / f"{name}.jsonl"
    said = run(*SMALL, *options, "--metrics", str(path))
    assert "warning" not in said, said
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(log):
    return [event["loss"] for event in log if event["event"] == "step"]


def check_form(log, policy, devices):
    steps, epochs = losses(log), [event for event in log if event["event"] == "epoch"]
    assert len(steps) == 2 * math.ceil(500 / 48), len(steps)
    assert [event["step"] for event in log if event["event"] == "step"] == list(range(len(steps)))
    assert [event["epoch"] for event in epochs] == [0, 1]
    assert all(set(event) == {"event", "epoch", "train_loss", "test_accuracy", "seconds"} for event in epochs)
    done = log[-1]
    assert done["event"] == "done" and done["policy"] == policy and done["devices"] == devices, done
    assert len(done["bytes_sent_per_device"]) == len(done["peak_memory_bytes_per_device"]) == devices, done
    assert len(done["parameters_sha256"]) == 64 and done["samples_per_second"] > 0, done
    assert all(peak > 0 for peak in done["peak_memory_bytes_per_device"]), done
    assert all((sent > 0) == (devices > 1) for sent in done["bytes_sent_per_device"]), done


logs = {}
for policy, devices in (("single", 1), ("dp", 2), ("dp", 3), ("ddp", 2), ("ddp", 3), ("parameter_server", 3), ("fsdp", 2), ("fsdp", 3),
                        ("tp", 2), ("mesh:2x2", 4)):
    name = f"{policy}{devices}"
    logs[name] = events(name, "--policy", policy, "--devices", str(devices))
    check_form(logs[name], policy, devices)
    worst = max(abs(a - b) for a, b in zip(losses(logs[name]), losses(logs["single1"]), strict=True))
    assert worst < 1e-4, f"{name} leaves the single device's trajectory by {worst}"
    print(f"{name}: losses within {worst:.1e} of one device's")

# Devices by number: the same run on other devices.
for policy, devices, named in (("single", 1, "3"), ("dp", 2, "1,3"), ("ddp", 2, "cpu:4,2"),
                               ("parameter_server", 3, "2,0,1"), ("fsdp", 2, "cpu:3,1")):
    log, plain = events("named", "--policy", policy, "--device", named), logs[f"{policy}{devices}"]
    check_form(log, policy, devices)
    assert losses(log) == losses(plain), f"{policy} on {named} takes other steps"
    for key in ("parameters_sha256", "peak_memory_bytes_per_device"):
        assert log[-1][key] == plain[-1][key] or policy not in ("single", "dp"), (policy, key, log[-1], plain[-1])
    assert log[-1]["bytes_sent_per_device"] == plain[-1]["bytes_sent_per_device"] or policy != "dp", log[-1]
print("named devices compute the same")

# Ranks that step independently leave the trajectory, and share one model again for the test.
check_form(events("local_sgd", "--policy", "local_sgd", "--devices", "2"), "local_sgd", 2)

for policy, devices in (("single", 1), ("dp", 3), ("ddp", 3)):
    again = events("again", "--policy", policy, "--devices", str(devices))
    assert losses(again) == losses(logs[f"{policy}{devices}"]), f"{policy} repeated gives other losses"
    assert again[-1]["parameters_sha256"] == logs[f"{policy}{devices}"][-1]["parameters_sha256"], policy
print("a repeated run is bit-identical")

# Stopped in the middle of an epoch and resumed under the same policy: same result as without a stop.
saved = str(FOLDER / "stopped")
for policy, devices in (("single", 1), ("fsdp", 3), ("ddp", 2), ("mesh:2x2", 4)):
    options = ("--policy", policy, "--devices", str(devices))
    first = events("stopped", *options, "--steps", "15", "--save", saved)
    rest = events("resumed", *options, "--resume", saved)
    assert losses(first) + losses(rest) == losses(logs[f"{policy}{devices}"]), f"{policy}: a resumed run differs"
    assert rest[-1]["parameters_sha256"] == logs[f"{policy}{devices}"][-1]["parameters_sha256"], policy
run(*SMALL, "--policy", "dp", "--resume", saved)
run(*SMALL, "--policy", "fsdp", "--devices", "2", "--resume", saved)
# Sharded gradients and parameters: the same numbers.
assert logs["fsdp2"][-1]["parameters_sha256"] == logs["ddp2"][-1]["parameters_sha256"]
assert "not under --policy mesh:2x2" in run(*SMALL, "--policy", "mesh:2x2", "--canonical-shares", "4", fails=True)
# Under local_sgd a checkpoint holds each rank's own state.
options = ("--policy", "local_sgd", "--devices", "2", "--save-every", "5")
whole = events("whole", *options, "--save", saved)
saved_early = str(FOLDER / "early")
first = events("stopped", *options, "--epochs", "1", "--save", saved_early)
assert losses(first) + losses(events("resumed", *options, "--resume", saved_early)) == losses(whole)
print("a resumed run goes on as if it had not stopped")

# With the same canonical shares, all policies and numbers of devices give the same bits.
options = ("--canonical-shares", "4", "--steps", "14")
cut = {}
for policy, devices in (("single", 1), ("dp", 3), ("ddp", 2), ("fsdp", 3), ("tp", 2), ("parameter_server", 3)):
    *_, cut[policy] = events("cut", "--policy", policy, "--devices", str(devices), *options, "--save", saved)
    assert cut[policy]["canonical_shares"] == 4, cut[policy]
assert len({done["parameters_sha256"] for done in cut.values()}) == 1, cut
assert "canonical_shares" not in logs["single1"][-1], logs["single1"][-1]
uncut = events("uncut", "--steps", "14")[-1]["parameters_sha256"]
assert uncut != cut["single"]["parameters_sha256"], "a batch in four shares has the bits of a whole one"
whole = events("cut", *options[:2])[-1]["parameters_sha256"]
for policy in ("single", "ddp", "fsdp"):  # resumes from another policy's checkpoint
    rest = events("resumed", "--policy", policy, *options[:2], "--resume", saved)
    assert rest[-1]["parameters_sha256"] == whole, (policy, rest[-1])
assert "the run's canonical_shares, 4, got 0 (none)" in run(*SMALL, "--resume", saved, fails=True)
assert "48 samples in 4 canonical shares: each of 3 devices has 12 to 24" in run(
    *SMALL[:-1], "--policy", "dp", "--devices", "3", *options)
print("with canonical shares all policies end with the same bits")

# Gradients of several batches per step: same steps as with one larger batch, also at the end of the data.
several = ("--batch", "12", "--accumulate", "4")
for policy, devices in (("single", 1), ("dp", 3), ("ddp", 3), ("parameter_server", 3), ("fsdp", 2), ("mesh:2x2", 4)):
    named = ("--policy", policy, "--devices", str(devices), *several)
    log = events("accumulate", *named)
    check_form(log, policy, devices)
    worst = max(abs(a - b) for a, b in zip(losses(log), losses(logs["single1"]), strict=True))
    assert worst < 1e-4, f"{policy} on {devices} devices adds up other gradients: {worst}"
    print(f"4 batches a step, {policy}{devices}: losses within {worst:.1e} of one batch's")
    if policy == "ddp":  # one all-reduce per step, not per batch
        sent, of_one = (max(each[-1]["bytes_sent_per_device"]) for each in (log, logs["ddp3"]))
        assert sent < 1.1 * of_one, (sent, of_one)
    if policy in ("single", "ddp"):
        first = events("stopped", *named, "--steps", "15", "--save", saved)
        rest = events("resumed", *named, "--resume", saved)
        assert losses(first) + losses(rest) == losses(log), f"{policy}: a resumed run differs"
        assert ("checkpoint: a run that accumulates 5 batches per step can resume after whole steps only: expected a multiple of 5 batches, "
                "got a checkpoint after 16 of its epoch") in run(*SMALL, *named, "--accumulate", "5", "--resume", saved,
                                                                 fails=True)
cut = {events("cut", "--policy", policy, "--devices", devices, *several, "--canonical-shares", "4",
              "--steps", "3")[-1]["parameters_sha256"] for policy, devices in (("single", "1"), ("ddp", "3"))}
assert len(cut) == 1, cut
one, others = (losses(events("accumulate", *several, "--model", "mlp", "--steps", "6", *policy))
               for policy in ((), ("--policy", "ddp", "--devices", "3")))
assert max(abs(a - b) for a, b in zip(one, others, strict=True)) < 1e-4, (one, others)  # dropout included

# With a rate of 0 no epoch improves on the first.
for policy, devices in (("single", "1"), ("ddp", "2")):
    log = events("patience", "--policy", policy, "--devices", devices, "--lr", "0", "--epochs", "9", "--patience", "2")
    assert [event["epoch"] for event in log if event["event"] == "epoch"] == [0, 1, 2], log
    assert log[-1]["event"] == "done", log[-1]
said = run(*SMALL[:-1], "--lr", "0", "--epochs", "9", "--patience", "1")
assert "in the last 1 epochs: stopped" in said and "epoch 3:" not in said, said
better = [event for event in events("patience", "--patience", "1", "--epochs", "2") if event["event"] == "epoch"]
assert len(better) == 2, better
print("--accumulate and --patience do the same under every policy")

# Models with batch norm, whose statistics are those of each device's share.
for model, policy, devices in (("resnet18", "single", 1), ("resnet18", "dp", 2), ("resnet18", "ddp", 2),
                               ("resnet50", "single", 1)):
    log = events("resnet", "--model", model, "--policy", policy, "--devices", str(devices), "--train-images", "16",
                 "--test-images", "4", "--batch", "8", "--epochs", "1")
    assert len(losses(log)) == 2 and all(0 < loss < 20 for loss in losses(log)), losses(log)
    assert log[-1]["event"] == "done" and log[-1]["policy"] == policy, log[-1]
assert "resnet50" in run("--model", "resnet7", fails=True)
print("ResNets train")

# The head: the model's table for one device's part of a batch; printing it changes nothing.
loud = SMALL[:-1] + ["--policy", "dp", "--devices", "3", "--metrics", str(FOLDER / "loud.jsonl")]
for part in ("conv1   Conv2d(3, 6, kernel=5x5)   [16, 6, 28, 28]   456         5644800\n",
             "input [16, 3, 32, 32]: 10427520 multiply-adds, "):
    assert part in (said := run(*loud)), said
done = [json.loads(line) for line in (FOLDER / "loud.jsonl").read_text().splitlines()][-1]
for key in ("parameters_sha256", "peak_memory_bytes_per_device"):
    assert done[key] == logs["dp3"][-1][key], (done, logs["dp3"][-1])

assert "pipeline" in run("--policy", "pipeline", fails=True)
assert "48 samples on 5 devices: each has 9 or 10" in run(*SMALL[:-1], "--policy", "dp", "--devices", "5")
assert "expected one device for policy 'single', got 2" in run(*SMALL, "--device", "0,1", fails=True)
assert "--devices 3, but --device 0,1 names 2" in run(*SMALL, "--policy", "dp", "--device", "0,1", "--devices", "3",
                                                      fails=True)
assert "policy local_sgd, where each process steps" in run(*SMALL, "--policy", "local_sgd", *options, fails=True)
for named in (("--devices", "5"), ("--device", "0,1,2,4,3")):
    assert "--canonical-shares 4: each of 5 devices takes whole shares: expected at least 5" in run(
        *SMALL, "--policy", "ddp", *named, *options, fails=True)
for line in ("YOLOv5", "--device 0,1     chooses no policy", "no torch.distributed.run", "-1 is refused"):
    assert line in run("--help"), line
for options, part in ((["--batch", "0"], "--batch: expected a whole number, 1 to 16777216, got '0'"),
                      (["--batch", "-1"], "--batch: expected the number of samples over all devices, got -1: a size"),
                      (["--batch", "abc"], "--batch: expected a whole number, 1 to 16777216, got 'abc'"),
                      (["--canonical-shares", "0"], "--canonical-shares: expected a whole number, 1 to 64, got '0'"),
                      (["--canonical-shares", "65"], "--canonical-shares: expected a whole number, 1 to 64, got '65'"),
                      (["--device", "0,0"], "--device: expected each device once, got 0 twice in '0,0'"),
                      (["--device", "0,x"], "got '0,x': 'x' is not a whole number"),
                      (["--device", "0,,1"], "got '0,,1': an entry is empty"),
                      (["--device", "64"], "--device: expected numbers of devices from 0 to 63, got 64"),
                      (["--device", "mps"], "expected the kind cpu or cuda, as in cpu:0,1, got 'mps'"),
                      (["--device", "cuda:0"], "--device cuda:0: expected cpu, the device of this program, got cuda; to use GPUs"),
                      (["--lr", "-1"], "--lr: expected a number, at least 0, got '-1'"),
                      (["--lr", "nan"], "--lr: expected a number, at least 0, got 'nan'"),
                      (["--seed", "-1"], "--seed: expected a whole number, at least 0, got '-1'"),
                      (["--save-every", "2.5"], "--save-every: expected a whole number, at least 0, got '2.5'"),
                      (["--timeout", "0"], "--timeout: expected a number, 0.001 to 1e+06, got '0'"),
                      (["--accumulate", "0"], "--accumulate: expected a whole number, 1 to 65536, got '0'"),
                      (["--accumulate", "two"], "--accumulate: expected a whole number, 1 to 65536, got 'two'"),
                      (["--patience", "-1"], "--patience: expected a whole number, 0 to 1048576, got '-1'"),
                      (["--nonsense"], "nonsense"),
                      (["--data", "/nonexistent"], "/nonexistent"), (["--metrics", "/nonexistent/m"], "/nonexistent/m"),
                      (["--resume", "/nonexistent/c"], "/nonexistent/c")):
    for policy in ("single", "ddp"):
        text = run(*SMALL, "--policy", policy, *options, fails=True)
        assert part in text, f"{options}: the message doesn't say {part}: {text}"
