#!/usr/bin/env python3
"""Writes the seeds of the fuzz targets, corpus/NAME/seed-*: small files as they are found outside, and what ranks say to
each other; and regressions, which have names. Files that fuzzers have found lie beside them and stay.

    python3 tests/fuzz/seeds.py
"""

import gzip
import io
import json
import pathlib
import struct
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
F32, I64 = 11, 7  # chorus::DType


def pack(form, *values):
    return struct.pack("<" + form, *values)


# Files.

def safetensors(tensors, metadata=None):
    """tensors: (name, dtype, shape, data), as the reference writer lays them out."""
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return pack("Q", len(text)) + text + data


def images(kind):
    """The files of golden_images whose names begin so."""
    content = (HERE.parent / "golden_images" / "images.safetensors").read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    entries = json.loads(content[8:begin])
    return [content[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]]
            for name, entry in entries.items() if name.startswith(kind) and name.endswith(".file")]


def floats(*numbers):
    return pack(f"{len(numbers)}f", *numbers)


def model(prefix="", dtype="F32", form="f"):
    def tensor(name, *shape):
        count = 1
        for size in shape:
            count *= size
        return (prefix + name, dtype, list(shape), pack(f"{count}{form}", *(0.5 + i for i in range(count))))
    return [tensor("fc1.weight", 3, 2), tensor("fc1.bias", 3), tensor("fc2.weight", 2, 3), tensor("fc2.bias", 2),
            tensor("norm.weight", 3), tensor("norm.bias", 3), tensor("norm.running_mean", 3),
            tensor("norm.running_var", 3), (prefix + "norm.num_batches_tracked", "I64", [], pack("q", 5))]


def checkpoint(more=(), without=()):
    parameters = {"fc.bias": [2], "fc.weight": [2, 1], "norm.bias": [2], "norm.weight": [2]}
    tensors = [("norm.num_batches_tracked", "I64", [], pack("q", 4))]
    tensors += [(f"training/steps.{name}", "I64", [], pack("q", 3)) for name in parameters]
    tensors += [("training/loss_scale", "F64", [2], pack("2d", 1024, 3)), ("training/lr", "F64", [1], pack("d", 0.1))]
    tensors += [(name, "F32", shape, floats(1, 2)) for name, shape in parameters.items()]
    tensors += [("norm.running_mean", "F32", [2], floats(0, 0)), ("norm.running_var", "F32", [2], floats(1, 1))]
    tensors += [(f"training/{slot}.{name}", "F32", shape, floats(0.25, 0.5))
                for slot in ("exp_avg", "exp_avg_sq") for name, shape in parameters.items()]
    metadata = {"training/batch": "2", "training/epoch": "1", "training/forward_passes": "7", "training/seed": "3",
                "training/parameter_order": "norm.bias\nnorm.weight\nfc.bias\nfc.weight\n", "training/step": "3"}
    return safetensors([t for t in tensors if t[0] not in without] + list(more), metadata)


def npy(descr, shape, data, fortran=False, version=1):
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}"
    prefix = 10 if version == 1 else 12
    text += " " * (63 - (prefix + len(text)) % 64) + "\n"
    return b"\x93NUMPY" + pack("BB", version, 0) + pack("H" if version == 1 else "I", len(text)) + text.encode() + data


def npz(method, names=("a", "b")):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for i, name in enumerate(names):
            content = npy("<f4", (2, 3), floats(*range(6))) if i % 2 == 0 else npy("<i8", (3,), pack("3q", 1, 2, 3))
            archive.writestr(zipfile.ZipInfo(name + ".npy"), content, method)
    return out.getvalue()


def made(name):
    return (HERE.parent / name).read_bytes()


def tokenizer(add_prefix_space=False):
    """A byte-level BPE of few words."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in itself] + [chr(256 + n) for n in range(256 - len(itself))]
    words = ["th", "the", "\u0120c", "aa", "\u0120the"]
    level = {"type": "ByteLevel", "add_prefix_space": add_prefix_space}
    return json.dumps({
        "added_tokens": [{"id": 300, "content": "<|e|>", "special": True, "normalized": False}], "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": {w: i for i, w in enumerate(letters + words)},
                  "merges": ["t h", ["th", "e"], "\u0120 c", "a a", "\u0120 the"]}}, separators=(",", ":")).encode()


def idx(*sizes, values=None):
    count = 1
    for size in sizes:
        count *= size
    return b"\0\0\x08" + bytes([len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + (values or bytes(count))


def zipped(content):
    return gzip.compress(content, mtime=0)


def mnist(images, labels, gz=False):
    return bytes([gz]) + pack("H", len(images)) + images + (zipped(labels) if gz else labels)


# Messages, as the headers of comm/ lay them out.

STORE_MAGIC, MAGIC = 0x000265726f747363, 0x00057375726f6863
(SET, GET, ADD, COMPARE_SET, DELETE, CHECK, WAIT, NUM_KEYS, APPEND, MULTI_SET, DONE, TIMED_OUT, REFUSED) = range(13)


def message(code, *texts, number=0):
    body = b"".join(pack("I", len(text)) + text for text in texts)
    return pack("B3xIQq", code, len(texts), len(body), number) + body


def request(code, *texts, number=b"", how=0):
    """As store_table reads it; `how`: see there."""
    return bytes([code, len(number)]) + number + bytes([len(texts)]) + b"".join(
        bytes([len(text), how]) + text for text in texts)


def store_hello(key=7):
    return pack("QQ", STORE_MAGIC, key) + bytes(48)


CHALLENGE = pack("Q", STORE_MAGIC) + bytes(24)
WELCOME = pack("QQ", STORE_MAGIC, 1) + bytes(32)


def piece(op, data, count, dtype=F32, detail=0, sequence=0):
    return pack("BBBBIQQ", op, dtype, detail, 0, sequence, count, len(data)) + data


def news(kind, other=-1, reason=b""):
    return pack("Ii1016s", kind, other, reason)


def call(how, count, data, of_news=b""):
    return bytes([how, count]) + pack("H", len(of_news)) + of_news + data


def hello(rank=1, size=2, kind=0, machine=1, purpose=b"fuzz", all_reduce=0):
    return pack("Q16siiiiQBB6x64s32x", MAGIC, b"", rank, size, 99, 4000, machine, kind, all_reduce, purpose)


def guest(content, closes=False):
    return bytes([250 if closes else len(content)]) + content


def answer(kind=2, welcome=1, refusal=b""):
    return pack("QQiiiiB7x1024s32x", MAGIC, 5, welcome, 99, 3, 4000, kind, refusal)


def addresses(family=2):
    one = pack("H", family) + struct.pack(">H", 4000) + bytes([127, 0, 0, 1]) + bytes(120) + pack("I4x", 16)
    return one * 64


SEEDS = {
    "safetensors": [
        safetensors([("a.w", "F32", [2, 3], floats(*range(6))), ("b", "I64", [], pack("q", 1)),
                     ("c", "BOOL", [3, 0], b""), ("d", "U8", [4], b"\0\1\2\3")], {"format": "pt", "k\\u00e9": "\n"}),
        safetensors([("x", "F4", [2, 2], b"\x12\x34"), ("y", "F8_E4M3", [1], b"\1"), ("z", "C64", [1], bytes(8))]),
        safetensors([]), pack("Q", 0), b"PK\3\4 data.pkl" + bytes(20), b"\x80\2}q\0.",
    ],
    "load_model": [
        bytes([0]) + safetensors(model()),
        bytes([1]) + safetensors(model("module.")[:4]),
        bytes([2]) + safetensors(model("model.", "F64", "d")),
        bytes([5]) + safetensors(model("encoder.", "F16", "e")),
        bytes([0]) + safetensors(model("_orig_mod."), {"norm.weight": "norm.bias"}),
        bytes([7]) + safetensors(model("", "BF16", "e")),
    ],
    "checkpoint": [
        checkpoint(),
        checkpoint(without=("training/lr",)),
        checkpoint([(f"training/rank1/{name}", "F32", [2], floats(3, 4))
                    for name in ("model/norm.weight", "exp_avg.norm.weight")]),
        checkpoint([("training/hook/rest.fc.weight", "F32", [2, 1], floats(1, 2))]),
        safetensors([("fc.bias", "F32", [2], floats(1, 2))]),
    ],
    "npy": [
        npy("<f4", (2, 3), floats(*range(6))), npy("<f4", (2, 3), floats(*range(6)), fortran=True),
        npy("<i8", (2, 1), pack("2q", 1, -1), version=2), npy("|b1", (2, 2), b"\0\1\1\0", version=3),
        npy("<f8", (1, 2, 1), pack("2d", 1, 2)), npy("<f2", (), pack("e", 1)), npy(">f4", (1,), bytes(4)),
        npy("|O", (1,), b"\x80\2."), npy("<f4", (0, 5), b""),
    ],
    "npz": [npz(zipfile.ZIP_STORED), npz(zipfile.ZIP_DEFLATED), npz(zipfile.ZIP_STORED, ()),
            npz(zipfile.ZIP_STORED, ("b", "a", "folder/a"))],
    "pt": [bytes([0]) + made("pt/state.pt"), bytes([1]) + made("pt/checkpoint.pt"), bytes([0]) + made("pt/module.pt"),
           bytes([0]) + made("pt/legacy.pt")],
    "tokenizer": [bytes([len(text)]) + text + tokenizer(**how) for text, how in [
        (b"the cat's <|e|>th \xff\n 12", {}), (b"aaaa ", {"add_prefix_space": True}), ("\u00e9 \u4f60".encode(), {})]],
    "idx": [bytes([2]) + idx(2, 3, 2), bytes([0]) + idx(5), bytes([3]) + idx(1, 2, 1, 2), bytes([0]) + idx(0)],
    "mnist": [mnist(idx(2, 3, 3), idx(2, values=b"\3\7")), mnist(idx(2, 3, 3), idx(2, values=b"\3\7"), gz=True),
              mnist(idx(2, 1, 1), idx(3)), mnist(idx(1, 2, 2), idx(1, values=b"\x0b"))],
    "cifar10": [pack("H", 3073) + pack("HB", 0, 9) + pack("HB", 3072, 255), pack("H", 2 * 3073) + pack("HB", 3073, 5),
                pack("H", 3073) + pack("HB", 0, 10), pack("H", 3000), pack("H", 0)],
    "gzip": [bytes([2]) + zipped(idx(40)), bytes([255]) + zipped(idx(3)) * 2, bytes([9]) + zipped(b""),
             bytes([1]) + zipped(bytes(5000))[:-4], bytes([7]) + gzip.compress(bytes(range(200)), 0, mtime=0)],
    "foreign_file": [bytes([i % 6]) + begin for i, begin in enumerate([
        b"", bytes(20), b"version https://git-lfs.github.com/spec/v1\n", b"PK\3\4 archive/data.pkl", b"PK\3\4 a.npy",
        b"PK\3\4 model.weights.h5", b"PK\5\6", b"\x80\2}q\0.", b"\x89HDF\r\n\x1a\n", b"\x93NUMPY\1\0", b"\x1f\x8b\x08",
        b"BZh9", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf\x27\x1c", bytes(257) + b"ustar\0",
        b"<!DOCTYPE html><html>", b"{\"a\": 1}", b"GGUF\3\0\0\0", b"\x08\x07\x12\x07pytorch", bytes(4) + b"TFL3",
        pack("Q", 2) + b"{}", b"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>", b"Not Found\n"])],
    "environment": [text.encode() for text in [
        "RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=127.0.0.1\nMASTER_PORT=29500\n",
        "RANK=0\nWORLD_SIZE=4\nMASTER_ADDR=[::1]\nMASTER_PORT=29500\nTORCHELASTIC_USE_AGENT_STORE=True\n"
        "CHORUS_TOKEN=0123456789abcdef\nCHORUS_RENDEZVOUS_FD=3\n",
        "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1\nOMPI_COMM_WORLD_LOCAL_SIZE=2\n"
        "PMIX_NAMESPACE=job\n",
        "PMI_RANK=0\nPMI_SIZE=2\nMPI_LOCALRANKID=0\nMPI_LOCALNRANKS=2\n",
        "SLURM_PROCID=1\nSLURM_STEP_NUM_TASKS=2\nSLURM_LOCALID=1\nSLURM_JOB_ID=5\nSLURM_STEP_ID=0\n"
        "SLURM_STEP_NUM_NODES=1\n",
        "SLURM_PROCID=3\nSLURM_NTASKS=4\nSLURM_NNODES=2\nMASTER_ADDR=10.0.0.1\nMASTER_PORT=4000\n",
        "CHORUS_LAUNCH=2 4 0,76 ddp\nCHORUS_TIMEOUT=2.5\nCHORUS_BACKEND=tcp\nCHORUS_ALL_REDUCE=ring\n",
        "CHORUS_LAUNCH=0 2 - single\n",
        "+123456789 2 rank 1: it failed", "RANK=0\n"]],
    "arguments": ["\n".join(words).encode() for words in [
        ("--devices", "2", "--seed=7", "--timeout", "1.5", "--backend", "tcp", "--all-reduce", "ring", "--epochs=3"),
        ("--help", "--device", "3", "--learning_rate=0.1"), ("--devices", "--", "--seed"), ("auto",),
        ("localhost:29400", "--x"), ("[::1]:0",), ("1:3",), ("0", "2"), ("0:1", "1:3"), ("SIGTERM", "SIGUSR1"),
        ("join_timeout=2", "last_call_timeout=0.5"), ("--start-method=spawn",), ("2.5",), ("--use_agent_store",)]],
    "einsum": [b"ij,jk->ik", b"bij,bjk->bik", b"ab,c->", b"abcdefgh,hgfedcba->a", b",->", b"ij,jk", b"ii,i->i"],
    "store_message": [message(SET, b"key", b"value") + message(GET, b"key", number=100),
                      message(ADD, b"n", number=-5), message(REFUSED, b"why"), message(MULTI_SET, b"a", b"", b"b", b"x"),
                      pack("B3xIQq", SET, 1, 1 << 40, 0)],
    "store_table": [
        request(SET, b"a", b"1") + request(GET, b"a") + request(ADD, b"a", number=b"\2") + request(NUM_KEYS)
        + request(COMPARE_SET, b"a", b"3", b"4") + request(APPEND, b"a", b"5") + request(CHECK, b"a", b"b")
        + request(DELETE, b"a") + request(WAIT, b"a"),
        request(MULTI_SET, b"a", b"x", b"b", b"y") + request(GET, b"a", b"b") + request(COMPARE_SET, b"c", b"", b"z"),
        request(ADD, b"n", number=b"\xff" * 7 + b"\x7f") + request(ADD, b"n", number=b"\1"),
    ],
    "store_server": [
        bytes([0]) + message(SET, b"k", b"v") + message(GET, b"k") + message(ADD, b"n", number=1) + message(CHECK, b"k")
        + message(COMPARE_SET, b"k", b"v", b"w") + message(APPEND, b"k", b"x") + message(DELETE, b"n")
        + message(NUM_KEYS) + message(MULTI_SET, b"a", b"b"),
        bytes([1]) + message(WAIT, b"nothing", number=10), bytes([2]) + b"GET / HTTP/1.1\r\n\r\n" + bytes(80),
        bytes([2]) + store_hello() + message(NUM_KEYS), bytes([3]) + message(SET, b"k", b"v") + message(GET, b"k"),
        bytes([2]) + store_hello(8),
    ],
    "store_client": [
        bytes([16]) + message(DONE), bytes([17]) + message(DONE, b"value"), bytes([18]) + message(DONE, number=5),
        bytes([19]) + message(DONE, b"c"), bytes([20]) + message(DONE, number=1), bytes([22]) + message(TIMED_OUT, b"a"),
        bytes([24]) + message(DONE, b"1", b"2"), bytes([25]) + message(REFUSED, b"the store is full"),
        bytes([0]) + CHALLENGE + WELCOME + message(DONE), bytes([1]) + CHALLENGE + pack("QQ", STORE_MAGIC, 0),
    ],
    "collectives": [
        call(how, count, data, of_news) for how, count, data, of_news in [
            (64, 4, piece(0, floats(1, 2, 3, 4), 4), b""), (65, 4, piece(1, floats(1, 2, 3, 4), 4, detail=1), b""),
            (66, 4, piece(2, floats(1, 2, 3, 4), 4), b""), (67, 4, piece(3, floats(1, 2, 3, 4), 4), b""),
            (68, 0, piece(5, b"", 0, 1), b""), (69, 0, piece(6, b"", 0, 1) * 2, b""),
            (70, 4, piece(4, floats(1, 2, 3, 4), 4), b""), (71, 4, b"", b""),
            (72, 4, piece(2, pack("q", 4), 1, I64) + piece(2, b"abcd", 4, 1, sequence=1), b""),
            (73, 0, piece(1, pack("q", 3), 1, I64, 1) + piece(1, b"abc", 3, 1, 1, 1), b""),
            (74, 0, piece(2, pack("qqQ", 0, 0, 1), 24, 1) + piece(2, pack("q504s", 4000, b"127.0.0.1"), 512, 1,
                                                                 sequence=1), b""),
            (64, 4, b"", news(1, reason=b"it failed")), (64, 4, b"", news(0)), (64, 4, b"", news(2, 0)),
            (0, 4, piece(1, floats(1), 1), b""), (192, 4, piece(0, floats(1, 2, 3, 4), 4), b"")]],
    "rendezvous_host": [
        bytes([0]) + guest(hello()), bytes([2]) + guest(hello(kind=2)), bytes([8]) + guest(hello() + b"\1"),
        bytes([1 + 8]) + guest(hello(kind=1) + b"\1"), bytes([8]) + guest(hello() + b"\0"),
        bytes([4]) + guest(hello(1, 3)) + guest(hello(2, 3)), bytes([0]) + guest(hello(1, 3)),
        bytes([0]) + guest(hello(purpose=b"another")), bytes([0]) + guest(hello()[:100]) + guest(b"GET / HTTP/1.1\r\n"),
        bytes([0]) + guest(hello(5)) + guest(hello(kind=7)), bytes([0]) + guest(hello(all_reduce=1)),
    ],
    "rendezvous_join": [
        bytes([0]) + pack("Q", MAGIC) + bytes(24) + answer() + addresses(),
        bytes([64]) + answer(welcome=0, refusal=b"no"), bytes([128, 2]) + bytes(9) + addresses(),
        bytes([128, 1, 3]) + bytes(4) + b"\2" + addresses(), bytes([129, 1]) + pack("i", 1) + bytes(5) + b"\2",
        bytes([0]) + b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(20), bytes([130, 2]) + bytes(9) + addresses(10),
    ],
    "png": images("png"), "jpeg": images("jpeg"),
    "mesh": [bytes([0, 2]), bytes([0]), bytes([0, 1 + 8 * 20, *bytes(20), 2]), bytes([4, 0, 2]), bytes([0, 0, 2])],
}


# What was a fault once.
REGRESSIONS = {
    # A value of 1 MiB, asked for 8192 times in one request.
    "store_table/get-many-times": bytes([SET, 0, 2, 1, 0]) + b"a" + bytes([31, 15]) + bytes(31)
                                  + bytes([GET, 0, 1, 1, 139]) + b"a",
    # Lengths of texts that there can't be.
    "collectives/all_gather_object-length": call(72, 4, piece(2, pack("q", -1), 1, I64)
                                                 + piece(2, b"abcd", 4, 1, sequence=1)),
    "collectives/broadcast_object-length": call(73, 0, piece(1, pack("q", 1 << 62), 1, I64, 1)),
    # A text that has no end.
    "collectives/split-text": call(74, 4, piece(2, pack("qqQ", 0, -5, 1), 24, 1)
                                   + piece(2, pack("q", 4000) + b"x" * 504, 512, 1, sequence=1)),
    # Rank 0 says that rank 1 is at a Unix socket, and that the ranks talk over what there is not.
    "rendezvous_join/address-family": bytes([128, 2]) + bytes(9) + addresses(1),
    "rendezvous_join/kind": bytes([128, 77]) + bytes(9) + addresses(),
}


def main():
    for name, seeds in SEEDS.items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("seed-*"):
            old.unlink()
        for i, seed in enumerate(seeds):
            (folder / f"seed-{i:02}").write_bytes(seed)
    for name, content in REGRESSIONS.items():
        (CORPUS / name).write_bytes(content)


if __name__ == "__main__":
    main()
