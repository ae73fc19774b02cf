#!/usr/bin/env python3
"""Writes single_include/chorus/chorus.hpp and all.hpp. They contain include/chorus/chorus.hpp and all.hpp with
everything that these include; all.hpp has only what chorus.hpp lacks. For each header that the two list, writes a file
of its name that includes one of them, so that programs for include/ compile with single_include/. --check only reports
whether the files are current and complete."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
INCLUDE = ROOT / "include"
TARGET = ROOT / "single_include"
# Left out: headers of foreign backends, of the compiled library, and of chorus-run.
APART = re.compile(r"chorus/testing/.*|chorus/(comm/(mpi|gloo|engine/(mpi_library|compare_calls)|transport/sigpipe)|compiled/.*|launch/(job_of_)?machines)\.hpp")
INCLUDE_LINE = re.compile(r"\s*#\s*include\s*(<[^>]+>)")
OPENS = re.compile(r"\s*#\s*(if|ifdef|ifndef)\b")
TURNS = re.compile(r"\s*#\s*(else|elif)\b")
CLOSES = re.compile(r"\s*#\s*endif\b")


class Amalgamation:
    """Expands a header at its first include, and again if that was under a condition that may be false here. Its
    include guard makes the compiler take it once."""

    def __init__(self):
        self.lines = []
        self.open = []  # headers that are being expanded
        self.conditions = []  # the #if lines around the current line
        self.expanded = {}  # the sets of conditions under which a header was expanded

    def seen(self, header):
        here = frozenset(self.conditions)
        if any(conditions <= here for conditions in self.expanded.get(header, [])):
            return True
        self.expanded.setdefault(header, []).append(here)
        return False

    def add(self, header):
        if header in self.open or self.seen(header):
            return
        self.open.append(header)
        guard = "CHORUS_SINGLE_" + re.sub(r"\W", "_", header).upper()
        self.lines += [f"// <{header}>", f"#ifndef {guard}", f"#define {guard}"]
        for line in (INCLUDE / header).read_text().splitlines():
            text = line.strip()
            if text == "#pragma once":
                continue
            if OPENS.match(line):
                self.conditions.append(text)
            elif CLOSES.match(line):
                self.conditions.pop()
            elif TURNS.match(line):
                self.conditions[-1] += text
            match = INCLUDE_LINE.match(line)
            if match is None:
                self.lines.append(line)
            elif match[1].startswith("<chorus/"):
                self.add(match[1].strip("<>"))
            elif not self.seen(match[1]):
                self.lines.append(line)
        self.lines += [f"#endif  // {guard}", ""]
        self.open.pop()


def amalgamated():
    """The text of each header, and the names of headers that none of them contains."""
    result = Amalgamation()
    texts = {}
    for header in ("chorus/chorus.hpp", "chorus/all.hpp"):
        result.lines = ["#pragma once", "// Made by tests/amalgamate.py from include/chorus: change it there.", ""]
        if texts:
            result.lines += ["#include <chorus/chorus.hpp>", ""]
        result.add(header)
        texts[header] = re.sub(r"\n{3,}", "\n\n", "\n".join(result.lines))
    for whole in ("chorus/chorus.hpp", "chorus/all.hpp"):
        for header in re.findall(r"#include <(chorus/\S+)>", (INCLUDE / whole).read_text()):
            if not APART.fullmatch(header) and not header.endswith("_impl.hpp"):
                texts.setdefault(header, f"#pragma once\n#include <{whole}>\n")
    everything = sorted(str(path.relative_to(INCLUDE)) for path in INCLUDE.rglob("*.hpp"))
    return texts, [header for header in everything if header not in result.expanded and not APART.fullmatch(header)]


def there():
    return [str(path.relative_to(TARGET)) for path in TARGET.rglob("*.hpp")]


def main():
    texts, missing = amalgamated()
    if sys.argv[1:] == ["--check"]:
        stale = [name for name, text in texts.items()
                 if not (TARGET / name).exists() or (TARGET / name).read_text() != text]
        stale += [name for name in there() if name not in texts]
        for name in stale:
            print(f"single_include/{name} is stale: run tests/amalgamate.py")
        for header in missing:
            print(f"<{header}> is included by neither <chorus/chorus.hpp> nor <chorus/all.hpp>")
        return 1 if stale or missing else 0
    if sys.argv[1:]:
        print(__doc__)
        return 2
    for name in there():
        if name not in texts:
            (TARGET / name).unlink()
    for name, text in texts.items():
        (TARGET / name).parent.mkdir(parents=True, exist_ok=True)
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
