#!/usr/bin/env python3
"""Builds quickstart header-only and without OpenSSL: it trains and saves, and its ranks refuse a token, since they
could not verify it. The compiler alone also accepts train_classifier.
usage: examples_without_openssl_test.py COMPILER SOURCE_DIRECTORY EIGEN_DIRECTORY QUICKSTART"""

import os
import pathlib
import subprocess
import sys
import tempfile

import cifar_files
from processes import free_port

COMPILER, SOURCE, EIGEN, QUICKSTART = sys.argv[1:]

subprocess.run([COMPILER, "-std=c++20", "-fsyntax-only", "-I", f"{SOURCE}/include", "-isystem", EIGEN,
                f"{SOURCE}/examples/train_classifier.cpp"], check=True)

with tempfile.TemporaryDirectory(prefix="chorus_plain_") as temporary:
    folder = pathlib.Path(temporary)
    cifar_files.write(folder, images=12)
    saved = folder / "saved"
    train = [QUICKSTART, "--data", folder, "--epochs", "1", "--save", saved]
    for devices in ("1", "2"):
        subprocess.run([*train, "--devices", devices], check=True, timeout=300)
        assert saved.stat().st_size > 0, devices
        saved.unlink()

    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in (0, 1):
        token = {"RANK": str(rank), "CHORUS_TOKEN": f"the secret of rank {rank} alone"}
        done = subprocess.run(train, env={**os.environ, **place, **token}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "was built without OpenSSL" in done.stderr, done
