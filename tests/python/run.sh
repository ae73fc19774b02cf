#!/bin/sh
# Compares what chorus reads and writes with what Python's packages do. Makes its own virtual environment.
# usage: tests/python/run.sh BUILD_DIR
# Exit status 77: skipped, because Python's venv or the packages can't be had here.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "${1:?usage: tests/python/run.sh BUILD_DIR}" && pwd)
programs=$build/tests/programs
venv=$build/tests/python-venv

packages="numpy safetensors tensorboard tokenizers nanobind"
train=$build/examples/train_classifier

for program in "$programs/safetensors_tool" "$programs/npy_tool" "$programs/quantized_tool" "$programs/tokenizer_tool" \
    "$train"; do
  if [ ! -x "$program" ]; then
    echo "tests/python/run.sh: $program is not built" >&2
    exit 1
  fi
done
if ! "$venv/bin/python" -c "import $(echo $packages | tr ' ' ,)" 2>/dev/null; then
  if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check $packages; }; then
    echo "tests/python/run.sh: SKIPPED: no virtual environment with $packages could be made"
    exit 77
  fi
fi
"$venv/bin/python" "$here/npy_check.py" "$programs/npy_tool"
"$venv/bin/python" "$here/tensorboard_check.py" "$train"
"$venv/bin/python" "$here/quantized_check.py" "$programs/quantized_tool"
"$venv/bin/python" "$here/tokenizer_check.py" "$programs/tokenizer_tool"
if "$venv/bin/python" -c "import os, sysconfig; exit(not os.path.exists(sysconfig.get_path('include') + '/Python.h'))"; then
  command -v ccache >/dev/null && export CMAKE_CXX_COMPILER_LAUNCHER=ccache
  module=$build/tests/python-module
  cmake -S "$here/../../examples/python" -B "$module" -DCMAKE_BUILD_TYPE=Debug -DPython_EXECUTABLE="$venv/bin/python" \
    -Dchorus_DIR="$build" >"$module.log" && cmake --build "$module" >>"$module.log" || { cat "$module.log"; exit 1; }
  CHORUS_ALLOW_UNOPTIMIZED=1 "$venv/bin/python" -B "$here/dlpack_check.py" "$module"
else
  echo "tests/python/run.sh: SKIPPED: examples/python, without Python.h (python3-dev)"
fi
exec "$venv/bin/python" "$here/safetensors_check.py" "$programs/safetensors_tool"
