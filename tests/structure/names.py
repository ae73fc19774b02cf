#!/usr/bin/env python3
"""The index of functions and their headers in include/chorus/ops/README.md: the compiler's "'scatter_add' is not a member of 'ch'"
then says where to look. Checks that it is current, and that the table of derivatives names each operator that has only the first one.
usage: names.py [--write]"""

import pathlib
import re
import sys

INCLUDE = pathlib.Path(__file__).resolve().parents[2] / "include"
README = INCLUDE / "chorus/ops/README.md"
HEADING = "## Which header has which function\n"
# The same functions of values that ranks split, and what other headers are made of.
INNER = {"columns", "sequence_part", "tensor_regions", "vocabulary", "intercepted", "narrow_indices", "mean_of_parts", "device_copy"}


def brought_by(entry):
    reached, waiting = set(), [entry]
    while waiting:
        for name in re.findall(r"^#include <(chorus/[^>]+)>", (INCLUDE / waiting.pop()).read_text(), re.MULTILINE):
            if name not in reached and not name.startswith("chorus/compiled/") and (INCLUDE / name).exists():
                reached.add(name)
                waiting.append(name)
    return reached


def functions(text):
    """The names of functions at the scope of namespace chorus, those that macros make included."""
    made_by, hidden, inner = {}, 0, ""
    text = re.sub(r"^#define (\w+)\(([^)]*)\)((?:[^\n]*\\\n)*[^\n]*\n)", lambda found: made_by.update({found[1]: found}) or "\n", text,
                  flags=re.MULTILINE)
    for line in text.splitlines():
        if opened := re.match(r"namespace (?:chorus::)?(\w+) \{", line):
            if hidden or opened[1] in ("detail", "operations", "functors", "math"):
                hidden += not line.endswith("}")
            else:
                inner = "" if opened[1] == "chorus" else f"{opened[1]}::"
        elif line.startswith("}  // namespace"):
            if hidden:
                hidden -= 1
            else:
                inner = ""
        elif hidden:
            continue
        elif call := re.match(r"(CHORUS_\w+)\((.*)\)$", line):
            if found := made_by.get(call[1]):
                parameters = [name.strip() for name in found[2].split(",")]
                for name in re.findall(r"\bauto (\w+)\(", found[3]):
                    if name in parameters:
                        yield call[2].split(",")[parameters.index(name)].strip()
        elif found := re.match(r"(?:template <[^;{]*> )?(?:requires\(.*\) )?(?:inline )?(?:auto|bool|[\w:]+(?:<.*>)?) (\w+)\(", line):
            if not re.match(r"(return|check|static_assert|struct|class|using|explicit)\b", line):
                yield inner + found[1]


def index():
    core, rows, all_of_core = brought_by("chorus/chorus.hpp"), {}, set()
    for path in sorted((INCLUDE / "chorus/ops").glob("*.hpp")):
        header = path.relative_to(INCLUDE).as_posix()
        names = {name for name in functions(path.read_text()) if name not in ("derivatives", "main", "requires")}
        if path.stem in INNER or not names:
            continue
        if header in core:
            all_of_core |= names
        else:
            rows[header] = names
    rows = {header: names - (all_of_core if header != "chorus/ops/lists.hpp" else set()) for header, names in rows.items()}
    lines = [HEADING, "Made by `tests/structure/names.py --write`.\n", "| header | functions |", "|---|---|"]
    for header, names in {"chorus/chorus.hpp": all_of_core, **rows}.items():
        if names:
            lines.append(f"| `<{header}>` | {', '.join(f'`{name}`' for name in sorted(names))} |")
    return "\n".join(lines) + "\n"


def of_first_order():
    """The names of recorded operations without `derivatives`."""
    named, derived = {}, set()
    for path in (INCLUDE / "chorus/ops").rglob("*.hpp"):
        text = path.read_text()
        named.update(re.findall(r'^struct (\w+) \{\n  static constexpr const char\* name = "(\w+)"', text, re.MULTILINE))
        named.update(re.findall(r'^CHORUS_\w+\((\w+), "(\w+)"\)', text, re.MULTILINE))
        derived.update(re.findall(r"derivatives\(const operations::(\w+)", text))
    return {name for struct, name in named.items() if struct not in derived}


def main():
    text = README.read_text()
    first = next(line for line in text.splitlines() if line.endswith("| 1 |"))
    if missing := sorted(name for name in of_first_order() if f"`{name}`" not in first):
        sys.exit(f"{README.name} of ops: the row of first derivatives lacks {', '.join(missing)}")
    begin = text.find(HEADING)
    end = text.find("\n## ", begin + 1) + 1 if begin >= 0 else 0
    now = text[:begin] + index() + "\n" + text[end:] if end > 0 else text
    if sys.argv[1:] == ["--write"]:
        README.write_text(now)
    elif now != text or begin < 0:
        sys.exit(f"{README.name} of ops: the index of functions is not current: names.py --write")


main()
