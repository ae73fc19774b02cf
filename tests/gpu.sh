#!/bin/sh
# On a machine with a GPU: runs the CUDA tests and benchmarks. tests/cuda/gpu.py says how, with --help.
exec python3 -B "$(dirname "$0")/cuda/gpu.py" "$@"
