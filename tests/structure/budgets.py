#!/usr/bin/env python3
"""What chorus costs those who include it and those who read it, beside what budgets.json allows: the files and lines of
chorus that each header brings, by the compiler's own preprocessor (no comments, no blanks), the bytes of quickstart's
code and those of them that name no type of its own, the code lines of include/, the words of README.md. All of it is
counted, not timed; bytes of code depend a little on the processor, and have room for it. A figure above its budget
fails. Whoever raises one says why in budgets.json, under "raised".
usage: budgets.py CXX EIGEN [NM QUICKSTART.o QUICKSTART_PLAIN.o]
       budgets.py --lower CXX EIGEN ...    writes what is lower now"""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUDGETS = pathlib.Path(__file__).with_suffix(".json")
USERS_TYPE = "ToyModel"


def reach(compiler, eigen, header, compiled):
    """How many of chorus' files and lines `header` brings."""
    command = [compiler, "-std=c++20", "-E", "-O2", f"-DCHORUS_COMPILED={int(compiled)}", "-DEIGEN_NO_CUDA",
               f"-I{ROOT / 'include'}", "-isystem", eigen, "-x", "c++", "-"]
    text = subprocess.run(command, input=f"#include <chorus/{header}>\n", capture_output=True, text=True, check=True).stdout
    files, lines, ours = set(), 0, False
    for line in text.splitlines():
        if marker := re.match(r'# \d+ "([^"]+)"', line):
            ours = "include/chorus/" in marker[1]
            if ours:
                files.add(marker[1])
        elif ours and line.strip():
            lines += 1
    return {"files": len(files), "lines": lines}


def code_bytes(nm, path):
    """Bytes of the functions in an object, and of those that name no type of the user's."""
    listing = subprocess.run([nm, "-C", "-S", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    everything = without = 0
    for line in listing.splitlines():
        parts = line.split(" ", 3)
        if len(parts) == 4 and parts[2] in "tTwW":
            size = int(parts[1], 16)
            everything += size
            without += 0 if USERS_TYPE in parts[3] or parts[3] == "main" else size
    return everything, without


def code_lines():
    """Lines of include/ that are no blanks, comments, includes or guards."""
    return sum(1 for path in (ROOT / "include").rglob("*") if path.suffix in (".hpp", ".cpp")
               for line in path.read_text().splitlines() if not re.match(r"\s*($|//|#include|#pragma once)", line))


def measure(budgets, compiler, eigen, nm=None, quickstart=None, plain=None):
    measured = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for kind, compiled in (("header-only", False), ("compiled", True)):
            reached = {header: pool.submit(reach, compiler, eigen, header, compiled) for header in budgets[kind]}
            measured[kind] = {header: result.result() for header, result in reached.items()}
    measured["include, lines of code"] = code_lines()
    measured["README.md, words"] = len((ROOT / "README.md").read_text().split())
    if nm:
        everything, without = code_bytes(nm, quickstart)
        measured["quickstart, bytes of code"] = everything
        measured["quickstart, bytes that name no type of the user's"] = without
        measured["quickstart header-only, bytes of code"] = code_bytes(nm, plain)[0]
    return measured


def flat(figures, before=""):
    for name, figure in figures.items():
        if isinstance(figure, dict):
            yield from flat(figure, f"{before}{name}: ")
        else:
            yield before + name, figure


def main():
    arguments = sys.argv[1:]
    lower = arguments[:1] == ["--lower"]
    budgets = json.loads(BUDGETS.read_text())
    measured = measure(budgets, *arguments[lower:])
    allowed = dict(flat({name: value for name, value in budgets.items() if name != "raised"}))
    above = 0
    for name, figure in flat(measured):
        over = figure > allowed[name]
        above += over
        print(f"{name:75} {figure:9}  of {allowed[name]:9}{'   <- ABOVE' if over else ''}")
    if lower:
        def lowered(old, new):
            if isinstance(old, dict):
                return {name: lowered(value, new[name]) if name in new else value for name, value in old.items()}
            return min(old, new)
        BUDGETS.write_text(json.dumps(lowered(budgets, measured), indent=1) + "\n")
    print(f"{above} figures above their budget")
    return above > 0


if __name__ == "__main__":
    sys.exit(main())
