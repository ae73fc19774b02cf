#!/usr/bin/env python3
"""chorus-run under faults around it: scripts between it and the ranks, processes that ranks leave behind, odd output,
full disks, programs that fail at once, launchers that disagree or are killed.
usage: chorus_run_faults_test.py CHORUS_RUN LAUNCH_PROBE"""

import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

from processes import CLEAN, alive, children, expect, free_port, say, until

RUN, PROBE = sys.argv[1:3]
temporary = tempfile.TemporaryDirectory(prefix="chorus_run_")
FOLDER = pathlib.Path(temporary.name)
SCRIPT = ["sh", "-c", '"$@"; exit $?', "sh"]  # a shell that stays between the launcher and the rank


def run(*words, limit=30, **more):
    """Status, standard output and standard error."""
    done = subprocess.run([RUN, *map(str, words)], capture_output=True, timeout=limit, env=CLEAN, **more)
    return done.returncode, done.stdout, done.stderr.decode()


def scripts_between():
    """A program that a script starts is a rank, and its errors are reported."""
    status, out, err = run("--nproc-per-node", 2, *SCRIPT, PROBE, "--do", "reduce")
    expect((status, out, err) == (0, b"sum 3\nsum 3\n", ""), status, out, err)
    status, out, err = run("--nproc-per-node", 2, *SCRIPT, PROBE, "--do", "throw", "--rank", 1)
    expect(status == 1 and "chorus: rank 1: load: no such file: weights\n" in err, status, err)
    # Python closes descriptors that a child should inherit: the rendezvous socket, and the pipe for error reports.
    closing = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"]
    status, out, err = run("--nproc-per-node", 2, *closing, PROBE, "--do", "reduce", "--timeout", 2)
    expect(status == 2 and "CHORUS_RENDEZVOUS_FD must be" in err, status, err)
    status, out, err = run("--nproc-per-node", 1, sys.executable, "-c", """
import os, subprocess, sys
number = int(os.environ["CHORUS_REPORT_FD"])
with open(sys.argv[2], "w") as file:
    file.write("mine")
    file.flush()
    os.dup2(file.fileno(), number)  # the number has another meaning now
    os.environ["CHORUS_RENDEZVOUS_FD"] = ""
    sys.exit(subprocess.run([sys.argv[1], "--do", "throw", "--rank", "0"], pass_fds=[number]).returncode)
""", PROBE, FOLDER / "other", )
    expect(status == 1 and "no such file: weights" in err, status, err)
    expect((FOLDER / "other").read_text() == "mine", (FOLDER / "other").read_text())
    say("scripts between launcher and ranks: ok")


def killed_launchers():
    """No process outlives a killed launcher, even if the program does not use chorus."""
    for words in (["sleep", "60"], [PROBE, "--do", "stubborn"], [*SCRIPT, PROBE, "--do", "stubborn"]):
        job = subprocess.Popen([RUN, "--nproc-per-node", "2", *words], stdout=subprocess.PIPE, env=CLEAN)
        until(lambda: len(children(job.pid)) == 2, "no ranks")
        if PROBE in words:
            for _ in range(2):
                expect(job.stdout.readline().startswith(b"ready"), words)
        ranks = children(job.pid)
        ranks += [child for rank in ranks for child in children(rank)]
        expect(len(ranks) == (4 if "sh" in words else 2), ranks)
        job.kill()
        job.wait()
        until(lambda: not any(map(alive, ranks)), words, "outlived the launcher")
        job.stdout.close()
    say("killed launchers: ok")


def signals_while_ranks_stop():
    """A signal ends the job, even while ranks are being stopped for a restart; a second one kills them at once."""
    for patience in (None, 0.2):
        job = subprocess.Popen([RUN, "--nproc-per-node", "2", "--max-restarts", "5", "--grace", "4", "sh", "-c",
                                "[ $RANK = 1 ] && { sleep 0.3; exit 7; }; trap 'sleep 1; exit 0' TERM; echo ready; while :; do sleep 0.05; done"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=CLEAN)
        expect(job.stdout.readline() == "ready\n", "no rank")
        line = job.stderr.readline()
        expect("rank 1" in line and "stopping the other rank" in line, line)
        begin = time.monotonic()
        job.terminate()
        if patience:
            time.sleep(patience)
            job.terminate()
        job.wait(timeout=10)
        took = time.monotonic() - begin
        err = job.communicate()[1]  # after a shell's own child has ended
        expect(job.returncode == 7 and "restart" not in err, job.returncode, err)
        expect(took < 0.7 if patience else took > 0.7, patience, took)
    say("signals while ranks stop: ok")


def a_port_that_is_held():
    """A process that rank 0 leaves behind keeps the rendezvous socket open, and a restart needs the port."""
    port = free_port()
    status, out, err = run("--nproc-per-node", 2, "--master-port", port, "--max-restarts", 2, "sh", "-c",
                           '[ $RANK = 0 ] && sleep 3 & [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 7; exec "$0" --do reduce', PROBE)
    expect((status, out) == (0, b"sum 3\nsum 3\n") and err.count("failed, exit status 7") == 2, status, out, err)
    say("a port that is held: ok")


def stopped_and_continued():
    # In its own process group, like a shell's job: an orphaned process group can't be stopped.
    job = subprocess.Popen([RUN, "--nproc-per-node", "2", "sh", "-c", "sleep 0.5; exit 3"], stderr=subprocess.PIPE,
                           text=True, env=CLEAN, preexec_fn=os.setpgrp)
    until(lambda: len(children(job.pid)) == 2, "no ranks")
    job.send_signal(signal.SIGTSTP)
    time.sleep(1)  # the ranks end meanwhile
    expect(job.poll() is None, "it did not stop")
    job.send_signal(signal.SIGCONT)
    _, err = job.communicate(timeout=5)
    expect(job.returncode == 3 and "failed, exit status 3" in err, job.returncode, err)
    say("stopped and continued: ok")


def output():
    # A process that a rank has left behind keeps the pipe open, and continues to write.
    begin = time.monotonic()
    status, out, err = run("--nproc-per-node", 2, "--prefix", "sh", "-c",
                           "(i=0; while [ $i -lt 1000 ]; do echo busy; i=$((i + 1)); sleep 0.01; done) & printf last")
    expect(status == 0 and out.count(b"last") == 2 and time.monotonic() - begin < 5, status, out, time.monotonic() - begin)
    # Arbitrary bytes, unterminated lines, many lines.
    noise = random.Random(3).randbytes(300_000).replace(b"\n", b"\0")
    (FOLDER / "noise").write_bytes(noise)
    status, out, err = run("--nproc-per-node", 1, "--prefix", "cat", FOLDER / "noise")
    expect(status == 0 and out == b"[rank 0] " + noise + b"\n", status, len(out))
    status, out, err = run("--nproc-per-node", 3, "--prefix", "seq", 1, 50_000)
    lines = out.split(b"\n")
    for rank in range(3):
        mine = [line[9:] for line in lines if line.startswith(f"[rank {rank}] ".encode())]
        expect(mine == [str(i).encode() for i in range(1, 50_001)], rank, len(mine))
    # A slow reader of a non-blocking pipe.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    job = subprocess.Popen([RUN, "--nproc-per-node", "2", "--prefix", "seq", "1", "50000"], stdout=writer, env=CLEAN)
    os.close(writer)
    time.sleep(0.3)
    with open(reader, "rb") as pipe:
        expect(pipe.read().count(b"\n") == 100_000, "lines are lost")
    expect(job.wait() == 0, job.returncode)
    # If the reader closes the pipe, no rank ends.
    done = subprocess.run(["sh", "-c", f'("{RUN}" --nproc-per-node 1 --prefix sh -c "seq 1 100000; exit 5"; echo $? >"{FOLDER}/status") | head -1'],
                          capture_output=True, timeout=20, env=CLEAN)
    expect(done.stdout == b"[rank 0] 1\n" and (FOLDER / "status").read_text() == "5\n", done)
    # A full disk: one message, and the ranks continue.
    logs = FOLDER / "logs"
    (logs / "attempt_0").mkdir(parents=True)
    (logs / "attempt_0" / "rank_0.log").symlink_to("/dev/full")
    status, out, err = run("--nproc-per-node", 1, "--log-dir", logs, "seq", 1, 50_000)
    expect(status == 0 and out.count(b"\n") == 50_000, status)
    expect(err == "chorus: rank 0's log is not complete: No space left on device\n", err)
    (FOLDER / "file").write_text("")
    status, out, err = run("--nproc-per-node", 1, "--log-dir", FOLDER / "file", "true")
    expect(status == 1 and f"log folder {FOLDER}/file/attempt_0: Not a directory" in err, status, err)
    say("output: ok")


def what_cannot_start():
    (FOLDER / "plain").write_text("not executable")
    for word, part in ((FOLDER, "Permission denied"), (FOLDER / "plain", "Permission denied"), (FOLDER / "none", "No such file"), ("", "No such file")):
        status, out, err = run("--nproc-per-node", 2, "--max-restarts", 3, word)
        expect(status == 1 and f"cannot start rank 0 of 2: {word}: {part}" in err and "restart" not in err, status, err)
    for words, part in ((["--grace", "nan"], "--grace: expected a number, 0 to 3600, got 'nan'"), (["--grace", "inf"], "--grace"),
                        (["--max-restarts", "-1"], "--max-restarts: expected a whole number, at least 0, got '-1'"),
                        (["--node-rank", "99999999999"], "--node-rank"), (["--nproc-per-node", "0x"], "--nproc-per-node"),
                        (["--master-port", "0"], "--master-port: expected a whole number, 1 to 65535, got '0'"), (["--nnodes", ""], "--nnodes")):
        status, out, err = run(*words, "true")
        expect(status == 2 and part in err, words, status, err)
    # Decimal numbers: 010 means ten restarts, not eight.
    status, out, err = run("--max-restarts", "010", "--standalone", "sh", "-c", "echo $TORCHELASTIC_MAX_RESTARTS")
    expect(status == 0 and out == b"10\n", status, out, err)
    done = subprocess.run([RUN, "--redirects", "3", "true"], capture_output=True, text=True, env={**CLEAN, "TMPDIR": "/proc"})
    expect(done.returncode == 1 and "cannot make a folder for logs" in done.stderr and "Success" not in done.stderr, done)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, out, err = run("--nproc-per-node", 2, "--master-port", port, "true")
        expect(status == 1 and f"cannot listen on 127.0.0.1:{port}: Address already in use" in err, status, err)
    status, out, err = run("--nproc-per-node", 2, "--master-addr", "no such host", "true")
    expect(status == 1 and "address 'no such host'" in err, status, err)
    for words in (["--master-addr", "::1"], ["--master-addr", "[::1]"], ["--rdzv-endpoint", f"[::1]:{free_port()}"]):
        status, out, err = run("--nproc-per-node", 2, *words, PROBE, "--do", "reduce", "--backend", "tcp")
        expect((status, out) == (0, b"sum 3\nsum 3\n") or "Cannot assign requested address" in err or "Address family" in err, status, out, err)
    begin = time.monotonic()
    status, out, err = run("--nproc-per-node", 2, "--max-restarts", 5, "false")
    expect(status == 1 and err.count("restart ") == 5 and time.monotonic() - begin > 0.9, "a busy loop:", time.monotonic() - begin, err)
    say("what cannot start: ok")


def several_calls_of_launch():
    """Ranks make each launch call that main makes, and rendezvous at their own socket for each."""
    status, out, err = run("--nproc-per-node", 2, "--master-port", free_port(), PROBE, "--main", "as it is")
    for number in (1, 2):
        for rank in (0, 1):
            expect(status == 0 and out.count(f"setting {number}: rank {rank} of 2, sum 2\n".encode()) == 1, status, out, err)
    expect(out.count(b"setting 0: rank 0 of 1, sum 1\n") == 2 and err.count("chorus:") == 1 and "each does all of the work" in err, out, err)
    # A failure that main ignores does not fail the run, but it is reported.
    status, out, err = run("--nproc-per-node", 2, PROBE, "--main", "ignores", "--fail", 2)
    expect(status == 0 and out.count(b"setting 1: ") == 2 and err.count("setting 2 has no file") == 2, status, out, err)
    say("several calls of launch: ok")


def launchers_that_disagree():
    for second in (["--nnodes", "3", "--node-rank", "1"], ["--nnodes", "2", "--node-rank", "0"]):
        port = str(free_port())
        jobs = [subprocess.Popen([RUN, *words, "--master-port", port, PROBE, "--do", "reduce", "--timeout", "2"], stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True, env=CLEAN) for words in (["--nnodes", "2", "--node-rank", "0"], second)]
        errors = [job.communicate(timeout=15)[1] for job in jobs]
        expect(all(job.returncode in (1, 76) for job in jobs), [job.returncode for job in jobs], errors)
        part = "expects 3 ranks, rank 0 expects 2" if "3" in second else "Address already in use"
        expect(any(part in err for err in errors) and all(err.startswith("chorus: ") for err in errors), errors)
    say("launchers that disagree: ok")


def closed_streams():
    """Output does not go into an unrelated file or socket if the standard streams are closed at the start."""
    for closed in ([0], [1], [2], [0, 1, 2]):
        logs = FOLDER / "closed" / "".join(map(str, closed))
        status, out, err = run("--nproc-per-node", 2, "--log-dir", logs, PROBE, "--do", "reduce",
                               preexec_fn=lambda: [os.close(fd) for fd in closed])
        expect(status == 0 and err == "", closed, status, out, err)
        for rank in (0, 1):
            text = "".join(log.read_text() for log in logs.rglob(f"rank_{rank}.log"))
            expect(text == "sum 3\n", closed, text)
    say("closed standard streams: ok")


scripts_between()
closed_streams()
killed_launchers()
signals_while_ranks_stop()
a_port_that_is_held()
stopped_and_continued()
output()
what_cannot_start()
launchers_that_disagree()
several_calls_of_launch()
