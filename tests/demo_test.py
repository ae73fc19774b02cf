#!/usr/bin/env python3
"""Runs a small form of examples/demo.sh without installing or building: its table says that all runs end with the same
parameters; if one differs, the script says so and fails.
usage: demo_test.py DEMO CHORUS_PAGE"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

DEMO, PAGE = (str(pathlib.Path(program).resolve()) for program in sys.argv[1:])
ROOT = pathlib.Path(__file__).resolve().parent.parent
temporary = tempfile.TemporaryDirectory(prefix="chorus_demo_")
FOLDER = pathlib.Path(temporary.name)
SMALL = "--train-images 256 --test-images 50 --epochs 2 --trace-steps 1:2"


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def demo(program):
    """The rows of the table and the other output of a demo whose program is that script."""
    script(FOLDER / "build/examples/demo", f"program={shlex.quote(DEMO)}\n{program}\n")
    path = f"{FOLDER / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(["sh", str(FOLDER / "examples/demo.sh")], env=os.environ | {"PATH": path}, cwd="/",
                          capture_output=True, text=True, timeout=200)
    rows = re.findall(r"^(single|dp|ddp) +(\d) .* (\S+)$", done.stdout, re.MULTILINE)
    return rows, done.returncode, done.stdout + done.stderr


(FOLDER / "examples").mkdir()
shutil.copy(ROOT / "examples/demo.sh", FOLDER / "examples")
for made_before in ("tests/install.sh", "bin/cmake"):
    script(FOLDER / made_before, "exit 0\n")
(FOLDER / "build").mkdir()
(FOLDER / "build/CMakeCache.txt").touch()
script(FOLDER / "build/examples/chorus-page", f'exec {shlex.quote(PAGE)} "$@"\n')

rows, status, text = demo(f'exec "$program" "$@" {SMALL}')
assert status == 0, text
print(text[text.index("policy "):text.index("What moved")])
assert [row[:2] for row in rows] == [("single", "1"), ("dp", "2"), ("ddp", "2"), ("ddp", "3")], text
assert len({row[2] for row in rows}) == 1 and re.fullmatch("[0-9a-f]{12}", rows[0][2]), rows
assert "The same parameters, bit for bit, in all 4 runs: each batch is cut into 4 shares" in text, text
assert text.count("--- ddp, devices: 3") == 1 and "NOT THE SAME" not in text, text
page = re.search(r"open (\S+) in a browser", text).group(1)
assert page == str(FOLDER / "build/demo/run.html") and "<html" in pathlib.Path(page).read_text()[:200], page

# A run with another result, here because of its seed.
rows, status, text = demo(f"""case "$*" in *"--devices 3"*) set -- "$@" --seed 2;; esac
exec "$program" "$@" {SMALL}""")
assert status == 1 and "NOT THE SAME: the runs end with other parameters" in text and "bit for bit" not in text, text
assert len({row[2] for row in rows[:3]}) == 1 and rows[3][2] != rows[0][2], rows

# No fingerprints, as from a program without OpenSSL.
rows, status, text = demo(f"""row=$("$program" "$@" {SMALL}) && printf '%s\\n' "$row" | sed 's/[0-9a-f]*$/?/' """)
assert status == 1 and "no fingerprint (SHA-256)" in text and {row[2] for row in rows} == {"?"}, text
