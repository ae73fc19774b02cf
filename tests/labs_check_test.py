#!/usr/bin/env python3
"""labs/check as a student calls it.
usage: labs_check_test.py ROOT         it names all that is not predicted before anything is compiled
       labs_check_test.py ROOT matrix  all solutions pass, whichever compiler and options build them (an hour of one core)"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(sys.argv[1]).resolve()
LABS = pathlib.Path("examples/lessons/labs")
SOLUTIONS = ROOT / "tests/labs/solutions"
MATRIX = {
    "g++ -O1": ["-DCMAKE_CXX_COMPILER=g++", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG", "-DCHORUS_NATIVE=OFF"],
    "g++ -O3 -march=native": ["-DCMAKE_CXX_COMPILER=g++", "-DCHORUS_NATIVE=ON"],
    "clang++ -O3 -march=native": ["-DCMAKE_CXX_COMPILER=clang++", "-DCHORUS_NATIVE=ON"],
}


def checkout(folder):
    """A student's checkout: the labs are a copy, everything else is this one's."""
    for entry in ROOT.iterdir():
        if entry.name not in ("build", "examples", ".git"):
            (folder / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "examples", folder / "examples")
    return sorted(path for path in (folder / LABS).iterdir() if path.is_dir())


def check(lab, **environment):
    return subprocess.run([lab.parent / "check", lab.name[0]], capture_output=True, text=True,
                          env={**os.environ, **environment})


def missing_predictions(folder):
    labs = checkout(folder)
    cmake = shutil.which("cmake")
    built = folder / "built"
    (folder / "bin").mkdir()
    fake = folder / "bin/cmake"  # reads predictions, and builds nothing
    fake.write_text(f'#!/bin/sh\ncase "$*" in *--build*|*-S*) touch {built}; exit 1;; esac\nexec {cmake} "$@"\n')
    fake.chmod(0o755)
    path = f"{folder}/bin:{os.environ['PATH']}"
    assert len(labs) == 8, labs
    for lab in labs:
        done = check(lab, PATH=path)
        names = list(json.loads((lab / "predict.json").read_text()))
        assert done.returncode == 2 and not built.exists(), (lab, done)
        assert all(f"\n  {name}\n" in done.stderr for name in names), (names, done.stderr)

    predictions = labs[4] / "predict.json"
    solved = json.loads((SOLUTIONS / "5_means.json").read_text())
    for text, said in (('{"a": 7 / 8}', "no formula"), ("[]", "expected a JSON object"), ("", "expected a JSON object"),
                       (json.dumps({**solved, "b": "7/8", "c": None}), "\n  b\n  c\n")):
        predictions.write_text(text)
        done = check(labs[4], PATH=path)
        assert done.returncode == 2 and not built.exists() and said in done.stderr, (text, done)
    assert "sum of both" not in done.stderr, done.stderr  # it is predicted
    predictions.write_text(json.dumps(solved))
    check(labs[4], PATH=path)
    assert built.exists()


def solutions_pass(folder, options):
    labs = checkout(folder)
    for lab in labs:
        source = next(lab.glob("*.cpp"))
        solution = (SOLUTIONS / f"{lab.name}.hpp").read_text() + "using Mine = Solution;\n"
        text, replaced = re.subn(r"^struct Mine \{.*?^\};\n", lambda _: solution, source.read_text(), flags=re.M | re.S)
        assert replaced == 1, source
        source.write_text(text)
        shutil.copy(SOLUTIONS / f"{lab.name}.json", lab / "predict.json")
    subprocess.run(["cmake", "-S", folder, "-B", folder / "build", "-DCHORUS_BUILD_TESTS=OFF", *options], check=True,
                   stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder / "build", "-j", str(os.cpu_count()), "--target",
                    *(f"lab_{lab.name}" for lab in labs)], check=True, stdout=subprocess.DEVNULL)
    for lab in labs:
        done = check(lab)
        print(done.stdout, done.stderr)
        assert done.returncode == 0 and done.stdout.endswith("all is right\n"), (lab, options)


if sys.argv[2:] == ["matrix"]:
    for compiler, its_options in MATRIX.items():
        print("==", compiler, flush=True)
        with tempfile.TemporaryDirectory() as place:
            solutions_pass(pathlib.Path(place), its_options)
else:
    with tempfile.TemporaryDirectory() as place:
        missing_predictions(pathlib.Path(place))
