#!/usr/bin/env python3
"""Runs chorus-page and train_classifier --advise as a user would: real traces, large and hostile ones, and refused
inputs.
usage: page_program_test.py CHORUS_PAGE TRAIN_CLASSIFIER CHORUS_RUN"""

import collections
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

from processes import CLEAN, expect, say
from trace_rules import broken

PAGE, PROGRAM, CHORUS_RUN = map(os.path.abspath, sys.argv[1:])
temporary = tempfile.TemporaryDirectory(prefix="chorus_page_")
FOLDER = pathlib.Path(temporary.name)
SMALL = ["--train-images", "640", "--test-images", "10", "--epochs", "1", "--quiet"]
MOST = 500_000


def run(*command, status=0, **options):
    environment = {**CLEAN, "TMPDIR": str(FOLDER), **options.pop("environment", {})}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, cwd=FOLDER,
                          env=environment, **options)
    expect(done.returncode == status, command, "gave", done.returncode, done.stdout, done.stderr)
    return done


def page(*arguments, output="run.html", **others):
    """The page's text, and its data."""
    done = run(PAGE, *arguments, "-o", output, **others)
    expect(done.stdout + done.stderr == "", done.stdout, done.stderr)
    text = (FOLDER / output).read_text()
    expect(len(text.encode()) < MOST, len(text))
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    expect(len(found) == 1 and "<" not in found[0], "data stands once in the page, without <")
    for mark in ("<!--data-->", "/*css*/", "/*js*/"):
        expect(mark not in text.replace(found[0], ""), mark)
    return text, json.loads(found[0])


def refused(*arguments, status=2, output="refused.html"):
    """The error message; checks that no page, nor a part of one, is left."""
    before = sorted(FOLDER.iterdir())
    done = run(PAGE, *arguments, *(["-o", output] if output else []), status=status)
    expect(done.stdout == "" and sorted(FOLDER.iterdir()) == before, done.stdout, sorted(FOLDER.iterdir()))
    return done.stderr


def made(name, devices=2, calls=3, gradients=0, steps=3, text="forward", all_to_all=False):
    """A trace of ddp."""
    events = []
    for rank in range(devices):
        def event(phase, lane, at, **fields):
            events.append({"ph": phase, "pid": rank + 1, "tid": 10 * (rank + 1) + lane, "ts": at, **fields})
        event("M", 1, 0, name="process_name", args={"name": f"rank {rank}"})
        for step in range(steps):
            start = 2000.0 * step
            event("X", 1, start, dur=1500 + step, cat="step", name=f"step {5 + step}", args={"step": 5 + step})
            event("X", 3, start, dur=400, cat="forward", name=text)
            event("X", 4, start + 400, dur=900, cat="backward", name="backward")
            for number in range(gradients):
                event("i", 4, start + 401, s="t", cat="gradient", name=f"gradient ready: {text}{number}", args={})
                events.append({"ph": "C", "pid": rank + 1, "ts": start + 402 + number / 100, "name": "memory, bytes",
                               "args": {"activations": number}})
            for call in range(calls):
                sequence = step * calls + call
                at = start + 450 + 400 / calls * call
                event("X", 5, at, dur=320 / calls, cat="comm", name=f"all_reduce, bucket {call}",
                      args={"op": "all_reduce", "sequence": sequence, "bucket": call, "bytes": 6400,
                            "traffic": "gradients", "algorithm": "direct"})
                if rank > 0:
                    event("s", 5, at, id=sequence * devices + rank, cat="late", name="waited for")
                    events.append({"ph": "f", "bp": "e", "pid": 1, "tid": 15, "ts": at + 319 / calls,
                                   "id": sequence * devices + rank, "cat": "late", "name": "waited for"})
            for to in range(devices) if all_to_all else ():
                if to != rank:
                    events.append({"ph": "C", "pid": rank + 1, "ts": start + 1400, "name": f"sent to {to}, bytes",
                                   "args": {"gradients": 200 * calls * (step + 1), "control": step + 1}})
    metadata = {"chorus": 1, "policy": "ddp", "devices": devices, "device_kind": "cpu", "first_step": 5, "steps": steps,
                "clock_error_us": 0, "peak": [{"activations": 5}] * devices, "notes": {"gradient_bytes": 6400 * calls}}
    (FOLDER / name).write_text(json.dumps({"metadata": metadata, "traceEvents": events}))
    return events


# Real runs.
for policy in ("single", "dp", "ddp"):
    run(PROGRAM, *SMALL, "--policy", policy, "--trace", f"{policy}.json")
text, data = page("single.json", "dp.json", "ddp.json", "--title", 'three <runs> & "more"')
expect("<title>three &lt;runs> &amp; &quot;more&quot;</title>" in text, text[:400])
expect(data["title"] == 'three <runs> & "more"' and data["left_out"] == "", data["title"], data["left_out"])
expect([each["name"] for each in data["runs"]] == ["single", "dp", "ddp"], data["runs"])
for each in data["runs"]:
    whole = json.loads((FOLDER / each["file"]).read_text())
    expect(each["events"] == whole["traceEvents"] and each["metadata"] == whole["metadata"], each["file"])
    expect({"batch", "classes", "lr", "optimizer", "sample_bytes"} <= set(each["metadata"]["notes"]), each["metadata"])
    expect(sorted(each["facts"]) == sorted(
        "step_us compute_us communication_us exposed_us bubble_us hidden utilisation loader_us samples gradient_bytes link_fit links "
        "late peak sent_bytes".split()))
    expect(each["median_step"] in (5, 6, 7) and len(each["facts"]["compute_us"]) == each["metadata"]["devices"], each)
    expect(all(set(sentence) == {"text", "section"} for sentence in each["sentences"]) and each["sentences"])
    expect(all(each["figures"] for each in each["advice"]) and each["advice"])
inputs = [link for link in data["runs"][1]["facts"]["links"] if link["kind"] == "inputs"]
expect(inputs and all(link["bytes"] == link["formula"] for link in inputs), inputs)
links = [link for link in data["runs"][2]["facts"]["links"] if link["kind"] == "gradients"]
expect(len(links) == 2 and all(link["bytes"] == link["formula"] for link in links), links)
expect(len(data["comparison"]) >= 3, data["comparison"])
say("three policies on one page")

# Names of runs.
for name in ("a.json", "b.json", "other/a.json"):
    (FOLDER / name).parent.mkdir(exist_ok=True)
    made(name)
made("three.json", devices=3)
names = [each["name"] for each in page("a.json", "b.json", "three.json", "single.json", "other/a.json")[1]["runs"]]
expect(names == ["a.json", "b.json", "ddp, 3 devices", "single", "other/a.json"], names)

# Hostile input is text in the data.
hostile = '</script><script>alert("x")</script> \' " \\ <!-- <!--data--> /*js*/ \x1b[31m ü'
made("<script>\"'.json", text=hostile)
text, data = page("<script>\"'.json", "--title", "</title><script>")
plain = page("a.json")[0]
for tag in ("<script", "</script>", "<!--"):
    expect(text.count(tag) == plain.count(tag), tag, text.count(tag), plain.count(tag))
expect(any(event["name"] == hostile for event in data["runs"][0]["events"]), "the name is as it was")
expect("<title>&lt;/title>&lt;script></title>" in text, text[:300])
say("names and titles stay text")

# Pages of large traces stay below 500 KB, keep the median step's lanes, and say what they omit.
events = made("many.json", devices=2, calls=20, gradients=3000)
data = page("many.json")[1]
shown = data["runs"][0]["events"]
expect(data["left_out"].startswith("Left out: of all steps but the median one everything but the spans of lanes"), data)
expect(data["runs"][0]["median_step"] == 6)
inside = [event for event in events if event["ph"] == "X" and 2000 <= event["ts"] < 3501]
expect(all(event in shown for event in inside), "the median step's spans are there")
expect(broken(shown) == [], broken(shown))
largest = max(event["args"]["activations"] for event in shown if event["ph"] == "C")
expect(largest == 2999, "of counters the largest stay:", largest)
made("ranks.json", devices=64, calls=20, gradients=60, all_to_all=True)
expect((FOLDER / "ranks.json").stat().st_size > 2_000_000)
data = page("ranks.json")[1]
expect("events of ranks or devices from " in data["left_out"], data["left_out"])
expect(len(data["runs"][0]["facts"]["compute_us"]) == 64, "facts are of all ranks")
expect(broken(data["runs"][0]["events"]) == [], broken(data["runs"][0]["events"]))
expect(any("each of 4032 links" in sentence["text"] for sentence in data["runs"][0]["sentences"]))
made("calls.json", devices=2, calls=3000)
data = page("calls.json")[1]
expect("spans of a lane but the " in data["left_out"], data["left_out"])
expect("of ranks or devices" not in data["left_out"], "there are two ranks:", data["left_out"])
def in_lanes(events, step):
    counts = collections.Counter(event["tid"] for event in events if event["ph"] == "X" and event["cat"] != "step" and
                                 2000 * step <= event["ts"] < 2000 * step + 1501)
    return {lane: count for lane, count in counts.items() if count}


shown, whole = (in_lanes(each, data["runs"][0]["median_step"] - 5) for each in (data["runs"][0]["events"], json.loads((FOLDER / "calls.json").read_text())["traceEvents"]))
expect(set(shown) == set(whole) and all(shown[lane] >= min(20, whole[lane]) for lane in whole), "lanes are erased:", shown, whole)
# Of each event the page's program keeps its text and a little more. Sanitizers take address space of their own.
if b"__sanitizer_" not in pathlib.Path(PAGE).read_bytes():
    count = len(made("long.json", devices=2, calls=8000, gradients=16_000))
    expect(count > 280_000, count)
    most = 50_000_000 + 400 * count
    data = page("long.json", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)))[1]
    expect(data["runs"][0]["median_step"] == 6)
say("large traces fit")

# Figures as files.
run(PAGE, "single.json", "dp.json", "ddp.json", "--svg", "pictures")
names = {file.name for file in (FOLDER / "pictures").iterdir()}
expect(names == {"0_single_timeline.svg", "0_single_memory.svg"} | {f"{run}_{kind}.svg" for run in ("1_dp", "2_ddp") for kind in ("timeline", "links", "memory")}, names)
for file in (FOLDER / "pictures").iterdir():
    root = xml.etree.ElementTree.parse(file).getroot()
    marks = [mark for mark in root.iter() if mark.tag.endswith(("rect", "path"))]
    expect(root.tag.endswith("svg") and len(marks) >= 5 and "nan" not in file.read_text(), file, len(marks))
expect("forward" in (FOLDER / "pictures" / "2_ddp_timeline.svg").read_text())
run(PAGE, "<script>\"'.json", "--svg", "pictures")
xml.etree.ElementTree.parse(FOLDER / "pictures" / "0_ddp_timeline.svg")
say("pictures for slides")

# Killed runs.
events = made("whole.json")
head = {"ph": "M", "pid": 1, "name": "chorus", "args": {"policy": "ddp", "distributed": 1, "rank": 0, "ranks": 2,
                                                        "device_kind": "cpu", "first_step": 5, "base": 1}}
lines = "[\n" + "".join(json.dumps(event) + ",\n" for event in [head] + events)
(FOLDER / "killed.json").write_text(lines[:-40])
expect(page("killed.json")[1]["runs"][0]["metadata"]["devices"] == 2)

# Refused inputs: status 2, the file's name, no page.
expected = "expected a file that train_classifier --trace or another program of chorus has written; "
(FOLDER / "text.json").write_text("loss 0.5\n")
(FOLDER / "other.json").write_text('{"traceEvents":[]}')
(FOLDER / "cut.json").write_text((FOLDER / "ddp.json").read_text()[:9000])
(FOLDER / "empty.json").write_text("")
for file, message in (("none.json", "trace: cannot read 'none.json': No such file or directory"),
                      ("text.json", f"trace 'text.json': {expected}it is not valid JSON, or ends early"),
                      ("cut.json", f"trace 'cut.json': {expected}it is not valid JSON, or ends early"),
                      ("empty.json", f"trace 'empty.json': {expected}got an empty file"),
                      ("other.json", f"trace 'other.json': {expected}its \"metadata\" does not say \"chorus\"")):
    expect(refused("ddp.json", file) == f"chorus: {message}\n", refused("ddp.json", file))
before = (FOLDER / "run.html").read_text()
refused("none.json", output="run.html")
expect((FOLDER / "run.html").read_text() == before, "an old page stays")
expect("would replace a trace that it reads" in refused("ddp.json", output="ddp.json"))
expect("-o: expected a file, got 'other'" in refused("ddp.json", output="other"))
expect("cannot write 'none/run.html" in refused("ddp.json", output="none/run.html", status=1))
expect("expected -o FILE or --svg FOLDER" in refused("ddp.json", output=None))
# The program writes to a device, and does not replace it.
(FOLDER / "device").symlink_to("/dev/null")
done = subprocess.run([PAGE, "ddp.json", "-o", "device"], cwd=FOLDER, capture_output=True, text=True, env=CLEAN)
expect(done.returncode == 0 and (FOLDER / "device").is_char_device(), done)
expect("TRACES is required" in refused())
# No space for the page.
before = sorted(FOLDER.iterdir())
done = subprocess.run([PAGE, "ddp.json", "-o", "full.html"], cwd=FOLDER, capture_output=True, text=True, env=CLEAN,
                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)))
expect(done.returncode == 1 and "cannot write 'full.html" in done.stderr, done)
expect(sorted(FOLDER.iterdir()) == before, "no half of a page is left")
say("what is refused")

# Advice at the end of a run.
for options in (["single"], ["dp"], ["ddp", "--devices", "3"], ["local_sgd"]):
    said = run(PROGRAM, *SMALL, "--advise", "--policy", *options)
    expect(said.stderr == "" and said.stdout.count("What the trace says:") == 1, said)
    expect(f"Policy {options[0]} on " in said.stdout and "\nAdvice:\n" in said.stdout, said.stdout)
    for figures in ("batch 64, 10 x 10 classes = 100", "batch 64, learning rate 0.02"):
        expect(figures in said.stdout, said.stdout)
expect("Ranks take the mean of their parameters every 8 steps." in said.stdout, said.stdout)
said = run(CHORUS_RUN, "--nproc-per-node", "2", PROGRAM, *SMALL, "--advise", "--policy", "ddp").stdout
expect(said.count("What the trace says:") == 1 and "Policy ddp on 2 cpu devices" in said, said)
expect(list(FOLDER.glob("chorus_advice*")) == [], "traces of its own are gone")
said = run(PROGRAM, *SMALL, "--advise", "--policy", "ddp", "--trace", "kept.json", "--trace-steps", "1:2").stdout
expect("2 steps recorded from step 1 on" in said and (FOLDER / "kept.json").exists(), said)
# A run that ends before its recorded steps, with an old trace at the same path.
said = run(PROGRAM, *SMALL, "--advise", "--steps", "3", "--trace", "kept.json")
expect("--advise: the run ended before step 6 and recorded nothing" in said.stderr, said.stderr)
expect("Advice:" not in said.stdout, said.stdout)
# A folder that others may write to.
open_folder = FOLDER / f"chorus_advice_{os.getuid()}"
open_folder.mkdir()
open_folder.chmod(0o777)
said = run(PROGRAM, *SMALL, "--advise", status=1).stderr
expect("that only this user can use for the trace; give --trace a file instead" in said, said)
say("--advise")
