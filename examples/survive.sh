#!/bin/sh
# Trains on four ranks, kills one of them every two seconds, chosen by chance, and lets another process take its place.
# At the end: what was lost, and the parameters beside those of an undisturbed run on one device: the same bits.
#   survive.sh [KILLS] [SECONDS BETWEEN TWO]
set -eu
cd "$(dirname "$0")/.."
kills=${1:-5}
every=${2:-2}

tests/install.sh g++ cmake ninja-build libeigen3-dev nlohmann-json3-dev libcli11-dev zlib1g-dev libssl-dev procps
if [ ! -f build/CMakeCache.txt ]; then
  CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}" cmake -S . -B build -DCHORUS_BUILD_TESTS=OFF
fi
cmake --build build --target survive

logs=build/survive
mkdir -p "$logs"
rm -f "$logs"/*
program=build/examples/survive
# Epochs of one to three seconds on two cores.
images=4000
epochs=$((kills * every + 4))

printf '\n--- one device, undisturbed\n'
$program --devices 1 --images $images --epochs $epochs --log "$logs/one.txt" | tee "$logs/one"

printf '\n--- four ranks; %s times one of them is killed\n' "$kills"
$program --devices 4 --images $images --epochs $epochs --log "$logs/four.txt" >"$logs/four" &
job=$!
done=0
: >"$logs/kills"
while [ $done -lt "$kills" ]; do
  sleep "$every"
  ranks=$(pgrep -P $job -x survive) || break
  # shellcheck disable=SC2086
  victim=$(printf '%s\n' $ranks | shuf -n 1)
  # The log has the machine's clock since its start.
  cut -d' ' -f1 /proc/uptime >>"$logs/kills"
  kill -KILL "$victim" 2>/dev/null || break
  done=$((done + 1))
done
status=0
wait $job || status=$?
cat "$logs/four"

printf '\n%-36s %12s %12s\n' '' 'one device' 'four ranks'
printf '%-36s %12s %12s\n' 'processes killed' 0 $done
# Of the log's lines: seconds of the machine's clock first, the step last.
awk '
  FNR == 1 { begin[++file] = $1 }
  { end[file] = $1 }
  END { printf "%-36s %12.1f %12.1f\n", "seconds from the first step to the last", end[1] - begin[1], end[2] - begin[2] }
' "$logs/one.txt" "$logs/four.txt"
awk '
  FILENAME ~ /kills$/ { killed[++kills] = $1; next }
  !($NF in done) { done[$NF]; at[++steps] = $1 }
  END {
    for (i = 1; i <= kills; ++i) {
      for (j = 1; j <= steps && at[j] <= killed[i];) ++j
      if (j <= steps) { lost += at[j] - killed[i]; ++counted }
    }
    printf "%-36s %12s %12.2f\n", "seconds from a kill to the next step", "", counted ? lost / counted : 0
  }' "$logs/kills" "$logs/four.txt"
one=$(awk '/sha256/ { print $2 }' "$logs/one")
four=$(awk '/sha256/ { print $2 }' "$logs/four")
printf '%-36s %12.12s %12.12s\n' parameters_sha256 "$one" "$four"
if [ $status -ne 0 ] || [ -z "$one" ] || [ "$one" != "$four" ]; then
  printf '\nNOT THE SAME: the runs end with other parameters, and must not (status %s).\n' "$status"
  exit 1
fi
printf '\nThe same parameters, bit for bit.\n'
