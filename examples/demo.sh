#!/bin/sh
# The same training under the three policies, on generated images, one table to compare them, and one page that shows
# what moved, when and why. On a fresh Debian or Ubuntu it installs what is missing first.
set -eu
cd "$(dirname "$0")/.."
devices=2 epochs=5

tests/install.sh g++ cmake ninja-build libeigen3-dev nlohmann-json3-dev libcli11-dev zlib1g-dev libssl-dev
if [ ! -f build/CMakeCache.txt ]; then
  CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}" cmake -S . -B build -DCHORUS_BUILD_TESTS=OFF
fi
cmake --build build --target train_classifier chorus_page

logs=build/demo
mkdir -p "$logs"
for policy in single dp ddp; do
  printf '\n--- %s\n' "$policy"
  count=$devices
  set --
  [ "$policy" = single ] && count=1
  # The model's gradients would fit one bucket, which leaves when backward has ended: smaller ones show the overlap.
  [ "$policy" = ddp ] && set -- --bucket-cap-mb 0.05
  build/examples/train_classifier --policy "$policy" --devices "$count" --model toy --data synthetic --batch 64 \
    --epochs "$epochs" --seed 1 --metrics "$logs/$policy.jsonl" --trace "$logs/$policy.json" --trace-steps 50:5 "$@"
done

echo
awk '
  # The value of a key in this line: text, a number, or what stands between brackets.
  function value(key) {
    if (!match($0, "\"" key "\":(\\[[^]]*\\]|\"[^\"]*\"|[^,}]*)")) return "?"
    found = substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3)
    gsub(/[]["]/, "", found)
    return found
  }
  function mebibytes(list,   n, parts, i, text) {
    n = split(list, parts, ",")
    for (i = 1; i <= n; i++) text = text (i > 1 ? " / " : "") sprintf("%.1f", parts[i] / 1048576)
    return text
  }
  BEGIN {
    form = "%-7s %7s %11s %14s %10s %22s %24s\n"
    printf form, "policy", "devices", "final loss", "test accuracy", "samples/s", "sent per device, MiB", "peak per device, MiB"
  }
  /"event":"epoch"/ { loss = value("train_loss"); accuracy = value("test_accuracy") }
  /"event":"done"/ {
    printf form, value("policy"), value("devices"), sprintf("%.4f", loss), sprintf("%.2f %%", 100 * accuracy),
      sprintf("%.0f", value("samples_per_second")), mebibytes(value("bytes_sent_per_device")),
      mebibytes(value("peak_memory_bytes_per_device"))
  }' "$logs/single.jsonl" "$logs/dp.jsonl" "$logs/ddp.jsonl"

build/examples/chorus-page "$logs/single.json" "$logs/dp.json" "$logs/ddp.json" -o "$logs/run.html" \
  --title "The same training under three policies"
printf '\nWhat moved, when and why: open %s in a browser.\n' "$PWD/$logs/run.html"
