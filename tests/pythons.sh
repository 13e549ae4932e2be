#!/usr/bin/env bash
# Runs the fast tests with several Pythons: pythons.sh "3.10 3.12" [ARGUMENTS OF PYTEST]. Each has an environment in
# .venv-pythons, which takes 5 GB with a CUDA build of torch. The oldest Python that pyproject.toml allows gets the lowest
# releases that it allows; these have no wheels for the newest Pythons. The others get the newest releases, with torch
# as in constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra versions <<<"$1"
shift
envs=.venv-pythons
mkdir -p "$envs"
sed -n '/^dependencies/,/^]/s/^ *"\(.*\)>=\(.*\)",$/\1==\2/p' pyproject.toml >"$envs/lowest.txt"
oldest=$(sed -n 's/^requires-python = ">=\(.*\)"$/\1/p' pyproject.toml)
grep '^torch==' constraints.txt >"$envs/newest.txt"

interpreter() { # prints the path of Python $1, or fails
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if "$candidate" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

check() { # runs the tests with Python $1 at $2, with the constraints $3
    local venv="$envs/$1"
    local install=("$venv/bin/python" -m pip install --no-compile --quiet --disable-pip-version-check --constraint "$3")
    test -x "$venv/bin/python" || "$2" -m venv "$venv" || return
    # torch first and alone, so that no other package chooses its release.
    "${install[@]}" torch || return
    "${install[@]}" cmake hypothesis nanobind ninja pytest pytest-timeout pytest-xdist scikit-build-core || return
    "${install[@]}" --no-build-isolation --editable . || return
    local package
    for package in h5py matplotlib pygame ray rich; do # some have no wheel for the newest Python
        "${install[@]}" --only-binary :all: "$package" || echo "Python $1: no wheel of $package"
    done
    "$venv/bin/python" -m pytest -q -n 2 --dist loadgroup -m "not slow" "${tests[@]}"
}

tests=("${@:-tests}")
report=()
failed=1 # also if no Python is found
for version in "${versions[@]}"; do
    if [ "$version" = "$oldest" ]; then releases=lowest; else releases=newest; fi
    if ! python=$(interpreter "$version"); then
        report+=("Python $version: not installed here")
    elif check "$version" "$python" "$envs/$releases.txt"; then
        report+=("Python $version, $releases releases: passed")
        if [ $failed = 1 ]; then failed=0; fi
    else
        report+=("Python $version, $releases releases: failed")
        failed=2
    fi
done
printf '%s\n' "${report[@]}"
exit $failed
