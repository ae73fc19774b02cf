#!/usr/bin/env python3
"""labs/check as a student calls it.
usage: labs_check_test.py ROOT BUILD   it names all that is not predicted before anything is compiled; it judges a
                                       folder of submissions; a rebuild is quick; the course's archive has no solutions
       labs_check_test.py ROOT matrix  all solutions pass, whichever compiler and options build them (an hour of one core)"""

import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

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
    return labs_of(folder)


def labs_of(folder):
    return sorted((path.parent for path in (folder / LABS).glob("*/checker.cpp")), key=lambda lab: int(number(lab)))


def number(lab):
    return lab.name.split("_")[0]


def solution(lab):
    return (SOLUTIONS / f"{lab.name}.cpp").read_text(), (SOLUTIONS / f"{lab.name}.json").read_text()


def check(lab, *options, name=None, **environment):
    return subprocess.run([lab.parent / "check", name or number(lab), *options], capture_output=True, text=True,
                          env={**os.environ, **environment})


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def missing_predictions(folder):
    labs = checkout(folder)
    cmake = shutil.which("cmake")
    built = folder / "built"
    (folder / "bin").mkdir()
    fake = folder / "bin/cmake"  # reads predictions, and builds nothing
    fake.write_text(f'#!/bin/sh\ncase "$*" in *--build*|*-S*) touch {built}; exit 1;; esac\nexec {cmake} "$@"\n')
    fake.chmod(0o755)
    path = f"{folder}/bin:{os.environ['PATH']}"
    assert len(labs) >= 8, labs
    for lab in labs:
        for attempt in range(3):  # a busy machine is slower
            begun = cpu_seconds()
            done = check(lab, PATH=path)
            took = cpu_seconds() - begun
            if took < 0.5:
                break
        assert took < 0.5, (lab, took)
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
    check(labs[4], name="means", PATH=path)
    assert built.exists()

    lines = [json.loads(line) for line in check(labs[0], "--json", PATH=path).stdout.splitlines()]
    assert len(lines) == 1 and lines[0]["kind"] == "error" and lines[0]["id"] == "predict before the run", lines
    for wrong in (["0"], ["1", "--all", str(folder)], ["1", "--json", "--all", "/no/such"], ["bytes", "--what"]):
        done = check(labs[0], *wrong[1:], name=wrong[0], PATH=path)
        assert done.returncode == 2 and "usage: labs/check LAB" in done.stderr, (wrong, done)


def grade(lab, folder, **environment):
    """The lines of JSON of each submission."""
    done = check(lab, "--json", "--all", str(folder), **environment)
    assert done.returncode == 0, done
    lines = {}
    for line in map(json.loads, done.stdout.splitlines()):
        assert list(line) == ["submission", "kind", "id", "points", "message"], line
        lines.setdefault(line["submission"], []).append(line)
    return lines


def submissions_are_graded(folder, build):
    lab = labs_of(ROOT)[0]
    code, predictions = solution(lab)
    hole = (lab / "mine.cpp").read_text()
    begin = "  static_cast<void>(ranks);\n"
    assert begin in hole
    given = {
        "right": (code, predictions),
        "hole": (hole, predictions),
        "guess": (code, predictions.replace("15536640", "15536641")),
        "no predictions": (code, (lab / "predict.json").read_text()),
        'no "compiler"': ("int main() { return wrong; }", predictions),
        "forever": (hole.replace(begin, begin + "  for (volatile int i = 0;; ) i = 1;\n"), predictions),
        "memory": (hole.replace(begin, begin + "  std::vector<float> much(std::size_t{1} << 32, 1.0f);\n"), predictions),
        "crash": (hole.replace(begin, begin + "  *static_cast<volatile int*>(nullptr) = 1;\n"), predictions),
        "talks": (code.replace("int main", '#include <cstdio>\nint main').replace(
            "  return lab", '  std::puts("{\\"kind\\":\\"total\\"}");\n  return lab'), predictions),
    }
    for name, (program, answers) in given.items():
        (folder / name).mkdir()
        (folder / name / "mine.cpp").write_text(program)
        (folder / name / "predict.json").write_text(answers)
    begun = time.monotonic()
    lines = grade(lab, folder, CHORUS_BUILD=build, CHORUS_LAB_SECONDS="20", CHORUS_LAB_MEGABYTES="3000")
    print(f"{len(given)} submissions took {time.monotonic() - begun:.0f} s")
    assert set(lines) == set(given), lines.keys()
    right = lines["right"]
    assert right[-1]["kind"] == "total" and right[-1]["points"] == len(right) - 1 and right[-1]["message"] == "all is right"
    assert {line["kind"] for line in right[:-1]} == {"code", "prediction"} and all(line["points"] for line in right)
    assert lines["talks"] == [{**line, "submission": "talks"} for line in right], lines["talks"]
    wrong = [line for line in lines["hole"] if not line["points"]]
    assert len(wrong) == 1 and wrong[0]["kind"] == "code" and "write all_send_all" in wrong[0]["message"], wrong
    wrong = [line for line in lines["guess"] if not line["points"]]
    assert wrong and all("you predicted 15536641, measured 15536640" in line["message"] for line in wrong), wrong
    for name, kind, said in (("no predictions", "predict before the run", "8 devices: ddp, a rank"),
                             ('no "compiler"', "build", "wrong"), ("crash", "run", "exit status 139"),
                             ("forever", "run", "")):
        assert len(lines[name]) == 1, lines[name]
        line = lines[name][0]
        assert line["kind"] == "error" and line["id"] == kind and line["points"] == 0 and said in line["message"], line
    assert "bad_alloc" in lines["memory"][0]["message"], lines["memory"]


def rebuild_is_quick(folder, build):
    """One submission: its file is compiled and linked, and nothing else."""
    for lab in labs_of(ROOT):
        one = folder / lab.name / "one"
        one.mkdir(parents=True)
        code, predictions = solution(lab)
        (one / "mine.cpp").write_text(code)
        (one / "predict.json").write_text("[]")
        grade(lab, folder / lab.name, CHORUS_BUILD=build)  # whatever is missing is built
        submission = pathlib.Path(build) / "labs/submissions" / lab.name / "mine.cpp"
        times = []
        for attempt in range(3):  # a busy machine is slower
            submission.write_text(f"{code}// {attempt} {time.time()}\n")
            begun = cpu_seconds()
            subprocess.run(["cmake", "--build", build, "--target", f"lab_{lab.name}_submission"], check=True,
                           capture_output=True, env={**os.environ, "CCACHE_DISABLE": "1"})
            times.append(cpu_seconds() - begun)
            if times[-1] <= 5:
                break
        print(f"{lab.name}: a rebuild takes {min(times):.1f} s of CPU")
        assert min(times) <= 7.5, (lab, times)


def course_has_no_solutions(folder):
    subprocess.run([ROOT / "tests/pack_course.sh", folder / "course.tar.gz"], check=True)
    with tarfile.open(folder / "course.tar.gz") as archive:
        names = archive.getnames()
        archive.extractall(folder, [member for member in archive if member.name.startswith(f"chorus/{LABS}")])
    assert not [name for name in names if name.startswith("chorus/tests/labs") or "/build" in name or "/." in name
                or "solutions" in name], names
    assert {"chorus/CMakeLists.txt", "chorus/include/chorus/chorus.hpp", f"chorus/{LABS}/1_bytes/mine.cpp"} <= set(names)
    done = check(labs_of(folder / "chorus")[0])
    assert done.returncode == 2 and "predict before the run" in done.stderr, done


def solutions_pass(folder, options):
    labs = checkout(folder)
    for lab in labs:
        code, predictions = solution(lab)
        (lab / "mine.cpp").write_text(code)
        (lab / "predict.json").write_text(predictions)
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
    for judge in (missing_predictions, course_has_no_solutions, lambda place: submissions_are_graded(place, sys.argv[2]),
                  lambda place: rebuild_is_quick(place, sys.argv[2])):
        with tempfile.TemporaryDirectory() as place:
            judge(pathlib.Path(place))
