#!/bin/sh
# Compares what chorus reads and writes with what Python's packages do. Makes its own virtual environment.
# usage: tests/python/run.sh BUILD_DIR
# Exit status 77: skipped, because Python's venv or the packages can't be had here.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "${1:?usage: tests/python/run.sh BUILD_DIR}" && pwd)
programs=$build/tests/programs
venv=$build/tests/python-venv

packages="numpy safetensors tensorboard tokenizers"
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
exec "$venv/bin/python" "$here/safetensors_check.py" "$programs/safetensors_tool"
