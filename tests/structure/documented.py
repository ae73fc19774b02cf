#!/usr/bin/env python3
"""Every public name has a doc comment: types, functions and constants of namespace chorus in the headers that chorus.hpp and all.hpp
include, and what is public in their classes. Names in a namespace detail, operations or functors are not public.

    documented.py INCLUDE_DIRECTORY
"""
import pathlib
import re
import sys

INCLUDE = pathlib.Path(sys.argv[1])
HIDDEN = re.compile(r"^namespace (?:[\w:]*::)?(detail|operations|functors)\b")
TYPE = re.compile(r"^(?:\[\[[^]]*\]\] )?(?:class|struct|enum class|enum|union|concept|using) (?:\[\[[^]]*\]\] )?(\w+)")
FUNCTION = re.compile(r"(~?\w+|operator\s*(?:\(\)|[^\s(]+))\(")
# An overload, a specialization or an operator says what the first of its name says; members that every type has need no words.
PLAIN = re.compile(r"^(operator.*|main|if|for|while|switch|return|static_assert|requires|defined|get|begin|end|size|name|visit|describe|derivatives)$")


def headers(entries=("chorus/chorus.hpp", "chorus/all.hpp")):
    for entry in entries:
        for name in re.findall(r"#include <(chorus/[^>]+)>", (INCLUDE / entry).read_text()):
            if name.count("/") == 1 and name not in entries:  # a room's, which lists others
                yield from headers((name,))
            yield name


def declarations(text):
    """(line, name, documented) of what stands at the scope of a namespace."""
    hidden, comment, head = 0, False, None
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if HIDDEN.match(line):
            hidden += not line.rstrip().endswith("}")
        elif hidden and re.match(r"^}  // namespace (?:[\w:]*::)?(detail|operations|functors)", line):
            hidden -= 1
        elif hidden:
            continue
        elif line.startswith("///"):
            comment = True
        elif line.startswith("//"):
            continue
        elif not line or line.startswith(("namespace", "}", "#", " ", "CHORUS_", ")")):
            if line.startswith("#") or not line or line.startswith("}"):
                comment, head = False, None
        elif line.startswith(("template", "requires", "[[")) and not re.search(r"[;{]$", line):
            head = head or number
        else:
            text_of = re.sub(r"^template <.*?> (?=class|struct)", "", line)
            found = TYPE.match(text_of) or FUNCTION.search(re.sub(r"^(template <[^;{]*> )", "", text_of))
            if found and not re.match(r"^(extern|friend|static_assert|template <>|struct \w+;|class \w+;|enum class \w+ : [\w:]+;|using namespace|using \w+::|template struct|template class)", line):
                name = found.group(1)
                specialized = re.match(r"^(?:struct|class) \w+<", text_of)
                declared = re.match(r"^(?:struct|class) \w+;", text_of)
                member = text_of[:found.start(1)].endswith("::")  # defined outside of its class, which documents it
                if not specialized and not declared and not member:
                    yield number, name, comment
            comment, head = False, None


known, missing, count = set(), [], 0
for header in dict.fromkeys(headers()):
    for number, name, documented in declarations((INCLUDE / header).read_text()):
        if PLAIN.match(name):
            continue
        count += 1
        if documented:
            known.add(name)
        else:
            missing.append((header, number, name))
missing = [m for m in missing if m[2] not in known]
for header, number, name in missing:
    print(f"{header}:{number}: {name} has no doc comment")
print(f"{count} public names, {len(missing)} without a doc comment")
sys.exit(bool(missing))
