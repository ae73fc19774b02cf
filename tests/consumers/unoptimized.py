#!/usr/bin/env python3
"""No silent slowness: a project without a build type hears of it from CMake, and a program that was compiled without
optimization says so itself, once, on the first of its ranks.

    unoptimized.py CMAKE GENERATOR COMPILER SOURCE_DIRECTORY BUILD_DIRECTORY
"""
import os
import pathlib
import subprocess
import sys
import tempfile

CMAKE, GENERATOR, COMPILER, SOURCE, BUILD = sys.argv[1:]
HERE = pathlib.Path(__file__).parent
SILENT = "CHORUS_ALLOW_UNOPTIMIZED"
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {SILENT, "CMAKE_BUILD_TYPE", "CXXFLAGS", *RANKS}}

with tempfile.TemporaryDirectory(prefix="chorus_unoptimized_") as folder:
    def warns(project, *options):
        done = subprocess.run([CMAKE, "-G", GENERATOR, "-S", HERE / project, "-B", f"{folder}/{project}", f"-DCMAKE_CXX_COMPILER={COMPILER}",
                               f"-Dchorus_DIR={BUILD}", f"-DCHORUS_SOURCE={SOURCE}", "-DCMAKE_BUILD_TYPE=", *options],
                              env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stderr.split())
        assert said.count("CMAKE_BUILD_TYPE is empty") <= 1, said
        return "without optimization" in said and "Configure with -DCMAKE_BUILD_TYPE=Release" in said

    for project in ("find_package", "add_subdirectory"):
        assert warns(project), project
    assert not warns("find_package", "-DCMAKE_BUILD_TYPE=Debug")  # who says Debug, means it
    assert not warns("find_package", "-DCMAKE_CXX_FLAGS=-march=native -O2")
    assert not warns("find_package", "-DCMAKE_CXX_FLAGS=", f"-D{SILENT}=ON")

    # Two units, of which each would say it.
    for name, text in (("main", "int main() {}"), ("unit", "int unit;")):
        (pathlib.Path(folder) / f"{name}.cpp").write_text(f"#include <chorus/core/config.hpp>\n{text}\n")

    def says(*options, **environment):
        program = f"{folder}/program"
        subprocess.run([COMPILER, "-std=c++20", *options, "-I", f"{SOURCE}/include", f"{folder}/main.cpp", f"{folder}/unit.cpp",
                        "-o", program], check=True)
        done = subprocess.run([program], env={**ENVIRONMENT, **environment}, capture_output=True, text=True, check=True)
        return done.stderr

    line = says()
    assert line.count("\n") == 1 and line.startswith("chorus: this program was compiled without optimization"), line
    assert "-O2" in line and "-DCMAKE_BUILD_TYPE=Release" in line and f"{SILENT}=1" in line, line
    assert says("-O1") == says("-Og") == says(f"-D{SILENT}") == says("-DCHORUS_COMPILED=1") == ""
    assert says(**{SILENT: "1"}) == "" and says(**{SILENT: "0"}) == line
    for rank in RANKS:
        assert says(**{rank: "1"}) == "" and says(**{rank: "0"}) == line, rank
