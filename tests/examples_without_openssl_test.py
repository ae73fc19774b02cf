#!/usr/bin/env python3
"""Examples that are built by a compiler alone, without OpenSSL, train to the end and save: only the hash is missing.
usage: examples_without_openssl_test.py COMPILER SOURCE_DIRECTORY EIGEN_DIRECTORY"""

import json
import pathlib
import subprocess
import sys
import tempfile

COMPILER, SOURCE, EIGEN = sys.argv[1:]
SMALL = ["--train-images", "60", "--batch", "16", "--epochs", "1", "--quiet"]

with tempfile.TemporaryDirectory(prefix="chorus_plain_") as temporary:
    folder = pathlib.Path(temporary)
    for name, policies in (("train_autoencoder", ["single"]), ("train_classifier", ["single", "ddp"])):
        program, saved, metrics = folder / name, folder / "saved", folder / "metrics"
        subprocess.run([COMPILER, "-std=c++20", "-I", f"{SOURCE}/include", "-isystem", EIGEN,
                        f"{SOURCE}/examples/{name}.cpp", "-o", program, "-lpthread"], check=True)
        for policy in policies:
            subprocess.run([program, *SMALL, "--policy", policy, "--save", saved, "--metrics", metrics], check=True,
                           timeout=300)
            assert saved.stat().st_size > 0, name
            saved.unlink()
            done = json.loads(metrics.read_text().splitlines()[-1])
            assert done["event"] == "done" and done["policy"] == policy and "parameters_sha256" not in done, done
