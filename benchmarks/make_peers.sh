#!/usr/bin/env bash
# Makes the second interpreter of `python -m benchmarks --peers`: make_peers.sh [FOLDER] (default .venv-peers).
# A peer that does not install is reported, left out, and tried again by the next run; after a run in which all
# did, the next does nothing unless the constraints changed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-peers}
constraints=benchmarks/peers-constraints.txt
stamp="$venv/.made-from"

if cmp -s "$constraints" "$stamp" && "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    exit 0
fi

"${PYTHON:-python3.11}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

# torch before anything that could ask for a range of it, and never again.
pip install --no-compile --constraint "$constraints" torch numpy
pip install --no-compile --constraint "$constraints" gymnasium tensordict
complete=yes
for peer in torchrl stable-baselines3 tianshou cpprb flashbax; do
    if pip install --no-compile --constraint "$constraints" "$peer"; then
        echo "peers: $peer installed"
    else
        echo "peers: $peer did not install and is left out" >&2
        complete=no
    fi
done

expected=$(sed -n 's/^torch==//p' "$constraints")
"$venv/bin/python" - "$expected" <<'PYTHON'
import importlib.metadata as metadata
import sys

found = metadata.version("torch").split("+")[0]
if found != sys.argv[1]:
    sys.exit(f"peers: expected torch {sys.argv[1]}, got {found}: a peer replaced it")
cuda = sorted(d.name for d in metadata.distributions() if d.name.lower().startswith("nvidia-"))
if cuda:
    print(f"peers: this torch brought CUDA packages along ({len(cuda)}); the benchmarks do not use them", file=sys.stderr)
PYTHON
if [ "$complete" = yes ]; then
    cp "$constraints" "$stamp"
fi
