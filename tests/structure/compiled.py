#!/usr/bin/env python3
"""Checks that the library chorus::compiled holds every kernel that kernels/*.hpp declare for the CPU, the element-wise
kernels of every functor of the library, and what headers define only where there is no library: a program that links it has
no other place to get them from.

    compiled.py INCLUDE_DIRECTORY
"""
import pathlib
import re
import sys

import headers


def main():
    root = pathlib.Path(sys.argv[1]) / "chorus"
    library = "\n".join(path.read_text() for path in (root / "compiled").glob("*.cpp"))
    named = set(re.findall(r"\w+", library))
    missing = []
    for header in sorted((root / "kernels").glob("*.hpp")):
        text = re.sub(r"///?[^\n]*", "", header.read_text())
        for declaration in re.findall(r"template <[^;{}]*?\b(\w+)\((?:const )?Cpu\b[^;{}]*\);", text):
            if declaration not in named and not declaration.startswith("pointwise_"):
                missing.append(f"{header.name}: {declaration}")
    for header in sorted([*root.glob("ops/*.hpp"), root / "kernels" / "functors.hpp"]):
        text = header.read_text()
        inside = "".join(re.findall(r"namespace (?:\w+::)*functors \{(.*?)\}  // namespace", text, re.S))
        if header.name == "functors.hpp":
            inside = text
        # kernels::transform is compiled in each program; beside it the library has what goes into element-wise kernels.
        elementwise = set(re.findall(r"pointwise\([^;]*?functors::(\w+)", text)) if "kernels::transform(" in text else None
        for functor in re.findall(r"struct (\w+) \{(?=[^}]*CHORUS_HD)", inside) + re.findall(r"CHORUS_FUNCTOR\((\w+), \w+\);", inside):
            if functor not in named and functor != "NAME" and (elementwise is None or functor in elementwise):
                missing.append(f"{header.name}: functors::{functor}")
    for header in sorted(root.glob("optim/*.hpp")):
        for functor in re.findall(r"struct (\w+) \{(?=[^}]*CHORUS_HD)", header.read_text()):
            if functor not in named:
                missing.append(f"{header.name}: optim::detail::{functor}")
    # NAME_impl.hpp, which NAME.hpp includes where there is no library, is in one of the library's sources.
    reached = set().union(*(headers.reached_from(f"chorus/compiled/{path.name}") for path in (root / "compiled").glob("*.cpp")))
    for header in sorted(root.rglob("*_impl.hpp")):
        name = header.relative_to(root.parent).as_posix()
        if name not in reached:
            missing.append(f"{name}: no source includes it")
        if re.search(r"^template <class Model", header.read_text(), re.MULTILINE):
            missing.append(f"{name}: has templates of models, which programs have to instantiate")
    if missing:
        sys.exit("chorus::compiled lacks, in include/chorus/compiled/*.cpp:\n  " + "\n  ".join(missing))


main()
