#!/bin/sh
# usage: reads.sh COMPILER ... -c ... -o OUTPUT ...
# The compiler reads, instantiates templates and warns, but makes no code: OUTPUT is an empty file. Takes half the time.
set -eu
output=
for word in "$@"; do
  shift
  if [ "$output" = -o ]; then
    output=$word
  elif [ "$word" = -o ]; then
    output=-o
  elif [ "$word" != -c ]; then
    set -- "$@" "$word"
  fi
done
"$@" -fsyntax-only
: >"$output"
