#!/usr/bin/env python3
"""Writes page.png, the picture at the top of the repository's README.md: the timeline of a page that chorus-page made
of two real runs, one under DataParallel and one under DistributedDataParallel. It needs chromium-headless-shell.
usage: picture.py TRAIN_CLASSIFIER CHORUS_PAGE"""

import base64
import pathlib
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1] / "tests"))
import browser  # noqa: E402

LARGEST = 150_000  # bytes: a front page loads at once


def main():
    train, page = (str(pathlib.Path(program).resolve()) for program in sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="chorus_picture_") as temporary:
        def run(*command):
            subprocess.run(command, check=True, cwd=temporary)

        for policy in ("dp", "ddp"):
            run(train, "--policy", policy, "--devices", "2", "--batch", "256", "--epochs", "1", "--quiet",
                "--train-images", "4096", "--test-images", "10", "--trace", f"{policy}.json", "--trace-steps", "6:7",
                *(["--bucket-cap-mb", "0.05"] if policy == "ddp" else []))
        run(page, "dp.json", "ddp.json", "-o", "page.html", "--title", "One training step: DataParallel, DistributedDataParallel")
        with browser.Page((pathlib.Path(temporary) / "page.html").as_uri(), 1100, 900) as opened:
            # A picture needs no controls, no table, and no text about a span that nobody points at.
            box = opened.js("""(() => {
              const section = document.querySelector('#timeline'), style = document.createElement('style');
              style.textContent = `#timeline { padding-top: 6px } #timeline h2, #timeline .intro, #timeline .controls,
                #timeline .says, #timeline details { display: none }`;
              document.head.append(style);
              const box = section.getBoundingClientRect();
              return [box.left + scrollX - 16, box.top + scrollY, box.width + 32, box.height]; })()""")
            picture = opened.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                                  clip=dict(zip(("x", "y", "width", "height"), box), scale=1))
    data = base64.b64decode(picture["data"])
    if len(data) > LARGEST:
        sys.exit(f"picture.py: the picture has {len(data)} bytes, at most {LARGEST} are wanted")
    (FOLDER / "page.png").write_bytes(data)
    print(f"{FOLDER / 'page.png'}: {len(data)} bytes")


main()
