#!/bin/sh
# The same training under the three policies, on generated images (demo.cpp), one table to compare them, and one page
# that shows what moved, when and why. All runs have to end with the same bits. On a fresh Debian or Ubuntu it installs
# what is missing first.
set -eu
cd "$(dirname "$0")/.."

tests/install.sh g++ cmake ninja-build libeigen3-dev nlohmann-json3-dev libcli11-dev zlib1g-dev libssl-dev
if [ ! -f build/CMakeCache.txt ]; then
  CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}" cmake -S . -B build -DCHORUS_BUILD_TESTS=OFF
fi
cmake --build build --target demo chorus_page

logs=build/demo
mkdir -p "$logs"
: >"$logs/rows"
train() {
  printf '\n--- %s, devices: %s\n' "$1" "$2"
  build/examples/demo --policy "$1" --devices "$2" --trace "$logs/$1$2.json" --trace-steps 50:5 >"$logs/row"
  cat "$logs/row" >>"$logs/rows"
}
train single 1
train dp 2
train ddp 2
train ddp 3

printf '\n%-7s %7s %11s %14s %10s %22s %24s %13s\n' policy devices "final loss" "test accuracy" samples/s \
  "sent per device, MiB" "peak per device, MiB" parameters
cat "$logs/rows"
status=0
awk '
  { differ += NR > 1 && $NF != first; first = NR == 1 ? $NF : first }
  END {
    if (first == "?")
      print "\nThe parameters have no fingerprint (SHA-256): the program was built without OpenSSL."
    else if (differ)
      print "\nNOT THE SAME: the runs end with other parameters, and must not."
    else
      print "\nThe same parameters, bit for bit, in all " NR " runs: each batch is cut into 4 shares, which are added up in one order."
    exit differ > 0 || first == "?"
  }' "$logs/rows" || status=$?

build/examples/chorus-page "$logs/single1.json" "$logs/dp2.json" "$logs/ddp2.json" -o "$logs/run.html" \
  --title "The same training under three policies"
printf '\nWhat moved, when and why: open %s in a browser.\n' "$PWD/$logs/run.html"
exit "$status"
