#!/usr/bin/env python3
"""chorus-simulate: its output is reproducible and plausible, its trace is complete, and it refuses wrong options.
usage: chorus_simulate_test.py CHORUS_SIMULATE"""

import json
import pathlib
import subprocess
import sys
import tempfile

import trace_rules
from processes import CLEAN, expect, say

PROGRAM = sys.argv[1]
temporary = tempfile.TemporaryDirectory(prefix="chorus_simulate_")
FOLDER = pathlib.Path(temporary.name)


def run(*words, limit=60):
    done = subprocess.run([PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=limit, env=CLEAN)
    return done.returncode, done.stdout, done.stderr


def table(out):
    """The rows of the first table, by number of ranks: step and exposed in ms."""
    lines = out.split("\n\n")[1].splitlines()
    expect(lines[0].split()[0] == "ranks", out)
    return {int(row[0]): (float(row[1]), float(row[2])) for row in map(str.split, lines[1:]) if row[0].isdigit()}


def scales():
    words = ["--ranks", 64, "--links", "25gbit", "--model", "resnet50", "--compute", 150, "--jitter", 0.05, "--seed", 3]
    status, out, err = run(*words)
    expect(status == 0 and err == "", status, err)
    expect(run(*words)[1] == out, "another result the second time")
    rows = table(out)
    expect(sorted(rows) == [1, 4, 16, 64], rows)
    steps = [rows[ranks][0] for ranks in sorted(rows)]
    expect(steps == sorted(steps), steps)
    expect("best: --bucket-cap " in out and "one kind of link" in out, out)
    other = run(*words[:-1], 4)[1]
    expect(table(other) != rows, "the seed does nothing")


def policies():
    steps = {}
    for policy in ("ddp", "local_sgd", "parameter_server"):
        status, out, err = run("--ranks", 32, "--policy", policy, "--links", "10gbit", "--brief")
        expect(status == 0, err)
        steps[policy] = table(out)[32][0]
    # One server for 31 workers is the bottleneck; averages every 8 steps cost the least.
    expect(steps["local_sgd"] < steps["ddp"] < steps["parameter_server"] / 10, steps)
    local = ("--ranks", 4, "--policy", "local_sgd", "--links", "1gbit", "--brief")
    whole, outer, hidden = (table(run(*local, *more)[1])[4][0] for more in
                            ((), ("--fragments", 1), ("--fragments", 2, "--overlap", 3)))
    # An outer optimizer sends an average's bytes; half of 1.2 s is hidden behind 3 of the steps of 100 ms.
    expect(whole == outer and hidden < whole - 50, whole, outer, hidden)
    status, _, err = run(*local, "--fragments", 3)
    expect(status != 0 and "expected a period that 3 fragments divide, got 8 steps" in err, err)


def islands():
    status, out, _ = run("--ranks", 64, "--links", "nvlink8+25gbit", "--model", "400000", "--compute", 5)
    rows = {row.split()[0]: float(row.split()[1]) for row in out.splitlines()[-2:]}
    expect(status == 0 and rows["hierarchical"] < rows["ring"], out)  # for short messages the hops count
    _, straggler, _ = run("--ranks", 64, "--model", "400000", "--compute", 5, "--straggler", "7:2", "--brief")
    expect(table(straggler)[64][0] > 9, straggler)
    # The other 63 wait 5 ms for the straggler's computing, not for links.
    late = next(float(row.split()[3]) for row in straggler.splitlines() if row.split()[:1] == ["64"])
    alike = table(run("--ranks", 64, "--model", "400000", "--compute", 5, "--brief")[1])[64]
    expect(abs(late - 5 * 63 / 64) < 0.4 and abs(table(straggler)[64][1] - alike[1]) < 0.6, straggler, alike)


def traces():
    file, again = FOLDER / "run.json", FOLDER / "again.json"
    words = ["--ranks", 8, "--links", "10gbit", "--model", "vgg16", "--compute", 300, "--brief", "--trace"]
    for path in (file, again):
        status, out, err = run(*words, path)
        expect(status == 0 and f"trace of ranks 0 to 7: {path}" in out, out, err)
    expect(file.read_bytes() == again.read_bytes(), "another trace the second time")
    trace = json.loads(file.read_text())
    events = trace["traceEvents"]
    expect(trace_rules.broken(events) == [], trace_rules.broken(events)[:3])
    expect(trace["metadata"]["policy"] == "ddp" and trace["metadata"]["devices"] == 8, trace["metadata"])
    open_spans = {}
    for event in (one for one in events if one["ph"] == "X"):  # spans of a lane don't overlap, or are nested
        lane = open_spans.setdefault(event["tid"], [])
        lane.append((event["ts"], event["ts"] + event["dur"]))
    for lane, spans in open_spans.items():
        for (_, end), (begin, _) in zip(sorted(spans), sorted(spans)[1:]):
            expect(begin >= end - 0.0011, lane, end, begin)
    buckets = [event for event in events if event.get("cat") == "bucket" and event["pid"] == 1]
    reduced = [event for event in events if event.get("cat") == "comm" and event["pid"] == 1 and event["args"]["op"] == "all_reduce"]
    expect(len(buckets) == len(reduced) > 0, len(buckets), len(reduced))
    # A simulation of a recorded simulation gives the same result.
    first = run(*words[:-1])[1]
    second = run("--recorded", file, "--ranks", 8, "--links", "10gbit", "--brief")[1]
    (a, b), (c, d) = table(first)[8], table(second)[8]
    expect(abs(a - c) < 0.01 and abs(b - d) < 0.01, first, second)
    status, _, err = run("--recorded", file, "--policy", "fsdp")
    expect(status == 2 and "--recorded: of --policy fsdp a recording lacks units and activations" in err, err)
    # A recording of a run that was killed while it wrote: its end is missing.
    lines = file.read_text().splitlines(keepends=True)
    head = {"ph": "M", "pid": 1, "name": "chorus", "args": {"policy": "ddp", "distributed": 1, "rank": 0, "ranks": 8,
                                                            "device_kind": "cpu", "first_step": 0, "base": 0}}
    cut = FOLDER / "cut.json"
    cut.write_text("[\n" + json.dumps(head) + ",\n" + "".join(lines[1:-2]) + '{"ph":"X","pid":')
    third = run("--recorded", cut, "--ranks", 8, "--links", "10gbit", "--brief")[1]
    expect(table(third)[8] == (c, d), second, third)
    many = FOLDER / "many.json"
    status, out, _ = run("--ranks", 100, "--model", "400000", "--brief", "--trace", many)
    expect("trace of ranks 0 to 63" in out, out)
    expect({event["pid"] for event in json.loads(many.read_text())["traceEvents"]} == set(range(1, 65)), "64 ranks")
    status, _, err = run("--trace", FOLDER / "no" / "such" / "folder.json", "--brief")
    expect(status == 1 and "trace: cannot write" in err and "No such file" in err, err)


def data_parallel():
    file, ring = FOLDER / "dp.json", FOLDER / "ring.json"
    words = ["--policy", "dp", "--links", "pcie", "--model", "vgg16", "--compute", 90, "--batch", 10, "--trace", file]
    status, out, err = run(*words, "--optimizer", "adam")
    expect(status == 0 and err == "" and "dp over pcie" in out, out, err)
    rows = table(out)
    expect(sorted(rows) == [1, 4] and rows[1] == (90, 0), rows)
    moved = {" ".join(row.split()[:-3]): tuple(map(float, row.split()[-3:])) for row in out.split("\n\n")[2].splitlines()[2:-1]}
    parameters, inputs = 138357544 * 4e-6, 10 * 3 * 224 * 224 * 4e-6  # MB, of floats
    for name, copies, megabytes in (("inputs", 3, 3 * inputs), ("parameters", 3, 3 * parameters), ("buffers", 0, 0), ("gradients", 3, 3 * parameters),
                                    ("outputs", 3, 3 * 10 * 4e-3), ("their gradients", 3, 3 * 10 * 4e-3)):
        expect(moved[name][0] == copies and abs(moved[name][1] - megabytes) < 0.001, name, moved)
    together = float(out.split("together")[1].split()[0])
    expect(abs(together - sum(row[2] for row in moved.values())) < 0.01 and abs(rows[4][0] - 90 - together) < 0.002, out)
    # Device 0's link carries everything: with twice the devices the wait is more than twice as long.
    more = table(run(*words[:-2], "--devices", 8, "--brief")[1])[8]
    expect(2.3 < more[1] / rows[4][1] < 2.4, more, rows)
    # Under ddp all links carry the same bytes, while computing continues.
    ddp = table(run("--policy", "ddp", "--ranks", 4, *words[2:8], "--brief")[1])[4]
    expect(ddp[1] < rows[4][1] / 2, ddp, rows)
    # With NCCL each link carries parameters and gradients once.
    nccl = run(*words[:-2], "--nccl")[1]
    expect(abs(table(nccl)[4][1] - float(nccl.split("together")[1].split()[0])) < 0.002, nccl)
    expect(0.3 < table(nccl)[4][1] / rows[4][1] < 0.4, nccl, rows)
    trace = json.loads(file.read_text())
    events = trace["traceEvents"]
    expect(trace_rules.broken(events) == [] and trace["metadata"]["policy"] == "dp" and trace["metadata"]["devices"] == 4, trace["metadata"])
    peaks = trace["metadata"]["peak"]
    expect(peaks[0]["optimizer"] == 2 * peaks[0]["parameters"] > 8 * 138357544 and peaks[3]["optimizer"] == 0, peaks)
    loss = run("--policy", "dp", "--model", "4000000", "--compute", 5)[1]
    expect("losses" in loss, loss)
    expect("losses" in run(*words[:-2], "--output", 0)[1], "--output 0")
    for links in ("nvlink2+25gbit", "25gbit", "nvlink2+25gbit:shared"):
        status, out, err = run("--policy", "dp", "--links", links, "--devices", 3)
        expect(status == 2 and out == "" and "DataParallel: one process on one machine: 3 devices" in err, links, out, err)
    # With --all-reduce ring, each step of the ring too.
    words = ["--ranks", 3, "--links", "pcie", "--model", "4000", "--steps", 1, "--brief", "--all-reduce", "ring", "--trace", ring]
    run(*words)
    expect('"ring"' not in ring.read_text().replace('"algorithm":"ring"', ""), "steps that nobody has asked for")
    status, _, err = run(*words, "--trace-ring")
    events = json.loads(ring.read_text())["traceEvents"]
    expect(status == 0 and trace_rules.broken(events) == [], err, trace_rules.broken(events)[:3])
    number = next(event["args"]["sequence"] for event in events if event["name"] == "all_reduce, bucket 0")
    steps = [event for event in events if event.get("cat") == "ring" and event["ph"] == "X" and event["args"]["sequence"] == number]
    expect(len(steps) == 3 * 5 and all("first" not in step["args"] for step in steps), len(steps))


def parts():
    """Policies whose ranks hold parts of the model."""
    words = ["--policy", "fsdp", "--ranks", 8, "--links", "10gbit", "--model", "vgg16", "--compute", 300]
    status, out, err = run(*words)
    expect(status == 0 and err == "" and "units" in out.splitlines()[0], out, err)
    units = [row.split() for row in out.split("\n\n")[2].splitlines()[1:]]
    held = [float(row[4]) for row in units]
    whole = 138357544 * 4e-6  # MB
    expect(held == sorted(held) and held[0] < whole and abs(held[-1] - whole) < 0.1, held)
    # Keeping parameters saves half of the gathers, a third of all bytes.
    kept = table(run(*words, "--keep-parameters", "--brief")[1])[8]
    expect(kept[1] < table(out)[8][1], kept, out)
    file = FOLDER / "fsdp.json"
    run(*words, "--brief", "--trace", file)
    events = json.loads(file.read_text())["traceEvents"]
    expect(trace_rules.broken(events) == [], trace_rules.broken(events)[:3])
    gathers = [event for event in events if event["ph"] == "X" and event["pid"] == 1 and event["tid"] == 18]
    expect(gathers and all(event["args"]["op"] in ("all_gather", "broadcast") for event in gathers), gathers[:2])
    # Eight ranks that share a batch are at most eight times as fast.
    words = ["--model", "bert_base", "--ranks", 8, "--links", "nvlink", "--compute", 1000, "--batch", 64]
    tensors, stages = (table(run("--policy", policy, *words)[1]) for policy in ("tp", "pp"))
    for rows in (tensors, stages):
        expect(rows[1] == (1000, 0) and 125 < rows[8][0] < 300, rows)
    out = run("--policy", "pp", *words)[1]
    rows = {(row.split()[0], int(row.split()[1])): row.split()[2:] for row in out.split("\n\n")[2].splitlines()[1:17]}
    expect(rows["gpipe", 8][2] == "46.7%" and rows["zb-h1", 64][2] == "3.5%", rows)  # 7/15; 7/199
    expect(float(rows["zb-h1", 64][0]) < float(rows["1f1b", 64][0]) < float(rows["1f1b", 8][0]), rows)
    expect(rows["gpipe", 64][3] == "64" and rows["1f1b", 64][3] == "8", rows)
    for schedule in ("gpipe", "interleaved"):
        file = FOLDER / f"{schedule}.json"
        status, _, err = run("--policy", "pp", *words, "--schedule", schedule, "--micro-batches", 16, "--brief", "--trace", file)
        events = json.loads(file.read_text())["traceEvents"]
        expect(status == 0 and trace_rules.broken(events) == [], err, trace_rules.broken(events)[:3])
        expect(any(event.get("cat") == "bubble" for event in events), schedule)


def meshes():
    """Of one axis a mesh is that axis' policy; of several each adds its part."""
    words = ["--links", "25gbit", "--model", "gpt2", "--compute", 1000, "--batch", 16, "--brief"]
    for axis, policy, ranks, more in (("data", "ddp", 32, ()), ("shard", "fsdp", 32, ()), ("tensor", "tp", 4, ()), ("pipe", "pp", 4, ("--micro-batches", 8))):
        _, one, err = run("--policy", policy, "--ranks", ranks, *words, *more)
        status, all_axes, _ = run("--policy", "mesh", "--mesh", f"{axis}={ranks}", *words, *more)
        expect(status == 0 and err == "" and table(one)[ranks] == table(all_axes)[ranks], one, all_axes)
        axes = {row[0]: row[1:] for row in map(str.split, all_axes.split("\n\n")[2].splitlines()[1:4])}
        expect(abs(float(axes[axis][1]) - table(one)[ranks][1]) < 0.002 and float(axes[axis][2]) > 0, axes)
        expect(all(row[0] == "1" and float(row[1]) == 0 for name, row in axes.items() if name != axis), axes)
    file = FOLDER / "mesh.json"
    words = ["--policy", "mesh", "--links", "nvlink4+100gbit", *words[2:]]
    for axes in ("pipe=2,data=4,tensor=4", "data=4,tensor=2", "pipe=2,shard=4"):
        status, out, err = run(*words, "--mesh", axes, "--trace", file)
        events = json.loads(file.read_text())["traceEvents"]
        expect(status == 0 and err == "" and trace_rules.broken(events) == [], axes, err, trace_rules.broken(events)[:3])
        ranks = max(table(out))
        expect({event["pid"] for event in events} == set(range(1, ranks + 1)), ranks)
        exposed = sum(float(row.split()[2]) for row in out.split("\n\n")[2].splitlines()[1:4])
        expect(abs(exposed - table(out)[ranks][1]) < 0.003 and "A rank holds" in out, out)
    # 1024 ranks of a model that one device doesn't hold.
    status, out, _ = run("--policy", "mesh", "--mesh", "pipe=8,data=16,tensor=8", "--links", "nvlink8+200gbit", "--model", "gpt3_175b", "--compute", 600000, "--optimizer", "adam")
    held = float(out.split("A rank holds ")[1].split()[0])
    expect(status == 0 and 175e9 * 16 / 64 * 1e-6 < held < 175e9 * 16 / 64 * 1e-6 * 1.3, out)


def many_ranks():
    # Ranks that behave alike are simulated once.
    status, out, err = run("--ranks", 65536, "--brief", "--steps", 1)
    expect(status == 0 and err == "" and table(out)[65536][1] > 11000, out)  # 6 calls of 2 (N-1) alpha
    strong = [run("--policy", policy, "--model", "gpt2", "--ranks", 2, "--links", "nvlink", "--brief")[1] for policy in ("tp", "sp")]
    expect("Weak scaling" in out and all("Strong scaling" in each for each in strong), out)
    status, out, _ = run("--policy", "fsdp", "--ranks", 4096, "--model", "bert_large", "--links", "nvlink8+100gbit", "--brief", "--steps", 1)
    expect(status == 0 and table(out)[4096][0] > 100, out)
    # Where some are slow, or one serves the others, no message is simulated, unless links differ.
    for words in (["--straggler", "5:1.3"], ["--jitter", 0.1], ["--policy", "parameter_server", "--model", 400000]):
        status, out, err = run("--ranks", 65536, "--steps", 1, "--brief", *words, limit=30)
        expect(status == 0 and err == "" and table(out)[65536][0] > 1000, words, out, err)
    status, out, err = run("--ranks", 65536, "--links", "nvlink8+25gbit", "--straggler", "5:1.3")
    expect(status == 2 and out == "" and "message by message" in err, out, err)
    status, out, _ = run("--ranks", 1024, "--links", "100gbit", "--model", "4000000", "--bucket-cap", 25, "--first-bucket-cap", 25, "--brief", "--steps", 1)
    expect(status == 0 and table(out)[1024][1] > 1, out)


def refuses():
    broken = FOLDER / "broken.json"
    about = '{"metadata":{"chorus":1,"policy":"ddp","devices":1,"device_kind":"cpu","first_step":0,"steps":1},"traceEvents":['
    span = '{"ph":"X","cat":"%s","pid":1,"ts":0,"dur":1}'
    pass_spans = ",".join(span % kind for kind in ("step", "forward", "backward"))
    for text, part in (("{", "it is not valid JSON, or ends early"), ('{"traceEvents":[]}', '"metadata" does not say "chorus"'),
                       ("[1]", "its first event is not named"), (about + "]}", "no step of rank 0"),
                       (about + span % "step" + "]}", "no forward span"),
                       (about + pass_spans + "]}", "no buckets in rank 0's last step"),
                       (about + pass_spans + ',{"ph":"i","cat":"bucket","name":"b","pid":1,"ts":0,"args":{"bytes":-1}}]}', "bucket 'b' of -1 bytes")):
        broken.write_text(text)
        status, _, err = run("--recorded", broken)
        expect(status == 1 and part in err, text, err)
    for words, part in ((["--ranks", 0], "expected a"), (["--ranks", 100000], "expected a"), (["--links", "string"], "expected nvlink"),
                        (["--model", "resnet18"], "expected resnet50"), (["--policy", "pipeline"], "ddp"), (["--straggler", "1"], "expected RANK:FACTOR"),
                        (["--straggler", "64:2"], "not in [0, 64)"), (["--straggler", "1:0"], "factor 0"), (["--straggler", "1:2x"], "RANK:FACTOR"),
                        (["--straggler", "1:nan"], "RANK:FACTOR"), (["--jitter", 2], "expected a"), (["--jitter", "nan"], "nan"),
                        (["--all-reduce", "tree"], "expected auto"), (["--all-reduce", "hierarchical"], "needs several machines"),
                        (["--compute", -1], "expected a"), (["--compute", 0], "expected a"), (["--unit-cap", "nan"], "expected a"), (["--ranks", "0x10"], "expected a whole number, 1 to"), (["--efficiency", 0], "expected a"), (["--seed", -1], "--seed"),
                        (["--recorded", "x", "--model", "vgg16"], "excludes"), (["--steps", 0], "expected a"), (["--trace-ring"], "--trace-ring: without --trace"),
                        (["--policy", "dp", "--trace-ring", "--trace", "x"], "dp makes no collective calls"), (["--batch", 0], "expected a"), (["--nccl"], "--nccl: of --policy dp alone"),
                        (["--optimizer", "lion"], "momentum"), (["--output", -1], "--output"), (["--policy", "dp", "--devices", 65], "expected 1 to 64"), (["--period", 0], "expected a"),
                        (["--policy", "pp"], "expected --activation BYTES"), (["--policy", "tp", "--model", "vgg16", "--activation", 4], "is not a transformer"), (["--model", "gpt4"], "gpt3_175b"),
                        (["--policy", "pp", "--model", "bert_base", "--micro-batches", 64], "--micro-batches 64 of 32 samples"), (["--schedule", "dualpipe"], "zb-h1"),
                        (["--keep-parameters"], "--keep-parameters: of --policy fsdp alone"), (["--unit-cap", -1], "expected a"), (["--activation", 0], "expected a"),
                        (["--policy", "mesh"], "expected --mesh pipe=2"), (["--mesh", "data=2"], "--mesh: of --policy mesh alone"),
                        (["--policy", "mesh", "--mesh", "pipe=2,data=4,tensor=2", "--ranks", 8, "--model", "gpt2"], "16 ranks, --ranks 8"),
                        (["--policy", "mesh", "--mesh", "pipe=2,rows=4"], "pipe, data or shard, and tensor"), (["--policy", "mesh", "--mesh", "data=x"], "65536 ranks for data"),
                        *((["--policy", "mesh", "--mesh", axes], part) for axes, part in (("pipe=2,pipe=2", "each once"), ("pipe", "ranks for pipe"), ("data=0", "ranks for data"),
                                                                                          ("data=2x", "ranks for data"), ("data=99999999999", "ranks for data"), ("data=65536,tensor=2", "131072 ranks"), ("", "expected --mesh"))),
                        (["--policy", "mesh", "--mesh", "pipe=5", "--model", "gpt2"], "12 layers of gpt2 in 5 stages"), (["--policy", "mesh", "--mesh", "data=2,shard=2"], "together"),
                        (["--policy", "mesh", "--mesh", "tensor=2", "--activation", 4], "is not a transformer"), (["--policy", "mesh", "--mesh", "data=4", "--straggler", "1:2"], "no stragglers"),
                        (["--policy", "mesh", "--mesh", "pipe=2", "--model", "gpt2", "--micro-batches", 64], "--micro-batches 64 of 32 samples"),
                        (["--policy", "mesh", "--mesh", "data=2", "--trace-ring", "--trace", "x"], "not of --policy mesh"),
                        (["stray"], "stray")):
        status, out, err = run(*words)
        expect(status == 2 and part in err and out == "", words, status, out, err)
    expect(run("--recorded", FOLDER / "none")[0] == 1, "a file that isn't there")


for check in (scales, policies, islands, traces, data_parallel, parts, meshes, many_ranks, refuses):
    check()
    say(f"{check.__name__}: right")
