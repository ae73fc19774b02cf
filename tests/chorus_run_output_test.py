#!/usr/bin/env python3
"""Output of chorus-run's ranks: into files (--redirects), or files and screen (--tee). If nobody reads the output,
ranks are still supervised, and nothing is lost.
usage: chorus_run_output_test.py CHORUS_RUN"""

import os
import pathlib
import pty
import signal
import subprocess
import sys
import tempfile
import termios
import time

from processes import CLEAN, alive, children, expect, say, until

RUN = sys.argv[1]
temporary = tempfile.TemporaryDirectory(prefix="chorus_run_")
FOLDER = pathlib.Path(temporary.name)
BOTH = ["sh", "-c", "echo out $RANK; echo err $RANK >&2"]


def run(*words, limit=30, environment=None):
    """Status, and the sorted lines of standard output and standard error."""
    done = subprocess.run([RUN, *map(str, words)], capture_output=True, text=True, timeout=limit, env={**CLEAN, **(environment or {})})
    return done.returncode, sorted(done.stdout.splitlines()), sorted(done.stderr.splitlines())


def files(folder):
    """The contents of each file."""
    return {path.name: path.read_text() for path in folder.iterdir()}


def redirects_and_tees():
    logs = FOLDER / "both"
    status, out, err = run("--nproc-per-node", 2, "--log-dir", logs, "-r", 3, *BOTH)
    expect((status, out, err) == (0, [], []), status, out, err)
    wanted = {f"rank_{rank}.{name}.log": f"{name[3:]} {rank}\n" for rank in range(2) for name in ("stdout", "stderr")}
    expect(files(logs / "attempt_0") == wanted, files(logs / "attempt_0"))
    # One stream of each rank into a file; the other one on the screen.
    logs = FOLDER / "some"
    status, out, err = run("--nproc-per-node", 3, "--log-dir", logs, "--redirects=0:1,1:2", *BOTH)
    expect((status, out, err) == (0, ["out 1", "out 2"], ["err 0", "err 2"]), status, out, err)
    expect(files(logs / "attempt_0") == {"rank_0.stdout.log": "out 0\n", "rank_1.stderr.log": "err 1\n"}, files(logs / "attempt_0"))
    # Both into files and on the screen; --tee overrides --redirects; the other streams are unchanged.
    logs = FOLDER / "tee"
    status, out, err = run("--nproc-per-node", 2, "--log-dir", logs, "-t", "0:3,1:1", "--redirects", "1:3", *BOTH)
    expect((status, out, err) == (0, ["[rank 0] out 0", "[rank 1] out 1"], ["[rank 0] err 0"]), status, out, err)
    expect(files(logs / "attempt_0") == wanted, files(logs / "attempt_0"))
    # Only one rank is shown; the others' files are still complete.
    logs = FOLDER / "filter"
    status, out, err = run("--nproc-per-node", 2, "--log-dir", logs, "--tee", 3, "--local-ranks-filter", 1, *BOTH)
    expect((status, out, err) == (0, ["[rank 1] out 1"], ["[rank 1] err 1"]), status, out, err)
    expect(files(logs / "attempt_0") == wanted, files(logs / "attempt_0"))
    # A second job appends to the logs of the first.
    status, out, err = run("--nproc-per-node", 2, "--log-dir", logs, "-r", 3, *BOTH)
    expect(files(logs / "attempt_0") == {name: 2 * text for name, text in wanted.items()}, files(logs / "attempt_0"))
    # Without --log-dir the launcher creates a folder and prints its name. Each attempt has its own.
    status, out, err = run("--rdzv-id", "job7", "--max-restarts", 1, "sh", "-c", "echo $TORCHELASTIC_RESTART_COUNT; exit $((1 - TORCHELASTIC_RESTART_COUNT))",
                           environment={"PET_REDIRECTS": "1", "TMPDIR": str(FOLDER)})
    made = pathlib.Path(next(line for line in err if "logs are in" in line).split()[-1])
    expect(made.parent == FOLDER and made.name.startswith("chorus_job7_"), made)
    expect([files(made / f"attempt_{n}") for n in range(2)] == [{"rank_0.stdout.log": f"{n}\n"} for n in range(2)], status, err)
    for words, part in ((["-r", 4], "--redirects: expected 0 to 3 for all ranks"), (["-r", "0:1,2:1"], "ranks from 0 to 1, got 2:1"),
                        (["-t", "0:"], "--tee: expected"), (["-t", "1,1:1"], "--tee: expected"), (["-t", "x"], "got x")):
        status, out, err = run("--nproc-per-node", 2, *words, "true")
        expect(status == 2 and part in err[-1], words, status, err)
    say("redirects and tees: ok")


def torchruns_other_options():
    for option in ("-m", "--module", "--run_path", "--start-method=spawn", "--event-log-handler", "--logs_specs",
                   "--numa-binding"):
        status, out, err = run("--nproc-per-node", 2, option, "true")
        expect(status == 2 and err[-1].startswith(f"chorus: option {option} of torchrun is not supported: "), option, status, err)
    status, out, err = run("--signals-to-handle", "SIGTERM,SIGKILL", "true")
    expect(status == 2 and "SIGUSR2, got SIGKILL" in err[-1], status, err)
    for number, handled in ((signal.SIGUSR1, True), (signal.SIGTERM, False)):
        job = subprocess.Popen([RUN, "--signals-to-handle=SIGINT,SIGUSR1", "sleep", "60"], stderr=subprocess.PIPE, text=True, env=CLEAN)
        until(lambda: len(children(job.pid)) == 1, "no rank")
        rank = children(job.pid)[0]
        job.send_signal(number)
        _, err = job.communicate(timeout=10)
        expect(job.returncode == (128 + number if handled else -number), number, job.returncode)
        expect(("SIGUSR1: stopping 1 rank" in err) == handled, err)
        until(lambda: not alive(rank), "the rank stayed")
    say("torchrun's other options: ok")


class Still:
    """chorus-run with a reader that does not read: of a pipe, or of a terminal after Ctrl-S."""

    def __init__(self, terminal, *words):
        self.reader, writer = pty.openpty() if terminal else os.pipe()
        if terminal:
            termios.tcflow(writer, termios.TCOOFF)
        else:
            os.set_blocking(writer, False)
            try:
                while True:
                    os.write(writer, b"-" * 4095 + b"\n")
            except BlockingIOError:
                os.set_blocking(writer, True)
        self.job = subprocess.Popen([RUN, *map(str, words)], stdout=writer, stderr=writer, env=CLEAN)
        self.writer, self.terminal = writer, terminal

    def rest(self):
        """Reads to the end."""
        if self.terminal:
            termios.tcflow(self.writer, termios.TCOON)
        os.close(self.writer)
        text = b""
        try:
            while part := os.read(self.reader, 65536):
                text += part
        except OSError:  # the end of a terminal's output
            pass
        os.close(self.reader)
        return text.replace(b"\r\n", b"\n").decode()


def readers_that_stand_still():
    for terminal in (False, True):
        # Ranks with much output, one of which is killed: all restart, and the last attempt ends successfully.
        mark = FOLDER / f"done_{terminal}"
        program = f"""if [ $RANK$TORCHELASTIC_RESTART_COUNT = 11 ]; then touch {mark}; exit 0; fi
if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then echo begin; seq 1 10000000; sleep 60; fi"""
        still = Still(terminal, "--nproc-per-node", 2, "--max-restarts", 1, "--prefix", "sh", "-c", program)
        until(lambda: len(children(still.job.pid)) == 2, "no ranks")
        time.sleep(1)
        ranks = children(still.job.pid)
        resident = [line for line in pathlib.Path(f"/proc/{still.job.pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
        expect(int(resident[0].split()[1]) < 45_000, "memory of a launcher whose reader stands still:", resident)
        os.kill(ranks[1], signal.SIGKILL)
        until(mark.exists, "no restart while the reader stands still")
        until(lambda: not any(map(alive, ranks)), "ranks of the first attempt are there")
        expect(still.job.poll() is None, "it did not wait for its reader")
        text = still.rest()
        expect(still.job.wait(timeout=10) == 0, still.job.returncode)
        for rank in range(2):
            lines = [line[9:] for line in text.splitlines() if line.startswith(f"[rank {rank}] ")]
            numbers = [int(line) for line in lines[1:] if line]
            expect(lines[0] == "begin" and len(numbers) > 10_000, rank, lines[:3], len(lines))
            expect(numbers[:-1] == list(range(1, len(numbers))), "lines are lost")
        expect("was killed by SIGKILL; stopping the other rank" in text and "chorus: restart 1 of 1" in text, text[-300:])

        # Ranks that write to the terminal directly: the launcher's own messages don't block it.
        again = FOLDER / f"again_{terminal}"
        still = Still(terminal, "--nproc-per-node", 2, "--max-restarts", 3, "sh", "-c", f"echo $RANK >>{again}; [ $RANK = 0 ] || exit 5; exec sleep 60")
        until(lambda: again.exists() and again.read_text().count("1\n") == 4, "restarts wait for the reader")
        text = still.rest()
        expect(still.job.wait(timeout=10) == 5 and "chorus: restart 3 of 3" in text, still.job.returncode, text[-500:])

        # A signal ends it, whether or not somebody reads.
        still = Still(terminal, "--nproc-per-node", 2, "--prefix", "--grace", 1, "yes")
        until(lambda: len(children(still.job.pid)) == 2, "no ranks")
        ranks = children(still.job.pid)
        time.sleep(0.5)
        still.job.send_signal(signal.SIGTERM)
        expect(still.job.wait(timeout=5) == 128 + signal.SIGTERM, still.job.returncode)
        expect(not any(map(alive, ranks)), "a rank stayed")
        still.rest()
    say("readers that stand still: ok")


def output_that_is_lost():
    """Standard output on a full disk: the job succeeds, but its launcher reports a failure."""
    def status_of(*words, out="/dev/full"):
        with open(out, "w") as full:
            done = subprocess.run([RUN, *map(str, words)], stdout=full, stderr=subprocess.PIPE, text=True, timeout=30, env=CLEAN)
        return done.returncode, done.stderr
    lost = "chorus: standard output: not all of it could be written"
    status, err = status_of("--help")
    expect(status == 1 and err.startswith(lost), status, err)
    expect(status_of("--help", out="/dev/null") == (0, ""))
    for words in (["--prefix"], ["--log-dir", FOLDER / "full"]):
        expect(status_of("--nproc-per-node", 2, *words, "echo", "text") == (1, f"{lost}: No space left on device\n"), words)
        expect(status_of("--nproc-per-node", 2, *words, "echo", "text", out="/dev/null") == (0, ""), words)
        expect(status_of(*words, "sh", "-c", "echo text; exit 7")[0] == 7, words)
    # A reader that closes the pipe causes no error.
    job = subprocess.Popen([RUN, "--prefix", "sh", "-c", "echo one; sleep 1; echo two"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=CLEAN)
    expect(job.stdout.readline() == "[rank 0] one\n")
    job.stdout.close()
    expect((job.wait(timeout=20), job.stderr.read()) == (0, ""))
    say("output that is lost: ok")


def words_that_steer_terminals():
    for words in (["--nproc-per-node", "\x1b[2J", "true"], ["--nnodes", "\x1b[2J", "true"], ["--no\x1b[2J", "true"], ["--max-restarts", "\x1b[2J", "true"],
                  ["-r", "\x1b[2J", "true"], ["/nonexistent/\x1b[2J"]):
        status, out, err = run(*words)
        text = "\n".join(err)
        expect(status in (1, 2) and "\\x1b[2J" in text and "\x1b" not in text, words, status, err)
    status, out, err = run("true", environment={"PET_NPROC_PER_NODE": "\x1b[2J\nx"})
    expect(status == 2 and "got '\\x1b[2J\\x0ax'" in err[-1], status, err)
    say("words that steer terminals: ok")


redirects_and_tees()
output_that_is_lost()
words_that_steer_terminals()
torchruns_other_options()
readers_that_stand_still()
