#!/usr/bin/env python3
"""Recomputes every number of chorus-page's page from the raw traces, without code of the page: real runs of all
policies, one that evaluates between its steps, and simulated ones.
usage: page_numbers_test.py CHORUS_PAGE CHORUS_SIMULATE TRAIN_CLASSIFIER TRAIN_GPT"""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from processes import CLEAN, expect, say

PAGE, SIMULATE, CLASSIFIER, GPT = map(os.path.abspath, sys.argv[1:5])
temporary = tempfile.TemporaryDirectory(prefix="chorus_numbers_")
FOLDER = pathlib.Path(sys.argv[5] if len(sys.argv) > 5 else temporary.name)
COMPUTES = ("forward", "backward", "optimizer")


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=FOLDER, env=CLEAN)
    expect(done.returncode == 0, command, done.stdout, done.stderr)
    return done.stdout


def ns(us):
    return round(us * 1000)


def union(stretches):
    out = []
    for begin, end in sorted(each for each in stretches if each[0] < each[1]):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def length(stretches):
    return sum(end - begin for begin, end in stretches)


def both(a, b):
    return union([(max(p[0], q[0]), min(p[1], q[1])) for p in a for q in b])


def without(a, b):
    return union(stretch for begin, end in a for stretch in gaps(begin, end, b))


def gaps(begin, end, taken):
    for start, stop in taken:
        if stop <= begin or start >= end:
            continue
        if start > begin:
            yield begin, start
        begin = max(begin, stop)
    if begin < end:
        yield begin, end


class Raw:
    """A trace, in whole nanoseconds."""

    def __init__(self, name):
        text = json.loads((FOLDER / name).read_text())
        self.about, events = text["metadata"], text["traceEvents"]
        self.policy, self.ranks = self.about["policy"], self.about["devices"]
        self.spans = collections.defaultdict(list)  # by rank: begin, end, category, lane, name, args
        self.counters = collections.defaultdict(list)
        for event in events:
            rank = event["pid"] - 1
            if event["ph"] == "X":
                begin = ns(event["ts"])
                self.spans[rank].append((begin, begin + ns(event["dur"]), event["cat"], event["tid"], event["name"], event.get("args", {})))
            elif event["ph"] == "C":
                self.counters[rank].append((ns(event["ts"]), event["name"], event["args"]))
        self.recorded = 1 + max(event["pid"] for event in events) - 1
        self.steps = collections.defaultdict(dict)
        for rank, spans in self.spans.items():
            for begin, end, category, _, _, args in spans:
                if category == "step":
                    self.steps[args["step"]][rank] = begin, end
        for ranks in self.steps.values():
            for rank in range(self.recorded):
                ranks.setdefault(rank, next(iter(ranks.values())))
        lengths = sorted((max(end - begin for begin, end in ranks.values()), number) for number, ranks in self.steps.items())
        self.step_ns, self.median = lengths[(len(lengths) - 1) // 2]
        self.own = self.steps[self.median]

    def time_of(self, rank, *categories, leaves=False):
        """The time covered by spans of these categories; `leaves`: only by spans that contain no others."""
        mine = [span for span in self.spans[rank] if span[2] in categories]
        if leaves:
            mine = [span for span in mine if not any(
                other is not span and other[3] == span[3] and span[0] <= other[0] and other[1] <= span[1] and other[1] > other[0] and
                (other[1] - other[0] < span[1] - span[0] or mine.index(other) > mine.index(span)) for other in mine)]
        begin, end = self.own[rank]
        return union((max(begin, span[0]), min(end, span[1])) for span in mine)

    def computing(self, rank):
        return without(self.time_of(rank, *COMPUTES, leaves=True), self.time_of(rank, "wait", "bubble"))

    def samples(self, rank):
        """The samples of the batches that the step's loader spans delivered."""
        shares = [span[5]["samples"] for span in self.spans[rank] if span[2] == "loader" and "samples" in span[5] and
                  any(ranks[rank][0] <= span[0] <= ranks[rank][1] for ranks in self.steps.values())]
        return max(shares, default=0)

    def sent(self):
        """Bytes in the median step by link and kind."""
        out = collections.Counter()
        for rank, counters in self.counters.items():
            begin, end = self.own[rank]
            sums = {}
            for at, name, args in sorted(counters, key=lambda each: each[0]):
                if not name.startswith("sent to ") or at > end:
                    continue
                to = int(name.split()[2].rstrip(","))
                for kind, count in args.items():
                    before, _ = sums.get((to, kind), (0, 0))
                    sums[to, kind] = (count if at <= begin else before), count
            for (to, kind), (before, after) in sums.items():
                if after > before:
                    out[rank, to, kind] = after - before
        return out

    def peak(self, rank):
        """The peak of the memory counters within the recorded steps."""
        most = {}
        for at, name, args in self.counters[rank]:
            if name == "memory, bytes" and sum(args.values()) > sum(most.values()):
                most = args
        return most


def near(got, expected, *what):
    expect(abs(got - expected) <= 1e-3 * abs(expected) + 2e-3, *what, "the page has", got, "the trace", expected)


def formula(raw, rank, to, kind):
    """The bytes of the step's calls, by the formulas of their algorithms; None if a formula is unknown."""
    total, known, n = 0, True, raw.ranks
    begin, end = raw.own[rank]
    for start, _, category, _, name, args in raw.spans[rank]:
        if category != "comm" or not begin <= start < end or args.get("traffic") != kind:
            continue
        group = args.get("group", list(range(n)))
        size, place = len(group), group.index(rank)
        after, count, algorithm = group[(place + 1) % size], args["bytes"], args.get("algorithm")
        parts = {"all_reduce": 2 * (size - 1) / size * count, "reduce_scatter": (size - 1) * count, "all_gather": (size - 1) * count}
        if args["op"] == "message":
            total += count if name == f"message to {to}" else 0
        elif args["op"] == "broadcast" and algorithm == "ring":
            total += count if after == to and to != args["root"] else 0
        elif args["op"] in parts and algorithm == "ring":
            total += parts[args["op"]] if after == to else 0
        elif args["op"] in parts and algorithm in ("direct", "in_place"):
            total += parts[args["op"]] / (size - 1) if to in group else 0
        else:
            known = False
    return total if known else None


def check(name, raw, shown):
    facts = shown["facts"]
    expect(shown["median_step"] == raw.median, name, shown["median_step"], raw.median)
    near(facts["step_us"], raw.step_ns / 1e3, name, "step")
    communicating = beside = 0
    expect(len(facts["compute_us"]) == raw.recorded, name, facts["compute_us"], raw.recorded)
    for rank in range(raw.recorded):
        begin, end = raw.own[rank]
        computing, communication = raw.computing(rank), raw.time_of(rank, "comm", "copy")
        waits = raw.time_of(rank, "wait", "bubble")
        if raw.policy == "dp":
            waits = without(without([(begin, end)], computing), raw.time_of(rank, "loader"))
        near(facts["compute_us"][rank], length(computing) / 1e3, name, "computing of", rank)
        near(facts["communication_us"][rank], length(communication) / 1e3, name, "communication of", rank)
        near(facts["exposed_us"][rank], length(waits) / 1e3, name, "waiting of", rank)
        near(facts["bubble_us"][rank], length(raw.time_of(rank, "bubble")) / 1e3, name, "bubbles of", rank)
        near(facts["loader_us"][rank], length(raw.time_of(rank, "loader")) / 1e3, name, "loader of", rank)
        near(facts["utilisation"][rank], length(computing) / max(1, end - begin), name, "utilisation of", rank)
        expect(length(computing) <= end - begin, name, rank)
        communicating += length(communication)
        beside += length(both(communication, computing))
        if raw.policy != "dp":
            expect(facts["samples"][rank] == raw.samples(rank), name, rank, facts["samples"], raw.samples(rank))
    if raw.policy == "dp":
        batch = raw.samples(0)
        expect(facts["samples"] == [batch // raw.ranks + (rank < batch % raw.ranks) for rank in range(raw.ranks)], name, facts["samples"], batch)
    if communicating:
        near(facts["hidden"], beside / communicating, name, "hidden")
    links = {(link["from"], link["to"], link["kind"]): link for link in facts["links"]}
    sent = raw.sent()
    expect(set(links) == set(sent), name, set(links) ^ set(sent))
    for (rank, to, kind), count in sent.items():
        link = links[rank, to, kind]
        near(link["bytes"], count, name, "bytes of", rank, to, kind)
        if link["formula"] is None:
            expect(kind == "control" or raw.policy in ("dp", "parameter_server") or formula(raw, rank, to, kind) is None, name, link)
        elif raw.policy not in ("dp", "parameter_server"):
            near(link["formula"], formula(raw, rank, to, kind), name, "formula of", rank, to, kind)
        if link["formula"] is not None:  # the bytes sent match the formula
            expect(abs(link["bytes"] - link["formula"]) <= 1e-3 * link["formula"] + 8 * raw.ranks * 64, name, link)
    for rank, peak in enumerate(facts["peak"]):
        if peak and raw.peak(rank):
            near(sum(peak.values()), sum(raw.peak(rank).values()), name, "peak of", rank)
            expect(peak == raw.peak(rank) or sum(peak.values()) == sum(raw.peak(rank).values()), name, peak, raw.peak(rank))
    said = " ".join(sentence["text"] for sentence in shown["sentences"])
    if raw.samples(0) and raw.policy in ("ddp", "local_sgd", "parameter_server", "fsdp"):
        shares = sorted({raw.samples(rank) for rank in range(raw.recorded)})
        expect(f"each rank has {' to '.join(map(str, (shares[0], shares[-1])[:len(shares)]))} of them" in said, name, said)


SMALL = ["--train-images", "640", "--test-images", "200", "--epochs", "1", "--quiet"]
LETTERS = ["--layers", "2", "--width", "16", "--window", "16", "--batch", "8", "--letters", "0", "--quiet", "--steps", "8"]
BERT = ["--model", "bert_base", "--compute", "90", "--brief"]
TRACES = {
    "single": [CLASSIFIER, *SMALL, "--policy", "single"],
    "dp": [CLASSIFIER, *SMALL, "--policy", "dp", "--devices", "3"],
    "ddp": [CLASSIFIER, *SMALL, "--policy", "ddp", "--devices", "2"],
    "ddp3": [CLASSIFIER, *SMALL, "--policy", "ddp", "--devices", "3", "--all-reduce", "ring", "--bucket-cap-mb", "0.05"],
    "fsdp": [CLASSIFIER, *SMALL, "--policy", "fsdp", "--devices", "2"],
    "local_sgd": [CLASSIFIER, *SMALL, "--policy", "local_sgd", "--devices", "2"],
    "server": [CLASSIFIER, *SMALL, "--policy", "parameter_server", "--devices", "2"],
    # Ten steps an epoch: the third recorded step is the last one of its epoch, before an evaluation.
    "evaluates": [CLASSIFIER, *SMALL, "--epochs", "2", "--policy", "dp", "--devices", "2", "--trace-steps", "8:4"],
    "evaluates_ddp": [CLASSIFIER, *SMALL, "--epochs", "2", "--policy", "ddp", "--devices", "2", "--trace-steps", "8:4"],
    "pp": [GPT, *LETTERS, "--policy", "pp", "--devices", "2"],
    "tp": [GPT, *LETTERS, "--policy", "tp", "--devices", "2"],
    "mesh": [GPT, *LETTERS, "--policy", "mesh:1x2x2"],
    "sim_dp": [SIMULATE, "--policy", "dp", "--devices", "4", "--model", "vgg16", "--compute", "90", "--brief"],
    "sim_ddp": [SIMULATE, "--ranks", "8", "--links", "10gbit", "--model", "vgg16", "--compute", "300", "--brief"],
    "sim_straggler": [SIMULATE, "--ranks", "6", "--straggler", "3:1.5", "--jitter", "0.05", "--brief"],
    "sim_islands": [SIMULATE, "--ranks", "16", "--links", "nvlink4+25gbit", "--brief"],
    "sim_fsdp": [SIMULATE, "--policy", "fsdp", "--ranks", "6", *BERT],
    "sim_tp": [SIMULATE, "--policy", "tp", "--ranks", "4", *BERT],
    "sim_pp": [SIMULATE, "--policy", "pp", "--ranks", "4", *BERT],
    "sim_zb": [SIMULATE, "--policy", "pp", "--ranks", "4", "--schedule", "zb-h1", *BERT],
    "sim_mesh": [SIMULATE, "--policy", "mesh", "--mesh", "pipe=2,data=2,tensor=2", *BERT],
    "sim_mesh_flat": [SIMULATE, "--policy", "mesh", "--mesh", "shard=4,tensor=2", *BERT],
    "sim_many": [SIMULATE, "--ranks", "1024", "--model", "400000", "--steps", "1", "--brief"],
    "sim_local": [SIMULATE, "--policy", "local_sgd", "--ranks", "4", "--period", "2", "--brief"],
    "sim_server": [SIMULATE, "--policy", "parameter_server", "--ranks", "4", "--brief"],
}

for name, command in TRACES.items():
    file = f"{name}.json"
    if not (FOLDER / file).exists():
        run(*command, "--trace", file)
    run(PAGE, file, "-o", "page.html")
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', (FOLDER / "page.html").read_text(), re.DOTALL)
    raw = Raw(file)
    check(name, raw, json.loads(found[0])["runs"][0])
    if name == "sim_many":
        expect(raw.ranks == 1024 and raw.recorded == 64, raw.ranks, raw.recorded)
    if name.startswith("evaluates"):
        expect(len(raw.steps) == 4 and raw.samples(0) in (64, 32), name, raw.steps, raw.samples(0))
    say(f"{name}: its numbers are the trace's")
