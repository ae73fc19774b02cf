#!/usr/bin/env python3
"""Rooms are ideas that a program can do without: each is a set of files that nobody else includes, but those who build on
it, <chorus/all.hpp> and the library. Where that holds, a room can be deleted and all else compiles, for every header
compiles alone (headers_alone). `rooms.py --delete ROOM CXX EIGEN` shows it: a copy of include/ without the room's files,
in which every other listed header is read."""

import fnmatch
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

INCLUDE = pathlib.Path(__file__).resolve().parents[2] / "include" / "chorus"
# Which files a room has, and which rooms build on it.
ROOMS = {
    "quantization": (["quantization/*", "quantization.hpp"], []),
    "same_bits_mesh": (["same_bits/mesh.hpp"], []),
    "same_bits": (["same_bits/*", "same_bits.hpp"], ["same_bits_mesh"]),
    "trace": (["trace/*", "trace.hpp"], ["simulate"]),
    "simulate": (["simulate/*", "simulate.hpp"], []),
    "fsdp": (["parallel/fsdp/*", "parallel/fully_sharded_data_parallel.hpp"], ["mesh", "launch_any"]),
    "mesh": (["parallel/mesh/*", "parallel/mesh.hpp"], ["experts", "same_bits_mesh"]),
    "experts": (["nn/mixture_of_experts.hpp", "nn/expert_group.hpp", "parallel/expert/*", "parallel/expert.hpp"], []),
    "all_to_all": (["comm/algorithms/all_to_all.hpp"], ["experts"]),
    "generate": (["parallel/generate.hpp"], []),
    "own_policy": (["parallel/own_policy.hpp"], []),
    "elastic": (["parallel/elastic/*", "parallel/elastic.hpp"], ["simulate"]),
    "testing": (["testing/*"], []),
    "launch_any": (["parallel/launch_any.hpp"], []),
    "local_sgd": (["parallel/local_sgd.hpp", "parallel/local_steps.hpp"], ["hooks"]),
    "outer": (["parallel/outer/*"], []),
    "parameter_server": (["parallel/parameter_server.hpp"], []),
    "sharded": (["parallel/sharded/*", "parallel/sharded_optimizer.hpp"], ["fsdp"]),
    "image_folder": (["data/image_folder.hpp", "data/images/*"], []),
    "dlpack": (["io/dlpack.hpp"], []),
    "mixed_precision": (["nn/mixed_precision.hpp"], []),
    "distributions": (["distributions.hpp"], []),
    "models": (["nn/models/*", "models.hpp"], ["gpt2_folder"]),
    "lora": (["nn/lora.hpp"], ["models"]),
    "placed_parameters": (["nn/placed_parameters.hpp"], []),
    "gpt2_folder": (["io/gpt2_folder.hpp"], []),
    "pt": (["io/pt.hpp", "io/pickle.hpp"], []),
    "tokenizer": (["data/tokenizer*.hpp", "data/unicode_classes.hpp"], []),
    "collectives": (["ops/collectives.hpp"], ["experts"]),
    "linalg": (["ops/linalg*.hpp", "ops/fft*.hpp"], []),
    "graphed": (["parallel/cuda/*"], []),
    "mpi": (["comm/mpi.hpp", "comm/engine/mpi*.hpp"], []),
    "gloo": (["comm/gloo.hpp"], []),
    "hooks": (["parallel/hooks/*"], ["fsdp", "mesh"]),
}
LISTS = ("all.hpp", "compiled/")  # they may name every room


def room_of(file):
    return next((room for room, (files, _) in ROOMS.items() if any(fnmatch.fnmatch(file, glob) for glob in files)), None)


def included_by(path):
    return re.findall(r"^\s*#\s*include\s*<chorus/([^>]+)>", path.read_text(), re.MULTILINE)


def all_files():
    return sorted(str(path.relative_to(INCLUDE)) for path in INCLUDE.rglob("*") if path.suffix in (".hpp", ".cpp"))


def problems():
    for file in all_files():
        own = room_of(file)
        if file.startswith(LISTS):
            continue
        for included in included_by(INCLUDE / file):
            room = room_of(included)
            if room in (None, own):
                continue
            if own not in ROOMS[room][1]:
                yield f"{file} includes {included}, of the room '{room}', on which it does not build"
    for room, (globs, _) in ROOMS.items():
        for glob in globs:
            if not any(fnmatch.fnmatch(file, glob) for file in all_files()):
                yield f"the room '{room}' has no file {glob}"


def builds_on(room):
    """The room and all that build on it."""
    out, waiting = set(), [room]
    while waiting:
        if (next_room := waiting.pop()) not in out:
            out.add(next_room)
            waiting += [r for r in ROOMS[next_room][1]]
    return out


def without(room, compiler, eigen):
    gone = builds_on(room)
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "chorus"
        shutil.copytree(INCLUDE, copy)
        for file in all_files():
            if room_of(file) in gone:
                (copy / file).unlink()
        listed = "\n".join(line for line in (copy / "all.hpp").read_text().splitlines()
                           if not (match := re.match(r"#include <chorus/([^>]+)>", line)) or (copy / match[1]).exists())
        (copy / "all.hpp").write_text(listed)
        return subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-DEIGEN_NO_CUDA", "-DCHORUS_ALLOW_UNOPTIMIZED=1",
                               f"-I{folder}", "-isystem", eigen, "-x", "c++", "-"], input="#include <chorus/all.hpp>\n",
                              text=True).returncode


if __name__ == "__main__":
    if sys.argv[1:2] == ["--delete"]:
        sys.exit(without(*sys.argv[2:]))
    found = list(problems())
    print("\n".join(found + [f"{len(ROOMS)} rooms, {len(found)} problems"]))
    sys.exit(bool(found))
