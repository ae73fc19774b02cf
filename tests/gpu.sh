#!/bin/bash
# On a machine with a GPU: builds the CUDA tests and benchmarks for it, and runs them all, in under 8 minutes together
# on 16 cores; on fewer build before, and give --run-only.
#   tests/gpu.sh [--build DIR] [--run-only] [--torch TORCH_TRAIN.PY]
#     --build DIR    where it builds (default: build-gpu)
#     --run-only     takes what stands in DIR already: for a machine without compilers or packages (configure DIR with
#                    -DCHORUS_NATIVE=OFF where it is another processor's)
#     --torch FILE   a script that times the same cases in PyTorch, as `FILE --device cuda --mode MODE CASE...` with the
#                    modes eager, compile and graphs; chorus has to beat it
# One line a check, PASSED or FAILED, its output beside it in DIR/gpu-logs; last what was SKIPPED. Ends with 0 where all
# passed, 1 where a check failed or had no time left, 77 without GPU.
set -u
cd "$(dirname "$0")/.."
build=build-gpu torch= run_only=
while [ $# -gt 0 ]; do
  case $1 in
    --build) build=$2; shift ;;
    --torch) torch=$(realpath "$2"); shift ;;
    --run-only) run_only=1 ;;
    *) sed -n '2,11p' "$0"; exit 2 ;;
  esac
  shift
done
if ! command -v nvidia-smi >/dev/null || ! gpus=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader); then
  echo "tests/gpu.sh: this machine has no NVIDIA GPU, or no driver for it (nvidia-smi finds none)" >&2
  exit 77
fi
export PATH=$PATH:/usr/local/cuda/bin
started=$(date +%s) time_limit=475
elapsed() { echo $(($(date +%s) - started)); }
say() { echo "$(elapsed) s: $*"; }
say "$gpus"

if [ -z "$run_only" ]; then
  for tool in cmake nvcc; do
    command -v $tool >/dev/null || { echo "tests/gpu.sh: $tool is missing" >&2; exit 1; }
  done
  command -v ninja >/dev/null && export CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}"
  arch=$(echo "$gpus" | head -1 | sed 's/.*, *//; s/\.//')
  mkdir -p "$build"
  cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DCHORUS_WITH_CUDA=ON -DCHORUS_BUILD_EXAMPLES=OFF \
    -DCHORUS_TESTS_AT_ONCE=1 -DCMAKE_CUDA_ARCHITECTURES="$arch" >"$build/gpu-build.log" 2>&1 || { cat "$build/gpu-build.log"; exit 1; }
  cmake --build "$build" -j "$(nproc)" --target gpu >>"$build/gpu-build.log" 2>&1 ||
    { tail -50 "$build/gpu-build.log"; exit 1; }
  say "built"
fi

unit=$build/tests/unit_cuda
[ -x "$unit" ] || { echo "tests/gpu.sh: there is no $unit" >&2; exit 1; }
missing() { ldd "$unit" | awk '/not found/ { print $1 }'; }
if [ -n "$(missing)" ]; then  # CUDA's libraries may be there as Python packages
  packages=$(python3 -c 'import glob, nvidia; print(":".join(d for p in nvidia.__path__ for d in glob.glob(p + "/*/lib")))' \
    2>/dev/null)
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$packages
  [ -z "$(missing)" ] || { echo "tests/gpu.sh: libraries are missing:" $(missing) >&2; exit 1; }
fi

logs=$build/gpu-logs
rm -rf "$logs"
mkdir -p "$logs"
failed=0 skipped=()
pass() { say "PASSED $*"; }
fail() { failed=$((failed + 1)); say "FAILED $*"; }
# check SECONDS NAME COMMAND...: runs it within its time.
check() {
  local limit=$1 name=$2 status left=$((time_limit - $(elapsed)))
  shift 2
  [ $left -gt 0 ] || { fail "$name: no time left to run it"; return; }
  [ $limit -lt $left ] || limit=$left
  timeout -k 10 "$limit" "$@" >"$logs/$name.log" 2>&1
  status=$?
  if grep -q "SKIPPED: no CUDA device" "$logs/$name.log"; then
    fail "$name: it found no GPU: $(grep -m 1 "SKIPPED: no CUDA device" "$logs/$name.log")"
  elif [ $status = 132 ]; then
    fail "$name: a processor's instruction that is not there: built for another one? Configure with -DCHORUS_NATIVE=OFF"
  elif [ $status = 0 ]; then
    pass "$name: $(grep -v '^$' "$logs/$name.log" | tail -1)"
  else
    fail "$name ($([ $status = 124 ] && echo "not done after $limit s" || echo "status $status"))"
    tail -25 "$logs/$name.log"
  fi
}
# No test may pass because it found no GPU.
export CHORUS_REQUIRE_GPU=1
for source in tests/cuda/*_test.cu; do
  name=$(basename "$source" .cu)
  check 120 "$name" "$unit" -# "[#$name]"
done
[ "$(echo "$gpus" | wc -l)" -gt 1 ] || skipped+=("copies between two GPUs, and DataParallel over NCCL (there is one)")
check 100 golden "$build/tests/golden_cuda" tests/golden
check 100 golden_bf16 "$build/tests/golden_cuda_bf16" tests/golden

cases="toy_b16 toy_b128 mlp_b64 resnet18_b32 gpt_b16 resnet18_b256_bf16"
small="toy_b16 mlp_b64 gpt_b16"
check 120 train_step "$build/tests/benchmarks/train_step_cuda" $cases
cat "$logs/train_step.log"
if [ -n "$torch" ]; then
  check 60 torch_eager python3 "$torch" --device cuda --mode eager $cases
  check 90 torch_compile python3 "$torch" --device cuda --mode compile $small
  check 120 torch_graphs python3 "$torch" --device cuda --mode graphs $small
  cat "$logs"/torch_*.log
  # Graphed steps take at most a quarter of PyTorch's eager time, and at most that of its best mode.
  for case in $small; do
    line=$(awk -v name="$case" '
      $1 == name {
        split($0, part, "median_ms="); ms = part[2] + 0
        torch = FILENAME ~ /torch_/
        if (torch && (best == 0 || ms < best)) best = ms
        if (torch && /mode=eager/) eager = ms
        if (!torch && /mode=graphs/) own = ms
      }
      END {
        printf "%.3f ms, PyTorch eager %.3f ms, its best mode %.3f ms", own, eager, best
        exit !(own > 0 && eager > 0 && own <= eager / 4 && own <= best)
      }' "$logs"/train_step.log "$logs"/torch_*.log) && pass "faster_$case: $line" || fail "faster_$case: $line"
  done
else
  skipped+=("comparison with PyTorch (no --torch FILE)")
fi

if sanitizer=$(command -v compute-sanitizer); then
  for source in tests/cuda/*_test.cu; do
    name=$(basename "$source" .cu)
    if grep -qE "processes.hpp|comm/nccl.hpp" "$source"; then
      skipped+=("memcheck of $name, which starts processes of its own, or runs NCCL's kernels")
      continue
    fi
    # Tests provoke errors of CUDA's calls, and look at them themselves.
    check 90 "memcheck_$name" "$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 9 \
      --log-file "$logs/memcheck_$name.txt" "$unit" -# "[#$name]"
  done
  check 60 racecheck "$sanitizer" --tool racecheck --report-api-errors no --error-exitcode 9 "$unit" -# "[#reduction_test]"
else
  skipped+=("memory and race checks (compute-sanitizer is missing)")
fi

for what in "${skipped[@]}"; do say "SKIPPED $what"; done
say "$([ $failed = 0 ] && echo "everything passed" || echo "$failed checks failed"), ${#skipped[@]} skipped"
[ $failed = 0 ]
