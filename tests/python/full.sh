#!/bin/sh
# Compares with what torch and transformers compute: GPT-2, its tokenizer, and files. They take minutes to install, so
# only tests/run.sh full calls it; every run compares with numbers that they left in tests/.
# usage: tests/python/full.sh BUILD_DIR
# Exit status 77: skipped, because Python's venv or the packages can't be had here.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "${1:?usage: tests/python/full.sh BUILD_DIR}" && pwd)
venv=$build/tests/python-venv-full
packages="torch transformers tokenizers safetensors"
if ! "$venv/bin/python" -c "import $(echo $packages | tr ' ' ,)" 2>/dev/null; then
  if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check $packages; }; then
    echo "tests/python/full.sh: SKIPPED: no virtual environment with $packages could be made"
    exit 77
  fi
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$venv/bin/python" "$here/tokenizer_check.py" "$build/tests/programs/tokenizer_tool" full
"$venv/bin/python" "$here/models_check.py" "$build/tests/programs/models_tool"
exec "$venv/bin/python" "$here/../finetune_gpt2_test.py" "$build/examples/finetune_gpt2" "$venv/bin/python"
