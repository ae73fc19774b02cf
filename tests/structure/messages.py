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
MOST_CHARACTERS = 280
MOST_WORDS_OF_PLACE = 5
# The caller puts the place in front of these.
PLACED_BY_CALLER = {"LinkError", "LinkTimeout"}
PLACED_IN = ("comm/engine/compare_calls.hpp", "comm/store/store_table.hpp", "parallel/ddp/batch_shares_impl.hpp",
             "parallel/dp/samples.hpp")
# Rooms and programs whose texts do not have the form yet.
# Words that a reader has to think about, and what to write in their place.
FOREIGN = {
    r"wants?|wanted": "requires, expected",
    r"(?:has|have|had) to(?: be)?": "must",
    r"(?:is|are|was|were) to be": "must be",
    r"let (?:it|the|backward|each|a)": "an imperative: call, return, use",
    r"(?:is|are|was|were) no(?:ne)?\b(?! longer)": "is not",
    r"nor (?:can|is|has|does|do)": "and ... not",
    r"neither .* nor": "not ... or ...",
    r"makes? no sense": "is invalid",
    r"in vain|seldom|with a word|will not come|such a|of old|as it were|by now|at hand|hardly": "plain words",
    r"of which|of whom|to which|by which|from which|with which|for which": "two sentences",
    r"what is no|than what|has what|takes what|with what|of what": "the thing itself",
    r"stands? for": "represents",
    r"shared? out|shares out": "split",
    r"otherwise|elsewhere|anew": "in a different way, in another place, again",
    r"(?:has|have) come|did not come|came|comes? back|come to|to come": "arrived, returned",
    r"(?:has|have|is|are) gone|went away|gone away": "exited, was destroyed, is lost",
    r"goes? on|go on": "continues",
    r"(?:is|was|are) asked for|asks for": "requested, uses",
    r"who answers": "the process at",
    r"another one|other ones|is another": "a different",
    r", say": "for example",
    r"by hand": "what is done",
    r"check sum": "checksum",
    r"each of them|all of them|none of them": "each, all, none",
    r"as many": "the same number of",
    r"of (?:its|their) own": "its own",
    r"beside": "next to, outside of",
    r"whereof|thereof|therein|whatever|whichever": "plain words",
    r"where (?:it|they|that) belongs?|where \S+ belong": "expected",
}
BOUND = r"(?:at least|at most) (?!one)|above|below|positive|\bin [\[(]|\d to \d|[<>]=? \d"
# What each rule refuses, and what it lets pass.
REFUSED = {
    "lines": "conv2d: a\nb\nc\nd",
    "length": "conv2d: " + "expected more words " * 20,
    "words": "conv2d: the bias is no vector",
    "place": "the bias has 3 elements, expected 4",
    "got": "conv2d: the stride is positive, got 0",
    "value": "conv2d: expected a stride of at least 1",
}
PASSED = ("conv2d: expected a stride of at least 1, got {}", "{}: rank {} is not in [0, {})",
          "--devices: expected 1 to {}, got {}", "ops::fft: expected one axis", "adam: 'is no' is a name; call x() first", "option --{} needs a value")
CALLS = {"check": 1, "fail": 0, "usage_error": 0, "static_assert": 1}
JOINED = {"cat", "format", "string", "string_view"}
TOKEN = re.compile(r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#[ \t]*(?!define)(?:[^\n\\]|\\.)*)
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
        pieces = [(kind, text) for kind, text, _ in self.tokens[begin:end] if text != "\\"]  # of a macro: #NAME "text"
        if pieces and all(kind == "string" or text == "#" or before == "#" for (_, before), (kind, text) in
                          zip([("", "")] + pieces, pieces)):
            return "".join(text if kind == "string" else "" if text == "#" else "{}" for kind, text in pieces)
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
                yield line, "", self.text(i, end)
            if kind != "name" or i in used or self.sign(i - 1, (".", "->")):
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
            text = "".join(self.text(*part) for part in parts[skip:])
            if name in ("usage_error", "format"):
                text = re.sub(r"%(?:l*[dugs]|\.\d+f|zu|02x)", "{}", self.text(*parts[0]))
            if name == "usage_error":
                yield line, "UsageError", text
            elif is_error or name == "static_assert":
                yield line, name, text
            else:
                yield line, error or ("Error" if name in CALLS else ""), text


def broken(kind, text, placed=False):
    """The rules that a text breaks, as (name, what to do). `placed`: what throws or prints it adds the place."""
    for words, instead in FOREIGN.items():
        if found := re.search(rf"(?<!\w)(?:{words})(?!\w)", re.sub(r"'[^']*'", "''", text)):
            yield "words", f"'{found[0]}': write {instead}"
    if not kind:
        return
    if text.count("\n") >= MOST_LINES:
        yield "lines", f"{text.count(chr(10)) + 1}, at most {MOST_LINES}"
    if len(text) > MOST_CHARACTERS:
        yield "length", f"{len(text)} characters, at most {MOST_CHARACTERS}"
    place, colon, rest = re.sub(r"::", "..", text).partition(": ")
    if not text.startswith(("{", "--", "option ", "environment variable")) and not placed and (
            not colon or len(place.split()) > MOST_WORDS_OF_PLACE):
        yield "place", "begin with an operation, class, file, option or rank, and a colon"
    if kind == "static_assert":
        return
    if re.search(r"\bgot\b", text) and not re.search(r"\bexpected\b|\bmust\b", text):
        yield "got", "it follows what was expected"
    if re.search(rf"(?:expected|must be|(?:is|are)) .*?(?:{BOUND})", rest) and "{" not in rest and "got" not in rest:
        yield "value", "a bound needs the value that was given"


def check_rules():
    """Each rule refuses its bad text and no rule refuses the good ones."""
    for rule, text in REFUSED.items():
        names = [name for name, _ in broken("UsageError", text)]
        assert names == [rule], (text, rule, names)
    for text in PASSED:
        assert not list(broken("UsageError", text)), (text, list(broken("UsageError", text)))
    source = """void f() {  // check(false, "a comment")
      check<ShapeError>(a < b || g(1, 2), "op: expected ", a, one ? " row" : " rows", ", got "
                        "[", b, "]");
      box.check(CLI::Range("not a message"));
      throw UsageError(cat("op: ", "R" + x));
    }"""
    found = [(line, kind, text) for line, kind, text in Source(source).messages() if kind]
    assert found == [(2, "ShapeError", "op: expected {}{ row| rows}, got [{}]"), (5, "UsageError", "op: R{}")], found


def files():
    for folder in FOLDERS:
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".hpp", ".cpp"))


def all_messages():
    """(file, line, kind, text) of all errors, and of other texts of three words or more, which may be parts of them."""
    for path in files():
        file = str(path.relative_to(ROOT))
        for line, kind, text in Source(path.read_text()).messages():
            if len(text.split()) > (0 if kind else 2):
                yield file, line, kind, text


def main():
    check_rules()
    if sys.argv[1:] == ["--list"]:
        for file, line, kind, text in all_messages():
            print(f"{file}:{line}: {kind or 'part'}: {text}")
        return 0
    count = wrong = 0
    for file, line, kind, text in all_messages():
        count += 1
        for rule, why in broken(kind, text, kind in PLACED_BY_CALLER or file.endswith(PLACED_IN)):
            wrong += 1
            print(f"{file}:{line}: {rule}: {why}\n    {text}")
    print(f"{count} texts, {wrong} that break a rule")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
