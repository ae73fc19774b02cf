"""Perfetto's rules for Chrome trace events, and chorus' own guarantees."""

import json


def read(text):
    """The events of a trace; of a truncated one the complete events."""
    if text.startswith("["):
        text = text[:text.rindex(",\n")] + "]" if not text.rstrip().endswith("]") else text
        return json.loads(text)
    return json.loads(text)["traceEvents"]


def ns(event):
    return round(event["ts"] * 1000)


def end(event):
    return ns(event) + round(event["dur"] * 1000)


def broken(events):
    """The rules that a whole file breaks, as sentences; empty if none."""
    bad, lanes, arrows = [], {}, {}
    for event in events:
        if event["ph"] != "M" and not isinstance(event.get("ts"), (int, float)):
            bad.append(f"no time: {event}")
        elif event.get("pid") == 0 or event.get("tid") == 0:
            bad.append(f"a process or a thread of number 0: {event}")
        elif event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for spans in lanes.values():
        around = []
        for span in sorted(spans, key=lambda each: (ns(each), -end(each))):
            while around and end(around[-1]) <= ns(span):
                around.pop()
            if around and end(span) > end(around[-1]):
                bad.append(f"overlaps: {span['name']} and {around[-1]['name']}")
            around.append(span)
    for event in events:
        if event["ph"] not in "sf":
            continue
        if not any(ns(span) <= ns(event) < end(span) for span in lanes.get((event["pid"], event["tid"]), [])):
            bad.append(f"an arrow's end outside of a span: {event}")
        if event["ph"] == "f" and event.get("bp") != "e":
            bad.append(f"an arrow that binds to the next span: {event}")
        arrows.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
    for name, ends in arrows.items():
        if sorted(each["ph"] for each in ends) != ["f", "s"]:
            bad.append(f"an arrow without its other end, or a number used twice: {name}")
        elif len({each["ph"]: ns(each) for each in ends}) == 2:
            times = {each["ph"]: ns(each) for each in ends}
            if times["f"] < times["s"]:
                bad.append(f"an effect before its cause: {name}")
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    bad += [f"an unnamed process: {pid}" for pid in sorted({event["pid"] for event in events} - named)]
    return bad
