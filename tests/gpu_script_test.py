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
    for arguments, words in ((["--only", "tests,x"], "unknown phase 'x'; known are tests, bench, faults, sanitize"),
                             (["--pack"], "--pack needs a value"), (["--quick"], "unknown option '--quick'"),
                             (["--limit", "soon"], "expected seconds, got 'soon'"),
                             (["--packed", "a", "--build", "b"], "goes with neither")):
        status, _, errors = gpu_sh(*arguments, tools=none)
        assert status == 2 and words in errors, (arguments, status, errors)
    status, output, _ = gpu_sh("--help")
    assert status == 0 and "--only PHASE" in output, output


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
    _, output, errors = gpu_sh("--packed", folder / "packed", "--only", "tests", "--results", folder / "r1", tools=tools,
                               without_nccl=True)
    assert "missing: libabsent.so.2" in output and "missing: libother.so.1" in output, (output, errors)
    found = {check["name"]: check for check in json.loads((folder / "r1/results.json").read_text())["checks"]}
    assert found["nccl_ranks_test"]["status"] == "skipped" and "libabsent.so.2" in found["nccl_ranks_test"]["detail"], found
    assert found["reduction_test"]["exit"] == 1, found  # it ran, and the NCCL replacement failed
    assert found["golden_cuda"]["status"] == "skipped" and "libother.so.1" in found["golden_cuda"]["detail"], found


STEP = """#!/bin/sh
[ "$1" ] || exit 3
for case in "$@"; do
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
    write(programs / "train_step_cuda", STEP % "[ $# -gt 1 ] || sleep 3")
    write(programs / "train_step_large_cuda", STEP % ":")
    (folder / "torch.py").write_text(TORCH)
    status, output, errors = gpu_sh("--packed", programs, "--only", "tests", "--limit", "3", tools=tools)
    assert status == 1, (output, errors)
    results = json.loads((programs / "results/results.json").read_text())
    found = {check["name"]: check for check in results["checks"]}
    assert results["gpus"] == ["Some GPU, 9.0, 580.1, 80 GiB"] and list(results["seconds_of_phases"]) == ["tests"], results
    assert found["arrays_test"]["status"] == "passed" and found["arrays_test"]["detail"] == "All tests passed"
    assert found["attention_test"]["status"] == "failed" and "not done after 3 s" in found["attention_test"]["detail"], found
    assert found["spatial_test"]["detail"] == "no time left to run it", found["spatial_test"]
    assert found["golden_cuda_bf16"]["status"] == "skipped" and found["several_gpus"]["status"] == "skipped"
    with tarfile.open(programs / "results.tar.gz") as archive:
        assert {"results/results.json", "results/arrays_test.log", "results/environment.log"} <= set(archive.getnames())

    write(programs / "unit_cuda", (programs / "unit_cuda").read_text().replace("sleep 300 & sleep 300", "kill -ILL $$"))
    status, output, errors = gpu_sh("--packed", programs, "--only", "tests,bench,faults,sanitize", "--torch", folder / "torch.py",
                                    "--results", folder / "r2", tools=tools, PYTHONPATH=folder / "python")
    results = json.loads((folder / "r2/results.json").read_text())
    found = {check["name"]: check for check in results["checks"]}
    assert status == 1 and list(results["seconds_of_phases"]) == ["tests", "bench", "faults", "sanitize"], (output, errors)
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
    assert found["racecheck"]["status"] == "failed", found  # it ran the test that fails

    # Without PyTorch a message says so.
    (folder / "python/torch.py").write_text("raise ImportError\n")
    _, output, _ = gpu_sh("--packed", programs, "--only", "bench", "--results", folder / "r3", tools=tools, PYTHONPATH=folder / "python")
    assert "SKIPPED pytorch: there is no PyTorch" in output, output


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tools = folder / "tools"
        write(tools / "nvidia-smi", "#!/bin/sh\necho 'Some GPU, 9.0, 580.1, 80 GiB'\n")
        write(tools / "compute-sanitizer", '#!/bin/sh\nwhile [ "${1#/}" = "$1" ]; do shift; done\nexec "$@"\n')
        write(folder / "python/torch.py", "class __config__: show = str\n")
        options(folder)
        packing(folder)
        missing_libraries(folder, tools)
        phases(folder, tools)


main()
