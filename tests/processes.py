"""Shared by tests that start programs, watch their processes and end them."""

import os
import pathlib
import socket
import time

started = time.monotonic()
# Variables that a launcher has set for the test itself are not passed to its programs.
CLEAN = {k: v for k, v in os.environ.items()
         if not k.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "CHORUS_", "PET_"))
         and k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")}


def say(text):
    """Prints the text after the seconds since the start of the test."""
    print(f"{time.monotonic() - started:5.1f} s  {text}", flush=True)


def expect(condition, *what):
    if not condition:
        raise AssertionError(" ".join(map(str, what)))


def until(condition, *what, limit=10):
    """Waits until the condition holds; fails with the message `what` after `limit` seconds."""
    end = time.monotonic() + limit
    while not condition():
        expect(time.monotonic() < end, *what)
        time.sleep(0.01)


def shared_memory():
    """The names in shared memory, except Open MPI's, which another test may be using."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("vader_segment")}


def children(pid):
    """The living direct children of a process."""
    try:
        return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def alive(pid):
    """Whether the process exists and is not a zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
