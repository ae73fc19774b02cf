#!/usr/bin/env python3
"""Runs the CUDA tests and benchmarks on a machine with a GPU, in phases of under 8 minutes each on 16 cores.

    tests/gpu.sh [PHASE...]                    builds, and runs all phases, or those, in their order here
    tests/gpu.sh --pack FOLDER                 builds for sm_80 and sm_90 and any processor, and puts the programs in
                                               FOLDER, stripped, to be carried to another machine
    tests/gpu.sh --packed FOLDER [PHASE...]    runs what lies there: without compilers or packages

First of all it compares the driver with the CUDA of the programs.

Phases, each of which fits a call of 10 minutes:
    tests      every test file, and the reference numbers in float and bf16; tensors of more than 2^31 numbers
    repeat     training steps three times: the same bits
    faults     a rank that is killed, a program that is killed in a replay, labels and memory that don't fit
    bench      training steps beside PyTorch's, in the same call, each case judged
    attention  attention by products of stacks and by blocks, from 1024 tokens on
    nsys       Nsight Systems' reports of training steps, with the nodes of graphs
    memcheck, initcheck                  compute-sanitizer over all test files, each tensor in memory of its own
    racecheck, synccheck                 compute-sanitizer over the kernels that share memory in a block

Options:
    --build DIR      where it builds (build-gpu)
    --run-only       takes what stands in DIR already
    --results DIR    where the logs, results.json and results.tar.gz with all of them go (DIR of --build or --packed,
                     /results, or /results-PHASE)
    --torch FILE     times the same cases in PyTorch as `FILE --device cuda --mode MODE CASE...`, with the modes eager,
                     compile and graphs (tests/benchmarks/torch_train.py)
    --limit SECONDS  of a phase (470)

CUDA's libraries are taken from where the loader finds them, from the toolkit in /usr/local/cuda, or from Python's
packages. Where cuDNN or NCCL is missing, that is said, and the tests that need it are skipped. A line a check: PASSED,
FAILED or SKIPPED. Ends with 0 where none failed, 1 where one did or had no time left, 2 for wrong options, 77 without
a GPU, or with a driver that is too old.
"""
import glob
import os
import pathlib
import shutil
import subprocess
import sys

from gpu_phases import PHASES, Run
from gpu_programs import PROGRAMS, Programs, pack

ROOT = pathlib.Path(__file__).resolve().parents[2]
DRIVERS = {12: 525, 13: 580}  # the oldest of each CUDA: NVIDIA's release notes, table "CUDA Toolkit and Minimum Required Driver Version"


def fail(message, status=2):
    print(f"tests/gpu.sh: {message}", file=sys.stderr)
    sys.exit(status)


def options(arguments):
    found = {"pack": "", "packed": "", "build": "", "results": "", "limit": "470", "torch": "", "run-only": False}
    phases, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        name = word.removeprefix("--")
        if word in ("--help", "-h"):
            print(__doc__)
            sys.exit(0)
        if not word.startswith("-"):
            if word not in PHASES:
                fail(f"unknown phase '{word}'; known are {', '.join(PHASES)}")
            phases.append(word)
            continue
        if not word.startswith("--") or name not in found:
            fail(f"unknown option '{word}'; --help names all")
        if name == "run-only":
            found[name] = True
        elif not rest:
            fail(f"--{name} needs a value")
        else:
            found[name] = rest.pop(0)
    found["phases"] = [phase for phase in PHASES if phase in phases or not phases]
    if not found["limit"].isdigit() or int(found["limit"]) == 0:
        fail(f"--limit: expected seconds, got '{found['limit']}'")
    if found["packed"] and (found["pack"] or found["build"]):
        fail("--packed goes with neither --pack nor --build")
    return found


def build(folder, architectures, *more):
    """Configures and builds the target gpu; its output lies in gpu-build.log."""
    os.environ["PATH"] += ":/usr/local/cuda/bin"
    for tool in ("cmake", "nvcc"):
        if not shutil.which(tool):
            fail(f"{tool} is missing", 1)
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("ninja"):
        os.environ.setdefault("CMAKE_GENERATOR", "Ninja")
    configure = ["cmake", "-S", ROOT, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", "-DCHORUS_WITH_CUDA=ON",
                 "-DCHORUS_BUILD_EXAMPLES=OFF", f"-DCMAKE_CUDA_ARCHITECTURES={architectures}", *more]
    with open(folder / "gpu-build.log", "w+") as log:
        for command in (configure, ["cmake", "--build", folder, "-j", str(os.cpu_count()), "--target", "gpu"]):
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode:
                log.seek(0)
                print("".join(log.readlines()[-50:]))
                fail("the build failed", 1)


def gpus():
    try:
        run = subprocess.run(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"],
                             capture_output=True, text=True)
    except OSError:
        return []
    return [line for line in run.stdout.splitlines() if line.strip()] if run.returncode == 0 else []


def check_driver(gpu, programs):
    """A driver that is older than the programs' CUDA needs NVIDIA's package cuda-compat: it is used where it is there."""
    driver, cuda = gpu.split(",")[2].strip(), programs.cuda_version()
    needed = DRIVERS.get(cuda)
    if needed is None or int(driver.split(".")[0]) >= needed:
        return print(f"driver {driver}, programs of CUDA {cuda or 'unknown'}", flush=True)
    compat = next(iter(sorted(glob.glob(f"/usr/local/cuda-{cuda}*/compat/libcuda.so.1") + glob.glob("/usr/local/cuda/compat/libcuda.so.1"))), None)
    if compat is None:
        fail(f"driver {driver} is too old: CUDA {cuda} needs {needed}; update it, or install the package cuda-compat-{cuda}-0 of "
             "NVIDIA's repository (data centre GPUs alone), which this script then finds in /usr/local/cuda/compat", 77)
    print(f"driver {driver}, programs of CUDA {cuda}: with cuda-compat, {compat}", flush=True)
    programs.put_first(os.path.dirname(compat))


def main():
    chosen = options(sys.argv[1:])
    folder = pathlib.Path(chosen["build"] or "build-gpu").resolve()
    if chosen["pack"]:
        if not chosen["run-only"]:
            build(folder, "80-real;90", "-DCHORUS_NATIVE=OFF")
        try:
            pack(folder / "tests", pathlib.Path(chosen["pack"]).resolve())
        except (OSError, subprocess.CalledProcessError) as error:
            fail(f"--pack: {error}", 1)
        return
    found = gpus()
    if not found:
        fail("this machine has no NVIDIA GPU, or no driver for it (nvidia-smi finds none)", 77)
    if chosen["packed"]:
        folder = programs_in = pathlib.Path(chosen["packed"]).resolve()
    else:
        programs_in = folder / "tests"
        if not chosen["run-only"]:
            build(folder, found[0].split(",")[1].strip().replace(".", ""), "-DCHORUS_TESTS_AT_ONCE=1")
    programs = Programs(programs_in)
    if not programs.there:
        fail(f"{programs_in} has none of the programs {', '.join(PROGRAMS)}", 1)
    check_driver(found[0], programs)
    some = "" if chosen["phases"] == list(PHASES) else "-" + "-".join(chosen["phases"])
    results = pathlib.Path(chosen["results"]).resolve() if chosen["results"] else folder / f"results{some}"
    torch = pathlib.Path(chosen["torch"]).resolve() if chosen["torch"] else ROOT / "tests/benchmarks/torch_train.py"
    os.chdir(ROOT)
    run = Run(programs, found, results, torch, int(chosen["limit"]))
    for phase in chosen["phases"]:
        run.phase(phase)
    sys.exit(run.finish())


if __name__ == "__main__":
    main()
