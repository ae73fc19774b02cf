#!/usr/bin/env python3
"""Compares chorus's safetensors reader and writer with the reference package of Python.

usage: safetensors_check.py TOOL [CASES]

1. What Python writes, chorus reads and writes again: the same bytes, for each dtype and for random models.
2. Damaged files (CASES of them, 20000 unless told) get the same verdict from both; where chorus is stricter, on purpose, the
   reason must be one of STRICTER. Where both accept, they see the same names, dtypes, shapes and data.
3. Files of other formats are refused as what they are.
"""

import bz2
import gzip
import io
import json
import lzma
import pathlib
import pickle
import random
import re
import struct
import subprocess
import sys
import tarfile
import tempfile

import numpy
import safetensors
import safetensors.numpy

# What chorus refuses and the reference takes.
STRICTER = re.compile("|".join([
    "appears twice",                      # the last one wins there
    "unknown field",                      # ignored there
    "its name has a control character",
    "its name has [0-9]+ bytes",
    "shape has more than [0-9]+ axes",
    "overflows$",                         # sizes beside a 0, and more bits than fit 63
    "in shape is too large",
    "a header of [0-9]+ bytes; the limit",
]))
BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
        "C64": 64, "F64": 64, "I64": 64, "U64": 64}


def fail(message):
    print(f"safetensors_check: {message}")
    sys.exit(1)


def file_of(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def random_file(rng):
    """A valid file with a few small tensors of any dtype, in any order."""
    names = rng.sample(["a", "b.weight", "b.bias", "", "x" * 40, "\u00fc\u20ac\U0001F600", 'q"\\/', "z 0"], rng.randrange(5))
    entries, offset = {}, 0
    for name in names:
        dtype = rng.choice(list(BITS))
        shape = [rng.randrange(4) for _ in range(rng.randrange(4))]
        if numpy.prod(shape) * BITS[dtype] % 8 != 0:
            shape.append(4)
        size = int(numpy.prod(shape)) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    order = list(entries)
    rng.shuffle(order)
    header = {name: entries[name] for name in order}
    if rng.randrange(2):
        header["__metadata__"] = {"k": "v", "e\n": "\u00e9"}
    return header, rng.randbytes(offset)


WORDS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"0", b"1", b"-1", b"-0", b"1.0", b"1e2", b"null", b"true", b"[]", b"{}", b'""',
         b"18446744073709551615", b"18446744073709551616", b"9223372036854775808", b'"dtype"', b'"F32"', b'"U8"', b"\\u0000",
         b"\\ud800", b"\\ud83d\\ude00", b'"__metadata__":', b'"shape":', b" ", b"\n", b"\x00", b"\xff", b"\xc3\xa9", b"NaN", b"//"]


def damaged(rng):
    """A file with zero to four edits: in the header, its length, or the data."""
    header, data = random_file(rng)
    text = bytearray(json.dumps(header, ensure_ascii=bool(rng.randrange(2)),
                                separators=(",", ":") if rng.randrange(2) else None).encode())
    text += b" " * rng.choice([0, 0, 1, 7])
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 1, 1, 2, 5, 20]))
        kind = rng.randrange(5)
        if kind == 0:
            text[start:end] = b""
        elif kind == 1:
            text[start:end] = rng.choice(WORDS)
        elif kind == 2:
            piece = text[start:end]
            at = rng.randrange(len(text) + 1)
            text[at:at] = piece
        elif kind == 3 and start < len(text):
            text[start] = rng.randrange(256)
        else:  # another number
            numbers = list(re.finditer(rb"\d+", bytes(text)))
            if numbers:
                number = rng.choice(numbers)
                text[number.start():number.end()] = str(int(number[0]) + rng.choice([-1, 1, 2])).encode()
    whole = bytearray(file_of(bytes(text), data))
    kind = rng.randrange(12)
    if kind == 0:
        del whole[rng.randrange(len(whole) + 1):]
    elif kind == 1:
        whole += rng.randbytes(rng.randrange(1, 9))
    elif kind == 2:
        whole[rng.randrange(min(8, len(whole)))] = rng.randrange(256)
    return bytes(whole)


def reference_verdict(data):
    try:
        tensors = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        return None, str(error)
    names = {"float4_e2m1fn_x2": "F4"}
    return sorted((name, names.get(facts["dtype"], facts["dtype"]), list(facts["shape"]), bytes(facts["data"]))
                  for name, facts in tensors), ""


def parse_verdict(line):
    if line.startswith(b"refused "):
        return None, line[8:].decode(errors="replace")
    tensors = []
    for item in line.decode().split(" ", 1)[1:]:
        for tensor in re.findall(r"([0-9a-f]*):(\w+):\[([^\]]*)\]:([0-9a-f]*)", item):
            shape = [int(size) for size in tensor[2].split(",") if size.strip()]
            tensors.append((bytes.fromhex(tensor[0]).decode(), tensor[1], shape, bytes.fromhex(tensor[3])))
    return sorted(tensors), ""


def check_verdicts(tool, cases):
    rng = random.Random(2024)
    files = [damaged(rng) for _ in range(cases)]
    stream = b"".join(struct.pack("<Q", len(data)) + data for data in files)
    output = subprocess.run([tool, "verdicts"], input=stream, stdout=subprocess.PIPE, check=True).stdout
    lines = output.split(b"\n")[:-1]
    if len(lines) != cases:
        fail(f"{cases} files, but {len(lines)} verdicts")
    accepted = stricter = 0
    for data, line in zip(files, lines):
        (expected, reason), (got, message) = reference_verdict(data), parse_verdict(line)
        if expected is None and got is not None:
            fail(f"chorus takes what Python refuses ({reason}): {data!r}")
        elif expected is not None and got is None:
            stricter += 1
            if not STRICTER.search(message):
                fail(f"chorus refuses what Python takes ({message}): {data!r}")
        elif expected != got:
            fail(f"Python sees {expected}, chorus sees {got}: {data!r}")
        accepted += got is not None
    print(f"{cases} damaged files, the same verdicts: {accepted} accepted, {cases - accepted - stricter} refused by both, "
          f"{stricter} by chorus alone")
    if min(accepted, cases - accepted) < cases // 10:
        fail("the damage is too one-sided to say anything")


def check_foreign(tool):
    """What Python's own modules write is refused as what it is."""
    array, arrays, tar = io.BytesIO(), io.BytesIO(), io.BytesIO()
    numpy.save(array, numpy.zeros(3))
    numpy.savez_compressed(arrays, a=numpy.zeros(3))
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.safetensors"), io.BytesIO())
    model = safetensors.numpy.save({"a": numpy.zeros(3)})
    files = [(array.getvalue(), "a NumPy array"), (arrays.getvalue(), "a NumPy archive"), (tar.getvalue(), "a tar archive"),
             (gzip.compress(model), "compressed with gzip"), (bz2.compress(model), "compressed with bzip2"),
             (lzma.compress(model), "compressed with xz"), (b'{"weight_map": {}}', "the index of a model")]
    files += [(pickle.dumps({"a": list(range(300))}, protocol), "a Python pickle") for protocol in range(2, 6)]
    stream = b"".join(struct.pack("<Q", len(data)) + data for data, _ in files)
    lines = subprocess.run([tool, "verdicts"], input=stream, stdout=subprocess.PIPE, check=True).stdout.decode().split("\n")
    for (_, what), line in zip(files, lines):
        if not line.startswith("refused ") or f"not a safetensors file; it is {what}" not in line:
            fail(f"expected {what}, got {line}")
    print(f"{len(files)} files of other formats, each named as what it is")


def check_rewrite(tool, folder):
    """Python -> chorus -> the same bytes; and read back by Python."""
    source, target = folder / "python.safetensors", folder / "chorus.safetensors"
    rng = numpy.random.default_rng(5)
    kinds = [numpy.bool_, numpy.uint8, numpy.int8, numpy.int16, numpy.uint16, numpy.float16, numpy.int32, numpy.uint32,
             numpy.float32, numpy.complex64, numpy.float64, numpy.int64, numpy.uint64]
    models = [{}, {"s": numpy.array(3, numpy.float32), "empty": numpy.zeros((2, 0, 3), numpy.int16)},
              {f"{kind.__name__}.{i}": (rng.random((i, 3)) * 100).astype(kind) for kind in kinds for i in (0, 1, 5)},
              {"nan": numpy.array([numpy.nan, -numpy.inf, -0.0], numpy.float64)},
              {"\u00fc \"quoted\" \\ \U0001F600": numpy.arange(3)}]
    for model in models:
        for metadata in (None, {"note": "line\nbreak \t \x01 \"quote\" \u20ac"}):
            safetensors.numpy.save_file(model, source, metadata)
            subprocess.run([tool, "rewrite", source, target], check=True)
            if source.read_bytes() != target.read_bytes():
                fail(f"not the same bytes for {list(model)}: {source.read_bytes()[:300]!r}, {target.read_bytes()[:300]!r}")
            loaded = safetensors.numpy.load_file(target)
            if any(loaded[name].tobytes() != model[name].tobytes() for name in model) or loaded.keys() != model.keys():
                fail(f"Python reads back something else for {list(model)}")
    checked = len(models)

    # The dtypes that numpy has not: files made by hand; the reference must at least take what chorus writes.
    shuffled = random.Random(9)
    for _ in range(40):
        header, data = random_file(shuffled)
        source.write_bytes(file_of(header, data))
        subprocess.run([tool, "rewrite", source, target], check=True)
        before, after = (reference_verdict(path.read_bytes())[0] for path in (source, target))
        if before is None or before != after:
            fail(f"rewritten, {before} became {after}")
        with safetensors.safe_open(target, "numpy") as file:
            if (file.metadata() or {}) != header.get("__metadata__", {}):
                fail(f"rewritten, the metadata became {file.metadata()}")
        checked += 1
    print(f"{checked} files written by chorus as Python writes them")


def main():
    tool = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        check_rewrite(tool, pathlib.Path(folder))
    check_foreign(tool)
    check_verdicts(tool, int(sys.argv[2]) if len(sys.argv) > 2 else 20000)


if __name__ == "__main__":
    main()
