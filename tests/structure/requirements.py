#!/usr/bin/env python3
"""Compilers and options that chorus can't be compiled with: one line says why, and nothing else of chorus is read.

    requirements.py INCLUDE_DIRECTORY COMPILER...
"""
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import amalgamate

INCLUDE, *COMPILERS = filter(None, sys.argv[1:])
MACRO = "-U{0} -D{0}={1}"
CASES = {  # what the line says, by the options
    "-std=c++17": "needs C++20: compile with -std=c++20",
    "-std=c++20 -fno-exceptions": "needs exceptions",
    "-std=c++20 -fno-rtti": "needs run-time type information",
    "-std=c++20 -ffast-math": "compile without -ffast-math",
    "-std=c++20 -Ofast": "compile without -ffast-math",
    "-std=c++20 -ffinite-math-only": "compile without -ffast-math",
    "-std=c++20 " + MACRO.format("__SIZEOF_POINTER__", 4): "needs a 64-bit target",
    "-std=c++20 -D_WIN32": "needs a POSIX system",
}
# What compilers may say in words of their own; clang reads on to the end each time, for three seconds.
EACH = ("-std=c++17", "-std=c++20 -fno-exceptions", "-std=c++20 -fno-rtti", "-std=c++20 -ffast-math")
OLD = {"clang": (MACRO.format("__clang_major__", 13), "needs clang 14 or newer"),
       "g++": (MACRO.format("__GNUC__", 10), "needs g++ 11 or newer")}

with tempfile.TemporaryDirectory() as single:
    texts, _ = amalgamate.amalgamated()
    for name, text in texts.items():
        (pathlib.Path(single) / name).parent.mkdir(parents=True, exist_ok=True)
        (pathlib.Path(single) / name).write_text(text)
    for compiler in COMPILERS:
        options, sentence = OLD["clang" if "clang" in compiler else "g++"]
        asked = [case for case in CASES.items() if compiler == COMPILERS[0] or case[0] in EACH]
        cases = [(INCLUDE, "chorus/chorus.hpp", *case) for case in [*asked, ("-std=c++20 " + options, sentence)]]
        if compiler == COMPILERS[0]:
            first = asked[0]
            cases += [(INCLUDE, "chorus/all.hpp", *first), (single, "chorus/chorus.hpp", *first), (single, "chorus/all.hpp", *first)]
        for include, header, options, sentence in cases:
            program = f"#include <{header}>\nchorus::Tensor<float, 2> x = no_such_thing;\n"
            done = subprocess.run([compiler, *options.split(), "-I", include, "-fsyntax-only", "-x", "c++", "-"],
                                  input=program, capture_output=True, text=True)
            errors = [line for line in done.stderr.splitlines() if "error:" in line]
            case = f"{compiler} {options}, {header} in {include}:\n{done.stderr[:3000]}"
            assert done.returncode != 0 and len(errors) == 2 and sentence in errors[0], case
            assert "fatal error:" in errors[1] and "for the reason above" in errors[1], case
            assert len(done.stderr.splitlines()) <= 15, case
