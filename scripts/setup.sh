#!/usr/bin/env bash
# Build the environment in .venv: torch first (CPU build where one is at hand), then vLLM without device code, then
# pilotage. Every step is skipped when it is already done, so running it again costs a second.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=2.13.0
VLLM=0.33.0
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}

fail() { echo "setup: $1" >&2; exit 2; }
say() { printf '\033[1msetup:\033[0m %s\n' "$1" >&2; }

[ -n "$PYTHON" ] || fail "no python3 found; install Python 3.11"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "$PYTHON is $("$PYTHON" --version 2>&1); pilotage needs Python 3.11, name it with PYTHON=/path/to/python3.11"
command -v "${CXX:-g++}" >/dev/null || fail "no C++ compiler (${CXX:-g++}) found; torch.compile needs one on the CPU"

# What is installed is decided by these lines and the two files; a change of any of them runs the steps again.
stamp=$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)
[ -f "$VENV/.pilotage-$stamp" ] && exit 0

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input -q "$@" 2> >(grep -v 'is ignored: it is neither' >&2); }
has() { "$VENV/bin/python" - "$1" "$2" <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
sys.exit(version(sys.argv[1]).split("+")[0] != sys.argv[2])
PY
}

if [ ! -x "$VENV/bin/python" ]; then
    say "creating $VENV"
    "$PYTHON" -m venv "$VENV"
fi
if ! has torch "$TORCH"; then
    say "torch $TORCH"
    pip install "torch==$TORCH"
fi
say "build tools"
pip install "setuptools>=77.0.3,<81" setuptools-scm setuptools-rust wheel cmake ninja jinja2 packaging
if ! has vllm "$VLLM"; then
    # PyPI's wheel is the CUDA build. From source with the empty target it is pure Python; without the override its
    # version would read 0.33.0+empty and pip would refuse it as inconsistent.
    say "vLLM $VLLM, built with the empty target"
    export VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$VLLM
    pip install --no-build-isolation --no-binary vllm "vllm==$VLLM" "torch==$TORCH"
fi
say "pilotage and its development tools"
pip install --no-build-isolation -e ".[dev,gguf]" "torch==$TORCH"
has torch "$TORCH" || fail "another package replaced torch $TORCH; remove $VENV and run it again"

rm -f "$VENV"/.pilotage-*
touch "$VENV/.pilotage-$stamp"
say "done: $VENV/bin/pilotage --help"
