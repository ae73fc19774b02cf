#!/usr/bin/env python3
"""Opens chorus-page's page of real runs in a browser: nothing is asked of the network, the console is empty, the
sections say what the traces say, keys reach every span, and it works in the dark, in print and on a small screen.
usage: page_test.py CHORUS_PAGE TRAIN_CLASSIFIER [FOLDER FOR SCREENSHOTS]"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import browser
from processes import CLEAN, expect, say

PAGE, TRAIN = map(os.path.abspath, sys.argv[1:3])
PICTURES = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else None
if not browser.available():
    print(f"skipped: there is no {browser.PROGRAM}")
    sys.exit(77)
temporary = tempfile.TemporaryDirectory(prefix="chorus_page_")
FOLDER = pathlib.Path(temporary.name)


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, cwd=FOLDER, env=CLEAN)
    expect(done.returncode == 0, command, done.stdout, done.stderr)
    return done.stdout


def trace(name, *options):
    run(TRAIN, "--train-images", "1200", "--test-images", "10", "--epochs", "1", "--quiet", "--trace", f"{name}.json", *options)


def events(name):
    return json.loads((FOLDER / f"{name}.json").read_text())["traceEvents"]


trace("single", "--policy", "single")
trace("dp", "--policy", "dp", "--devices", "2")
trace("ddp", "--policy", "ddp", "--devices", "3", "--bucket-cap-mb", "0.05", "--all-reduce", "ring", "--trace-ring")
run(PAGE, "single.json", "dp.json", "ddp.json", "-o", "run.html")
text = (FOLDER / "run.html").read_text()
expect(len(text) <= 500_000, "the page has", len(text), "bytes")
for outside in ("http://", "https://", "@import", "src=\"", "url(//"):
    expect(outside not in text.replace("http://www.w3.org/2000/svg", ""), "the page names", outside)
ADDRESS = (FOLDER / "run.html").as_uri()

with browser.Page(ADDRESS) as page:
    expect(page.requests == [ADDRESS], "the network was asked for", page.requests)
    expect(page.console == [], page.console)
    marks = page.js("document.querySelectorAll('.mark').length")
    expect(0 < marks <= 5000, marks, "marks")
    expect(page.js("[...document.querySelectorAll('.mark')].every((m) => m.querySelector('title') && m.getAttribute('aria-label'))"))
    said = {name: page.js(f"document.getElementById('{name}').innerText")
            for name in ("happened", "timeline", "links", "memory", "ring", "gradients", "formulas")}
    for name, words in {"happened": ["single", "dp", "ddp", "exposed wait"], "timeline": ["rank 2", "exposed wait", "bucket 1"],
                        "links": ["Measured", "control", "gradients"], "memory": ["dp: device cpu:0", "At its peak"],
                        "ring": ["by ring", "rank 1"], "gradients": ["fc1.weight", "conv1.bias"],
                        "formulas": ["2 (N − 1)", "ddp"]}.items():
        for word in words:
            expect(word in said[name], f"the section {name} lacks '{word}'", said[name])
    say(f"{marks} marks, all sections")

    # The matrices' cells are the traces' sums, a step.
    cells = page.js("[...document.querySelectorAll('#links table')].filter((t) => t.querySelector('td.matrix')).map((t) => "
                    "[...t.querySelectorAll('td.matrix')].map((c) => [+c.dataset.from, +c.dataset.to, +c.dataset.bytes]))")
    for name, matrix in zip(("dp", "ddp"), cells, strict=True):
        sums = {}
        for event in events(name):
            if event["ph"] == "C" and event["name"].startswith("sent to "):
                link = event["pid"] - 1, int(event["name"].split()[2].rstrip(","))
                sums[link] = sum(b for kind, b in event["args"].items() if kind != "control")
        for source, target, shown in matrix:
            expect(abs(shown - sums.get((source, target), 0) / 3) < 1, name, source, target, shown, sums)
    say("the cells of the links are the traces' sums")

    # Keys go from span to span, and from row to row, to each of them.
    page.js("document.querySelectorAll('#timeline svg[role=group]')[2].querySelector('.mark').focus()")
    count = page.js("document.activeElement.closest('svg').querySelectorAll('.mark').length")
    seen = set()
    for _ in range(count):
        seen.add(page.js("[...document.querySelectorAll('.mark')].indexOf(document.activeElement)"))
        expect(page.js("document.getElementById('details').textContent") == page.js("document.activeElement.dataset.text"))
        page.key("ArrowRight")
    expect(len(seen) == count, "keys reach", len(seen), "of", count, "spans")
    page.key("Home")
    row = page.js("+document.activeElement.dataset.row")
    page.key("ArrowDown")
    expect(page.js("+document.activeElement.dataset.row") > row)
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    for role in ("img", "slider", "button", "heading"):
        named = [node for node in nodes if node.get("role", {}).get("value") in (role, "image" if role == "img" else role) and not node["ignored"]]
        expect(named and all(node.get("name", {}).get("value") for node in named), "without a name:", role)
    say(f"keys reach all {count} spans")

    # The ring's last step is what the ranks had: one sum in each column, that of all.
    page.js("[...document.querySelectorAll('#ring button')].find((b) => b.textContent === 'Last').click()")
    rows = page.js("[...document.querySelectorAll('#ring tbody tr')].map((r) => [...r.querySelectorAll('td')].map((c) => [c.firstChild.textContent, c.dataset.first]))")
    expect(len(rows) == 3 and len(rows[0]) >= 3, rows)
    for column in zip(*rows):
        expect({whose for whose, _ in column} == {"all"}, "not the sum of all:", column)
        expect(len({number for _, number in column}) == 1, "ranks end with other numbers:", column)
    say("the ring player ends with one sum on all ranks")

    # Another step, other numbers of ranks.
    before = page.js("document.querySelector('#timeline h3').textContent")
    page.js("(() => { const s = document.querySelector('#timeline input'); s.value = s.value === '0' ? 1 : 0; s.dispatchEvent(new Event('input')); })()")
    expect(page.js("document.querySelector('#timeline h3').textContent") != before)
    formula = page.js("document.querySelector('.formula').textContent")
    page.js("(() => { const s = document.querySelector('#formulas input'); s.value = 1000; s.dispatchEvent(new Event('input')); })()")
    expect("1023" in page.js("document.querySelector('.formula').textContent"), formula)
    page.js("document.querySelector('#links td button').click()")
    expect(page.js("[...document.querySelectorAll('#links caption')].some((c) => c.textContent.startsWith('From 0 to 1'))"))

    light = page.js("getComputedStyle(document.body).backgroundColor")
    page.media(prefers_color_scheme="dark")
    expect(page.js("getComputedStyle(document.body).backgroundColor") != light, "dark looks as light does")
    if PICTURES:
        page.picture(PICTURES / "page_dark.png", whole=True)
    page.media(prefers_reduced_motion="reduce")
    expect(page.js("getComputedStyle(document.documentElement).scrollBehavior") == "auto")
    page.media(media="print")
    expect(page.js("getComputedStyle(document.querySelector('.controls')).display") == "none", "controls are printed")
    pages = len(re.findall(rb"/Type\s*/Page\b", page.pdf()))
    expect(pages >= 2, "it prints on", pages, "pages")
    expect(page.console == [], page.console)

for width in (360, 1280):
    with browser.Page(ADDRESS, width) as page:
        expect(page.js("document.documentElement.scrollWidth") <= width, width, "px are too few for the page")
        if PICTURES:
            page.picture(PICTURES / f"page_{width}.png", whole=True)
say("dark, printed, still, and at 360 px")

# Names are no markup.
hostile = json.loads((FOLDER / "ddp.json").read_text())
hostile["metadata"]["policy"] = "</script><script>document.title='taken'</script><!--"
for event in hostile["traceEvents"]:
    if event.get("cat") == "gradient":
        event["args"]["parameter"] = "\"><img src=x onerror=\"document.title='taken'\">'"
(FOLDER / "hostile.json").write_text(json.dumps(hostile))
run(PAGE, "hostile.json", "-o", "hostile.html")
with browser.Page((FOLDER / "hostile.html").as_uri()) as page:
    expect(page.js("document.title") != "taken" and page.js("document.querySelectorAll('img').length") == 0)
    expect("</script>" in page.js("document.querySelector('#happened').innerText") and page.console == [], page.console)
say("names are no markup")

# 64 ranks.
many = [event for rank in range(64) for event in ({**each, "pid": rank + 1, **({"tid": 10 * (rank + 1) + each["tid"] % 10} if "tid" in each else {})}
                                                 for each in events("ddp") if each["pid"] == 1 and each["ph"] not in "sf" and each.get("cat") != "ring")]
for event in many:
    if event["ph"] == "M" and event["name"] == "process_name":
        event["args"] = {"name": f"rank {event['pid'] - 1}"}
about = json.loads((FOLDER / "ddp.json").read_text())["metadata"]
about.update(devices=64, peak=[about["peak"][0]] * 64)
(FOLDER / "many.json").write_text(json.dumps({"metadata": about, "traceEvents": many}))
run(PAGE, "many.json", "-o", "many.html")
expect((FOLDER / "many.html").stat().st_size <= 500_000, "64 ranks:", (FOLDER / "many.html").stat().st_size, "bytes")
with browser.Page((FOLDER / "many.html").as_uri()) as page:
    paint = page.js("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? performance.now()")
    expect(paint < 3000, "64 ranks: first paint after", paint, "ms")  # a second, and what other tests leave of the cores
    expect(page.js("document.querySelectorAll('.mark').length") <= 5000 and page.console == [], page.console)
say(f"64 ranks: first paint after {paint:.0f} ms")
