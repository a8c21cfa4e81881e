#!/usr/bin/env bash
# Make /usr/bin/chromium available for the tests of the report. Does nothing when a Chromium is already there; needs
# Debian or Ubuntu and root (or sudo without a password) otherwise. Never fails: the test itself says what is missing.
set -uo pipefail

for name in "${PILOTAGE_CHROMIUM:-chromium}" chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
say() { echo "install-chromium: $1" >&2; }
command -v apt-get >/dev/null || { say "no apt-get here; install Chromium and name it in PILOTAGE_CHROMIUM"; exit 0; }
SUDO=
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || { say "not root; run: sudo apt-get install chromium"; exit 0; }
    SUDO=sudo
fi
say "installing Debian's chromium"
export DEBIAN_FRONTEND=noninteractive
if ! { $SUDO apt-get update -qq && $SUDO apt-get install -y -qq --no-install-recommends chromium; } >/dev/null; then
    say "apt-get could not install chromium; install it by hand and name it in PILOTAGE_CHROMIUM"
fi
exit 0
