"""Free host memory: of the machine, or less where a control group has a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcast.runtime.free_memory import free_host_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 64 GiB free."""
    write(tmp_path, {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {64 * GIB // 1024} kB"})
    return tmp_path


def test_a_machine_without_control_groups(root: Path) -> None:
    assert free_host_bytes(root) == 64 * GIB


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) == 0


def test_a_limit_of_version_2_counts_without_what_the_kernel_can_drop(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 8 * GIB,
            "sys/fs/cgroup/memory.current": 6 * GIB,
            "sys/fs/cgroup/memory.stat": f"anon {GIB}\ninactive_file {GIB}",
        },
    )
    assert free_host_bytes(root) == 3 * GIB


def test_the_tightest_limit_above_a_process_counts(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/jobs/seven/step",
            "sys/fs/cgroup/jobs/memory.max": 20 * GIB,
            "sys/fs/cgroup/jobs/memory.current": 10 * GIB,
            "sys/fs/cgroup/jobs/seven/memory.max": 16 * GIB,
            "sys/fs/cgroup/jobs/seven/memory.current": GIB,
            "sys/fs/cgroup/jobs/seven/step/memory.max": "max",
            "sys/fs/cgroup/jobs/seven/step/memory.current": GIB,
        },
    )
    assert free_host_bytes(root) == 10 * GIB


@pytest.mark.parametrize("path", ["/docker/abc", "/"])
def test_a_limit_of_version_1_counts_though_the_path_is_the_host_s(root: Path, path: str) -> None:
    write(
        root,
        {
            "proc/self/cgroup": f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::{path}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 4 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 3 * GIB,
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}",
        },
    )
    assert free_host_bytes(root) == 3 * GIB // 2


def test_no_limit_and_a_group_that_is_over_its_limit(root: Path) -> None:
    limit, used = root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"
    write(root, {"proc/self/cgroup": "4:memory:/", used: 3 * GIB})
    limit.write_text("9223372036854771712\n")
    assert free_host_bytes(root) == 64 * GIB
    limit.write_text(f"{GIB}\n")
    assert free_host_bytes(root) == 0


def test_this_machine_says() -> None:
    assert free_host_bytes() > 0
