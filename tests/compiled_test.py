#!/usr/bin/env python3
"""Trains quickstart as a header-only program and as one that links chorus::compiled, with one process and with two:
both programs save the same parameters.

    compiled_test.py HEADER_ONLY COMPILED
"""
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile

import cifar_files


def train(program, data, devices, saved):
    subprocess.run([program, "--data", data, "--devices", devices, "--seed", "3", "--epochs", "2", "--save", saved],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=100)
    # All but the metadata, in which a build with OpenSSL has a checksum.
    file = saved.read_bytes()
    data = 8 + int.from_bytes(file[:8], "little")
    tensors = {name: value for name, value in json.loads(file[8:data]).items() if name != "__metadata__"}
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode() + file[data:]).hexdigest()


def main():
    header_only, compiled = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        cifar_files.write(folder, images=60)
        results = set()
        for devices in ("1", "2"):
            expected, got = (train(program, folder, devices, folder / "saved") for program in (header_only, compiled))
            assert expected == got, f"{devices} devices: header-only {expected}, compiled {got}"
            print(devices, got)
            results.add(got)
        # Sums of two ranks round differently: two different results show that each run wrote its own file.
        assert len(results) == 2, results


main()
