#!/usr/bin/env bash
# Makes the interpreter of the tests in this folder: make_env.sh [FOLDER] (default .venv-foreign).
# The package itself isn't installed there: it is imported from src, with the core that `make build` put there.
# After a run that succeeded, the next does nothing unless the constraints changed.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv-foreign}
constraints=tests/foreign/constraints.txt
stamp="$venv/.made-from"

if cmp -s "$constraints" "$stamp"; then
    exit 0
fi

echo "Setting up $venv (the first time takes a few minutes)"
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

# torch before anything that could ask for a range of it, and never again.
pip install --no-compile --constraint "$constraints" torch numpy
pip install --no-compile --constraint "$constraints" tensordict gymnasium cloudpickle rich pytest pytest-timeout hypothesis
pip install --no-compile --constraint "$constraints" torchrl

expected=$(sed -n 's/^torch==//p' "$constraints")
"$venv/bin/python" - "$expected" <<'PYTHON'
import importlib.metadata as metadata
import sys

found = metadata.version("torch").split("+")[0]
if found != sys.argv[1]:
    sys.exit(f"expected torch {sys.argv[1]}, got {found}: another package replaced it")
PYTHON
cp "$constraints" "$stamp"
