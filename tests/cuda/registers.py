#!/usr/bin/env python3
"""Registers and local memory of the kernels in programs that nvcc has built: what a kernel spills, and arrays that it
indexes at run time, lie in local memory, which is the GPU's slow one.

    registers.py [--table] PROGRAM...

Ends with 1 and names the kernels where any has local memory, but for those known below; with 77 where a
program has no machine code that can be read. --table prints a line for each kind of kernel.
"""
import collections
import re
import struct
import subprocess
import sys

# Known: sin and cos of large arguments, which CUDA reduces with an array of its own; and the four words of a random
# draw of attention's dropout, of which one is picked at run time; and coefficients that loops walk through: Taylor's of
# higher derivatives, those of the series of the gamma function.
KNOWN = re.compile(r"functors::(Sin|Cos|NthDerivative|Lgamma|Digamma)\b|kernels::NormalNumbers<|cuda::attention_(forward|query_gradient|key_gradients)<")
FATBIN = struct.pack("<I", 0xBA55ED50)
ELF_CODE = 2
FRAME_SIZE, REGISTER_COUNT = 0x11, 0x2F  # of .nv.info: bytes of local memory, registers; both by symbol
WORD_AND_BYTES = 4  # the form of an attribute: what follows has a length


class Unreadable(Exception):
    pass


def cubins(program):
    """The machine code of all fat binaries in the file."""
    data = open(program, "rb").read()
    at = data.find(FATBIN)
    while at >= 0:
        _, header, size = struct.unpack_from("<HHQ", data, at + 4)
        end = at + header + size
        at += header
        while at + 16 <= end:
            kind, _, length, count = struct.unpack_from("<HHIQ", data, at)
            code = data[at + length:at + length + count]
            at += length + count
            if kind == ELF_CODE:
                if code[:4] != b"\x7fELF":
                    raise Unreadable("its machine code is compressed")
                yield code
        at = data.find(FATBIN, end)


def text(data, offset):
    return data[offset:data.index(b"\0", offset)].decode()


def kernels(cubin):
    """(name, registers, bytes of local memory) of each kernel."""
    offset, = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    of = {text(cubin, sections[names][4] + section[0]): section for section in sections}
    symbols, strings = of[".symtab"], of[".strtab"]
    facts = collections.defaultdict(dict)
    at, end = of[".nv.info"][4], of[".nv.info"][4] + of[".nv.info"][5]
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form != WORD_AND_BYTES:
            continue
        if attribute in (FRAME_SIZE, REGISTER_COUNT):
            symbol, value = struct.unpack_from("<II", cubin, at)
            name, = struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)
            facts[text(cubin, strings[4] + name)][attribute] = value
        at += length
    for name, fact in facts.items():
        if ".text." + name in of:
            yield name, fact.get(REGISTER_COUNT, 0), fact.get(FRAME_SIZE, 0)


def demangled(names):
    run = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def kind(name):
    """What a kernel is called, without its types: of `each<...>`, which calls a functor, the functor."""
    functor = re.search(r"\beach<(.*)", name)
    name = functor.group(1) if functor else name
    word = re.search(r"([\w:]*\w)[<(>]", name.removeprefix("void "))
    return word.group(1).split("::")[-1] if word else name


def main():
    arguments = sys.argv[1:]
    table = "--table" in arguments
    programs = [argument for argument in arguments if not argument.startswith("--")]
    if not programs or any(a.startswith("--") and a != "--table" for a in arguments):
        sys.exit(__doc__)
    found = {}
    for program in programs:
        before = len(found)
        try:
            for cubin in cubins(program):
                for name, registers, local in kernels(cubin):
                    most = found.get(name, (0, 0))
                    found[name] = max(most[0], registers), max(most[1], local)
        except (Unreadable, KeyError, struct.error) as error:
            print(f"SKIPPED: {program}: {error}")
            sys.exit(77)
        if len(found) == before and len(programs) == 1:
            print(f"SKIPPED: {program} has no machine code of kernels")
            sys.exit(77)
    names = dict(zip(found, demangled(found)))
    if table:
        kinds = collections.defaultdict(list)
        for name, fact in found.items():
            kinds[kind(names[name])].append(fact)
        print("| kernel | instances | registers | bytes of local memory |\n|---|---|---|---|")
        for word, facts in sorted(kinds.items()):
            least, most = min(f[0] for f in facts), max(f[0] for f in facts)
            print(f"| {word} | {len(facts)} | {least if least == most else f'{least} to {most}'} | {max(f[1] for f in facts)} |")
    spills = [name for name in found if found[name][1] and not KNOWN.search(names[name])]
    for name in spills:
        print(f"{found[name][1]} bytes of local memory: {names[name]}")
    print(f"{len(found)} kernels, at most {max(f[0] for f in found.values())} registers, "
          f"{sum(f[1] > 0 for f in found.values()) - len(spills)} with local memory that is known, {len(spills)} with other")
    sys.exit(1 if spills else 0)


main()
