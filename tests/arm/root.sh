#!/bin/sh
# root.sh FOLDER            unpack Debian's Python for arm64 there; needs apt, but no privileges
# root.sh FOLDER --headers  print the compiler's flags that find the headers of that Python
set -eu
root=$(realpath -m "$1")
if [ "${2:-}" = --headers ]; then
  echo "-isystem $(echo "$root"/usr/include/python3.*) -idirafter $root/usr/include"
  exit
fi
[ -x "$root/usr/bin/python3" ] && exit
state=$root/var/apt
mkdir -p "$state/lists/partial" "$state/archives/partial"
: > "$state/status"
get() {
  apt-get --quiet=2 -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$state" \
    -o Dir::State::Status="$state/status" -o Dir::Cache="$state" -o APT::Sandbox::User=root "$@"
}
get update
get install --yes --download-only --no-install-recommends python3 libpython3-dev libstdc++6 libgomp1
for package in "$state"/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
rm -r "$state"
