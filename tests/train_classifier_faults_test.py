#!/usr/bin/env python3
"""Runs train_classifier under faults: bad options, bad files, full disks, ranks that die, hang or never come. Each
gives a message and a nonzero status soon, and leaves no process and no partial file. Then resuming after a kill, and
one trajectory under all policies over 100 steps.
usage: train_classifier_faults_test.py PROGRAM"""

import gzip
import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

import cifar_files
from processes import alive, free_port, say, shared_memory

PROGRAM = sys.argv[1]
temporary = tempfile.TemporaryDirectory(prefix="chorus_faults_")
FOLDER = pathlib.Path(temporary.name)
TINY = ["--train-images", "40", "--test-images", "10", "--epochs", "1", "--batch", "16", "--workers", "0", "--quiet"]


def run(*options, limit=20, environment=None, **more):
    """Status and output of a run that ends by itself."""
    done = subprocess.run([PROGRAM, *map(str, options)], capture_output=True, text=True, timeout=limit,
                          env={**os.environ, **(environment or {})}, **more)
    return done.returncode, done.stdout + done.stderr


def succeed(*options, **more):
    status, text = run(*options, **more)
    assert status == 0, f"{options}: exit status {status}\n{text}"
    return text


def refuse(parts, *options, lines=None, environment=None, **more):
    """The run fails with all of `parts` in its message, and does not change metrics and checkpoint."""
    metrics, checkpoint = FOLDER / "old.jsonl", FOLDER / "old.safetensors"
    metrics.write_text("old")
    checkpoint.write_text("old")
    if "--metrics" not in options:
        options += ("--metrics", metrics)
    if "--save" not in options:
        options += ("--save", checkpoint)
    before = sorted(FOLDER.iterdir())
    status, text = run(*options, environment=environment, **more)
    assert status > 0 and status != 124, f"{options}: exit status {status}\n{text}"
    for part in parts:
        assert part in text, f"{options}: the message doesn't say '{part}':\n{text}"
    assert "terminate" not in text, f"{options}: {text}"
    assert metrics.read_text() == "old" and checkpoint.read_text() == "old", f"{options}: a file was touched"
    assert sorted(FOLDER.iterdir()) == before, f"{options}: files were left"
    if lines is not None:
        assert len(text.splitlines()) == lines, f"{options}: expected {lines} lines:\n{text}"
    return text


def under_all(parts, *options, **more):
    for policy in (["single"], ["dp", "--devices", "2"], ["ddp", "--devices", "2"]):
        refuse(parts, *TINY, *options, "--policy", *policy, **more)


# --- Standard streams that are closed at the start: output does not go into an unrelated file or socket.

for closed in ([0], [1], [2], [0, 1, 2]):
    for policy in (["single"], ["ddp", "--devices", "2"]):
        metrics = FOLDER / "closed.jsonl"
        done = subprocess.run([PROGRAM, *TINY[:-1], "--policy", *policy, "--metrics", metrics, "--save", FOLDER / "closed.st"],
                              env={**os.environ, "CHORUS_BACKEND": "tcp"}, timeout=60, preexec_fn=lambda: [os.close(fd) for fd in closed],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert done.returncode == 0, f"{closed} {policy}: {done}"
        events = [json.loads(line)["event"] for line in metrics.read_text().splitlines()]
        assert events[-2:] == ["epoch", "done"] and set(events[:-2]) == {"step"}, events
for name in ("closed.jsonl", "closed.st"):
    (FOLDER / name).unlink()

# --- Options.

refuse(["--nonsense"], "--nonsense")
refuse(["--policy", "pipeline", "single", "dp", "ddp"], "--policy", "pipeline")
refuse(["--model", "resnet", "toy", "mlp"], "--model", "resnet")
refuse(["--optimizer", "lbfgs"], "--optimizer", "lbfgs")
refuse(["--devices", "0"], "--policy", "dp", "--devices", 0)
refuse(["--devices", "0"], "--policy", "ddp", "--devices", 0)
refuse(["--devices", "65"], "--policy", "ddp", "--devices", 65)
refuse(["--devices", "-1"], "--policy", "ddp", "--devices", -1)
refuse(["--devices", "two"], "--policy", "ddp", "--devices", "two")
refuse(["--policy single", "--devices 2"], "--policy", "single", "--devices", 2)
refuse(["--batch", "0"], "--batch", 0)
refuse(["--batch", "many"], "--batch", "many")
refuse(["--lr", "-1"], "--lr", -1)
refuse(["--seed"], "--seed")
refuse(["--timeout"], "--timeout", 0)
succeed(*TINY, "--policy", "ddp", "--devices", 3, "--batch", 2)  # one rank has no sample
refuse(["--lr", "nan"], "--lr", "nan")
text = succeed("--help")
for word in ("single", "dp", "ddp", "--batch", "--resume", "--metrics", "torchrun", "mpirun", "MNIST", "CIFAR"):
    assert word in text, f"--help doesn't say {word}"
say("bad options are refused, --help teaches")

# --- Data.


def idx(magic, *sizes, content=b""):
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + content


def mnist(name, train_images=None, train_labels=None, suffix=""):
    """A folder with 20 images of 28 x 28, with the given files in place of the defaults."""
    folder = FOLDER / name
    folder.mkdir()
    images, labels = idx(0x803, 20, 28, 28, content=bytes(20 * 784)), idx(0x801, 20, content=bytes(i % 10 for i in range(20)))
    write = (lambda path, data: path.write_bytes(gzip.compress(data))) if suffix else pathlib.Path.write_bytes
    write(folder / f"train-images-idx3-ubyte{suffix}", train_images if train_images is not None else images)
    write(folder / f"train-labels-idx1-ubyte{suffix}", train_labels if train_labels is not None else labels)
    write(folder / f"t10k-images-idx3-ubyte{suffix}", images)
    write(folder / f"t10k-labels-idx1-ubyte{suffix}", labels)
    return folder


succeed(*TINY, "--data", mnist("good"))
pixels = bytes(20 * 784)
bad_images = {
    "magic": idx(0x804, 20, 28, 28, content=pixels),
    "count": idx(0x803, 21, 28, 28, content=pixels),
    "cut": idx(0x803, 20, 28, 28, content=pixels[:-1]),
    "long": idx(0x803, 20, 28, 28, content=pixels + b"x"),
    "header": idx(0x803, 20)[:6],
    "empty": b"",
    "huge": idx(0x803, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, content=pixels),
    "flat": idx(0x803, 20, 0, 28),
}
for name, data in bad_images.items():
    under_all(["train-images-idx3-ubyte"], "--data", mnist(f"images_{name}", train_images=data))
    shutil.rmtree(FOLDER / f"images_{name}")
bad_labels = {
    "range": idx(0x801, 20, content=bytes(19) + b"\x0a"),
    "fewer": idx(0x801, 19, content=bytes(19)),
    "magic": idx(0x803, 20, content=bytes(20)),
    "cut": idx(0x801, 20, content=bytes(12)),
}
for name, data in bad_labels.items():
    under_all(["train-labels-idx1-ubyte"], "--data", mnist(f"labels_{name}", train_labels=data))
refuse(["label", "10"], *TINY, "--data", FOLDER / "labels_range")
zipped = mnist("zipped", suffix=".gz")
succeed(*TINY, "--data", zipped)
packed = (zipped / "train-images-idx3-ubyte.gz").read_bytes()
(zipped / "train-images-idx3-ubyte.gz").write_bytes(packed[:-9])
under_all(["train-images-idx3-ubyte.gz"], "--data", zipped)
under_all([str(FOLDER / "nowhere")], "--data", FOLDER / "nowhere")
(FOLDER / "void").mkdir()
under_all([str(FOLDER / "void")], "--data", FOLDER / "void")

cifar = FOLDER / "cifar"
cifar.mkdir()
cifar_files.write(cifar, images=4)
succeed(*TINY, "--data", cifar)
(cifar / "data_batch_3.bin").write_bytes(bytes(3073 * 4 - 1))
under_all(["data_batch_3.bin"], "--data", cifar)
(cifar / "data_batch_3.bin").write_bytes(b"\x0a" + bytes(3072))
under_all(["data_batch_3.bin", "label"], "--data", cifar)
(cifar / "data_batch_3.bin").unlink()
under_all(["data_batch_3.bin"], "--data", cifar)
say("bad data files are refused")

# The program of the README, with a good folder and without one.
quickstart = pathlib.Path(PROGRAM).with_name("quickstart")
if quickstart.exists():
    cifar_files.write(cifar, images=4)
    model = FOLDER / "model.safetensors"
    again = ["--devices", "2", "--seed", "1", "--epochs", "1"]
    done = subprocess.run([quickstart, "--data", cifar, "--save", model, *again], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and model.stat().st_size > 200_000, done.stderr
    done = subprocess.run([quickstart, *again], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "--data" in done.stderr, done.stderr
    done = subprocess.run([quickstart, "--data", FOLDER / "void", *again], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and str(FOLDER / "void") in done.stderr, done.stderr
    say("quickstart trains, and refuses")

# --- Checkpoints and output paths.

good = FOLDER / "good.safetensors"
succeed(*TINY, "--save", good)
content = good.read_bytes()
header_size = struct.unpack("<Q", content[:8])[0]
header = json.loads(content[8:8 + header_size])


def with_header(change):
    changed = json.loads(json.dumps(header))
    change(changed)
    text = json.dumps(changed).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + header_size:]


def overlap(tensors):
    first, second = sorted((t for n, t in tensors.items() if n != "__metadata__"), key=lambda t: t["data_offsets"])[:2]
    size = second["data_offsets"][1] - second["data_offsets"][0]
    second["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + size]


bad_checkpoints = {
    "empty": b"",
    "cut": content[:-5],
    "header_cut": content[:40],
    "hostile": struct.pack("<Q", 2**63) + content[8:],
    "long": struct.pack("<Q", len(content)) + content[8:],
    "overlap": with_header(overlap),
    "no_json": struct.pack("<Q", 7) + b'{"a": [' + content[8 + header_size:],
    "foreign": b"PK\x03\x04 this is a zip archive",
    "position": with_header(lambda h: h["__metadata__"].update({"training/step": "-4"})),
}
for name, data in bad_checkpoints.items():
    bad = FOLDER / f"bad_{name}"
    bad.write_bytes(data)
    under_all([str(bad)], "--resume", bad)
refuse([str(FOLDER / "absent")], *TINY, "--resume", FOLDER / "absent")
under_all([str(good), "fc1.weight (expected F32 [256, 3072], got F32 [120, 400])", "unexpected: ", "conv1.weight",
           "training/momentum.conv2.bias"], "--resume", good, "--model", "mlp")
under_all([str(good), "missing: training/exp_avg.", "unexpected: training/momentum."], "--resume", good, "--optimizer", "adam")
for policy in ("single", "ddp"):
    for place in ("nowhere/file", "void", "good.safetensors/file"):
        for option in ("--save", "--metrics"):
            refuse([str(FOLDER / place)], *TINY, option, FOLDER / place, "--policy", policy)

# A full disk: the limit is above the size of the ranks' shared memory, and below a checkpoint's 6 MB.
limit = (5_000_000, 5_000_000)
for policy in ("single", "ddp"):
    # SIGXFSZ has its default action: a write of the program's own would end it.
    status, text = run(*TINY, "--model", "mlp", "--save", good, "--policy", policy,
                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert status == 1 and str(good) in text and "File too large" in text, f"status {status}: {text}"
    assert good.read_bytes() == content, "a save that failed changed the old checkpoint"
    assert not list(FOLDER.glob(".good*")), "a temporary file was left"
status, text = run(*TINY, "--metrics", "/dev/full")
assert status == 1 and "/dev/full" in text and "No space left" in text, f"status {status}: {text}"
for policy in ("single", "dp", "ddp"):
    loud = [word for word in TINY if word != "--quiet"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, *loud, "--policy", policy], stdout=full, stderr=subprocess.PIPE, text=True, timeout=20)
    assert done.returncode == 1 and "standard output: not all of it could be written" in done.stderr, f"{policy}: {done}"
say("bad checkpoints and full disks are refused")

# --- Ranks that don't meet.


def place(rank, size, port):
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    refuse([str(port), "in use"], *TINY, "--policy", "ddp", "--timeout", 5, environment=place(0, 2, port))
begun = time.monotonic()
refuse(["rank 1", "did not"], *TINY, "--policy", "ddp", "--timeout", 1, environment=place(0, 2, free_port()))
refuse(["rank 1", "rank 0"], *TINY, "--policy", "ddp", "--timeout", 1, environment=place(1, 2, free_port()))
assert time.monotonic() - begun < 6
refuse(["MASTER_PORT"], *TINY, "--policy", "ddp", environment={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
refuse(["RANK", "2"], *TINY, "--policy", "ddp", environment=place(2, 2, free_port()))

port = free_port()
joined = [subprocess.Popen([PROGRAM, *TINY, "--policy", "ddp", "--metrics", str(FOLDER / f"joined{rank}.jsonl")],
                           env={**os.environ, **place(rank, 2, port)}) for rank in (0, 1)]
assert [process.wait(20) for process in joined] == [0, 0]
assert (FOLDER / "joined0.jsonl").exists() and not (FOLDER / "joined1.jsonl").exists(), "rank 0 alone writes"
say("ranks that don't meet are named, those that do train")

# --- Ranks that end during training.


def ranks_of(supervisor):
    """Pids by rank of the processes that a supervisor has started."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) != supervisor:
                continue
            variables = dict(item.split("=", 1) for item in (entry / "environ").read_text().split("\0") if "=" in item)
            found[int(variables["RANK"])] = int(entry.name)
        except (OSError, KeyError, IndexError):
            continue
    return found


class Training:
    """A long run on three ranks that has written some steps."""

    def __init__(self, *options):
        self.metrics = FOLDER / "long.jsonl"
        self.metrics.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [PROGRAM, "--policy", "ddp", "--devices", "3", "--train-images", "600", "--test-images", "10", "--batch", "20",
             "--epochs", "100000", "--workers", "0", "--quiet", "--metrics", str(self.metrics), *map(str, options)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        limit = time.monotonic() + 60
        while not (self.metrics.exists() and '"epoch"' in self.metrics.read_text()):
            if self.process.poll() is not None or time.monotonic() > limit:
                self.process.kill()
                raise AssertionError("the run doesn't start")
            time.sleep(0.02)
        self.ranks = ranks_of(self.process.pid)
        assert sorted(self.ranks) == [0, 1, 2], self.ranks

    def end(self, limit=5):
        """Status and output, after all processes have ended within `limit`."""
        begun = time.monotonic()
        text, _ = self.process.communicate(timeout=limit)
        while any(alive(pid) for pid in self.ranks.values()):
            assert time.monotonic() - begun < limit, "a rank lives on"
            time.sleep(0.02)
        return self.process.returncode, text


shared_before = shared_memory()
for victim in (0, 1, 2):
    training = Training()
    os.kill(training.ranks[victim], signal.SIGKILL)
    status, text = training.end()
    assert status == 128 + 9, f"status {status}: {text}"
    assert f"rank {victim} (pid {training.ranks[victim]}) was killed by SIGKILL" in text, text
training = Training()
os.killpg(training.process.pid, signal.SIGINT)  # like Ctrl-C
status, text = training.end()
assert status == 128 + 2 and "SIGINT" in text, f"status {status}: {text}"
training = Training()
os.kill(training.process.pid, signal.SIGTERM)  # only the supervisor
status, text = training.end()
assert status == 128 + 15 and "SIGTERM" in text, f"status {status}: {text}"
training = Training()
os.kill(training.process.pid, signal.SIGKILL)
training.end()
training = Training("--timeout", "1")
os.kill(training.ranks[2], signal.SIGSTOP)
status, text = training.end(8)
assert status > 0 and "rank 2" in text and "1000 ms" in text, f"status {status}: {text}"
assert shared_memory() <= shared_before, "shared memory was left"
say("a rank that is killed or stopped, Ctrl-C and a killed supervisor end all ranks soon")

# --- Runs that continue.


def log(*options):
    """Losses and hash."""
    path = FOLDER / "log.jsonl"
    succeed(*options, "--metrics", path, limit=60)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"], events[-1]["parameters_sha256"]


# A run that is killed at any time resumes from its last checkpoint with the same results: with dropout, augmentation, a
# schedule and clipping, which vary from step to step.
RICH = ["--model", "mlp", "--train-images", "200", "--test-images", "10", "--batch", "30", "--epochs", "3", "--augment",
        "--schedule", "cosine", "--clip", "1", "--quiet"]
for policy, devices, optimizer, stop in (("single", 1, "sgd", 10), ("single", 1, "adam", 14), ("dp", 2, "adam", 3), ("dp", 3, "sgd", 10),
                                         ("ddp", 2, "sgd", 10), ("ddp", 3, "adam", 5), ("ddp", 3, "sgd", 10)):
    options = [*RICH, "--policy", policy, "--devices", devices, "--optimizer", optimizer, "--lr", 0.01 if optimizer == "sgd" else 0.001]
    losses, whole = log(*options)
    first, _ = log(*options, "--steps", stop, "--save", FOLDER / "stopped")
    rest, resumed = log(*options, "--resume", FOLDER / "stopped")
    assert first + rest == losses and resumed == whole, f"{policy} {devices} {optimizer}: a resumed run differs"
    assert len(losses) == 21 and len(first) == stop
    if (policy, stop) == ("ddp", 10):  # on other devices up to rounding
        for other, count in (("single", 1), ("dp", 2)):
            elsewhere, _ = log(*options, "--policy", other, "--devices", count, "--resume", FOLDER / "stopped")
            assert max(abs(a / b - 1) for a, b in zip(elsewhere, rest, strict=True)) < 1e-3, f"{policy} resumed as {other}"
# A complete run does nothing when resumed, and prints the same hash.
_, again = log(*options, "--resume", FOLDER / "stopped", "--save", FOLDER / "complete")
nothing, same = log(*options, "--resume", FOLDER / "complete")
assert nothing == [] and same == again == whole
# --save-every also writes at an epoch's last step, before the epoch is over.
first, _ = log(*options, "--steps", 7, "--save", FOLDER / "edge")
edge = (FOLDER / "edge").read_bytes()
for old, new in (('epoch":"1"', 'epoch":"0"'), ('batch":"0"', 'batch":"7"')):
    assert edge.count(f'"training/{old}'.encode()) == 1, edge[:2000]
    edge = edge.replace(f'"training/{old}'.encode(), f'"training/{new}'.encode())
(FOLDER / "edge").write_bytes(edge)
rest, resumed = log(*options, "--resume", FOLDER / "edge")
assert first + rest == losses and resumed == whole, "a run resumed at the end of an epoch differs"

training = Training("--save", FOLDER / "killed", "--save-every", 7, "--seed", 4)
time.sleep(0.3)
os.kill(training.ranks[1], signal.SIGKILL)
training.end()
written = [json.loads(line) for line in training.metrics.read_text().splitlines() if line.endswith("}")]
step = int(json.loads((lambda data: data[8:8 + struct.unpack("<Q", data[:8])[0]])((FOLDER / "killed").read_bytes()))["__metadata__"]["training/step"])
assert step > 0 and (step % 7 == 0 or step % 30 == 0), step
after, _ = log("--policy", "ddp", "--devices", 3, "--train-images", 600, "--test-images", 10, "--batch", 20, "--epochs", 100000, "--workers", 0,
               "--quiet", "--seed", 4, "--resume", FOLDER / "killed", "--steps", step + 20)
before = {event["step"]: event["loss"] for event in written if event["event"] == "step"}
common = [(before[step + i], loss) for i, loss in enumerate(after) if step + i in before]
assert all(a == b for a, b in common), "a run that was killed goes on differently"
say("resumed runs end as if they had not stopped")

# 100 steps, every 16th of which has a batch that doesn't divide. The learning rate is small: with a large one, a ReLU
# whose input changes sign by rounding would make the policies diverge.
hundred = ["--model", "mlp", "--train-images", 1000, "--test-images", 10, "--batch", 64, "--steps", 100, "--epochs", 7, "--lr", 0.001, "--quiet"]
expected, _ = log(*hundred)
assert len(expected) == 100
for policy, devices in (("dp", 2), ("dp", 3), ("ddp", 2), ("ddp", 3)):
    losses, first = log(*hundred, "--policy", policy, "--devices", devices)
    worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    assert worst < 1e-4, f"{policy} on {devices} leaves the single device's trajectory by {worst}"
    assert log(*hundred, "--policy", policy, "--devices", devices) == (losses, first), "a repeated run differs"
say("100 steps agree under all policies")
