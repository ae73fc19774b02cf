#!/usr/bin/env python3
"""README.md is short enough to be read, and what all README.md files say can be followed: links lead to files and
headings that exist, and a file that is named in code type is one of the repository's.
usage: front_page.py
       front_page.py --programs FOLDER    writes each C++ block that has a main function to FOLDER, to be compiled;
                                          prints the paths of all README.md files"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("include", "examples", "tests")
MOST_LINES, MOST_WORDS, LONGEST_CELL, LARGEST_PICTURE = 150, 1500, 120, 150_000
MOST_LINES_OF_A_FOLDERS = 200
# What a stranger asks, in this order.
SECTIONS = ("Two commands", "One line changed", "A program", "Your own program", "DP against DDP", "Learn", "Features",
            "What isn't there", "Five figures", "How it is built", "Licence")
# Names in examples of what a user has, or a program writes.
OWN = re.compile(r".*(\bmy_|\bX\.|\bX_|NAME|FLOOR|\bN[_.]|\bmodel\.)")
FILE_NAME = re.compile(r"(?<![\w.*/-])(?:[\w.-]+/)*[\w-]+\.(?:hpp|cpp|py|sh|cmake|md)")


def readmes():
    return [ROOT / "README.md", *sorted(path for folder in FOLDERS for name in ("README.md", "guide.md")
                                        for path in (ROOT / folder).rglob(name))]


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """The anchors that GitHub gives to the headings of a page."""
    found = {}
    for heading in re.findall(r"^#+ +(.*?) *$", without_code(path.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug + (f"-{number}" if number else "") for slug, last in found.items() for number in range(last + 1)}


def bad_links(path, text):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            yield f"links to {target}, which does not exist"
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            yield f"links to {target}, and {file.name} has no heading of that name"


def bad_names(text, files):
    for span in re.findall(r"`([^`\n]+)`", without_code(text)):
        for name in FILE_NAME.findall(span):
            if not OWN.match(name) and not any(file.endswith("/" + name.lstrip("./")) for file in files):
                yield f"names `{name}`, which is no file of the repository"


def cells(text):
    for line in without_code(text).splitlines():
        if line.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])


def problems():
    front = (ROOT / "README.md").read_text()
    for what, number, most in (("lines", len(front.splitlines()), MOST_LINES), ("words", len(front.split()), MOST_WORDS)):
        if number > most:
            yield f"README.md has {number} {what}, at most {most} are read"
    for cell in cells(front):
        if len(cell) > LONGEST_CELL:
            yield f"README.md: a table cell has {len(cell)} characters, at most {LONGEST_CELL}: {cell[:60]}..."
    sections = tuple(re.findall(r"^## (.*)$", without_code(front), re.MULTILINE))
    if sections != SECTIONS:
        yield f"README.md: expected the sections {', '.join(SECTIONS)}; got {', '.join(sections)}"
    for picture in re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", front):
        if (ROOT / picture).exists() and (ROOT / picture).stat().st_size > LARGEST_PICTURE:
            yield f"README.md: {picture} has more than {LARGEST_PICTURE} bytes"
    files = ["/" + path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    files += [f"/{path.name}" for path in ROOT.iterdir() if path.is_file()]
    for path in readmes():
        name, text = path.relative_to(ROOT), path.read_text()
        lines = len(text.splitlines())
        if lines > MOST_LINES_OF_A_FOLDERS:
            yield f"{name} has {lines} lines, at most {MOST_LINES_OF_A_FOLDERS}"
        yield from (f"{name} {problem}" for problem in (*bad_links(path, text), *bad_names(text, files)))


def write_programs(folder):
    folder.mkdir(parents=True, exist_ok=True)
    written = set()
    for path in readmes():
        blocks = re.findall(r"^```cpp\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
        programs = [block for block in blocks if re.search(r"^int main\(", block, re.MULTILINE)]
        for number, program in enumerate(programs, 1):
            name = "_".join((*path.relative_to(ROOT).parent.parts, "readme", str(number))) + ".cpp"
            written.add(name)
            if not (folder / name).exists() or (folder / name).read_text() != program:
                (folder / name).write_text(program)
        print(path)
    for path in folder.glob("*.cpp"):
        if path.name not in written:
            path.unlink()


def main():
    if sys.argv[1:2] == ["--programs"]:
        write_programs(pathlib.Path(sys.argv[2]))
        return
    found = list(problems())
    for problem in found:
        print(problem)
    print(f"{len(readmes())} README.md files, {len(found)} problems")
    sys.exit(1 if found else 0)


main()
