#!/bin/sh
# usage: instead.sh A B COMMAND ...
# Runs the command with B in place of the word A, where that comes first.
set -eu
a=$1 b=$2
shift 2
for word in "$@"; do
  shift
  if [ "$word" = "$a" ]; then
    word=$b a=
  fi
  set -- "$@" "$word"
done
exec "$@"
