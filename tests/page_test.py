#!/usr/bin/env python3
"""Opens chorus-page's page of real runs in a browser: no network requests, no console messages, the sections match the
traces, keys reach every span, and it works in dark mode, in print and on a small screen.
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

MARKS = "document.querySelectorAll('svg rect, svg path, svg line, svg circle').length"
SECTIONS = ("happened", "timeline", "links", "memory", "ring", "gradients", "formulas")


def sent_in_step(name):
    """Bytes of data and of control over each link in a step, by the trace's counters."""
    sums = {}
    for event in events(name):
        if event["ph"] == "C" and event["name"].startswith("sent to "):
            link = event["pid"] - 1, int(event["name"].split()[2].rstrip(","))
            sums[link] = (sum(count for kind, count in event["args"].items() if kind != "control") / 3,
                          event["args"].get("control", 0) / 3)
    return sums


def choose(page, section, index, which=0):
    page.js(f"(() => {{ const s = document.querySelectorAll('#{section} select')[{which}]; s.value = '{index}'; "
            "s.dispatchEvent(new Event('change')); })()")


def walk(page, section, marks):
    """Moves right from the first mark to the last; returns how many different ones had the focus with details."""
    page.js(f"document.querySelector('#{section} {marks}').focus()")
    count, seen = page.js(f"document.querySelectorAll('#{section} {marks}').length"), set()
    for _ in range(count):
        seen.add(page.js(f"[...document.querySelectorAll('#{section} {marks}')].indexOf(document.activeElement)"))
        expect(page.js(f"document.querySelector('#{section} .says').textContent === "
                       "document.activeElement.getAttribute('aria-label')"), "details are not of what has the focus")
        page.key("ArrowRight")
    expect(seen == set(range(count)), "keys reach", len(seen), "of", count, "in", section)
    return count


with browser.Page(ADDRESS) as page:
    outside = [address for address in page.requests if not address.startswith("data:")]
    expect(outside == [ADDRESS], "the network was asked for", outside)
    expect(page.console == [], page.console)
    marks = page.js(MARKS)
    expect(100 < marks <= 5000, marks, "marks")
    expect(page.js("[...document.querySelectorAll('.span, .cell, .piece, .hit')].every((mark) => "
                   "mark.getAttribute('aria-label') && mark.querySelector('title').textContent)"), "a mark has no name")
    said = {name: page.js(f"document.getElementById('{name}').innerText") for name in SECTIONS}
    for name, words in {"happened": ["single", "dp", "ddp", "Side by side", "Advice", "peak of device 0"],
                        "timeline": ["bucket 1 (b1)", "waiting", "the median one of each run", "Spans as a table"],
                        "links": ["measured", "control", "gradients", "difference", "2 (N-1)/N K"],
                        "memory": ["device 0 ◆", "activations", "What the peak of the recorded steps was made of"],
                        "ring": ["Algorithm ring", "all_reduce", "Before: each rank has its own numbers."],
                        "gradients": ["bucket full", "Rank"],
                        "formulas": ["T = 2(N−1) · t", "2(N−1)/N · K", "t = α + K/(N·B)"]}.items():
        for word in words:
            expect(word in said[name], f"the section {name} lacks '{word}'", said[name])
    for name, words in {"timeline": ["rank 2", "dp, step"], "gradients": ["fc1.weight", "conv1.bias"], "ring": ["rank 1"]}.items():
        drawn = page.js(f"[...document.querySelectorAll('#{name} svg text')].map((each) => each.textContent).join('\\n')")
        for word in words:
            expect(word in drawn, f"the pictures of {name} lack '{word}'", drawn)
    targets = page.js("[...new Set([...document.querySelectorAll('#happened a')].map((a) => a.hash.slice(1)))]")
    expect({"timeline", "links", "memory"} <= set(targets) <= set(SECTIONS), "sentences link to", targets)
    expect(page.js("document.querySelectorAll('#happened tbody tr').length") == 3)
    expect(not {"undefined", "NaN", "[object"} & set(re.findall(r"undefined|NaN|\[object", "".join(said.values()))), said)
    say(f"{marks} marks, all sections")

    # A step's figure shows its numbers: its duration, and waits if the facts have them, next to no pass.
    expect(page.js("runs.every((run) => [...document.querySelectorAll('#timeline .run')].some((head) => head.textContent"
                   ".startsWith(`${run.name}, step ${run.median_step}: ${time(run.facts.step_us)}`)))"), "lengths of steps")
    for name, device, drawn, waited in page.js(
            "runs.flatMap((run) => run.facts.exposed_us.map((waited, device) => [run.name, device, sum(spansOfStep(run, device, "
            "stepOf(run).of(device)).filter((span) => span.lane === lanes.wait).map((span) => span.end - span.begin)), waited]))"):
        expect(abs(drawn - waited) <= 0.01 * waited + 0.01, name, device, "waits", waited, "of which are drawn", drawn)
        expect(name != "dp" or waited > 0)
    expect(page.js("runs.every((run) => run.facts.compute_us.every((_, device) => { "
                   "const spans = spansOfStep(run, device, stepOf(run).of(device)), waits = spans.filter((span) => span.lane === lanes.wait); "
                   "return spans.every((span) => span.frame || !passLanes.includes(span.lane) || "
                   "waits.every((wait) => wait.end <= span.begin || wait.begin >= span.end)); }))"), "a pass is drawn where it waits")
    expect(page.js("ringCalls().every((call) => call.span.args.traffic !== 'control') && ringCalls().length > 0"))

    # The matrices' cells are the traces' sums of a step; a link lists its messages.
    for index, name in enumerate(("dp", "ddp")):
        choose(page, "links", index)
        cells = page.js("[...document.querySelectorAll('#links .cell')].map((c) => [c.dataset.from, c.dataset.to, "
                        "c.dataset.bytes, c.dataset.control].map(Number))")
        sums = sent_in_step(name)
        expect(len(cells) == (4, 9)[index] and any(shown for _, _, shown, _ in cells), cells)
        for source, target, shown, control in cells:
            expected = sums.get((source, target), (0, 0))
            expect(abs(shown - expected[0]) < 1 and abs(control - expected[1]) < 1, name, source, target, shown, control, sums)
        page.js("[...document.querySelectorAll('#links .cell')].find((c) => c.dataset.from === '0' && c.dataset.to === '1')"
                ".dispatchEvent(new MouseEvent('click', {bubbles: true}))")
        messages = page.js("[...document.querySelectorAll('#links .messages tbody tr')].map((row) => "
                           "[...row.cells].map((cell) => cell.textContent))")
        counted = sum(int(row[2].replace(",", "")) for row in messages)
        expect(messages and all(row[0] == "0 → 1" for row in messages), messages)
        expect(counted == sum(sums[0, 1]), "messages of the link have", counted, "of", sums[0, 1])
    say("the cells of the links, and their messages, are the traces' sums")

    page.media(prefers_reduced_motion="reduce")  # otherwise a smooth scroll moves marks away from the pointer
    # Keys reach every span, one after another, and move between rows.
    count = walk(page, "timeline", ".span")
    page.key("Home")
    before = page.js("+document.activeElement.getAttribute('y')")
    page.key("ArrowUp")
    expect(page.js("+document.activeElement.getAttribute('y')") < before)
    walk(page, "gradients", ".hit")
    walk(page, "links", ".cell")
    page.key("Enter")
    expect(page.js("document.activeElement.matches('.chosen')"), "Enter chooses a link")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    for roles in (("img", "image"), ("slider",), ("button",), ("heading",), ("combobox",), ("table",)):
        named = [node for node in nodes if node.get("role", {}).get("value") in roles and not node["ignored"]]
        expect(named and all(node.get("name", {}).get("value") for node in named), "without a name:", roles, len(named))
    say(f"keys reach all {count} spans")

    # Pointing at a mark shows its description, as the focus does.
    spot = page.js("(() => { const mark = [...document.querySelectorAll('.span.backward')].at(-1); "
                   "mark.scrollIntoView({block: 'center', behavior: 'instant'}); const box = mark.getBoundingClientRect(); "
                   "for (let part = 0.05; part < 1; part += 0.05) { const x = box.left + box.width * part, y = box.top + 5; "
                   "if (document.elementFromPoint(x, y) === mark) return [x, y, mark.getAttribute('aria-label')]; } })()")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=spot[0], y=spot[1])
    page.until(f"document.querySelector('#timeline .says').textContent === {json.dumps(spot[2])}")
    expect(page.js("document.querySelectorAll('.cursor[visibility=visible]').length") > 1, "memory shows the same moment")

    # The ring's last step has one sum in each column, for all ranks, as in the trace.
    page.js("document.querySelector('#ring svg').focus()")
    page.key("ArrowRight")
    expect(page.js("document.querySelector('#ring .says').textContent.startsWith('1 of ')"))
    page.key("End")
    pieces = page.js("[...document.querySelectorAll('#ring .piece')].map((c) => [+c.dataset.piece, c.dataset.holds, c.dataset.first])")
    call = int(re.search(r"call (\d+)", page.js("document.querySelector('#ring select').selectedOptions[0].textContent"))[1])
    steps = [event for event in events("ddp") if event.get("cat") == "ring" and event.get("args", {}).get("sequence") == call]
    offsets = sorted({step["args"]["offset"] for step in steps})
    last = {}
    for step in sorted(steps, key=lambda step: step["ts"]):
        last[step["pid"], step["args"]["offset"]] = step["args"]["first"]
    expect(len(pieces) == 3 * len(offsets), len(pieces), offsets)
    for piece, holds, first in pieces:
        expect(holds == "0 1 2", "not the sum of all:", piece, holds)
        expect({float(first)} == {last[pid, offsets[piece]] for pid in (1, 2, 3)}, piece, first, last)
    expect(page.js("[...document.querySelectorAll('#ring button')].some((b) => b.textContent === 'Play')"), "it does not play by itself")
    say("the ring player ends with one sum on all ranks, the trace's")

    # Another step, other numbers of ranks, a larger figure.
    heading = "[...document.querySelectorAll('#timeline .run')].at(-1).textContent"
    steps = set()
    for value in (1, 2, 3):
        page.js(f"(() => {{ const s = document.querySelector('#timeline input'); s.value = {value}; s.dispatchEvent(new Event('input')); }})()")
        steps.add(page.js(heading))
    expect([f"step {number}" in "".join(steps) for number in (5, 6, 7)] == [True] * 3 and len(steps) == 3, steps)
    page.js("(() => { const s = document.querySelector('#formulas input'); s.value = 64; s.dispatchEvent(new Event('input')); })()")
    expect("2 · 63/64" in page.js("document.querySelector('#formulas').innerText"))
    choose(page, "timeline", 4)
    expect(page.js("document.querySelector('#timeline svg[role=group]').clientWidth") > 16 * 1000)
    expect(page.js(MARKS) <= 5000 and page.console == [], page.console)
    choose(page, "timeline", 0)

    light = page.js("getComputedStyle(document.body).backgroundColor")
    page.media(prefers_color_scheme="dark")
    expect(page.js("getComputedStyle(document.body).backgroundColor") != light, "dark looks as light does")
    if PICTURES:
        page.picture(PICTURES / "page_dark.png", whole=True)
    page.media(prefers_reduced_motion="reduce")
    expect(page.js("getComputedStyle(document.documentElement).scrollBehavior") == "auto")
    page.media(media="print")
    expect(page.js("getComputedStyle(document.querySelector('.says')).display") == "none")
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

# Names are not interpreted as markup.
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

# A run of one device: the page says which data it lacks.
run(PAGE, "single.json", "-o", "single.html")
with browser.Page((FOLDER / "single.html").as_uri()) as page:
    for name, words in {"links": "Nothing was sent", "ring": "--all-reduce ring --trace-ring", "gradients": "--policy ddp",
                        "formulas": "One device sends nothing"}.items():
        expect(words in page.js(f"document.getElementById('{name}').innerText"), name)
    expect(page.console == [], page.console)
say("empty sections say what is missing")

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
    expect(paint < 3000, "64 ranks: first paint after", paint, "ms")  # a second, plus the load of other tests
    expect(page.js(MARKS) <= 5000 and page.console == [], page.console)
    expect("64 cpu devices" in page.js("document.getElementById('runs').textContent"))
    expect(page.js("document.getElementById('left_out').textContent").startswith("Left out: "))
say(f"64 ranks: first paint after {paint:.0f} ms")
