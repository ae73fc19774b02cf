#!/usr/bin/env python3
"""Runs programs under chorus-run: the ranks' environment, their output, how a job ends; and a training run whose ranks
are killed repeatedly, on one machine or two, ends with the parameters of an undisturbed run.
usage: chorus_run_test.py CHORUS_RUN TRAIN_CLASSIFIER [KILLS]"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from processes import CLEAN, children, expect, free_port, say, shared_memory

RUN, TRAIN = sys.argv[1:3]
KILLS = int(sys.argv[3]) if len(sys.argv) > 3 else 20
temporary = tempfile.TemporaryDirectory(prefix="chorus_run_")
FOLDER = pathlib.Path(temporary.name)


def run(*words, limit=30, environment=None):
    """Status, standard output and standard error."""
    done = subprocess.run([RUN, *map(str, words)], capture_output=True, text=True, timeout=limit,
                          env={**CLEAN, **(environment or {})})
    return done.returncode, done.stdout, done.stderr


def environment_of_ranks():
    status, out, err = run("--nproc-per-node", 3, "--rdzv-id", "job7", "--max-restarts", 2, "--prefix", "sh", "-c",
                           "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_RANK "
                           "$ROLE_WORLD_SIZE $ROLE_NAME $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS "
                           "$TORCHELASTIC_RUN_ID $OMP_NUM_THREADS")
    expect(status == 0, status, err)
    wanted = [f"[rank {r}] {r} {r} 3 3 0 1 {r} 3 default 127.0.0.1 0 2 job7 1" for r in range(3)]
    expect(sorted(out.splitlines()) == wanted, out)
    # The second of two machines: its ranks are 2 and 3.
    status, out, err = run("--nnodes", 2, "--node-rank", 1, "--nproc-per-node", 2, "--master-addr", "127.0.0.1",
                           "--prefix", "sh", "-c", "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $MASTER_PORT")
    expect(sorted(out.splitlines()) == ["[rank 2] 2 0 4 1 29500", "[rank 3] 3 1 4 1 29500"], out, err)
    say("environment: ok")


def options_pass_through():
    small = ["--train-images", 96, "--test-images", 32, "--epochs", 1, "--batch", 48, "--quiet"]
    status, out, err = run("--nproc-per-node", 2, TRAIN, "--policy", "ddp", "--device", "3,1", *small)
    expect(status == 0, status, out, err)
    status, out, err = run("--nproc-per-node", 2, TRAIN, "--policy", "ddp", "--device", "0", *small)
    expect(status == 2 and "--device 0: expected one device for each of the 2 processes that the launcher started on "
           "this machine, got 1" in err, status, out, err)
    say("--device: ok")


def torchrun_command_lines():
    """The command lines in torchrun's documentation, for a program that is not Python."""
    show = ["sh", "-c", "echo $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $ROLE_NAME"]
    status, out, err = run("--nnodes=1", "--nproc-per-node=2", "--rdzv-id=7", "--rdzv-backend=static",
                           "--rdzv-endpoint=127.0.0.1:29511", "--role=trainer", "--no-python", *show)
    expect((status, out) == (0, "2 127.0.0.1 29511 trainer\n" * 2), status, out, err)
    status, out, err = run("--nnodes=2", "--node-rank=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost", *show)
    expect((status, out) == (0, "2 localhost 29400 default\n"), status, out, err)
    status, out, err = run("--nnodes=2", "--node-rank=1", "--rdzv_endpoint=[::1]:5000", *show)
    expect((status, out) == (0, "2 ::1 5000 default\n"), status, out, err)
    status, out, err = run("--nnodes=2", "--node-rank=1", "--rdzv-endpoint=::1", *show)
    expect((status, out) == (0, "2 ::1 29500 default\n"), status, out, err)
    status, out, err = run("--nnodes=2", "--node-rank=1", "--master-addr=[::1]", *show)
    expect((status, out) == (0, "2 ::1 29500 default\n"), status, out, err)
    for visible, ranks in (("0,3", "2"), ("0,-1,1", "1")):
        status, out, err = run("--nproc-per-node=gpu", *show, environment={"CUDA_VISIBLE_DEVICES": visible})
        expect(status == 0 and out.startswith(f"{ranks} "), visible, status, out, err)
    status, out, err = run("--nproc-per-node=gpu", *show, environment={"CUDA_VISIBLE_DEVICES": "-1"})
    expect(status == 2 and "this machine has no GPU" in err, status, out, err)
    cores = len(os.sched_getaffinity(0))
    for word in ("cpu", "auto"):
        status, out, err = run("--nproc_per_node", word, "--standalone", *show)
        expect(status == 0 and out.count("\n") == min(cores, 64) and out.startswith(f"{min(cores, 64)} "), word, status, out, err)
    status, out, err = run(*show, environment={"PET_NPROC_PER_NODE": "3", "PET_MASTER_PORT": "29512", "PET_ROLE": "env"})
    expect((status, out) == (0, "3 127.0.0.1 29512 env\n" * 3), status, out, err)
    # The option overrides the variable.
    status, out, err = run("--nproc-per-node", 2, *show, environment={"PET_NPROC_PER_NODE": "3"})
    expect(status == 0 and out.count("\n") == 2, status, out, err)
    status, out, err = run("--nproc-per-node", 4, "--prefix", "--local-ranks-filter", "1,3", "sh", "-c", "echo $RANK; echo late >&2")
    expect(sorted(out.splitlines()) == ["[rank 1] 1", "[rank 1] late", "[rank 3] 3", "[rank 3] late"] and not err, out, err)
    logs = FOLDER / "filtered"
    status, out, err = run("--nproc-per-node", 2, "--local_ranks_filter", 0, "--log-dir", logs, "sh", "-c", "echo $RANK")
    expect(out == "[rank 0] 0\n" and (logs / "attempt_0" / "rank_1.log").read_text() == "1\n", out, err)
    for words, part in ((["--rdzv-backend=etcd"], "--rdzv-backend"), (["--nproc-per-node=tpu"], "--nproc-per-node"),
                        (["--rdzv-endpoint=h:0x"], "--rdzv-endpoint: expected HOST or HOST:PORT, got 'h:0x'"),
                        (["--rdzv-endpoint=h:70000"], "--rdzv-endpoint: expected HOST or HOST:PORT, got 'h:70000'"),
                        (["--rdzv-endpoint=[::1"], "--rdzv-endpoint: expected HOST or HOST:PORT, got '[::1'"),
                        (["--rdzv-endpoint=h:1", "--master-port=2"], "--rdzv-endpoint"),
                        (["--nproc-per-node=2", "--local-ranks-filter=2"], "--local-ranks-filter: expected ranks from 0 to 1, got 2")):
        status, out, err = run(*words, *show)
        expect(status == 2 and part in err and not out, words, status, out, err)
    status, out, err = run(*show, environment={"PET_NPROC_PER_NODE": "many"})
    expect(status == 2 and "PET_NPROC_PER_NODE" in err and "many" in err, status, out, err)
    say("torchrun's command lines: ok")


def logs_and_prefixes():
    logs = FOLDER / "logs"
    status, out, err = run("--nproc-per-node", 2, "--log-dir", logs, "--max-restarts", 1, "sh", "-c",
                           'echo attempt $TORCHELASTIC_RESTART_COUNT; echo to stderr >&2; printf "no end"; exit $((1 - TORCHELASTIC_RESTART_COUNT))')
    expect(status == 0, status, err)
    for attempt in range(2):
        for rank in range(2):
            text = (logs / f"attempt_{attempt}" / f"rank_{rank}.log").read_text()
            if attempt == 1:
                expect(text == f"attempt {attempt}\nto stderr\nno end\n", text)
                for line in (f"attempt {attempt}", "to stderr", "no end"):
                    expect(f"[rank {rank}] {line}\n" in out, out)
    expect("chorus: restart 1 of 1" in err, err)
    big = "x" * 3_000_000  # far more than a pipe holds, in one line
    status, out, err = run("--nproc-per-node", 2, "--prefix", sys.executable, "-c", f"print('x' * {len(big)})")
    expect(out.count("x") == 2 * len(big), len(out))
    say("logs: ok")


def endings():
    status, out, err = run("--nproc-per-node", 3, "--max-restarts", 2, "sh", "-c",
                           "if [ $RANK = 1 ]; then exit 7; fi; exec sleep 30")
    expect(status == 7, status, err)
    expect(err.count("rank 1 (pid ") == 3 and err.count("failed, exit status 7") == 3, err)
    expect(err.splitlines().index("chorus: restart 2 of 2") == 3, err)
    status, out, err = run("--nproc-per-node", 2, "--max-restarts", 2, "sh", "-c", "exit 2")
    expect(status == 2 and "restart" not in err, err)  # no restart for a wrong option
    for words, part in ((["--nproc-per-node", 2], "no program to start"), (["--nproc-per-node", 2, "no such program"], "No such file"),
                        (["--nproc-pernode", 2, "true"], "unknown option --nproc-pernode"), (["--nnodes", 2, "--node-rank", 2, "true"], "--node-rank 2"),
                        (["--nnodes", 2, "--standalone", "true"], "--standalone: expected one machine"),
                        (["--nnodes", 9, "--nproc-per-node", 9, "true"], "9 machines x 9 ranks are more than 64")):
        status, out, err = run(*words)
        expect(status in (1, 2) and part in err, words, status, err)
    for name in ("SIGTERM", "SIGINT"):
        job = subprocess.Popen([RUN, "--nproc-per-node", "2", "--max-restarts", "3", "sleep", "30"], stderr=subprocess.PIPE, text=True, env=CLEAN)
        while len(children(job.pid)) < 2:
            time.sleep(0.01)
        ranks = children(job.pid)
        job.send_signal(getattr(signal, name))
        _, err = job.communicate(timeout=10)
        expect(job.returncode == 128 + getattr(signal, name), job.returncode)
        expect(f"{name}: stopping 2 ranks" in err and "restart" not in err, err)
        expect(not any(pathlib.Path(f"/proc/{pid}").exists() for pid in ranks), "a rank stayed")
    say("endings: ok")


def hash_of(metrics):
    last = json.loads(metrics.read_text().splitlines()[-1])
    expect(last["event"] == "done", last)
    return last["parameters_sha256"]


def killed_again_and_again():
    options = ["--policy", "ddp", "--model", "mlp", "--optimizer", "adam", "--train-images", "600", "--test-images", "40", "--batch", "10",
               "--epochs", "3", "--augment", "--workers", "0", "--quiet", "--save-every", "1", "--timeout", "10"]
    undisturbed = FOLDER / "undisturbed.jsonl"
    status, out, err = run("--nproc-per-node", 2, TRAIN, *options, "--save", FOLDER / "undisturbed.safetensors", "--metrics", undisturbed, limit=300)
    expect(status == 0, err)
    checkpoint, metrics = FOLDER / "killed.safetensors", FOLDER / "killed.jsonl"
    shared_before = shared_memory()
    job = subprocess.Popen([RUN, "--nproc-per-node", "2", "--max-restarts", str(KILLS), TRAIN, *options, "--save", str(checkpoint),
                            "--resume", "auto", "--metrics", str(metrics)], stderr=subprocess.PIPE, text=True, env=CLEAN)
    chance = random.Random(7)
    before = set()
    for kill in range(KILLS):
        limit = time.monotonic() + 60
        saved = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        in_start = kill % 4 == 3  # a quarter of the kills hits ranks that are just starting
        while True:
            expect(time.monotonic() < limit and job.poll() is None, f"no progress before kill {kill}", job.poll())
            ranks = set(children(job.pid)) - before
            if len(ranks) == 2 and (in_start or (checkpoint.exists() and checkpoint.stat().st_mtime_ns != saved)):
                break
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.06))
        before |= ranks
        os.kill(chance.choice(sorted(ranks)), signal.SIGKILL)
    _, err = job.communicate(timeout=300)
    expect(job.returncode == 0, job.returncode, err)
    expect(err.count("was killed by SIGKILL") == KILLS and f"restart {KILLS} of {KILLS}" in err, err)
    expect(hash_of(metrics) == hash_of(undisturbed), "the parameters differ from the undisturbed run's")
    first = json.loads(metrics.read_text().splitlines()[0])  # of the last attempt, which resumed
    expect(first["event"] == "step" and first["step"] >= KILLS // 2, first)
    left = [path.name for path in FOLDER.glob("killed.safetensors?*")]
    expect(not left, "left behind:", left)
    expect(shared_memory() <= shared_before, shared_memory() - shared_before)
    say(f"{KILLS} kills: the same parameters")


class TwoMachines:
    """Two launchers of one job, two ranks each, that rendezvous on loopback."""

    def __init__(self, restarts, *words):
        port = free_port()
        self.launchers = [subprocess.Popen(
            [RUN, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port",
             str(port), "--max-restarts", str(restarts), TRAIN, *map(str, words)], stderr=subprocess.PIPE, text=True, env=CLEAN)
            for node in range(2)]

    def ranks(self, node):
        return set(children(self.launchers[node].pid))

    def await_ranks(self, node, before=frozenset()):
        limit = time.monotonic() + 60
        while len(self.ranks(node) - before) < 2:
            expect(time.monotonic() < limit and self.launchers[node].poll() is None, f"node {node} does not start", self.launchers[node].poll())
            time.sleep(0.002)
        return self.ranks(node) - before

    def ends(self, node, limit):
        """Status and standard error."""
        _, err = self.launchers[node].communicate(timeout=limit)
        return self.launchers[node].returncode, err


def two_machines_start_again():
    options = ["--policy", "ddp", "--model", "mlp", "--optimizer", "adam", "--train-images", "600", "--test-images", "40", "--batch", "12",
               "--epochs", "3", "--augment", "--workers", "0", "--quiet", "--save-every", "1", "--timeout", "20"]
    undisturbed = FOLDER / "one_machine.jsonl"
    status, out, err = run("--nproc-per-node", 4, TRAIN, *options, "--save", FOLDER / "one_machine.safetensors", "--metrics", undisturbed, limit=300)
    expect(status == 0, err)
    checkpoint, metrics = FOLDER / "machines.safetensors", FOLDER / "machines.jsonl"
    job = TwoMachines(6, *options, "--save", checkpoint, "--resume", "auto", "--metrics", metrics)
    before = [set(), set()]
    # A rank of machine 1, of rank 0's machine, then of machine 1 as it starts, while the other waits for it.
    for node, local_rank, in_start in ((1, 1, False), (0, 0, False), (1, 0, True), (0, 1, False)):
        ranks = [job.await_ranks(n, before[n]) for n in range(2)]
        saved = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        limit = time.monotonic() + 60
        while not in_start and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns != saved):
            expect(time.monotonic() < limit, "no checkpoint before a kill")
            time.sleep(0.001)
        # The other machine's ranks end too, unless they still wait for this one's: then they join its new ranks.
        before = [before[n] | (ranks[n] if n == node or not in_start else set()) for n in range(2)]
        os.kill(sorted(ranks[node])[local_rank], signal.SIGKILL)
    errors = []
    for node in range(2):
        status, err = job.ends(node, 300)
        expect(status == 0, node, status, err)
        errors.append(err)
    expect([err.count("was killed by SIGKILL") for err in errors] == [2, 2], *errors)
    for err in errors:  # the kills on one machine also ended the other's ranks
        expect(err.count("restart ") >= 3, err)
    expect(hash_of(metrics) == hash_of(undisturbed), "the parameters differ from the undisturbed run's")
    first = json.loads(metrics.read_text().splitlines()[0])
    expect(first["event"] == "step" and first["step"] > 0, first)
    say("two machines, 4 kills: the same parameters")


def a_machine_that_is_gone():
    options = ["--policy", "ddp", "--model", "mlp", "--train-images", "6000", "--test-images", "40", "--batch", "4", "--epochs", "1000",
               "--workers", "0", "--quiet", "--timeout", "3"]
    for gone, part in ((1, "ranks 2, 3 of 4 did not arrive within 3000 ms"), (0, "rank 0 did not answer within 3000 ms")):
        job = TwoMachines(1, *options)
        orphans = job.await_ranks(gone)
        job.await_ranks(1 - gone)
        time.sleep(2)
        job.launchers[gone].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        status, err = job.ends(1 - gone, 30)
        expect(status not in (0, 2), status, err)
        # Its ranks lose the others, restart once, and wait for them until the deadline.
        expect("restart 1 of 1" in err and part in err, err)
        expect(time.monotonic() - killed < 15, time.monotonic() - killed)
        job.launchers[gone].wait()
        expect(not any(pathlib.Path(f"/proc/{pid}").exists() for pid in orphans), "a rank outlived its launcher")
    say("a launcher that is killed: ok")


environment_of_ranks()
options_pass_through()
torchrun_command_lines()
logs_and_prefixes()
endings()
killed_again_and_again()
two_machines_start_again()
a_machine_that_is_gone()
