#!/usr/bin/env python3
"""A small training compiles for aarch64 and gives there, in an emulator, what it gives here, up to rounding. Exits with 77 where
the cross compiler or the emulator is missing.

    aarch64_test.py INCLUDE_DIRECTORY EIGEN_DIRECTORY JSON_DIRECTORY
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile

LOSSES = [1.694042, 1.547586, 1.303102, 1.026749, 0.776388]  # on x86-64


def main():
    include, eigen, json = sys.argv[1:]
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not compiler or not emulator:
        print("skipped: " + " and ".join(name for name, found in (("aarch64-linux-gnu-g++ (g++-aarch64-linux-gnu)", compiler),
                                                                    ("qemu-aarch64 (qemu-user)", emulator)) if not found)
              + " not found: nothing was compiled for another kind of processor")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        # JSON's folder alone: beside it lie headers of this machine's processor.
        (pathlib.Path(folder) / "nlohmann").symlink_to(pathlib.Path(json.split(";")[0]) / "nlohmann")
        program = pathlib.Path(folder) / "program"
        subprocess.run([compiler, "-std=c++20", "-O0", "-g0", "-Wall", "-Wextra", "-Wno-psabi", "-Werror", "-static", "-I", include, "-isystem",
                        eigen, "-isystem", folder, str(pathlib.Path(__file__).with_name("aarch64.cpp")), "-o", str(program)],
                       check=True, timeout=500)
        done = subprocess.run([emulator, str(program)], check=True, timeout=100, capture_output=True, text=True)
    got = [float(line) for line in done.stdout.split()]
    print("losses:", *got)
    assert len(got) == len(LOSSES) and all(abs(a - b) < 1e-4 for a, b in zip(got, LOSSES)), f"expected {LOSSES}"
    return 0


sys.exit(main())
