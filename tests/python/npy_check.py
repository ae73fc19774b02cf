#!/usr/bin/env python3
"""Compares chorus's .npy and .npz files with NumPy's.

usage: npy_check.py TOOL

1. What NumPy writes, in C and in Fortran order, stored and compressed, chorus reads and writes again; NumPy reads the same arrays.
2. Damaged files are refused with a message, never with a crash, and never read as something else.
"""

import io
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy

KINDS = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]


def fail(message):
    print(f"npy_check: {message}")
    sys.exit(1)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def rewrite(tool, kind, rank, source, target):
    return subprocess.run([tool, "rewrite", kind, str(rank), source, target], capture_output=True, text=True, errors="replace", timeout=60)


def check_arrays(tool, folder):
    rng = numpy.random.default_rng(3)
    count = 0
    for kind in KINDS:
        for shape in ((), (7,), (0,), (1,), (2, 3, 4), (2, 0, 3), (70, 1, 5)):
            array = (rng.random(shape) * 100).astype(kind)
            for order in "CF":
                source, target = folder / "numpy.npy", folder / "chorus.npy"
                numpy.save(source, numpy.asarray(array, order=order))
                done = rewrite(tool, kind, len(shape), source, target)
                if done.returncode != 0 or not same(numpy.load(target), array):
                    fail(f"{kind} {shape} {order}: {done.stderr or 'other numbers'}")
                count += 1
        arrays = {"a": (rng.random((2, 3, 4)) * 50).astype(kind), "b.weight": numpy.zeros((5, 0, 1), kind),
                  "\u00fc": numpy.ones((300, 10, 3), kind)}
        for save in (numpy.savez, numpy.savez_compressed):
            source, target = folder / "numpy.npz", folder / "chorus.npz"
            save(source, **arrays)
            done = rewrite(tool, kind, 3, source, target)
            if done.returncode != 0:
                fail(f"{kind}.npz: {done.stderr}")
            with numpy.load(target) as loaded:
                if set(loaded.files) != set(arrays) or not all(same(loaded[name], arrays[name]) for name in arrays):
                    fail(f"{kind}.npz: other arrays")
            count += 1
    print(f"{count} files read and written as NumPy does")


def check_refusals(tool, folder):
    source, target = folder / "bad.npy", folder / "out.npy"
    array = numpy.arange(6, dtype="float32")
    for bad, what in ((array.astype(">f4"), "big-endian"), (array.astype("complex64"), "not supported"), (numpy.array(["a", "b"]), "not supported"),
                      (numpy.zeros(3, dtype=[("x", "f4")]), "structured"), (array.astype("int32"), "expected F32 with 1 axes, got I32 [6]"),
                      (array.reshape(2, 3), "expected F32 with 1 axes, got F32 [2, 3]")):
        numpy.save(source, bad)
        done = rewrite(tool, "float32", 1, source, target)
        if done.returncode != 1 or what not in done.stderr:
            fail(f"{bad.dtype} {bad.shape} was not refused with '{what}': {done.returncode} {done.stderr}")
    rng = random.Random(11)
    refused = 0
    for ending in ("npy", "npz"):
        buffer = io.BytesIO()
        if ending == "npy":
            numpy.save(buffer, array)
        else:
            numpy.savez_compressed(buffer, x=array, y=numpy.zeros(1000, "float32"))
        whole = buffer.getvalue()
        source, target = folder / f"bad.{ending}", folder / f"out.{ending}"
        for _ in range(150):
            data = bytearray(whole)
            kind = rng.randrange(3)
            at = rng.randrange(len(data))
            if kind == 0:
                del data[at:]
            elif kind == 1:
                data[at] ^= 1 << rng.randrange(8)
            else:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            source.write_bytes(bytes(data))
            done = rewrite(tool, "float32", 1, source, target)
            if done.returncode not in (0, 1) or (done.returncode == 1 and "loading" not in done.stderr):
                fail(f"a damaged {ending} file ended in {done.returncode}: {done.stderr}: {bytes(data)!r}")
            if done.returncode == 0:
                mine = numpy.load(target)
                try:
                    theirs = numpy.load(source)
                    equal = same(mine, theirs) if ending == "npy" else all(same(mine[name], theirs[name]) for name in mine.files)
                except Exception as error:
                    fail(f"chorus takes a {ending} file that NumPy refuses ({error}): {bytes(data)!r}")
                if not equal:
                    fail(f"a damaged {ending} file is read as something else: {bytes(data)!r}")
            refused += done.returncode
    print(f"{refused} of 300 damaged files refused, the others read as NumPy reads them")
    if refused < 150:
        fail("too few were refused to say anything")


def main():
    tool = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        check_arrays(tool, pathlib.Path(folder))
        check_refusals(tool, pathlib.Path(folder))


if __name__ == "__main__":
    main()
