"""What the tests share that start programs, watch their processes and end them."""

import os
import pathlib
import socket
import time

started = time.monotonic()
# What a launcher around a test has set is none of its programs'.
CLEAN = {k: v for k, v in os.environ.items()
         if not k.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "CHORUS_", "PET_"))
         and k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")}


def say(text):
    """Prints it, behind the seconds since the test has begun."""
    print(f"{time.monotonic() - started:5.1f} s  {text}", flush=True)


def expect(condition, *what):
    if not condition:
        raise AssertionError(" ".join(map(str, what)))


def until(condition, *what, limit=10):
    """Waits for it to hold; `what` is said where it does not within `limit` seconds."""
    end = time.monotonic() + limit
    while not condition():
        expect(time.monotonic() < end, *what)
        time.sleep(0.01)


def shared_memory():
    """The names of what lies in shared memory, but for that of Open MPI, which another test may be running."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("vader_segment")}


def children(pid):
    """The processes that a process has started itself, and that are there."""
    try:
        return [int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def alive(pid):
    """Whether there is such a process, and it is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
