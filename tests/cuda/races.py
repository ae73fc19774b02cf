#!/usr/bin/env python3
"""A second opinion on races: sentryward (a static verifier of PTX) proves for launches of the kernels with barriers, for
each architecture, that all threads meet at them and that no two unordered accesses meet. Where the PTX has lost its
barriers it must not say so. "Undecided" is no pass. It cannot decide where branches depend on numbers in memory
(index_select, attention), and takes too long for the gradients of attention.

    tests/cuda/races.py [NVCC]

Needs nvcc, and sentryward (pip install sentryward==0.1.1) on the PATH; without one of them it ends with 77.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
ARCHITECTURES = (80, 90)


def build(nvcc, folder):
    """The launches, [(name, input)], and the PTX of each architecture."""
    flags = ["-std=c++20", "-DEIGEN_NO_CUDA", "-DCHORUS_USE_CUDA=1", "-DCHORUS_ALLOW_UNOPTIMIZED=1",
             "--expt-relaxed-constexpr", f"-I{ROOT}/include", "-isystem", "/usr/include/eigen3", "-w",
             f"{ROOT}/tests/cuda/races.cu"]
    subprocess.run([nvcc, *flags, "-arch=sm_80", "-Xcompiler=-O0", "-o", f"{folder}/races"], check=True)
    lines = subprocess.run([f"{folder}/races"], check=True, capture_output=True, text=True).stdout.splitlines()
    for architecture in ARCHITECTURES:
        subprocess.run([nvcc, *flags, f"-arch=compute_{architecture}", "-ptx", "-o", f"{folder}/{architecture}.ptx"],
                       check=True)
    return ([line.split("\t") for line in lines],
            {a: pathlib.Path(f"{folder}/{a}.ptx").read_text() for a in ARCHITECTURES})


def kernel_alone(ptx, name):
    """This kernel's PTX, and what comes before it: the functions that kernels call."""
    parts = re.split(r"(?m)^(?=\.(?:visible|weak|func)\b)", ptx)
    functions = [part for part in parts if part.startswith(".func") and "{" in part]
    return next(part for part in parts if re.match(rf"\.\w+ \.entry \w*{name}\w*\(", part)), "".join([parts[0], *functions])


def verdict(ptx, launch, folder):
    pathlib.Path(f"{folder}/kernel.ptx").write_text(ptx)
    pathlib.Path(f"{folder}/launch.json").write_text(launch)
    done = subprocess.run(["sentryward", f"{folder}/kernel.ptx", "--input", f"{folder}/launch.json", "--timeout", "300",
                           "--memory-limit-mib", "8000"], capture_output=True, text=True)
    try:
        result = json.loads(done.stdout)
    except ValueError:
        return f"no answer: {done.stderr[-300:]}", []
    return result["result"], result.get("diagnostics", [])


def main():
    nvcc = sys.argv[1] if len(sys.argv) > 1 else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.access(nvcc, os.X_OK) or not shutil.which("sentryward"):
        print("SKIPPED: nvcc or sentryward is missing")
        sys.exit(77)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        launches, texts = build(nvcc, folder)
        for name, launch in launches:
            for architecture, text in texts.items():
                kernel, before = kernel_alone(text, name)
                result, why = verdict(before + kernel, launch, folder)
                bare, _ = verdict(before + re.sub(r"\n\s*(bar\.sync|barrier\.sync)[^\n]*", "\n", kernel), launch, folder)
                print(f"{name:24} sm_{architecture}: {result}; without barriers: {bare}", flush=True)
                if result != "race_free" or bare == "race_free":
                    wrong.append(f"{name} on sm_{architecture}")
                    print(json.dumps(why)[:1000])
    if wrong:
        sys.exit(f"expected race_free with barriers and not without, got something else for {', '.join(wrong)}")


if __name__ == "__main__":
    main()
