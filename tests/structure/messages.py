#!/usr/bin/env python3
"""Reads the text of every error of include/chorus and examples, and refuses those that do not have the one form:

    PLACE: what is wrong, as `expected X, got Y` if there are values; what to do

The place is an operation, a class, a file, an option or a rank. A text has three lines at most and is plain English.

    messages.py            says which text breaks which rule
    messages.py --list     prints all texts, with {} for a value and {a|b} for one of two texts
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("include/chorus", "examples")
MOST_LINES = 3
MOST_CHARACTERS = 420
# Texts that follow a place which the caller has put in front.
THROWN_WITHIN = {"LinkError", "LinkTimeout"}
FRAGMENTS = {
    "comm/store/store_table.hpp": "store.{}: ",
    "parallel/ddp/batch_shares_impl.hpp": "rank {}: {}: ",
    "parallel/dp/samples.hpp": "DataParallel: ",
    "parallel/ddp/same_program_impl.hpp": "{}: ",
}
# What is not the plain English of this field, and what to write in its place.
FOREIGN = {
    r"wants?|wanted": "requires, expected",
    r"(?:has|have|had) to(?: be)?": "must",
    r"(?:is|are|was|were) to be": "must be",
    r"\blet (?:it|the|backward|each)\b": "an imperative",
    r"; let\b|: let\b": "an imperative",
    r"no (?:whole|list|object|tuple|number|digit|power|multiple|part|parameter of|exception|JSON|quantized|8-bit|one of|mean)": "not a",
    r"\b(?:is|are|was|were) no(?:ne)?\b(?! longer)": "is not",
    r"nor (?:can|is|has|does|do)": "and ... not",
    r"neither .* nor": "not ... or ...",
    r"makes? no sense": "is invalid",
    r"in vain": "without success",
    r"of which|of whom|to which|by which|in which|from which|with which|for which": "two sentences",
    r"what is no|that what|than what|is what|has what|takes what|with what": "the thing itself",
    r"stands? for": "represents",
    r"shared? out|shares out": "split",
    r"seldom|with a word|will not come|such a\b|of old|as it were|by now|at hand": "plain words",
    r"otherwise|elsewhere|anew": "in a different way, somewhere else, again",
    r"(?:has|have) come|did not come|came\b|comes? back|come to|to come|has gone|have gone|is gone|are gone|went away|gone away": "arrived, returned, exited",
    r"goes? on|go on": "continues",
    r"(?:is|was) asked for|asks for": "requested",
    r"who answers": "the process at",
    r"another one|other ones|is another\b": "a different",
    r"\bsay\)|, say\b": "for example",
    r"by hand": "outside of the optimizer",
    r"check sum": "checksum",
    r"each of them|all of them|none of them": "each, all, none",
    r"as many": "the same number of",
    r"of its own": "its own",
    r"\bbeside\b": "next to, outside",
    r"\bwhereof|thereof|therein|whatever|whichever": "plain words",
    r"\bfor (?:it|they|the|a|these|dropout|ranks|pickle|no)\b(?= \w+ (?:can|is|are|does|has|have|run|follow)\b)": "because",
}
CALLS = {"check": 1, "fail": 0, "usage_error": 0, "static_assert": 1}
JOINED = {"cat", "format", "string", "string_view"}
TOKEN = re.compile(r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:[^\n\\]|\\.)*)
  | (?P<raw>R"(?P<mark>[^(\s]*)\((?P<body>.*?)\)(?P=mark)")
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<char>'(?:[^'\\\n]|\\.)+')
  | (?P<number>\d(?:[\w.']|(?<=[eEpP])[+-])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<sign>::|->|<<|>>|&&|\|\||[-+*/%<>=!&|^]=|.)""", re.VERBOSE | re.DOTALL | re.MULTILINE)


class Source:
    """The tokens of a file, and what lies between brackets."""

    def __init__(self, text):
        self.tokens, line = [], 1
        for match in TOKEN.finditer(text):
            kind = next(k for k in ("space", "raw", "string", "char", "number", "name", "sign") if match[k] is not None)
            if kind == "raw":
                self.tokens.append(("string", match["body"], line))
            elif kind == "string":
                escapes = {"n": "\n", "t": "\t"}
                self.tokens.append((kind, re.sub(r"\\(.)", lambda m: escapes.get(m[1], m[1]), match[0][1:-1]), line))
            elif kind != "space":
                self.tokens.append((kind, match[0], line))
            line += match[0].count("\n")

    def sign(self, i, signs):
        return i < len(self.tokens) and self.tokens[i][0] == "sign" and self.tokens[i][1] in signs

    def end(self, begin):
        depth = 0
        for i in range(begin, len(self.tokens)):
            depth += self.sign(i, "([{") - self.sign(i, ")]}")
            if depth == 0:
                return i
        return len(self.tokens) - 1

    def split(self, begin, end, signs):
        """The parts between signs that are in no brackets."""
        parts, depth, first = [], 0, begin
        for i in range(begin, end):
            depth += self.sign(i, "([{") - self.sign(i, ")]}")
            if depth == 0 and self.sign(i, signs):
                parts.append((first, i))
                first = i + 1
        return parts + [(first, end)] if first < end else parts

    def text(self, begin, end):
        """The text that an expression gives: literals, {} for values, {a|b} for a choice."""
        question = self.split(begin, end, ("?",))
        if len(question) > 1:
            rest, depth, nested = question[0][1] + 1, 0, 0
            for i in range(rest, end):
                depth += self.sign(i, "([{") - self.sign(i, ")]}")
                if depth == 0 and self.sign(i, "?"):
                    nested += 1
                elif depth == 0 and self.sign(i, ":"):
                    if nested == 0:
                        either, other = self.text(rest, i), self.text(i + 1, end)
                        return "{}" if either == other == "{}" else f"{{{either.strip('{}')}|{other.strip('{}')}}}"
                    nested -= 1
        sums = self.split(begin, end, ("+",))
        if len(sums) > 1:
            return "".join(self.text(*part) for part in sums)
        if begin < end and all(kind == "string" for kind, _, _ in self.tokens[begin:end]):
            return "".join(text for _, text, _ in self.tokens[begin:end])
        at = begin
        while at < end and (self.tokens[at][0] == "name" or self.sign(at, ("::",))):
            at += 1
        if at < end and self.sign(at, "({") and self.end(at) == end - 1:
            if at == begin:
                return self.text(begin + 1, end - 1)
            if self.tokens[at - 1][1] in JOINED:
                return "".join(self.text(*part) for part in self.split(at + 1, end - 1, ","))
        return "{}"

    def messages(self):
        """(line, kind, condition, text): kind is the error's type, 'static_assert', or '' for parts of messages."""
        used = set()
        for i, (kind, name, line) in enumerate(self.tokens):
            if kind == "string" and i not in used:
                end = i
                while end < len(self.tokens) and self.tokens[end][0] == "string":
                    end += 1
                used.update(range(i, end))
                yield line, "", "", self.text(i, end)
            if kind != "name" or i in used:
                continue
            at, error = i + 1, ""
            if name in ("check", "fail") and self.sign(at, "<"):
                close = next((j for j in range(at, min(at + 12, len(self.tokens))) if self.sign(j, ">")), at)
                error = self.tokens[close - 1][1]
                at = close + 1
            is_error = re.fullmatch(r"[A-Z]\w*Error", name)
            if not self.sign(at, "({") or not (name in CALLS or is_error or name in ("cat", "format") or
                                               name.startswith(("refuse", "fail_", "check"))):
                continue
            end = self.end(at)
            parts = self.split(at + 1, end, ",")
            if not any(token[0] == "string" for token in self.tokens[at:end]):
                continue
            used.update(range(i, end + 1))
            if name == "static_assert":
                parts = [(parts[0][0], parts[-1][0] - 1), parts[-1]]
            skip = CALLS.get(name, 0)
            condition = " ".join(token[1] for token in self.tokens[parts[0][0]:parts[0][1]]) if skip else ""
            kind = name if is_error or name == "static_assert" else error or ("Error" if name in CALLS else "")
            yield line, "UsageError" if name == "usage_error" else kind, condition, "".join(self.text(*p) for p in parts[skip:])


def broken(file, kind, condition, text):
    """The rules that a text breaks, each with what to do."""
    if text.count("\n") >= MOST_LINES and kind:
        yield f"lines: more than {MOST_LINES}"
    if len(text) > MOST_CHARACTERS and kind:
        yield f"length: {len(text)} characters, at most {MOST_CHARACTERS}"
    for words, instead in FOREIGN.items():
        if found := re.search(rf"(?:\b|(?<=; )|(?<=: ))(?:{words})(?:\b|$)", re.sub(r"'[^' ]*'", "''", text)):
            yield f"words: '{found[0]}': write {instead}"
    if not kind or kind in THROWN_WITHIN or any(file.endswith(end) for end in FRAGMENTS):
        return
    place = re.match(r"(?:\{[^}]*\}|--|option --|environment variable|[^:;,]{1,60}?(?:\{[^}]*\})?: |[\w:]+(?:<[^>]*>)?: )", text)
    if not place:
        yield "place: begin with the operation, class, file, option or rank, and a colon"
    if re.search(r"\bgot\b", text) and not re.search(r"\bexpected\b|\bmust\b", text) and kind != "static_assert":
        yield "expected: 'got' follows 'expected'"


def files():
    for folder in FOLDERS:
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".hpp", ".cpp"))


def all_messages():
    for path in files():
        file = str(path.relative_to(ROOT))
        for line, kind, condition, text in Source(path.read_text()).messages():
            if kind or (len(text.split()) > 2 and file.startswith("include/")):
                yield file, line, kind, condition, text


def main():
    if sys.argv[1:] == ["--list"]:
        for file, line, kind, _, text in all_messages():
            print(f"{file}:{line}: {kind or 'part'}: {text}")
        return 0
    count = wrong = 0
    for file, line, kind, condition, text in all_messages():
        count += 1
        for rule in broken(file, kind, condition, text):
            wrong += 1
            print(f"{file}:{line}: {rule}\n    {text}")
    print(f"{count} texts, {wrong} breaks of rules")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
