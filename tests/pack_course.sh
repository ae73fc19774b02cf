#!/bin/sh
# tests/pack_course.sh OUTPUT.tar.gz: this checkout for students, in a folder chorus: without the solutions of the labs,
# which tests/labs* have, and those of other exercises (folders with the name solutions), without builds and history.
set -eu
output=${1:?usage: tests/pack_course.sh OUTPUT.tar.gz}
case $output in /*) ;; *) output=$PWD/$output ;; esac
cd "$(dirname "$0")/.."
tar -czf "$output" --exclude='./build*' --exclude='./.*' --exclude='./tests/labs*' --exclude='solutions' \
  --exclude='__pycache__' --exclude='*.o' --transform 's,^\.,chorus,' .
