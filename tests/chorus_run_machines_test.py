#!/usr/bin/env python3
"""Launchers that find each other (--rdzv-backend c10d), each a chorus-run of its own on loopback: they number
themselves, restart together, and continue without a lost one, and with one that joins late or returns.
usage: chorus_run_machines_test.py CHORUS_RUN LAUNCH_PROBE"""

import os
import pathlib
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
SHOW = 'echo machine $GROUP_RANK of $GROUP_WORLD_SIZE, rank $RANK of $WORLD_SIZE, restart $TORCHELASTIC_RESTART_COUNT >>"$0"'
# A failing rank stops the others, so it waits until all have written a line: a busy machine starts them late.
SHOW_ALL = f'{SHOW}; until [ $(grep -c "restart $TORCHELASTIC_RESTART_COUNT" "$0") = $WORLD_SIZE ]; do sleep 0.02; done'


class Job:
    """Several launchers with the same command line, started one after another."""

    def __init__(self, nodes, *words, machines=0, conf="join_timeout=10,last_call_timeout=1", **environment):
        self.port = free_port()
        self.options = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", conf]
        self.words, self.environment, self.launchers = [str(word) for word in words], environment, []
        for _ in range(machines):
            self.add()

    def add(self, *more):
        self.launchers.append(subprocess.Popen([RUN, *self.options, *more, *self.words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                               env={**CLEAN, **self.environment}))
        if len(self.launchers) == 1:  # machine 0
            until(lambda: listens(self.port) or self.launchers[0].poll() is not None, "nobody listens")
        time.sleep(0.05)
        return self.launchers[-1]

    def ends(self, limit=20):
        """For each launcher: status, standard output and standard error."""
        end = time.monotonic() + limit
        results = []
        for launcher in self.launchers:
            out, err = launcher.communicate(timeout=end - time.monotonic())
            results.append((launcher.returncode, out, err))
        return results


def listens(port):
    with open("/proc/net/tcp") as table:
        return any(words[1] == f"0100007F:{port:04X}" and words[3] == "0A" for words in map(str.split, table))


def lines(file):
    return file.read_text().splitlines() if file.exists() else []


def machines_number_themselves():
    file = FOLDER / "numbers"
    job = Job(3, "--nproc-per-node", 2, "sh", "-c", SHOW, file, machines=3)
    results = job.ends()
    expect(all(result == (0, "", "") for result in results), results)
    expect(sorted(lines(file)) == [f"machine {r // 2} of 3, rank {r} of 6, restart 0" for r in range(6)], lines(file))
    results = Job(2, "--nproc-per-node", 2, PROBE, "--do", "reduce", machines=2).ends()
    expect(all(result[:2] == (0, "sum 10\nsum 10\n") for result in results), results)
    expect("no CHORUS_TOKEN is set: any user of this machine" in results[0][2] and results[1][2] == "", results)
    # The token belongs to the job: a launcher with another token can't join.
    job = Job(2, PROBE, "--do", "reduce", CHORUS_TOKEN="a secret of this test", conf="join_timeout=3")
    job.add()
    job.environment["CHORUS_TOKEN"] = "another secret, as long"
    stranger = job.add()
    expect("does not know the job's token" in stranger.communicate(timeout=10)[1] and stranger.returncode == 1, stranger.returncode)
    job.environment["CHORUS_TOKEN"] = "a secret of this test"
    job.add()
    del job.launchers[1]
    expect(all(result == (0, "sum 3\n", "") for result in job.ends()), job)
    say("machines that number themselves: ok")


def restarts_are_the_jobs():
    """If a rank fails on one machine, all ranks restart, and that counts as one restart."""
    for machine in range(2):
        file = FOLDER / f"restarts_{machine}"
        program = f'{SHOW_ALL}; [ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; [ $RANK = {machine} ] && exit 7; exec sleep 60'
        begin = time.monotonic()
        results = Job(2, "--max-restarts", 2, "sh", "-c", program, file, machines=2).ends()
        expect([result[0] for result in results] == [0, 0], results)
        expect(sorted(lines(file)) == sorted(f"machine {r} of 2, rank {r} of 2, restart {n}" for r in range(2) for n in range(3)), lines(file))
        expect("failed, exit status 7" in results[machine][2] and "ranks of another machine have failed: stopping 1 rank" in results[1 - machine][2], results)
        expect(all(err.count("restart 2 of 2") == 1 for _, _, err in results), results)
        expect(time.monotonic() - begin < 10, "a machine waited for ranks that had failed")
        # One failure too many: the job ends on both, and the failed rank's machine returns the rank's status.
        results = Job(2, "--max-restarts", 1, "sh", "-c", program, FOLDER / f"more_{machine}", machines=2).ends()
        expect(results[machine][0] == 7 and results[1 - machine][0] == 76, results)
        expect(f"rank {machine} has failed, and all restarts are used up" in results[1 - machine][2], results)
    # Ranks of all machines fail at once, twice: each time is one restart, since no machine waits for another's ranks.
    file = FOLDER / "at_once"
    program = f'{SHOW_ALL}; [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 7'
    results = Job(3, "--max-restarts", 2, "sh", "-c", program, file, machines=3).ends()
    expect([result[0] for result in results] == [0, 0, 0] and len(lines(file)) == 9, results, lines(file))
    results = Job(2, "--max-restarts", 3, "sh", "-c", "exit 2", machines=2).ends()
    expect([result[0] for result in results] == [2, 2] or sorted(result[0] for result in results) == [2, 76], results)
    say("restarts: ok")


def a_number_that_changes():
    # Ranks that notice a lost peer by themselves: of three machines, the last and then the second is killed.
    job = Job("1:3", PROBE, "--do", "ring", "--timeout", 5, machines=3)
    running = lambda: [len(children(launcher.pid)) for launcher in job.launchers]
    until(lambda: running() == [1, 1, 1], "no ranks")
    for left in (2, 1):
        for launcher in job.launchers[:left + 1]:
            expect(launcher.stdout.readline().startswith("ready"), left)
        before = [children(launcher.pid) for launcher in job.launchers[:left]]
        job.launchers[left].kill()
        until(lambda: all(children(l.pid) and children(l.pid) != b for l, b in zip(job.launchers, before)), "they did not go on with", left, "machines", limit=15)
    expect(job.launchers[0].stdout.readline().startswith("ready"), "the last one")
    job.launchers[0].terminate()
    status, _, err = job.ends()[0]
    expect(status == 128 + signal.SIGTERM and "continuing with 2 of 3 machines" in err and "continuing with 1 of 2 machines" in err and "restart" not in err, status, err)

    # Fewer than MIN machines are left: the job ends at the deadline with a message.
    job = Job("2:3", PROBE, "--do", "ring", "--timeout", 5, machines=2, conf="join_timeout=2,last_call_timeout=0.5")
    until(lambda: all(children(launcher.pid) for launcher in job.launchers), "no ranks")
    for launcher in job.launchers:
        expect(launcher.stdout.readline().startswith("ready"))
    job.launchers[1].kill()
    status, _, err = job.ends()[0]
    expect(status == 76 and "1 of 2 machines arrived within 2000 ms" in err, status, err)
    say("a number that changes: ok")


def starts_of(file, machines):
    """The lines of the last `machines` starts, sorted."""
    return sorted(lines(file)[-machines:])


def machines_that_come_later():
    started = lambda machines: [f"machine {r} of {machines}, rank {r} of {machines}, restart 0" for r in range(machines)]
    # Two machines of 1:3 run. A third makes them start anew with it, which is no restart; a fourth has to wait.
    file = FOLDER / "elastic"
    job = Job("1:3", "--log-dir", FOLDER / "logs", "sh", "-c", f"{SHOW}; exec sleep 60", file, machines=2, conf="join_timeout=3,last_call_timeout=1")
    until(lambda: len(lines(file)) == 2, "it did not form")
    expect(starts_of(file, 2) == started(2), lines(file))
    third = job.add()
    expect("the job runs on 2 machines: all restart with this machine" in third.stderr.readline(), "the third")
    until(lambda: len(lines(file)) == 5, "not with the third", lines(file))
    expect(starts_of(file, 3) == started(3), lines(file))
    _, err = job.add().communicate(timeout=10)
    fourth = job.launchers.pop()
    expect(fourth.returncode == 1 and "the job runs on 3 machines: waiting for a place" in err and "no place became free within 3000 ms" in err, fourth.returncode, err)
    expect(len(lines(file)) == 5, "they did not go on", lines(file))
    job.launchers[0].terminate()
    results = job.ends()
    expect(all(status == 76 and "machine 0 was sent SIGTERM" in err for status, _, err in results[1:]), results)
    status, _, err = results[0]
    expect(status == 128 + signal.SIGTERM and "a machine joins: stopping 1 rank" in err and "continuing with 3 machines instead of 2" in err, status, err)

    # A lost machine returns. One machine is then in excess, and replaces the next lost one.
    job = Job("1:2", PROBE, "--do", "ring", "--timeout", 5, machines=2, conf="join_timeout=20,last_call_timeout=2")
    ready = lambda launcher: expect(launcher.stdout.readline().startswith("ready"), "not ready:", launcher.poll() is not None and launcher.stderr.read())
    for launcher in job.launchers:
        ready(launcher)
    first, lost = job.launchers
    lost.kill()
    ready(first)
    back = job.add()
    ready(back)
    ready(first)
    spare = job.add()
    until(lambda: "waiting for a place" in spare.stderr.readline(), "it did not wait")
    back.kill()
    ready(spare)
    ready(first)
    for launcher in (spare, first):
        launcher.terminate()
    _, err = first.communicate(timeout=10)
    expect(first.returncode == 128 + signal.SIGTERM and "restart" not in err and err.count("a machine joins") == 1, first.returncode, err)
    expect("continuing with 1 of 2 machines" in err and "continuing with 2 machines instead of 1" in err, err)
    for launcher in (lost, back, spare):
        launcher.communicate(timeout=10)

    # A machine that joins after some ranks have ended gets no ranks, and stops none; if the job fails, so does it.
    file = FOLDER / "ended"
    job = Job("2:3", "sh", "-c", f"{SHOW}; [ $RANK = 1 ] || sleep 3", file, machines=2, conf="join_timeout=10,last_call_timeout=0.2")
    until(lambda: job.launchers[1].poll() == 0, "machine 1 did not end")
    job.add()
    results = job.ends()
    expect([result[0] for result in results] == [0, 0, 0] and "the job has succeeded without this machine" in results[2][2], results)
    expect(len(lines(file)) == 2, lines(file))
    job = Job(2, "sh", "-c", "[ $RANK = 1 ] && exec sleep 30; sleep 3; exit 7", machines=2)
    until(lambda: all(children(launcher.pid) for launcher in job.launchers), "no ranks")
    job.add()
    results = job.ends()
    expect([result[0] for result in results] == [7, 76, 1] and "rank 0 has failed, and all restarts are used up" in results[2][2], results)

    # A machine that joins and can't run its ranks gets no part, nor does one that gets a signal. Others don't wait.
    file = FOLDER / "unable"
    job = Job("1:3", "sh", "-c", f"{SHOW}; exec sleep 60", file, machines=2, conf="join_timeout=10,last_call_timeout=1")
    until(lambda: len(lines(file)) == 2, "it did not form")
    job.options[-1] = "join_timeout=10,last_call_timeout=30"
    for more, part in ((["--log-dir", "/proc/none"], "log folder /proc/none/attempt_1"), (["--grace", "1", "no such program"], "no such program: No such file")):
        before = len(lines(file))
        _, err = job.add(*more).communicate(timeout=10)
        expect(job.launchers.pop().returncode == 1 and part in err, err)
        until(lambda: len(lines(file)) >= before + 2 and starts_of(file, 2) == started(2), "two did not go on", lines(file))
    job.launchers[1].terminate()
    until(lambda: starts_of(file, 1) == started(1), "one did not go on", lines(file))
    job.launchers[0].terminate()
    expect([result[0] for result in job.ends()] == [128 + signal.SIGTERM] * 2, job)

    # Ranks that end successfully while others are stopped for a joining machine still start anew.
    file = FOLDER / "crossing"
    job = Job("2:3", "sh", "-c", f"{SHOW}; [ $GROUP_WORLD_SIZE = 3 ] || exec sleep $((60 - 59 * RANK))", file, machines=2, conf="join_timeout=10,last_call_timeout=5")
    until(lambda: len(lines(file)) == 2, "no ranks")
    os.kill(job.launchers[1].pid, signal.SIGSTOP)
    job.add()
    time.sleep(1.5)
    os.kill(job.launchers[1].pid, signal.SIGCONT)
    expect([result[0] for result in job.ends()] == [0, 0, 0] and starts_of(file, 3) == started(3), lines(file))
    say("machines that come later: ok")


def jobs_that_outlive_ranks():
    """Another process takes a killed rank's place; if a machine's launcher is killed, its ranks continue, and so does another
    launcher for them; if all its processes are killed, the other machine's ranks continue."""
    job = Job(2, "--nproc-per-node", 2, "--max-restarts", 1, PROBE, "--do", "outlive", "--size", 2, machines=2)
    first, second = job.launchers
    lost = int(next(line for line in iter(first.stdout.readline, "") if line.startswith("ready")).split()[2])
    os.kill(lost, signal.SIGKILL)
    until(lambda: len(children(first.pid)) == 3 and lost not in children(first.pid), "nobody in the lost one's place")
    until(lambda: len(children(second.pid)) == 3, "nobody stands by")
    ranks = children(second.pid)
    successor = ranks.pop()
    second.kill()
    until(lambda: children(successor), "nobody has taken over")
    os.kill(successor, signal.SIGSTOP)  # it starts no other one
    for victim in [*children(successor), *ranks, successor]:
        os.kill(victim, signal.SIGKILL)
    (status, out, err), other = job.ends()
    expect(status == 0 and out.count("of 2\n") == 2 and other[0] == -signal.SIGKILL, status, out, err, other)
    expect(f"(pid {lost}) was killed by SIGKILL; the others continue, and another process takes its place\n" in err, err)
    say("jobs that outlive ranks: ok")


def what_goes_wrong():
    begin = time.monotonic()
    job = Job(3, "true", machines=2, conf="join_timeout=1")
    results = job.ends()
    expect(results[0][0] == 1 and "2 of 3 machines arrived within 1000 ms" in results[0][2], results)
    expect(results[1][0] == 1 and "store.get: the server at" in results[1][2], results)
    job = Job(2, "sleep", 30)
    job.add()
    for more, part in ((["--rdzv-id", "other"], "expected the job 'none' there, got 'other'"), (["--nproc-per-node", "2"], "machine 0 starts 1 ranks, this machine 2")):
        wrong = job.add(*more)
        _, err = wrong.communicate(timeout=10)
        expect(wrong.returncode == 2 and part in err, more, wrong.returncode, err)
        job.launchers.pop()
        job.launchers[0].kill()
        job.launchers[0].communicate()
        job = Job(2, "sleep", 30)
        job.add()
    # A program that one machine does not have.
    job.words = ["no such program"]
    lacking = job.add()
    _, err = lacking.communicate(timeout=10)
    expect(lacking.returncode == 1 and "cannot start rank 1 of 2" in err, lacking.returncode, err)
    status, _, err = job.ends()[0]
    expect(status == 76 and "cannot start rank 1 of 2: no such program" in err, status, err)
    job = Job(2, "sleep", 30)
    job.add()
    # The machine with the store is killed: the others end.
    job.add()
    until(lambda: all(children(launcher.pid) for launcher in job.launchers), "no ranks")
    job.launchers[0].kill()
    other = job.launchers[1]
    os.kill(children(other.pid)[0], signal.SIGKILL)
    expect(job.ends()[1][0] == 128 + signal.SIGKILL, "the other one")
    done = subprocess.run([RUN, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "192.0.2.1:29400", "--rdzv-conf", "join_timeout=0.5", "true"],
                          capture_output=True, text=True, timeout=20, env={**CLEAN, "CHORUS_TOKEN": "a secret of this test"})
    expect(done.returncode == 1 and "no server answered at 192.0.2.1:29400" in done.stderr and "is not an address of this machine" in done.stderr, done)
    for words, part in ((["--nnodes=1:2"], "a range of machines needs --rdzv-backend c10d"), (["--nnodes=3:2"], "--nnodes: expected N or MIN:MAX"),
                        (["--nnodes=x"], "--nnodes: expected"), (["--nnodes=0"], "--nnodes: expected"), (["--monitor-interval=1"], "--monitor-interval is for"),
                        (["--rdzv-conf=join_timeout=5"], "--rdzv-conf and --local-addr are for"), (["--local-addr=127.0.0.1"], "--rdzv-conf and --local-addr are for"),
                        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=retries=5"], "--rdzv-conf: expected join_timeout=SECONDS"),
                        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=join_timeout=x"], "expected seconds"),
                        (["--nnodes=2", "--rdzv-backend=c10d", "--monitor-interval=nan"], "expected seconds")):
        done = subprocess.run([RUN, *words, "true"], capture_output=True, text=True, timeout=20, env=CLEAN)
        expect(done.returncode == 2 and part in done.stderr, words, done)
    own = socket.gethostname()
    if socket.gethostbyname(own).startswith("127."):
        for words in (["--rdzv-backend=c10d", f"--rdzv-endpoint={own}"], [f"--master-addr={own}", "--node-rank=0"]):
            done = subprocess.run([RUN, "--nnodes=2", *words, "true"], capture_output=True, text=True, timeout=20, env=CLEAN)
            expect(done.returncode == 2 and f"'{own}' is 127.0." in done.stderr and "no other machine can reach" in done.stderr, done)
    expect(time.monotonic() - begin < 20, "it took", time.monotonic() - begin)
    say("what goes wrong: ok")


machines_number_themselves()
restarts_are_the_jobs()
a_number_that_changes()
machines_that_come_later()
jobs_that_outlive_ranks()
what_goes_wrong()
