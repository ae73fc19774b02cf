#!/usr/bin/env python3
"""Builds and runs the fuzz targets, each for some seconds from its corpus, side by side, and prints a line for each. Fails
where one finds something, or covers less than coverage.txt says.

    tests/fuzz/run.py [--seconds S] [--jobs N] [--no-floor] [--write-floor] [NAME ...]

Findings lie in build-fuzz/findings: what is mended goes into corpus/NAME, too. New inputs are kept in build-fuzz/corpus,
and are no part of the next run, so that runs can be compared. --write-floor takes 90 % of what this run covers for the
floor.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build-fuzz"
FLOOR = HERE / "coverage.txt"


def floors():
    lines = [line.split() for line in FLOOR.read_text().splitlines() if line and not line.startswith("#")]
    return {name: int(edges) for name, edges in lines}


def last(pattern, text):
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def fuzz(name, seconds):
    new, findings = BUILD / "corpus" / name, BUILD / "findings"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    command = [BUILD / "tests" / f"fuzz_{name}", f"-max_total_time={seconds}", "-seed=1", "-timeout=10",
               "-rss_limit_mb=2048", "-max_len=16384", "-print_final_stats=1", f"-artifact_prefix={findings}/{name}-",
               new, HERE / "corpus" / name]
    run = subprocess.run(["nice", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         errors="replace", stdin=subprocess.DEVNULL, timeout=seconds + 300)
    return run.returncode, run.stdout


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--no-floor", action="store_true")
    parser.add_argument("--write-floor", action="store_true")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    names = args.names or sorted(path.stem for path in HERE.glob("*.cpp"))
    subprocess.run(["cmake", "--preset", "fuzz"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", "--preset", "fuzz", "-j", str(args.jobs)], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    (BUILD / "findings").mkdir(exist_ok=True)
    floor = {} if args.no_floor or args.write_floor else floors()
    covered, bad = {}, []
    print(f"{'target':<16} {'executions':>10} {'per second':>10} {'edges':>6} {'floor':>6}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = [(name, pool.submit(fuzz, name, args.seconds)) for name in names]
        for name, future in runs:
            status, text = future.result()
            covered[name] = last(r"cov: (\d+)", text)
            executions = last(r"stat::number_of_executed_units: +(\d+)", text)
            rate = last(r"stat::average_exec_per_sec: +(\d+)", text)
            least = floor.get(name, 0)
            what = "FOUND" if status != 0 else "covers too little" if covered[name] < least else ""
            print(f"{name:<16} {executions:>10} {rate:>10} {covered[name]:>6} {least:>6} {what}", flush=True)
            if status != 0:
                print("\n".join(text.splitlines()[-60:]), flush=True)
            if what or (floor and name not in floor):
                bad.append(name)
    if args.write_floor:
        old = floors() if FLOOR.exists() else {}
        old.update({name: edges * 9 // 10 for name, edges in covered.items()})
        FLOOR.write_text("# The edges that each target covers at least within ten seconds: nine tenths of what a machine "
                         "of 2 cores reaches.\n" + "".join(f"{name} {old[name]}\n" for name in sorted(old)))
    if bad:
        sys.exit(f"not as it should be: {', '.join(bad)}; what was found lies in {BUILD / 'findings'}")


if __name__ == "__main__":
    main()
