#!/bin/sh
# Installs those of the given Debian or Ubuntu packages that are missing. Elsewhere, or without the right to, it leaves
# it to the configuration to say what is missing.
set -eu
command -v dpkg-query >/dev/null || exit 0
missing=
for package in "$@"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
as_root=
if [ "$(id -u)" != 0 ]; then
  as_root=sudo
  command -v sudo >/dev/null || { echo "not installed, and no sudo to do it:$missing" >&2; exit 0; }
fi
echo "installing:$missing"
$as_root apt-get update -qq
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
