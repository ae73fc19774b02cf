"""What tests/gpu.sh runs in each phase, and what it writes down: a log a check, results.json, and an archive of all."""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tarfile
import threading
import time

import gpu_bench
from gpu_programs import OPTIONAL

NEEDS = {"cudnn": r"[cC]onv\d|cudnn|training_step\.hpp", "nccl": r"nccl|NCCL"}  # in the source of a test file
WITH_CONVOLUTIONS = re.compile(r"conv|train_")  # reference numbers
# Test files whose kernels share memory within a block, or all kernels of a step.
WITH_BARRIERS = ["arrays_test", "attention_test", "losses_test", "reduction_test", "training_test"]
ATTENTION = ["attention_1024", "attention_2048", "attention_4096"]
REPEATED = {"train_step_cuda": ["mlp_b64", "gpt_b16", "resnet18_b32"], "train_step_large_cuda": ["gpt2_124m_b8_bf16"]}


class Run:
    def __init__(self, programs, gpus, results, torch, limit):
        self.programs, self.gpus, self.results, self.torch, self.limit = programs, gpus, results, torch, limit
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir(parents=True)
        self.checks, self.times, self.phases = [], [], {}
        self.lock = threading.Lock()
        self.began = self.phase_began = time.monotonic()
        self.missing = {OPTIONAL[library] for library in programs.missing & OPTIONAL.keys()}
        for gpu in gpus:
            self.say(gpu)
        for library in sorted(programs.missing):
            self.say(f"missing: {library}")
        with open(results / "environment.log", "w") as log:
            for command in (["nvidia-smi"], ["nvidia-smi", "-q"], ["nvidia-smi", "topo", "-m"], ["lscpu"], ["uname", "-a"],
                            ["python3", "-c", "import torch; print(torch.__config__.show())"]):
                print("$", *command, file=log, flush=True)
                if shutil.which(command[0]):
                    subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=60)

    def say(self, text):
        print(f"{time.monotonic() - self.began:.0f} s: {text}", flush=True)

    def note(self, name, status, detail, **facts):
        """Writes a check down; `status` is passed, failed or skipped."""
        with self.lock:
            self.checks.append({"phase": self.current, "name": name, "status": status, "detail": detail, **facts})
            self.say(f"{status.upper()} {name}: {detail}")

    def left(self):
        return self.limit - (time.monotonic() - self.phase_began)

    def has(self, name, program, needs=()):
        """Whether a check can run; where not, that is noted."""
        absent = sorted(self.missing & set(needs))
        if program not in self.programs.there:
            self.note(name, "skipped", f"there is no {program}")
        elif self.programs.unloadable and self.programs.lacking([program]):
            self.note(name, "skipped", "libraries are missing: " + " ".join(sorted(self.programs.lacking([program]))))
        elif absent:
            self.note(name, "skipped", "it needs " + " and ".join(k for k, v in OPTIONAL.items() if v in absent))
        else:
            return True
        return False

    def check(self, name, limit, command, judge=None, **environment):
        """Runs a command within its time and what is left of the phase's; returns what it wrote. `judge(text)` says what
        else is wrong."""
        limit = min(limit, self.left())
        if limit <= 0:
            self.note(name, "failed", "no time left to run it")
            return ""
        path, began = self.results / f"{name}.log", time.monotonic()
        with open(path, "w") as log:
            process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=subprocess.STDOUT,
                                       env={**self.programs.environment, **environment}, start_new_session=True)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            self.end(process)
        text = path.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        last = lines[-1] if lines else "it wrote nothing"
        no_gpu = next((line for line in lines if "SKIPPED: no CUDA device" in line), None)
        wrong = judge(text) if judge else None
        if status is None:
            outcome = "failed", f"not done after {limit:.0f} s; last line: {last}"
        elif no_gpu:
            outcome = "failed", f"it found no GPU: {no_gpu}"
        elif status == -signal.SIGILL:
            outcome = "failed", "an instruction that this processor lacks: build with -DCHORUS_NATIVE=OFF, or --pack"
        elif status != 0:
            outcome = "failed", f"status {status}: {last}"
        else:
            outcome = ("failed", wrong) if wrong else ("passed", last)
        self.note(name, *outcome, seconds=round(time.monotonic() - began, 1), exit=status, log=path.name)
        return text

    def end(self, process):
        """Nothing that a check has started outlives it."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def phase(self, name):
        self.current, self.phase_began = name, time.monotonic()
        PHASES[name](self)
        self.phases[name] = round(time.monotonic() - self.phase_began, 1)
        self.write()

    def write(self):
        facts = {"gpus": self.gpus, "missing_libraries": sorted(self.programs.missing), "seconds_of_phases": self.phases,
                 "checks": self.checks, "times": self.times}
        (self.results / "results.json").write_text(json.dumps(facts, indent=1) + "\n")
        with tarfile.open(self.results.with_name(self.results.name + ".tar.gz"), "w:gz") as archive:
            archive.add(self.results, self.results.name)

    def finish(self):
        count = {status: sum(check["status"] == status for check in self.checks) for status in ("passed", "failed", "skipped")}
        self.say(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped: {self.results}/results.json")
        return 1 if count["failed"] or not count["passed"] else 0


def test_files():
    """(name, libraries it needs, source) of the test files of unit_cuda."""
    for source in sorted(pathlib.Path("tests/cuda").glob("*_test.cu")):
        text = source.read_text()
        yield source.stem, [library for library, words in NEEDS.items() if re.search(words, text)], text


def tests(run):
    for name, needs, _ in test_files():
        if run.has(name, "unit_cuda", needs):
            run.check(name, 120, [run.programs.there["unit_cuda"], "-#", f"[#{name}]"])
    if len(run.gpus) == 1:
        run.note("several_gpus", "skipped", "copies between two GPUs, and DataParallel over NCCL: there is one GPU")
    numbers = pathlib.Path("tests/golden")
    if "cudnn" in run.missing:
        chosen = run.results / "golden_without_convolutions"
        shutil.copytree(numbers, chosen, ignore=lambda _, names: [n for n in names if WITH_CONVOLUTIONS.match(n)])
        numbers = chosen
        run.note("golden_convolutions", "skipped", "it needs libcudnn.so.9")
    for name in ("golden_cuda", "golden_cuda_bf16"):
        if run.has(name, name):
            run.check(name, 100, [run.programs.there[name], numbers])


def faults(run):
    if run.has("rank_killed", "unit_cuda", ["nccl"]):
        run.check("rank_killed", 120, [run.programs.there["unit_cuda"], "nccl on one GPU: one of two is killed and the other ends"])
    for name, case in (("bad_label", "a bad label is an error at the next wait"),
                       ("failed_capture", "a capture that failed has left nothing behind when it is tried again"),
                       ("end_of_memory", "memory is accounted by kind, apart from the CPU's, and its end is an error that says so")):
        if run.has(name, "unit_cuda"):
            run.check(name, 60, [run.programs.there["unit_cuda"], case])
    if run.has("killed_in_a_replay", "train_step_cuda"):
        killed_in_a_replay(run)


def killed_in_a_replay(run):
    """A program that is killed while it replays graphs leaves a GPU behind that the next one trains on."""
    program = run.programs.there["train_step_cuda"]
    with subprocess.Popen([program, "mlp_b64"], stdout=subprocess.PIPE, text=True, env=run.programs.environment,
                          start_new_session=True) as process:
        line = process.stdout.readline()  # of the eager steps; those as a graph take seconds
        time.sleep(2)
        alive = process.poll() is None
        run.end(process)
    if "mode=eager" not in line or not alive:
        run.note("killed_in_a_replay", "failed", f"it ended before it was killed; it had written '{line.strip()}'")
        return
    run.check("killed_in_a_replay", 60, [program, "mlp_b64"], lambda text: None if "mode=graphs" in text else "no replays after it")


def sanitizer(tool):
    """A phase: compute-sanitizer's `tool` over test files, four at a time, each in memory of its own for every tensor, as
    the tools know the driver's allocations alone."""

    def phase(run):
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if not program:
            run.note(tool, "skipped", "compute-sanitizer is missing")
            return
        # Tests provoke errors of CUDA's calls, and look at them themselves.
        flags = ["--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
        exact = {"CHORUS_CUDA_EXACT_MEMORY": "1"} if tool in ("memcheck", "initcheck") else {}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            started = []
            for name, needs, text in test_files():
                check = f"{tool}_{name}"
                if not exact and name not in WITH_BARRIERS:
                    continue
                if re.search(r"processes\.hpp|comm/nccl\.hpp", text):
                    run.note(check, "skipped", "it starts processes of its own, or runs NCCL's kernels")
                elif name == "large_test":
                    run.note(check, "skipped", "under compute-sanitizer its tensors take hours")
                elif run.has(check, "unit_cuda", needs):
                    command = [program, *flags, run.programs.there["unit_cuda"], "-#", f"[#{name}]"]
                    started.append(pool.submit(run.check, check, 300, command, **exact))
            for check in started:
                check.result()

    return phase


def attention(run):
    """Attention by stacks of products and by blocks: the times of both, for the limit at which the library changes over."""
    if run.has("attention", "train_step_large_cuda"):
        text = run.check("attention", 300, [run.programs.there["train_step_large_cuda"], *ATTENTION],
                         lambda text: None if text.count("mode=blocks") == len(ATTENTION) else "not all were timed")
        gpu_bench.keep(run, "chorus", text)


def repeat(run):
    """Two runs of a program end with the same bits; a third takes the steps one by one, without overlap."""
    for program, cases in REPEATED.items():
        cases = [case for case in cases if "cudnn" not in run.missing or not case.startswith("resnet")]
        if not run.has(f"repeat_{program}", program):
            continue
        first = None
        for turn, environment in enumerate(({}, {}, {"CUDA_LAUNCH_BLOCKING": "1"})):
            def judge(text, first=first):
                hashes = hashes_in(text)
                if set(hashes) != {(case, mode) for case in cases for mode in ("eager", "graphs")}:
                    return "a case printed no hash"
                other = [" ".join(key) for key in hashes if first is not None and hashes[key] != first[key]]
                return f"other bits than in the first run: {', '.join(other)}" if other else None
            text = run.check(f"repeat_{program}_{turn + 1}", 120, [run.programs.there[program], "hash", *cases], judge,
                             **environment)
            if first is None:
                first = hashes_in(text)
            if not first:
                break


def hashes_in(text):
    return {(case, mode): value for case, mode, value in re.findall(r"^(\S+) .*mode=(\S+) .*hash=(\S+)", text, re.MULTILINE)}


def nsys(run):
    """What the GPU does in each step, with the nodes of graphs: a report for Nsight Systems, and its sums by kernel."""
    program = shutil.which("nsys") or shutil.which("nsys", path="/usr/local/cuda/bin")
    if not program:
        run.note("nsys", "skipped", "nsys is missing")
        return
    for name, case in (("train_step_cuda", "gpt_b16"), ("train_step_large_cuda", "gpt2_124m_b8_bf16")):
        if run.has(f"nsys_{case}", name):
            report = run.results / f"nsys_{case}.nsys-rep"
            run.check(f"nsys_{case}", 120, [program, "profile", "--trace=cuda", "--cuda-graph-trace=node", "--sample=none",
                                            "--cpuctxsw=none", "--force-overwrite=true", "-o", report,
                                            run.programs.there[name], case])
            if report.exists():
                run.check(f"kernels_{case}", 60, [program, "stats", "--report", "cuda_gpu_kern_sum", report])


PHASES = {"tests": tests, "repeat": repeat, "faults": faults, "bench": gpu_bench.bench, "attention": attention, "nsys": nsys,
          "memcheck": sanitizer("memcheck"), "initcheck": sanitizer("initcheck"), "racecheck": sanitizer("racecheck"),
          "synccheck": sanitizer("synccheck")}
