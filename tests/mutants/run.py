#!/usr/bin/env python3
"""Whether tests notice bugs that distributed training has had elsewhere: each patch here puts one into a copy of the
headers, and the test that it names must then fail. First each of these tests must pass with the headers as they are.
usage: run.py [--check] [--jobs N] [NUMBER ...]
    NUMBER    only these patches
    --check   only reads the patches: each must fit the headers, in one place, and name its report and an existing test
    --jobs N  so many compilers and tests at once; 1 by default

A patch begins with two lines, then comes the diff:
    report: the address of the public report
    test: tests/unit/FLOOR/NAME_test.cpp [Catch2's filter], or tests/faults.cpp OPTIONS
Programs are made in build/mutants. Exit status: 1 where a mutant survives, 2 for a patch or a test that is not in order."""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/mutants"
CACHE = ["ccache"] if shutil.which("ccache") else []
COMPILER = [*CACHE, os.environ.get("CXX", "clang++"), *"""-std=c++20 -O0 -march=native -w -DCHORUS_ALLOW_UNOPTIMIZED=1
    -DCHORUS_USE_OPENSSL=1 -DCHORUS_USE_ZLIB=1 -DEIGEN_NO_CUDA -isystem /usr/include/eigen3""".split(), f"-I{ROOT}/tests"]
CATCH_3 = pathlib.Path("/usr/include/catch2/catch_all.hpp").is_file()
LIBRARIES = "-lssl -lcrypto -lz -lpthread".split()
MOST = 600  # seconds of a test that passes; five times what it took are enough for one that fails


class NotInOrder(Exception):
    pass


class Mutant:
    def __init__(self, path):
        self.number, self.name = int(path.name[:2]), path.stem[3:]
        head = re.match(r"report: (https://\S+)\ntest: (\S+)(?: (.*))?\n\n(diff .*)", path.read_text(), re.S)
        if not head:
            raise NotInOrder(f"{path.name}: expected the lines 'report: https://...', 'test: FILE ...', '', and a diff")
        self.report, self.test, self.filter, self.diff = head.groups()
        if not (ROOT / self.test).is_file():
            raise NotInOrder(f"{path.name}: there is no {self.test}")

    def patched(self):
        """The changed headers: {path: text}."""
        texts = {}
        for part in re.split(r"^diff .*\n", self.diff, flags=re.M)[1:]:
            path, hunks = re.match(r"--- a/(include/\S+)\n\+\+\+ b/\1\n(.*)", part, re.S).groups()
            text = (ROOT / path).read_text()
            for hunk in re.split(r"^@@ .*\n", hunks, flags=re.M)[1:]:
                old, new = ("".join(line[1:] for line in hunk.splitlines(True) if line[0] in kind) for kind in (" -", " +"))
                if text.count(old) != 1:
                    raise NotInOrder(f"{self.number:02} {self.name}: a hunk fits {text.count(old)} places of {path}, "
                                     f"expected 1; make the patch anew:\n{old}")
                text = text.replace(old, new)
            texts[path] = text
        return texts


def run(command, limit, folder=ROOT):
    """Runs it with its children: (exit status, None where it took longer; output; seconds)."""
    begin = time.monotonic()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                          start_new_session=True) as process:
        try:
            output, status = process.communicate(timeout=limit)[0], process.returncode
        except subprocess.TimeoutExpired:
            output, status = "", None
        try:
            os.killpg(process.pid, signal.SIGKILL)  # ranks that are left
        except ProcessLookupError:
            pass
    return status, output, time.monotonic() - begin


def is_unit(test):
    return test.startswith("tests/unit/")


def compiled(test, folder):
    """Makes the test's program in `folder`, which has the headers in `include`: (whether it compiles, messages)."""
    main = ["-lCatch2Main", "-lCatch2"] if CATCH_3 else [BUILD / "catch_main.o"]
    status, output, _ = run([*COMPILER, "-Iinclude", "-c", ROOT / test, "-o", "test.o"], MOST, folder)
    if status == 0:
        status, output, _ = run([*COMPILER[len(CACHE):], "test.o", *(main if is_unit(test) else []), "-o", "test", *LIBRARIES], MOST, folder)
    return status == 0, output


def words(mutant):
    if not mutant.filter:
        return []
    return [mutant.filter] if is_unit(mutant.test) else mutant.filter.split()


def folder_with(name, texts):
    """A folder with a copy of the headers, of which some have other texts."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "include", folder / "include")
    for path, text in texts.items():
        (folder / path).write_text(text)
    return folder


def passes(test, mutants):
    """Checks that the test passes with the headers as they are: the seconds that it takes, by filter."""
    folder = folder_with(pathlib.Path(test).stem + "_unpatched", {})
    good, output = compiled(test, folder)
    if not good:
        raise NotInOrder(f"{test} does not compile:\n{output[-3000:]}")
    seconds = {}
    for mutant in mutants:
        if mutant.filter not in seconds:
            status, output, seconds[mutant.filter] = run([folder / "test", *words(mutant)], MOST)
            if status != 0 or "No test cases matched" in output:
                raise NotInOrder(f"{test} {mutant.filter or ''} fails without a patch:\n{output[-3000:]}")
    shutil.rmtree(folder)
    return seconds


def who_noticed(mutant, seconds):
    """What the test says about the mutant; empty where it passes."""
    folder = folder_with(f"{mutant.number:02}", mutant.patched())
    good, output = compiled(mutant.test, folder)
    if not good:
        asserted = re.search(r"static_?\s?assert.*", output)
        if not asserted:
            raise NotInOrder(f"{mutant.number:02} {mutant.name} does not compile:\n{output[-3000:]}")
        return asserted[0]
    limit = 30 + 5 * seconds
    status, output, _ = run([folder / "test", *words(mutant)], limit)
    shutil.rmtree(folder)
    if status is None:
        return f"not done in {limit:.0f} s"
    if status == 0:
        return ""
    case = re.search(r"^-{70,}\n(.*?)\n-{70,}\n\S+_test\.cpp:\d+", output, re.S | re.M)
    found = " ".join(case[1].split()) if case else next((line for line in output.splitlines() if "seed " in line), "")
    return found or f"exit status {status}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("numbers", nargs="*", type=int)
    options = parser.parse_args()
    mutants = [Mutant(path) for path in sorted(pathlib.Path(__file__).parent.glob("*.patch"))]
    if [mutant.number for mutant in mutants] != list(range(1, len(mutants) + 1)):
        raise NotInOrder("patches: expected the numbers 01, 02, ... without gaps")
    for mutant in mutants:
        mutant.patched()
    if options.check:
        return print(f"{len(mutants)} mutants fit the headers")
    if unknown := [number for number in options.numbers if number not in range(1, len(mutants) + 1)]:
        raise NotInOrder(f"run.py: expected numbers from 1 to {len(mutants)}, got {unknown}")
    mutants = [mutant for mutant in mutants if not options.numbers or mutant.number in options.numbers]
    BUILD.mkdir(parents=True, exist_ok=True)
    if not CATCH_3 and any(is_unit(mutant.test) for mutant in mutants):
        made = run([*COMPILER, "-c", ROOT / "tests/catch_main.cpp", "-o", BUILD / "catch_main.o"], MOST)
        if made[0] != 0:
            raise NotInOrder(f"tests/catch_main.cpp does not compile:\n{made[1]}")

    killed, survived, wrong = 0, [], 0

    def try_all(test):
        """The mutants of one test: [(mutant, what noticed it, an error)]."""
        own = [mutant for mutant in mutants if mutant.test == test]
        try:
            seconds = passes(test, own)
        except NotInOrder as error:
            return [(own[0], "", str(error))]
        results = []
        for mutant in own:
            try:
                results.append((mutant, who_noticed(mutant, seconds[mutant.filter]), None))
            except NotInOrder as error:
                results.append((mutant, "", str(error)))
        return results

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(try_all, test) for test in dict.fromkeys(mutant.test for mutant in mutants)]
        for done in concurrent.futures.as_completed(waiting):
            for mutant, noticed, error in done.result():
                verdict = "ERROR" if error else "killed" if noticed else "SURVIVED"
                print(f"{mutant.number:02} {mutant.name:38} {verdict:9} {error or noticed or mutant.test}", flush=True)
                killed += verdict == "killed"
                wrong += verdict == "ERROR"
                survived += [mutant.name] if verdict == "SURVIVED" else []
    print(f"{killed} killed, {len(survived)} survived" + (f", {wrong} in error" if wrong else ""))
    return 2 if wrong else 1 if survived else 0


try:
    sys.exit(main())
except NotInOrder as error:
    sys.exit(print(error, file=sys.stderr) or 2)
