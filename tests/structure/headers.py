#!/usr/bin/env python3
"""Checks every header under include/: guard, opening comment, includes that exist and never point up a floor, macros."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include"
FLOOR = {"core": 1, "train": 1, "tensor": 2, "kernels": 3, "autograd": 3, "comm": 3, "data": 3, "ops": 4, "nn": 5,
         "optim": 6, "io": 6, "parallel": 6, "compiled": 7}
# Macros that may outlive the header that defines them.
KEPT = re.compile(r"CHORUS_\w+|EIGEN_NO_CUDA|OMPI_SKIP_MPICXX|MPICH_SKIP_MPICXX")


def floor_of(header):
    """The floor of chorus/<folder>/..., or 7 for chorus/chorus.hpp, which may include everything."""
    parts = header.split("/")
    return FLOOR.get(parts[1], 0) if len(parts) > 2 else 7


def problems(header, text):
    lines = text.splitlines()
    if not lines or lines[0] != "#pragma once":
        yield "the first line is not '#pragma once'"
    if len(lines) < 2 or not lines[1].startswith("/// "):
        yield "no '/// ' comment in line 2 says what the header is"
    if floor_of(header) == 0:
        yield "its folder is on no floor"
    macros = set()
    for number, line in enumerate(lines, 1):
        if line != line.rstrip() or "\t" in line:
            yield f"line {number} has a tab or trailing space"
        if match := re.match(r"\s*#\s*include\s*(\S+)", line):
            included = match[1].strip('<>"')
            if match[1].startswith('"'):
                yield f"line {number} includes {match[1]}: write <chorus/...>"
            elif included.startswith("chorus/"):
                if not (INCLUDE / included).exists():
                    yield f"line {number} includes {included}, which does not exist"
                elif floor_of(included) > floor_of(header):
                    yield f"line {number} includes {included}, which is a floor above"
        if match := re.match(r"\s*#\s*define\s+(\w+)", line):
            macros.add(match[1])
        if match := re.match(r"\s*#\s*undef\s+(\w+)", line):
            macros.discard(match[1])
    for macro in sorted(macros):
        if not KEPT.fullmatch(macro):
            yield f"macro {macro} is neither CHORUS_... nor undefined at the end"


def main():
    failed = 0
    headers = sorted(path for suffix in ("*.hpp", "*.cuh") for path in INCLUDE.rglob(suffix))
    for path in headers:
        header = path.relative_to(INCLUDE).as_posix()
        for problem in problems(header, path.read_text()):
            print(f"{header}: {problem}")
            failed += 1
    print(f"{len(headers)} headers, {failed} problems")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
