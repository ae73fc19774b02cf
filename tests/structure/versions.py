#!/usr/bin/env python3
"""Links a unit of another version of chorus, and one for another processor, into a program: it ends at its start, and
says why.
versions.py COMPILER INCLUDE"""

import pathlib
import platform
import subprocess
import sys
import tempfile

compiler, include = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    core = folder / "other/chorus/core"
    core.mkdir(parents=True)
    for name in ("config.hpp", "one_version.hpp", "requirements.hpp", "unoptimized.hpp"):
        text = (pathlib.Path(include) / "chorus/core" / name).read_text()
        (core / name).write_text(text.replace("#define CHORUS_VERSION_PATCH ", "#define CHORUS_VERSION_PATCH 1 + "))
    (folder / "main.cpp").write_text("#include <chorus/core/config.hpp>\nint main() {}\n")
    (folder / "unit.cpp").write_text("#include <chorus/core/config.hpp>\n")

    def status(*units):
        objects = []
        for source, headers, *options in units:
            objects.append(f"{folder}/{source}{len(objects)}.o")
            subprocess.run([compiler, "-std=c++20", "-O1", *options, "-I", headers, "-c", folder / source, "-o", objects[-1]],
                           check=True)
        subprocess.run([compiler, *objects, "-o", folder / "program"], check=True)
        ended = subprocess.run([folder / "program"], capture_output=True, text=True)
        return ended.returncode, ended.stderr

    assert status(("main.cpp", include), ("unit.cpp", include)) == (0, "")
    code, said = status(("main.cpp", include), ("unit.cpp", f"{folder}/other"))
    assert code == 1 and said.startswith("chorus: this program has units compiled with version "), (code, said)
    if platform.machine() == "x86_64":
        # Neither unit computes anything, so that a processor without AVX runs them, too.
        code, said = status(("main.cpp", include), ("unit.cpp", include, "-mavx"))
        assert code == 1 and "compiled for a processor with no AVX and with AVX: give -march" in said, (code, said)
