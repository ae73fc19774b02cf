#!/bin/sh
# DistributedDataParallel over a link of 100 Mbit/s between two network namespaces, and simulated: they agree within a
# tenth. Needs root and the programs ip and tc; elsewhere it is skipped, with status 77.
# usage: simulated_link_test.sh FOLDER_OF_PROGRAMS
set -eu
program=$1/simulated_link
a=chorus_sa_$$ b=chorus_sb_$$
folder=$(mktemp -d)
finish() {
  for pid in ${pids:-}; do kill -9 "$pid" 2>/dev/null || true; done
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
  rm -rf "$folder"
}
trap finish EXIT
if [ "$(id -u)" != 0 ] || ! command -v ip >/dev/null || ! command -v tc >/dev/null || ! ip netns add "$a" 2>"$folder/why" ||
  ! ip netns exec "$a" true 2>"$folder/why"; then
  echo "SKIPPED: network namespaces need root, and the programs ip and tc (iproute2): $(cat "$folder/why" 2>/dev/null)"
  exit 77
fi
ip netns add "$b"
ip -n "$a" link add veth_a type veth peer name veth_b netns "$b"
ip -n "$a" addr add 10.97.0.1/24 dev veth_a
ip -n "$b" addr add 10.97.0.2/24 dev veth_b
for side in a b; do
  eval ns=\$$side
  ip -n "$ns" link set lo up
  ip -n "$ns" link set "veth_$side" up
  if ! ip netns exec "$ns" tc qdisc add dev "veth_$side" root tbf rate 100mbit burst 32kb latency 50ms 2>"$folder/why"; then
    echo "SKIPPED: this kernel has no token bucket filter: $(cat "$folder/why")"
    exit 77
  fi
done
start() {
  env RANK="$2" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.97.0.1 MASTER_PORT=29519 CHORUS_NUM_THREADS=1 \
    CHORUS_TOKEN="a secret of this test" CHORUS_BACKEND=tcp ip netns exec "$1" "$program" >"$folder/$2" 2>&1 &
  pids="${pids:-} $!"
}
# What else the machine does takes time from the ranks, never from the simulation: three tries.
for try in 1 2 3; do
  start "$a" 0
  start "$b" 1
  worst=0
  for pid in $pids; do
    status=0
    wait "$pid" || status=$?
    [ "$status" = 0 ] || worst=$status
  done
  pids=
  cat "$folder/0" "$folder/1"
  [ "$worst" = 0 ] && exit 0
  echo "try $try: status $worst"
done
exit 1
