#!/bin/sh
# The same training under the three policies, on generated images, one table to compare them, and one page that shows
# what moved, when and why. Each batch is cut into the same shares on any number of devices (--canonical-shares), so
# that all runs have to end with the same bits. On a fresh Debian or Ubuntu it installs what is missing first.
set -eu
cd "$(dirname "$0")/.."
# Four shares are whole runs of one size on 1, 2 and 4 devices; on 3 one has two of them, and the others wait for it.
shares=4 epochs=5

tests/install.sh g++ cmake ninja-build libeigen3-dev nlohmann-json3-dev libcli11-dev zlib1g-dev libssl-dev
if [ ! -f build/CMakeCache.txt ]; then
  CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}" cmake -S . -B build -DCHORUS_BUILD_TESTS=OFF
fi
cmake --build build --target train_classifier chorus_page

logs=build/demo
mkdir -p "$logs"
train() {
  printf '\n--- %s, devices: %s\n' "$1" "$2"
  policy=$1 devices=$2
  set --
  # The model's gradients would fit one bucket, which leaves when backward has ended: smaller ones show the overlap.
  [ "$policy" = ddp ] && set -- --bucket-cap-mb 0.05
  build/examples/train_classifier --policy "$policy" --devices "$devices" --canonical-shares "$shares" --model toy \
    --data synthetic --batch 64 --epochs "$epochs" --seed 1 --metrics "$logs/$policy$devices.jsonl" \
    --trace "$logs/$policy$devices.json" --trace-steps 50:5 "$@"
}
train single 1
train dp 2
train ddp 2
train ddp 3

echo
status=0
awk -v shares="$shares" '
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
    form = "%-7s %7s %11s %14s %10s %22s %24s %13s\n"
    printf form, "policy", "devices", "final loss", "test accuracy", "samples/s", "sent per device, MiB",
      "peak per device, MiB", "parameters"
  }
  /"event":"epoch"/ { loss = value("train_loss"); accuracy = value("test_accuracy") }
  /"event":"done"/ {
    parameters = value("parameters_sha256")
    if (runs++ == 0) first = parameters
    if (parameters != first || parameters == "?") differ = 1
    printf form, value("policy"), value("devices"), sprintf("%.4f", loss), sprintf("%.2f %%", 100 * accuracy),
      sprintf("%.0f", value("samples_per_second")), mebibytes(value("bytes_sent_per_device")),
      mebibytes(value("peak_memory_bytes_per_device")), substr(parameters, 1, 12)
  }
  END {
    if (first == "?")
      print "\nThe parameters have no fingerprint (SHA-256): the program was built without OpenSSL."
    else if (differ)
      print "\nNOT THE SAME: the runs end with other parameters, and with --canonical-shares " shares " must not."
    else
      print "\nThe same parameters, bit for bit, in all " runs " runs: each batch is cut into " shares \
        " shares, which are added up in one order."
    exit differ
  }' "$logs/single1.jsonl" "$logs/dp2.jsonl" "$logs/ddp2.jsonl" "$logs/ddp3.jsonl" || status=$?

build/examples/chorus-page "$logs/single1.json" "$logs/dp2.json" "$logs/ddp2.json" -o "$logs/run.html" \
  --title "The same training under three policies"
printf '\nWhat moved, when and why: open %s in a browser.\n' "$PWD/$logs/run.html"
exit "$status"
