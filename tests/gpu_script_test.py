#!/usr/bin/env python3
"""tests/gpu.sh without a GPU: its options, how it packs programs, and how it judges their results, with scripts in
place of the programs, nvidia-smi and PyTorch.

    gpu_script_test.py COMPILER
"""
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMPILER = sys.argv[1]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


# gpu.py with a library that no machine has in place of NCCL.
WITHOUT_NCCL = f"""
import sys
sys.path.insert(0, "{ROOT}/tests/cuda")
import gpu, gpu_programs
del gpu_programs.OPTIONAL["libnccl.so.2"]
gpu_programs.OPTIONAL["libabsent.so.2"] = "nccl"
gpu.main()
"""


def gpu_sh(*arguments, tools=None, without_nccl=False, **environment):
    path = f"{tools}:{os.environ['PATH']}" if tools else os.environ["PATH"]
    program = [sys.executable, "-B", "-c", WITHOUT_NCCL] if without_nccl else [ROOT / "tests/gpu.sh"]
    run = subprocess.run([*program, *map(str, arguments)], capture_output=True, text=True, timeout=100,
                         env=dict(os.environ, PATH=path, **environment))
    return run.returncode, run.stdout, run.stderr


def options(folder):
    none = folder / "no_gpu"
    write(none / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    status, _, errors = gpu_sh(tools=none)
    assert status == 77 and "no NVIDIA GPU" in errors, (status, errors)
    for arguments, words in ((["tests", "x"], "unknown phase 'x'; known are tests, repeat, faults, bench, attention, nsys, memcheck, "
                                               "initcheck, racecheck, synccheck"),
                             (["--pack"], "--pack needs a value"), (["--quick"], "unknown option '--quick'"),
                             (["--limit", "soon"], "expected seconds, got 'soon'"),
                             (["--packed", "a", "--build", "b"], "goes with neither")):
        status, _, errors = gpu_sh(*arguments, tools=none)
        assert status == 2 and words in errors, (arguments, status, errors)
    status, output, _ = gpu_sh("--help")
    assert status == 0 and "[PHASE...]" in output, output


def packing(folder):
    """Packs programs whose libraries are missing later: a library in NCCL's place is replaced, another is not."""
    build = folder / "build/tests"
    build.mkdir(parents=True)
    (folder / "l.c").write_text("int ncclGetVersion(int* v) { return *v = 0; }\n")
    (folder / "p.c").write_text("int ncclGetVersion(int*);\nint main(void) { int v; return ncclGetVersion(&v); }\n")
    subprocess.run([COMPILER, "-x", "c", "-shared", "-fPIC", folder / "l.c", "-Wl,-soname,libabsent.so.2", "-o", folder / "libabsent.so.2"], check=True)
    subprocess.run([COMPILER, "-x", "c", "-shared", "-fPIC", folder / "l.c", "-Wl,-soname,libother.so.1", "-o", folder / "libother.so.1"], check=True)
    link = ["-x", "c", folder / "p.c", "-x", "none", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]
    subprocess.run([COMPILER, *link, folder / "libabsent.so.2", "-g", "-o", build / "unit_cuda"], check=True)
    subprocess.run([COMPILER, *link, folder / "libabsent.so.2", folder / "libother.so.1", "-o", build / "golden_cuda"], check=True)
    status, output, errors = gpu_sh("--pack", folder / "packed", "--build", folder / "build", "--run-only",
                                    without_nccl=True)
    assert status == 0, errors
    assert "MiB in all, of 60" in output and "left out: train_step_cuda" in output, output
    packed = json.loads((folder / "packed/packed.json").read_text())["bytes"]
    assert set(packed) == {"unit_cuda", "golden_cuda", "stand_in/nccl/libabsent.so.2"}, packed
    assert packed["unit_cuda"] < (build / "unit_cuda").stat().st_size
    status, _, errors = gpu_sh("--pack", folder, "--build", folder / "build", "--run-only")
    assert status == 1 and "is not empty" in errors, errors
    status, _, errors = gpu_sh("--pack", folder / "other", "--build", folder / "none", "--run-only")
    assert status == 1 and "has none of the programs" in errors, errors


def missing_libraries(folder, tools):
    """Without both libraries the first program skips its NCCL tests; the second is skipped with its name."""
    for library in ("libabsent.so.2", "libother.so.1"):
        (folder / library).rename(folder / (library + ".gone"))
    _, output, errors = gpu_sh("--packed", folder / "packed", "tests", "--results", folder / "r1", tools=tools,
                               without_nccl=True)
    assert "missing: libabsent.so.2" in output and "missing: libother.so.1" in output, (output, errors)
    found = {check["name"]: check for check in json.loads((folder / "r1/results.json").read_text())["checks"]}
    assert found["nccl_ranks_test"]["status"] == "skipped" and "libabsent.so.2" in found["nccl_ranks_test"]["detail"], found
    assert found["reduction_test"]["exit"] == 1, found  # it ran, and the NCCL replacement failed
    assert found["golden_cuda"]["status"] == "skipped" and "libother.so.1" in found["golden_cuda"]["detail"], found


PHASES = ["tests", "repeat", "faults", "bench", "attention", "nsys", "memcheck", "initcheck", "racecheck", "synccheck"]
STEP = """#!/bin/sh
[ "$1" ] || exit 3
if [ "$1" = hash ]; then
  for case in "$@"; do
    [ $case = hash ] || echo "$case device=cuda mode=eager steps=20 loss=1 hash=ab"
    [ $case = hash ] || echo "$case device=cuda mode=graphs steps=20 loss=1 hash=cd$%s"
  done
  exit
fi
echo plans=$CHORUS_CUDA_PLANS >&2
for case in "$@"; do
  case $case in attention*)
    echo "$case device=cuda mode=stacks median_ms=2.0 samples_per_s=8 peak_gpu_mib=1"
    echo "$case device=cuda mode=blocks median_ms=1.0 samples_per_s=16 peak_gpu_mib=1"
    continue ;;
  esac
  echo "$case device=cuda mode=eager median_ms=2.0 samples_per_s=8 peak_gpu_mib=1"
  %s
  echo "$case device=cuda mode=graphs median_ms=1.0 samples_per_s=16 peak_gpu_mib=1"
done
"""
TORCH = """import sys
if sys.argv[4] == "graphs": sys.exit(5)
for case in sys.argv[5:]:
    ms = 0.5 if case == "mlp_b64" else 3.0 if case == "toy_b16" else 9.0
    print(f"{case} threads=1 device=cuda mode={sys.argv[4]} torch=2 median_ms={ms} samples_per_s=1 peak_gpu_mib=2")
"""


def phases(folder, tools):
    programs = folder / "programs"
    write(programs / "unit_cuda", """#!/bin/sh
case "$*" in
  *reduction_test*) echo "wrong sum"; exit 1 ;;
  *spatial_test*) echo "SKIPPED: no CUDA device (for a reason)" ;;
  *attention_test*) sleep 300 & sleep 300 ;;
  *) echo "All tests passed" ;;
esac
""")
    write(programs / "golden_cuda", "#!/bin/sh\necho '329 passed, 0 failed'\n")
    write(programs / "train_step_cuda", STEP % ("NONE", "[ $# -gt 1 ] || sleep 3"))
    write(programs / "train_step_large_cuda", STEP % ("CUDA_LAUNCH_BLOCKING", ":"))
    (folder / "torch.py").write_text(TORCH)
    status, output, errors = gpu_sh("--packed", programs, "tests", "--limit", "3", tools=tools)
    assert status == 1, (output, errors)
    results = json.loads((programs / "results-tests/results.json").read_text())
    found = {check["name"]: check for check in results["checks"]}
    assert results["gpus"] == ["Some GPU, 9.0, 580.1, 80 GiB"] and list(results["seconds_of_phases"]) == ["tests"], results
    assert found["arrays_test"]["status"] == "passed" and found["arrays_test"]["detail"] == "All tests passed"
    assert found["attention_test"]["status"] == "failed" and "not done after 3 s" in found["attention_test"]["detail"], found
    assert found["spatial_test"]["detail"] == "no time left to run it", found["spatial_test"]
    assert found["golden_cuda_bf16"]["status"] == "skipped" and found["several_gpus"]["status"] == "skipped"
    with tarfile.open(programs / "results-tests.tar.gz") as archive:
        assert {f"results-tests/{name}" for name in ("results.json", "arrays_test.log", "environment.log")} <= set(archive.getnames())

    write(programs / "unit_cuda", (programs / "unit_cuda").read_text().replace("sleep 300 & sleep 300", "kill -ILL $$"))
    status, output, errors = gpu_sh("--packed", programs, "--torch", folder / "torch.py",
                                    "--results", folder / "r2", tools=tools, PYTHONPATH=folder / "python")
    results = json.loads((folder / "r2/results.json").read_text())
    found = {check["name"]: check for check in results["checks"]}
    assert status == 1 and list(results["seconds_of_phases"]) == PHASES, (output, errors)
    assert found["reduction_test"]["detail"] == "status 1: wrong sum" and found["golden_cuda"]["status"] == "passed"
    assert "it found no GPU" in found["spatial_test"]["detail"] and "CHORUS_NATIVE=OFF" in found["attention_test"]["detail"]
    # Limits: a quarter of eager's time for a small model (9 ms), not half (3 ms), no worse than any mode (0.5 ms).
    verdicts = {name: check["status"] for name, check in found.items() if name.startswith("faster_")}
    assert len(verdicts) == 9, verdicts
    assert {name for name, status in verdicts.items() if status == "failed"} == {"faster_toy_b16", "faster_mlp_b64"}, verdicts
    assert found["torch_graphs"]["status"] == "failed" and found["torch_compile"]["status"] == "passed", found
    assert {"program": "torch", "case": "gpt_b16", "mode": "eager", "median_ms": 9.0, "samples_per_s": 1.0, "peak_gpu_mib": 2.0} in results["times"]
    assert found["rank_killed"]["status"] == "passed" and found["killed_in_a_replay"]["status"] == "passed", found
    assert found["memcheck_arrays_test"]["status"] == "passed" and found["memcheck_ddp_test"]["status"] == "skipped", found
    assert found["racecheck_reduction_test"]["status"] == "failed", found  # it ran the test that fails
    for tool in ("racecheck", "synccheck"):
        ran = {name for name in found if name.startswith(tool)}
        assert ran == {f"{tool}_{name}_test" for name in ("arrays", "attention", "losses", "reduction", "training")}, ran
    log = (folder / "r2/memcheck_arrays_test.log").read_text() + (folder / "r2/racecheck_arrays_test.log").read_text()
    assert "memcheck, exact memory: 1" in log and "racecheck, exact memory: \n" in log, log
    assert "plans=1" in (folder / "r2/train_step_cuda.log").read_text()
    assert found["attention"]["status"] == "passed" and found["nsys_gpt_b16"]["status"] == "passed", found
    assert "--cuda-graph-trace=node" in (folder / "r2/nsys_gpt_b16.log").read_text()
    assert "sums by kernel" in (folder / "r2/kernels_gpt_b16.log").read_text()
    assert {t["mode"]: t["median_ms"] for t in results["times"] if t["case"] == "attention_2048"} == {"stacks": 2.0, "blocks": 1.0}
    # One program repeats itself; the other has other bits where its kernels don't overlap.
    assert all(found[f"repeat_train_step_cuda_{turn}"]["status"] == "passed" for turn in (1, 2, 3)), found
    assert found["repeat_train_step_large_cuda_2"]["status"] == "passed", found
    detail = found["repeat_train_step_large_cuda_3"]["detail"]
    assert detail == "other bits than in the first run: gpt2_124m_b8_bf16 graphs", detail

    # Without PyTorch a message says so.
    (folder / "python/torch.py").write_text("raise ImportError\n")
    _, output, _ = gpu_sh("--packed", programs, "bench", "--results", folder / "r3", tools=tools, PYTHONPATH=folder / "python")
    assert "SKIPPED pytorch: there is no PyTorch" in output, output


def old_driver(folder):
    """A driver that is too old for the programs' CUDA is named, with the package that helps."""
    tools, programs = folder / "old_driver", folder / "with_runtime"
    write(tools / "nvidia-smi", "#!/bin/sh\necho 'Some GPU, 9.0, 570.86.10, 80 GiB'\n")
    write(tools / "ldd", "#!/bin/sh\necho 'libcudart.so.13 => /somewhere/libcudart.so.13'\n")
    write(programs / "unit_cuda", "#!/bin/sh\n")
    status, _, errors = gpu_sh("--packed", programs, "tests", tools=tools)
    assert status == 77 and "driver 570.86.10 is too old: CUDA 13 needs 580" in errors and "cuda-compat-13-0" in errors, (status, errors)
    write(tools / "nvidia-smi", "#!/bin/sh\necho 'Some GPU, 9.0, 580.65.06, 80 GiB'\n")
    _, output, _ = gpu_sh("--packed", programs, "tests", "--limit", "1", tools=tools)
    assert output.startswith("driver 580.65.06, programs of CUDA 13\n"), output


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tools = folder / "tools"
        write(tools / "nvidia-smi", "#!/bin/sh\necho 'Some GPU, 9.0, 580.1, 80 GiB'\n")
        write(tools / "compute-sanitizer", '#!/bin/sh\necho "$2, exact memory: $CHORUS_CUDA_EXACT_MEMORY"\n'
              'while [ "${1#/}" = "$1" ]; do shift; done\nexec "$@"\n')
        write(tools / "nsys", """#!/bin/sh
[ "$1" = profile ] || { echo "sums by kernel of $4"; exit; }
echo "$@"
while [ "$1" != -o ]; do shift; done
touch "$2"
""")
        write(folder / "python/torch.py", "class __config__: show = str\n")
        options(folder)
        old_driver(folder)
        packing(folder)
        missing_libraries(folder, tools)
        phases(folder, tools)


main()
