"""The free memory of the machine and of its container is what Linux reports."""

import pytest

from models.platforms import host_memory
from models.platforms.host_memory import available_memory_bytes

GIB = 2**30
STAT = """\
anon 1073741824
file 3221225472
{prefix}inactive_file 2147483648
{prefix}active_file 1073741824
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 20 GiB free, without control groups; returns its folder."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal:       {32 * 2**20} kB\nMemAvailable:   {20 * 2**20} kB\nHugePages_Total:  0\n"
    )
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    groups = [
        group._replace(folder=tmp_path / group.folder.name) for group in host_memory._CONTROL_GROUPS
    ]
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", groups)
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "own_groups")
    return tmp_path


def write_group(folder, limit_file, limit, usage_file, used_bytes, stat):
    folder.mkdir(parents=True)
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / usage_file).write_text(f"{used_bytes}\n")
    (folder / "memory.stat").write_text(stat)


def test_without_a_container_the_machine_counts(machine):
    assert available_memory_bytes() == 20 * GIB


@pytest.mark.parametrize(
    ("limit", "wanted_gib"),
    # The container uses 6 GiB, of which 3 are cached files. Above its limit, nothing is free.
    [("max", 20), (8 * GIB, 5), (2 * GIB, 0), (64 * GIB, 20)],
)
def test_the_limit_of_a_container_counts_if_it_leaves_less(machine, limit, wanted_gib):
    stat = STAT.format(prefix="")
    write_group(machine / "cgroup", "memory.max", limit, "memory.current", 6 * GIB, stat)
    assert available_memory_bytes() == wanted_gib * GIB


@pytest.mark.parametrize(("limit", "wanted_gib"), [(2**63 - 4096, 20), (8 * GIB, 5)])
def test_control_groups_of_version_1_are_read_too(machine, limit, wanted_gib):
    write_group(
        *(machine / "memory", "memory.limit_in_bytes", limit, "memory.usage_in_bytes", 6 * GIB),
        STAT.format(prefix="total_"),
    )
    assert available_memory_bytes() == wanted_gib * GIB


@pytest.mark.parametrize("folder", ["user.slice/a.service", "user.slice", "."])
@pytest.mark.parametrize(
    ("own_groups", "group", "limit_file", "usage_file", "prefix"),
    [
        ("0::/user.slice/a.service\n", "cgroup", "memory.max", "memory.current", ""),
        ("0::/user.slice/a.service\n", "cgroup", "memory.high", "memory.current", ""),
        (
            "5:cpu,cpuacct:/\n4:memory:/user.slice/a.service\n0::/\n",
            *("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ),
    ],
)
def test_limits_of_the_own_group_and_of_all_around_it_count(
    machine, folder, own_groups, group, limit_file, usage_file, prefix
):
    (machine / "own_groups").write_text(own_groups)
    where = machine / group / folder
    write_group(where, limit_file, 8 * GIB, usage_file, 6 * GIB, STAT.format(prefix=prefix))
    assert available_memory_bytes() == 5 * GIB


def test_group_without_statistics_counts_all_that_is_used(machine):
    write_group(machine / "cgroup", "memory.max", 8 * GIB, "memory.current", 6 * GIB, "")
    assert available_memory_bytes() == 2 * GIB


def test_other_systems_have_half_of_their_memory(machine, monkeypatch):
    (machine / "meminfo").unlink()
    sizes = {"SC_PHYS_PAGES": 1_000, "SC_PAGE_SIZE": 4_096}
    monkeypatch.setattr(host_memory.os, "sysconf", sizes.__getitem__)
    assert available_memory_bytes() == 500 * 4_096
