#!/bin/sh
# Two machines, played by network namespaces: ranks form a group over the link between them; once it is cut, each side
# names at the deadline whom it lost. Needs root; elsewhere it is skipped, with status 77.
# usage: netns_test.sh FOLDER_OF_PROGRAMS
set -eu
probe=$1/launch_probe
a=chorus_a_$$ b=chorus_b_$$
folder=$(mktemp -d)
finish() {
  for pid in ${pids:-}; do kill -9 "$pid" 2>/dev/null || true; done
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
  rm -rf "$folder"
}
trap finish EXIT
if [ "$(id -u)" != 0 ] || ! command -v ip >/dev/null || ! ip netns add "$a" 2>"$folder/why" ||
  ! ip netns exec "$a" true 2>"$folder/why"; then
  echo "SKIPPED: network namespaces need root, and the program ip (iproute2): $(cat "$folder/why" 2>/dev/null)"
  exit 77
fi
ip netns add "$b"
ip -n "$a" link add veth_a type veth peer name veth_b netns "$b"
ip -n "$a" addr add 10.99.0.1/24 dev veth_a
ip -n "$b" addr add 10.99.0.2/24 dev veth_b
for side in a b; do
  eval ns=\$$side
  ip -n "$ns" link set lo up
  ip -n "$ns" link set "veth_$side" up
done

# start NAMESPACE RANK LOCAL_RANK LOCAL_SIZE: a rank of three that reduces for ever.
start() {
  env RANK="$2" WORLD_SIZE=3 LOCAL_RANK="$3" LOCAL_WORLD_SIZE="$4" MASTER_ADDR=10.99.0.1 MASTER_PORT=29517 \
    CHORUS_TOKEN="a secret of this test" \
    ip netns exec "$1" "$probe" --do ring --backend tcp --timeout 2 >"$folder/$2" 2>&1 &
  pids="${pids:-} $!"
}
start "$a" 0 0 2
start "$a" 1 1 2
start "$b" 2 0 1
for second in 1 2 3 4 5 6 7 8 9 10; do
  [ "$(cat "$folder"/[012] | grep -c ready)" = 3 ] && break
  sleep 1
done
[ "$(cat "$folder"/[012] | grep -c ready)" = 3 ] || { echo "the ranks did not meet:"; cat "$folder"/[012]; exit 1; }

ip -n "$a" link set veth_a down
cut=$(date +%s)
wrong=0
for pid in $pids; do
  status=0
  wait "$pid" || status=$?
  [ "$status" = 76 ] || { echo "a rank ended with status $status, expected 76"; wrong=1; }
done
pids=
took=$(($(date +%s) - cut))
cat "$folder"/[012]
[ "$took" -le 8 ] || { echo "it took $took s to notice, the deadline was 2 s"; wrong=1; }
grep -q "rank 0: all_reduce #.*rank 2" "$folder/0" || { echo "rank 0 does not name rank 2"; wrong=1; }
grep -q "rank 1: all_reduce #.*rank 2" "$folder/1" || { echo "rank 1 does not name rank 2"; wrong=1; }
grep -q "waited 2000 ms" "$folder/0" || { echo "rank 0 does not speak of the deadline"; wrong=1; }
grep -q "rank 2: all_reduce #.*waited 2000 ms for rank [01]" "$folder/2" || { echo "rank 2 does not name a rank beyond the cut"; wrong=1; }
[ $wrong = 0 ] && echo "a cut link was named on both sides after $took s"
exit $wrong
