#!/usr/bin/env python3
"""Writes single_include/chorus/chorus.hpp: all of chorus in one header. With --check, only says whether it is current."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
INCLUDE = ROOT / "include"
TARGET = ROOT / "single_include" / "chorus" / "chorus.hpp"
INCLUDE_LINE = re.compile(r"\s*#\s*include\s*(<[^>]+>)")
OPENS = re.compile(r"\s*#\s*(if|ifdef|ifndef)\b")
CLOSES = re.compile(r"\s*#\s*endif\b")


class Amalgamation:
    """A header included under no condition is expanded at its first include and dropped at the others. One included
    under an #if is expanded there, and again wherever else it is needed: its guard lets the compiler take it once."""

    def __init__(self):
        self.lines = []
        self.unconditional = set()

    def add(self, header, depth):
        if header in self.unconditional:
            return
        if depth == 0:
            self.unconditional.add(header)
        guard = "CHORUS_SINGLE_" + re.sub(r"\W", "_", header).upper()
        self.lines += [f"// <{header}>", f"#ifndef {guard}", f"#define {guard}"]
        for line in (INCLUDE / header).read_text().splitlines():
            if line.strip() == "#pragma once":
                continue
            if OPENS.match(line):
                depth += 1
            elif CLOSES.match(line):
                depth -= 1
            match = INCLUDE_LINE.match(line)
            if match is None:
                self.lines.append(line)
            elif match[1].startswith("<chorus/"):
                self.add(match[1].strip("<>"), depth)
            elif match[1] not in self.unconditional:
                self.lines.append(line)
                if depth == 0:
                    self.unconditional.add(match[1])
        self.lines += [f"#endif  // {guard}", ""]


def amalgamated():
    result = Amalgamation()
    result.lines = ["#pragma once", "// chorus in one header, made by tests/amalgamate.py from include/chorus: change it there.", ""]
    result.add("chorus/chorus.hpp", 0)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(result.lines))


def main():
    text = amalgamated()
    if sys.argv[1:] == ["--check"]:
        if not TARGET.exists() or TARGET.read_text() != text:
            print(f"{TARGET.relative_to(ROOT)} is stale: run tests/amalgamate.py")
            return 1
        return 0
    if sys.argv[1:]:
        print(__doc__)
        return 2
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
