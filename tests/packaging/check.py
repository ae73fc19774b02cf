#!/usr/bin/env python3
"""Compares the recipes with CMakeLists.txt: all name the same optional parts and the same version, and each sets every
option that CMake would otherwise decide by the machine. It reads them only; conan.sh runs Conan's."""
import json
import pathlib
import re
import sys

here = pathlib.Path(__file__).resolve().parent
root = here.parents[1]
cmake = (root / "CMakeLists.txt").read_text()
config = (root / "include/chorus/core/config.hpp").read_text()
parts = set(re.search(r"foreach\(part ([A-Z ]+)\)", cmake)[1].lower().split())
options = set(re.findall(r"^option\(CHORUS_(\w+)", cmake, re.M))
version = ".".join(re.search(rf"define CHORUS_VERSION_{part} (\d+)", config)[1] for part in ("MAJOR", "MINOR", "PATCH"))

conan = (here / "conan/conanfile.py").read_text()
port = (here / "vcpkg/chorus/portfile.cmake").read_text()
manifest = json.loads((here / "vcpkg/chorus/vcpkg.json").read_text())
spack = (here / "spack/packages/chorus/package.py").read_text()

named = {
    "conanfile.py": set(re.findall(r'"(\w+)"', re.search(r"for part in \(([^)]*)\)", conan)[1])),
    "vcpkg.json": set(manifest["features"]),
    "portfile.cmake": set(re.search(r"ITEMS ([A-Z ]+)\)", port)[1].lower().split()) | {"compiled"},
    "package.py, variants": set(re.findall(r'^    variant\("(\w+)"', spack, re.M)),
    "package.py, arguments": set(re.findall(r'"(\w+)"', re.search(r"parts = \[([^\]]*)\]", spack)[1])) | {"compiled"},
}
faults = [f"{recipe}: expected {sorted(parts | {'compiled'})}, got {sorted(names)}" for recipe, names in named.items()
          if names != parts | {"compiled"}]
for recipe, got in (("vcpkg.json", manifest["version"]), ("package.py", re.search(r'version\("([^"]+)"', spack)[1])):
    if got != version:
        faults.append(f"{recipe}: expected version {version}, got {got}")
for recipe, text in (("conanfile.py", conan), ("portfile.cmake", port), ("package.py", spack)):
    for option in ("BUILD_TESTS", "BUILD_EXAMPLES", "NATIVE", "INSTALL", "BUILD_COMPILED"):
        if option not in options:
            faults.append(f"CMakeLists.txt has no option CHORUS_{option}")
        if option not in text:
            faults.append(f"{recipe}: does not set CHORUS_{option}")
if on := re.findall(r'^    variant\("(\w+)", default=True', spack, re.M):
    faults.append(f"package.py: expected no part by default, as in the other recipes, got {on}")
print("\n".join(faults) or f"3 recipes, {len(parts)} optional parts, version {version}: 0 problems")
sys.exit(bool(faults))
