#!/usr/bin/env python3
"""Compares chorus's tokenizer with Hugging Face's.

usage: tokenizer_check.py TOOL [full]

1. Tokens of random texts, and the texts of tokens, are the package's: with and without a prefix space, and with added
   tokens that overlap.
2. With `full`, every code point has the package's class, by where the pattern splits it from letters, numbers and others.
"""

import pathlib
import random
import subprocess
import sys
import tempfile

from tokenizers import AddedToken

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tokenizer"))
from generate import TEXTS, small  # noqa: E402

TOOL, FULL = sys.argv[1], sys.argv[2:] == ["full"]
COUNT = 20000 if FULL else 2000
PARTS = ["a", "Z", "the", " the", "cat", "'s", "'ll", "'", "\u2019s", " ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2028", "0", "12", "\u00bd", "\u0663",
         "!", "?!", "_", "-", "\u00e9", "e\u0301", "\u4f60\u597d", "\U0001F600", "\u200d", "\u00ad", "\x00", "\x7f", "\x85", "<", ">", "<tag>", "<tag>>",
         "of<", "<|end|>", "<|endoftext|>", "<|", "aaaa", "\ufffd", "\u0301", "\U000E0100", "\u1680", "\ufeff"]


def chorus(path, texts):
    lines = "\n".join(text.encode().hex() for text in texts) + "\n"
    done = subprocess.run([TOOL, path], input=lines, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        tokens, plain, skipped = line.split("|")
        yield [int(token) for token in tokens.split()], bytes.fromhex(plain).decode(), bytes.fromhex(skipped).decode()


def compare(path, tokenizer, texts):
    tokenizer.save(path)
    encodings = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    results = list(chorus(path, texts))
    assert len(results) == len(texts), (len(results), len(texts))
    for text, ids, (own, plain, skipped) in zip(texts, encodings, results):
        assert own == ids, f"{text!r}: expected {ids}, got {own}"
        assert plain == tokenizer.decode(ids, skip_special_tokens=False), f"{text!r}: {plain!r}"
        assert skipped == tokenizer.decode(ids), f"{text!r}: {skipped!r}"


rng = random.Random(7)
with tempfile.TemporaryDirectory() as folder:
    path = folder + "/tokenizer.json"
    texts = TEXTS + ["".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 12))) for _ in range(COUNT)]
    texts += ["".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(8)) for _ in range(COUNT)]
    compare(path, small(), texts)
    compare(path, small(prefix_space=True), texts[:COUNT // 4])
    more = small()
    more.add_tokens([AddedToken(text, special=special, normalized=normalized) for text, special, normalized in
                     (("the c", False, False), (" the", False, True), ("e", False, False), ("ab", True, True), ("bc", True, False))])
    compare(path, more, texts[:COUNT // 4] + ["abc", "abcab", "the cat", "bcab e"])
    print(f"tokenizer_check: {len(texts)} texts have the package's tokens")
    if FULL:
        codes = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
        compare(path, small(), ["".join(f"a{code}\n1{code}\n!{code}\n" for code in codes[begin:begin + 50]) for begin in range(0, len(codes), 50)])
        print(f"tokenizer_check: {len(codes)} code points have its classes")
