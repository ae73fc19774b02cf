#!/usr/bin/env python3
"""Writes small.json, a tokenizer in GPT-2's form that Hugging Face's tokenizers trained here on a text made up here, and
vectors.json, what that package makes of some texts with it: [text, its tokens, their text].

    pip install tokenizers; generate.py"""

import json
import pathlib
import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
TEXTS = [
    "", " ", "  ", "\n", "the cat sees a dog", "The cat's dog, it'll we've they're I'm he'd isn't", "'S 'T 'LL", "!'s 's \u2019s '' ''s",
    "a  b   c\t\td \t e\n\n\nf", "ends in blanks   ", "   begins", "tab\tand\r\nlines\n", "\u00a0no-break\u00a0 \u00a0space\u3000wide",
    "e\u0301 combining n\u0303", "\u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f", "\u00bd \u2167 \u0663 \u00b2x", "\U0001F600\U0001F468\u200d\U0001F469\u200d\U0001F467 ok",
    "na\u00efve caf\u00e9 \u00fcber", "0123456789 12,345.67 1st", "a_b-c(d)[e]{f}", "<|endoftext|>", "one<|endoftext|>two <|endoftext|> three",
    "<|endoftext", "<|end|><|end|>of<tag>text", "<tag><tag>>", "\u0000\u0001\x7f\u0080\u00ad", "\U00011F02\U0001E4D0\u0870", "aaaaaaaaaaaaaaaa" * 4,
    "the the the the", "thecatthecat", "\ufffd \ufeff", "\u2028\u2029\u0085x",
]


def small(prefix_space=False):
    rng = random.Random(5)
    words = "the cat dog house river sees follows likes is a red old small quiet there they're it's don't we'll 12 345 6 caf\u00e9 \u4f60\u597d".split()
    text = [" ".join(rng.choice(words) for _ in range(12)) + rng.choice(".!?\n") for _ in range(300)] + ["aaaa aaaaaaaa aa"] * 5
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<tag>"), AddedToken("<tag>>"), AddedToken("of<"), AddedToken("\u00e9 x")])
    return tokenizer


if __name__ == "__main__":
    tokenizer = small()
    (HERE / "small.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")
    vectors = [[text, ids := tokenizer.encode(text).ids, tokenizer.decode(ids, skip_special_tokens=False)] for text in TEXTS]
    (HERE / "vectors.json").write_text("[\n" + ",\n".join(json.dumps(v, separators=(",", ":")) for v in vectors) + "\n]\n")
