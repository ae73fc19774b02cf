#!/bin/bash
# On a machine with a GPU: builds the CUDA tests and benchmarks for it, and runs them all, in under 8 minutes.
#   tests/gpu.sh [--build DIR] [--run-only] [--torch TORCH_TRAIN.PY]
#     --build DIR    where it builds (default: build-gpu)
#     --run-only     takes what stands in DIR already: for a machine without compilers or packages
#     --torch FILE   a script that times the same cases in PyTorch, as `FILE --device cuda --mode eager|graphs CASE...`
# One line a check, PASSED or FAILED, its output beside it in DIR/gpu-logs; ends with 0 where all passed, 77 without GPU.
set -u
cd "$(dirname "$0")/.."
build=build-gpu torch= run_only=
while [ $# -gt 0 ]; do
  case $1 in
    --build) build=$2; shift ;;
    --torch) torch=$2; shift ;;
    --run-only) run_only=1 ;;
    *) sed -n '2,7p' "$0"; exit 2 ;;
  esac
  shift
done
if ! command -v nvidia-smi >/dev/null || ! gpus=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader); then
  echo "tests/gpu.sh: this machine has no NVIDIA GPU, or no driver for it (nvidia-smi finds none)" >&2
  exit 77
fi
started=$(date +%s)
say() { echo "$(($(date +%s) - started)) s: $*"; }
say "$gpus"

if [ -z "$run_only" ]; then
  for tool in cmake nvcc; do
    PATH=$PATH:/usr/local/cuda/bin command -v $tool >/dev/null || { echo "tests/gpu.sh: $tool is missing" >&2; exit 1; }
  done
  export PATH=$PATH:/usr/local/cuda/bin
  command -v ninja >/dev/null && export CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}"
  arch=$(echo "$gpus" | head -1 | sed 's/.*, *//; s/\.//')
  cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DCHORUS_WITH_CUDA=ON -DCHORUS_BUILD_EXAMPLES=OFF \
    -DCMAKE_CUDA_ARCHITECTURES="$arch" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
  cmake --build "$build" -j "$(nproc)" --target gpu >>"$build.log" 2>&1 || { tail -50 "$build.log"; exit 1; }
  say "built"
fi

logs=$build/gpu-logs
mkdir -p "$logs"
failed=0
# check SECONDS NAME COMMAND...: runs it within its time.
check() {
  local limit=$1 name=$2 status
  shift 2
  timeout -k 10 "$limit" "$@" >"$logs/$name.log" 2>&1
  status=$?
  grep -q "SKIPPED: no CUDA device" "$logs/$name.log" && status=skipped
  if [ $status = 0 ]; then
    say "PASSED $name: $(grep -v '^$' "$logs/$name.log" | tail -1)"
  else
    failed=$((failed + 1))
    say "FAILED $name ($([ $status = 124 ] && echo "not done after $limit s" || echo "status $status"))"
    tail -25 "$logs/$name.log"
  fi
}
# No test may pass because it found no GPU.
export CHORUS_REQUIRE_GPU=1
unit=$build/tests/unit_cuda
for source in tests/cuda/*_test.cu; do
  name=$(basename "$source" .cu)
  check 120 "$name" "$unit" -# "[#$name]"
done
[ -x "$build/tests/golden_cuda" ] && check 60 golden "$build/tests/golden_cuda" tests/golden

if sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer); then
  # Files without processes of their own.
  for source in tests/cuda/*_test.cu; do
    name=$(basename "$source" .cu)
    grep -q "processes.hpp" "$source" && continue
    check 90 "memcheck_$name" "$sanitizer" --tool memcheck --error-exitcode 9 --log-file "$logs/memcheck_$name.txt" \
      "$unit" -# "[#$name]"
  done
  check 60 racecheck "$sanitizer" --tool racecheck --error-exitcode 9 "$unit" -# "[#reduction_test]"
else
  say "compute-sanitizer is missing: no memory checks"
fi

cases="toy_b16 toy_b128 mlp_b64 resnet18_b32 gpt_b16 resnet18_b256_bf16"
check 120 train_step "$build/tests/benchmarks/train_step_cuda" $cases
cat "$logs/train_step.log"
if [ -n "$torch" ]; then
  check 90 torch_eager python3 "$torch" --device cuda --mode eager $cases
  cat "$logs/torch_eager.log"
  check 150 torch_graphs python3 "$torch" --device cuda --mode graphs $cases
  cat "$logs/torch_graphs.log"
fi

say "$([ $failed = 0 ] && echo "everything passed" || echo "$failed checks failed")"
[ $failed = 0 ]
