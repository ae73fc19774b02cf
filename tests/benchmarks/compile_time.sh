#!/bin/sh
# Compiles examples/quickstart.cpp and the same program written with libtorch in turn, N times each (default 5), and prints the
# least user time of each: chorus as a program that links chorus::compiled (as libtorch's links libtorch) aims at a third of
# libtorch's; and header-only, where the program compiles all of chorus itself. Then the same program with a model of 5 and of
# 50 layers: 50 aim at 1.5 times the time of 5. Needs libtorch's headers (Debian, Ubuntu: libtorch-dev); without them only
# the models' depth is measured, and the exit status is 77.
#
#   tests/benchmarks/compile_time.sh [N]
#
# CXX is the compiler (default g++), LIBTORCH a prefix whose include/torch holds libtorch's headers (default /usr),
# EIGEN the folder of Eigen's. Both are compiled with -O2, each with the standard that its users use: libtorch 1.x is C++17.
set -eu
runs=${1:-5}
top=$(cd "$(dirname "$0")/../.." && pwd)
cxx=${CXX:-g++} libtorch=${LIBTORCH:-/usr} eigen=${EIGEN:-/usr/include/eigen3}
peer=$libtorch/include/torch/csrc/api/include

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# compile NAME ARGUMENTS...: the user time, in seconds, goes into NAME.times.
compile() {
  name=$1
  shift
  ("$cxx" "$@" -c -o "$work/$name.o" && times) >"$work/times"
  awk 'NR == 2 { split($1, part, /[ms]/); print 60 * part[1] + part[2] }' "$work/times" >>"$work/$name.times"
}
least() { sort -n "$work/$1.times" | head -n 1; }

for layers in 5 50; do "$top/tests/benchmarks/compile_time/layers.sh" $layers >"$work/layers$layers.cpp"; done
for run in $(seq "$runs"); do
  for layers in 5 50; do
    compile compiled$layers -std=c++20 -O2 -DCHORUS_COMPILED=1 -I "$top/include" -isystem "$eigen" "$work/layers$layers.cpp"
    compile header_only$layers -std=c++20 -O2 -I "$top/include" -isystem "$eigen" "$work/layers$layers.cpp"
  done
done
for kind in compiled header_only; do
  awk -v kind=$kind -v few="$(least ${kind}5)" -v many="$(least ${kind}50)" -v runs="$runs" 'BEGIN {
    printf "user seconds, least of %d, %s: 5 layers %.2f, 50 layers %.2f, ratio %.2f\n", runs, kind, few, many, many / few }'
done

if ! [ -e "$peer/torch/torch.h" ]; then
  echo "compile_time: libtorch is not installed ($peer/torch/torch.h): nothing to compare with" >&2
  exit 77
fi
for run in $(seq "$runs"); do
  compile compiled -std=c++20 -O2 -DCHORUS_COMPILED=1 -I "$top/include" -isystem "$eigen" "$top/examples/quickstart.cpp"
  compile header_only -std=c++20 -O2 -I "$top/include" -isystem "$eigen" "$top/examples/quickstart.cpp"
  compile libtorch -std=c++17 -O2 -I "$libtorch/include" -I "$peer" "$top/tests/benchmarks/compile_time/libtorch_quickstart.cpp"
done
awk -v compiled="$(least compiled)" -v header_only="$(least header_only)" -v peer="$(least libtorch)" -v runs="$runs" 'BEGIN {
  printf "user seconds, least of %d: libtorch %.2f\n", runs, peer
  printf "chorus::compiled %.2f, ratio %.2f\n", compiled, compiled / peer
  printf "chorus header-only %.2f, ratio %.2f\n", header_only, header_only / peer }'
