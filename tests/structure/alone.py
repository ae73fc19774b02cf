#!/usr/bin/env python3
"""alone.py INCLUDE HEADER...: groups of headers that one file can include after each other and that compile there as they
do alone, a line a group, separated by semicolons. A header may follow others where it says no name that only they bring
along: one that it forgot to include would be missed as if it stood alone."""
import functools
import pathlib
import re
import sys

include = pathlib.Path(sys.argv[1])


@functools.cache
def text(header):
    return (include / header).read_text()


@functools.cache
def closure(header):
    """What a header includes, and what that includes."""
    found, left = set(), [header]
    while left:
        for one in re.findall(r"^ *# *include <(chorus/[^>]+)>", text(left.pop()), re.M):
            if one not in found and (include / one).exists():
                found.add(one)
                left.append(one)
    return found


@functools.cache
def words(header):
    """Those in a header but for comments, texts and includes."""
    code = re.sub(r"//.*|^ *# *include.*", "", text(header), flags=re.M)
    return set(re.findall(r"[A-Za-z_]\w*", re.sub(r'"(\\.|[^"\\\n])*"', "", code)))


def names(headers):
    return set().union(*map(words, headers))


groups = []  # (headers in order, all that they bring along)
for header in sorted(sys.argv[2:], key=lambda one: (len(closure(one)), one)):
    own, known = words(header), names(closure(header))
    fitting = [group for group in groups if not own & names(group[1] - closure(header)) - known]
    if fitting:
        order, brought = min(fitting, key=lambda group: len(closure(header) - group[1]))
        order.append(header)
    else:
        order, brought = [header], set()
        groups.append((order, brought))
    brought |= closure(header) | {header}
for order, _ in groups:
    print(";".join(order))
