#!/usr/bin/env bash
# Checks the device paths on a CUDA GPU without a network: scripts/cuda_check.sh OUT
#
# The script compiles the core, runs the CUDA tests of tests/devices, counts waits for the device, and runs benchmarks.
# It writes check.json (steps, exit statuses, seconds), tests.log, tests.xml, waits.json, benchmarks.json and
# benchmarks.md into OUT. After a failed step it continues with the next. The exit status is 1 if a step failed.
#
# Environment:
#   PYTHON    interpreter with torch, numpy, cmake, ninja, nanobind, pytest, pytest-xdist, pytest-timeout, hypothesis,
#             cloudpickle and rich (default python3)
#   WHEELS    folder with more wheels to install: tensordict, gymnasium and their dependencies. WHEELS/peers may have
#             TorchRL and its tensordict, for comparison. WHEELS/_core.*.so is a core to use if the compiler fails.
#   DEVICE    cuda (default) or cpu. With cpu the same steps run on the CPU, to prepare a run without a GPU.
#   WORKERS   number of test processes (default: the number of cores, at most 12)
#   TESTS     files or folders to test (default tests/devices)
#   TESTS_S, BENCH_S   time limits of tests and benchmarks in seconds (default 170 and 220)
#   CASES     benchmarks to run (default: device-replay devices); CASES=none runs none
#   BENCH_ARGS   options of `python -m benchmarks` (default: --rounds 7)
set -uo pipefail
if [ $# -ne 1 ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=$(command -v "${PYTHON:-python3}") || {
    echo "cuda_check: no ${PYTHON:-python3} here: name an interpreter with PYTHON=..." >&2
    exit 2
}
device=${DEVICE:-cuda}
wheels=${WHEELS:-}
cores=$(nproc)
read -ra tests <<<"${TESTS:-tests/devices}"
read -ra cases <<<"${CASES:-device-replay devices}"
read -ra bench_args <<<"${BENCH_ARGS:---rounds 7}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

case $device in
cuda)
    "$python" -c 'import torch; torch.zeros(1, device="cuda")' 2>"$scratch/why" || {
        echo "cuda_check: torch finds no usable CUDA device: $(tail -n 1 "$scratch/why")" >&2
        echo "cuda_check: DEVICE=cpu runs the same steps on the CPU." >&2
        exit 2
    }
    ;;
cpu) export CUDA_VISIBLE_DEVICES="" ;;
*)
    echo "cuda_check: DEVICE: expected cuda or cpu, got $device" >&2
    exit 2
    ;;
esac

steps=()
failed=0
step() { # NAME LIMIT_S LOG COMMAND...: run a command, and record its exit status and its time
    local name=$1 limit=$2 log=$3 start=$SECONDS status
    shift 3
    # SIGINT, because pytest and the benchmarks then still report their results so far.
    timeout --signal=INT --kill-after=15 "$limit" "$@" >"$log" 2>&1
    status=$?
    printf '=== %s: exit status %s, %s s\n' "$name" "$status" $((SECONDS - start))
    steps+=("{\"step\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - start))}")
    [ "$status" -eq 0 ] || failed=1
    return "$status"
}
finish() {
    local IFS=,
    printf '{"device": "%s", "seconds": %s, "steps": [%s]}\n' "$device" "$SECONDS" "${steps[*]}" >"$out/check.json"
    printf '=== all: %s s; %s\n' "$SECONDS" "$([ "$failed" -eq 0 ] && echo "every step passed" || echo "a step failed")"
    exit "$failed"
}

export PATH=${python%/*}:$PATH
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
peers=()
if [ -n "$wheels" ]; then
    install=("$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-index
        --no-deps --no-compile --no-cache-dir --target)
    step wheels 60 "$scratch/log" "${install[@]}" "$scratch/site" "$wheels"/*.whl || tail -n 3 "$scratch/log"
    PYTHONPATH=$PWD/src:$scratch/site
    if [ -d "$wheels/peers" ]; then
        step peers 60 "$scratch/log" "${install[@]}" "$scratch/peers" "$wheels"/peers/*.whl || tail -n 3 "$scratch/log"
        printf '#!/bin/sh\nPYTHONPATH=%q exec %q "$@"\n' "$scratch/peers" "$python" >"$scratch/python"
        chmod +x "$scratch/python"
        peers=(--peers "$scratch/python")
    fi
fi

# The state "editable" makes CMake put the core into src/gleanrl.
step configure 60 "$scratch/log" cmake -S . -B "$scratch/core" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DSKBUILD_STATE=editable -DPython_EXECUTABLE="$python" \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" \
    && step compile 150 "$scratch/log" cmake --build "$scratch/core"
if [ "$failed" -ne 0 ]; then
    tail -n 20 "$scratch/log"
    compgen -G "$wheels/_core.*.so" >/dev/null && cp -v "$wheels"/_core.*.so src/gleanrl/
fi
step import 60 "$scratch/log" "$python" -c 'import gleanrl.collectors, gleanrl.data' || {
    tail -n 5 "$scratch/log"
    finish
}

# Disable other installed plugins: they may warn, and warnings are errors.
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 step tests "${TESTS_S:-170}" "$out/tests.log" "$python" -m pytest -q -p xdist \
    -p pytest_timeout -p _hypothesis_pytestplugin -p no:cacheprovider -n "${WORKERS:-$((cores < 12 ? cores : 12))}" \
    --dist loadgroup --maxfail 60 -k "$device" --durations 15 --junit-xml "$out/tests.xml" "${tests[@]}"
grep -E '^(FAILED|ERROR) ' "$out/tests.log" | cut -c 1-250 | head -n 20
grep -E '[0-9]+ (passed|failed|error)' "$out/tests.log" | tail -n 1

if [ "${cases[*]}" != none ]; then
    step waits 60 "$scratch/log" "$python" -m benchmarks.device_waits "$out/waits.json"
    grep '^|' "$scratch/log" | cut -c 1-250 || tail -n 3 "$scratch/log"
    step benchmarks "${BENCH_S:-220}" "$scratch/log" "$python" -m benchmarks "${cases[@]}" "${bench_args[@]}" \
        "${peers[@]}" --out "$scratch/benchmarks" || tail -n 3 "$scratch/log" | cut -c 1-300
    cp "$scratch"/benchmarks/benchmarks.* "$out" && sed -n '/^| case/,/^$/p' "$out/benchmarks.md" | cut -c 1-200
fi
finish
