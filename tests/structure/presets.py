#!/usr/bin/env python3
"""A build folder that the demo has configured without tests gets them by the presets; a run of no test at all fails."""
import json
import pathlib
import subprocess
import sys
import tempfile

root = pathlib.Path(__file__).resolve().parents[2]
generator = sys.argv[1]

with tempfile.TemporaryDirectory() as folder:
    off = ["CHORUS_BUILD_TESTS", "CHORUS_BUILD_EXAMPLES", "CHORUS_WITH_CUDA", "CHORUS_WITH_MPI", "CHORUS_WITH_GLOO"]
    for step in [["cmake", "-S", root, "-B", folder, "-G", generator, *(f"-D{name}=OFF" for name in off)],
                 ["cmake", "--preset", "dev", "-B", folder]]:
        done = subprocess.run(step, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    cache = (pathlib.Path(folder) / "CMakeCache.txt").read_text()
    for name in ["CHORUS_BUILD_TESTS", "CHORUS_BUILD_EXAMPLES"]:
        assert f"{name}:BOOL=ON" in cache, f"preset dev leaves {name} as the folder had it"

presets = json.loads((root / "CMakePresets.json").read_text())["testPresets"]
for preset in presets:
    base = preset if "inherits" not in preset else next(p for p in presets if p["name"] == preset["inherits"])
    action = base.get("execution", {}).get("noTestsAction")
    assert action == "error", f"ctest --preset {preset['name']} passes where there is no test: noTestsAction {action}"
