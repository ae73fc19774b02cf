#!/bin/sh
# Compares what chorus reads and writes with what Python's packages do. Makes its own virtual environment.
# usage: tests/python/run.sh BUILD_DIR
# Exit status 77: skipped, because Python's venv or the packages can't be had here.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "${1:?usage: tests/python/run.sh BUILD_DIR}" && pwd)
tool=$build/tests/programs/safetensors_tool
venv=$build/tests/python-venv

if [ ! -x "$tool" ]; then
  echo "tests/python/run.sh: $tool is not built" >&2
  exit 1
fi
if ! "$venv/bin/python" -c 'import numpy, safetensors' 2>/dev/null; then
  if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check numpy safetensors; }; then
    echo "tests/python/run.sh: SKIPPED: no virtual environment with numpy and safetensors could be made"
    exit 77
  fi
fi
exec "$venv/bin/python" "$here/safetensors_check.py" "$tool"
