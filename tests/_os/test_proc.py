"""Free memory and the state of processes are read from /proc; the tests use folders that imitate it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gleanrl._os import proc

GIB = 2**30


def machine(root, files: dict[str, str]):
    for name, text in {
        "proc/meminfo": f"MemFree: 1 kB\nMemAvailable:  {8 * GIB // 1024} kB\n",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_available_memory_without_cgroups_is_the_machines(tmp_path):
    assert proc.available_memory(machine(tmp_path, {})) == 8 * GIB


def test_available_memory_without_meminfo_is_none(tmp_path):
    assert proc.available_memory(tmp_path) is None


def test_tightest_cgroup_v2_limits_available_memory(tmp_path):
    groups = "sys/fs/cgroup"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/one\n",
            f"{groups}/jobs/one/memory.max": "max\n",
            f"{groups}/jobs/one/memory.current": f"{GIB}\n",
            f"{groups}/jobs/memory.max": f"{3 * GIB}\n",
            f"{groups}/jobs/memory.current": f"{2 * GIB}\n",
            f"{groups}/jobs/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        },
    )
    assert proc.available_memory(root) == GIB + GIB // 2


def test_container_with_only_its_own_cgroup_is_limited(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/somewhere/outside\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
    )
    assert proc.available_memory(root) == GIB


def test_cgroup_v1_limits_available_memory(tmp_path):
    group = "sys/fs/cgroup/memory/jobs"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/jobs\n",
            f"{group}/memory.limit_in_bytes": f"{GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{GIB + 5}\n",
        },
    )
    assert proc.available_memory(root) == 0


def test_limit_of_the_whole_machine_has_no_effect(tmp_path):
    groups = "sys/fs/cgroup"
    root = machine(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n",
            "proc/self/cgroup": "0::/jobs\n",
            f"{groups}/jobs/memory.max": f"{16 * GIB}\n",
            f"{groups}/jobs/memory.current": f"{15 * GIB}\n",  # much of this is page cache in use
        },
    )
    assert proc.available_memory(root) == 8 * GIB


def test_values_of_this_machine_are_plausible():
    available = proc.available_memory()
    assert available is None or 0 < available < 2**50
    assert 1 <= proc.cpu_count() <= (os.cpu_count() or 1)


def test_cpu_count_follows_the_affinity():
    script = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
    script += "from gleanrl._os import proc; print(proc.cpu_count())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr


def test_is_alive_reports_running_processes_only():
    assert proc.is_alive(os.getpid())
    assert proc.is_alive(1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not proc.is_alive(ended.pid)
    for bad in (0, -1):
        with pytest.raises(ValueError, match="positive process number"):
            proc.is_alive(bad)


def test_processes_are_signalled_by_descriptor_and_their_state_is_read():
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    descriptor = os.pidfd_open(child)
    assert proc.signal_process(descriptor, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    assert proc.state_of(child) == "T"
    assert proc.signal_process(descriptor, signal.SIGKILL)
    os.waitpid(child, 0)
    assert proc.state_of(child) == "" and not proc.signal_process(descriptor, 0)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (-9, "was killed by SIGKILL"),
        (-99, "was killed by signal 99"),
        (None, "unknown"),
    ],
)
def test_exit_codes_are_described(code, words):
    assert words in proc.describe_exit(code)


def test_peak_memory_and_free_descriptors_are_reported():
    assert 10 << 20 < proc.peak_memory() < 1 << 40
    before = proc.descriptors_left()
    with open("/dev/null"):
        assert proc.descriptors_left() == before - 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_run_on_binds_the_process_to_processors():
    child = os.fork()
    if child == 0:
        first = min(os.sched_getaffinity(0))
        proc.run_on([first])
        os._exit(int(os.sched_getaffinity(0) != {first} or proc.cpu_count() != 1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_identity_names_the_process():
    assert proc.identity() == proc.identity()
    assert proc.identity().startswith(f"process {os.getpid()}, started at ") and "?" not in proc.identity()


def test_forked_process_with_a_reused_pid_reads_its_identity_again(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "getpid", lambda: 4)
    assert "?" not in proc.identity()
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(proc, "_ROOT", tmp_path)
        os._exit(int("started at ?" not in proc.identity()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
