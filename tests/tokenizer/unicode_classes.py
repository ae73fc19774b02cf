#!/usr/bin/env python3
"""Writes include/chorus/data/unicode_classes.hpp: the letters and numbers of the version of Unicode that Hugging Face's
tokenizers have. They say it themselves, by where GPT-2's pattern splits "a" + c, "1" + c and "!" + c.

    pip install tokenizers; unicode_classes.py"""

import pathlib
import sys

from tokenizers import __version__
from tokenizers.pre_tokenizers import ByteLevel

HEADER = pathlib.Path(__file__).resolve().parents[2] / "include" / "chorus" / "data" / "unicode_classes.hpp"
BLANKS = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def classes():
    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        found = [kind for kind, before in (("letter", "a"), ("number", "1"), ("other", "!")) if len(split(before + chr(code))) == 1]
        kind = found[0] if found else "blank"
        assert len(found) < 2 and (kind == "blank") == (code in BLANKS), (hex(code), found)
        yield code, kind


def ranges(kind, all_classes):
    out = []
    for code, its in all_classes:
        if its != kind or code < 128:
            continue
        if out and (out[-1][1] == code - 1 or (out[-1][1] == 0xD7FF and code == 0xE000)):
            out[-1][1] = code
        else:
            out.append([code, code])
    return out


def array(name, comment, pairs):
    lines, line = [f"/// {comment}", f"inline constexpr CodePoints {name}[] = {{"], "   "
    for first, last in pairs:
        text = f" {{0x{first:X}, 0x{last:X}}},"
        if len(line + text) > 120:
            lines.append(line)
            line = "   "
        line += text
    return "\n".join(lines + [line, "};"])


all_classes = list(classes())
HEADER.write_text("\n".join([
    "#pragma once",
    f"/// Letters and numbers beyond ASCII, as tokenizers {__version__} has them. Made by tests/tokenizer/unicode_classes.py.",
    "",
    "#include <cstdint>",
    "",
    "namespace chorus::data::detail {",
    "",
    "/// Code points from `first` to `last`.",
    "struct CodePoints {",
    "  std::uint32_t first, last;",
    "};",
    "",
    array("unicode_letters", "Those of category L.", ranges("letter", all_classes)),
    "",
    array("unicode_numbers", "Those of category N.", ranges("number", all_classes)),
    "",
    "}  // namespace chorus::data::detail",
    ""]))
