#!/usr/bin/env bash
# Makes the virtual environment for `python -m benchmarks --peers`: make_peers.sh [FOLDER] (default .venv-peers).
# If a peer does not install, the script reports it, leaves it out, and tries again in the next run. After a run that
# installed all peers, the script does nothing until the constraints change.
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

# torch comes first and alone, so that no other package replaces it by another version.
pip install --no-compile --constraint "$constraints" torch numpy
pip install --no-compile --constraint "$constraints" gymnasium tensordict
complete=yes
# PufferLib's package downloads a graphics library from GitHub when it is built. pufferlib-core is its Python part, built;
# it asks for another torch, so it is installed without its dependencies, which the other packages have.
for peer in torchrl stable-baselines3 tianshou cpprb flashbax "--no-deps pufferlib-core"; do
    # shellcheck disable=SC2086 # options and the name are separate words
    if pip install --no-compile --constraint "$constraints" $peer; then
        echo "peers: ${peer##* } installed"
    else
        echo "peers: ${peer##* } did not install and is left out" >&2
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
