#!/usr/bin/env python3
"""train_classifier, built header-only and without OpenSSL, trains to the end and saves: only the hash is missing, and
ranks refuse a token, which they could not prove to each other. The compiler alone takes the other examples, too.
usage: examples_without_openssl_test.py COMPILER SOURCE_DIRECTORY EIGEN_DIRECTORY TRAIN_CLASSIFIER"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from processes import free_port

COMPILER, SOURCE, EIGEN, TRAIN = sys.argv[1:]
SMALL = ["--train-images", "60", "--batch", "16", "--epochs", "1", "--quiet"]

subprocess.run([COMPILER, "-std=c++20", "-fsyntax-only", "-I", f"{SOURCE}/include", "-isystem", EIGEN,
                f"{SOURCE}/examples/train_autoencoder.cpp"], check=True)

with tempfile.TemporaryDirectory(prefix="chorus_plain_") as temporary:
    folder = pathlib.Path(temporary)
    saved, metrics = folder / "saved", folder / "metrics"
    for policy in ("single", "ddp"):
        subprocess.run([TRAIN, *SMALL, "--policy", policy, "--save", saved, "--metrics", metrics], check=True, timeout=300)
        assert saved.stat().st_size > 0, policy
        saved.unlink()
        done = json.loads(metrics.read_text().splitlines()[-1])
        assert done["event"] == "done" and done["policy"] == policy and "parameters_sha256" not in done, done

    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in (0, 1):
        token = {"RANK": str(rank), "CHORUS_TOKEN": f"the secret of rank {rank} alone"}
        done = subprocess.run([TRAIN, *SMALL, "--policy", "ddp"], env={**os.environ, **place, **token},
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "was built without OpenSSL" in done.stderr, done
