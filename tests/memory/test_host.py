"""Limits that a container puts on the process, in both versions of Linux control groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_oom.memory.host import ControlGroup, find_control_groups

if TYPE_CHECKING:
    from pathlib import Path


def write_group(folder: Path, **files: str) -> Path:
    """Write files such as ``memory.max``; ``__`` in a name stands for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_version_2_has_a_limit_and_cached_files_that_can_go(tmp_path: Path) -> None:
    """File cache that the kernel would drop is not in use."""
    folder = write_group(
        tmp_path,
        memory__max="1000\n",
        memory__current="700\n",
        memory__stat="anon 500\ninactive_file 150\n",
    )
    group = ControlGroup(folder)

    assert (group.read_limit(), group.read_used()) == (1000, 550)


def test_version_1_has_other_names(tmp_path: Path) -> None:
    """The same figures under the names of version 1."""
    folder = write_group(
        tmp_path,
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="700",
        memory__stat="total_inactive_file 100\n",
    )
    group = ControlGroup(folder)

    assert (group.read_limit(), group.read_used()) == (1000, 600)


def test_no_limit_is_no_number(tmp_path: Path) -> None:
    """``max`` and a missing file are both ``None``."""
    assert ControlGroup(write_group(tmp_path, memory__max="max\n")).read_limit() is None
    assert ControlGroup(tmp_path / "gone").read_limit() is None


def test_the_groups_above_count_too(tmp_path: Path) -> None:
    """A process is bound by its own group and by each one above it."""
    write_group(tmp_path, memory__max="max")
    write_group(tmp_path / "jobs", memory__max="2000")
    write_group(tmp_path / "jobs" / "mine", memory__max="1000")

    groups = find_control_groups("0::/jobs/mine\n", tmp_path)

    assert [group.read_limit() for group in groups] == [1000, 2000, None]


def test_a_path_outside_the_container_falls_back_to_its_root(tmp_path: Path) -> None:
    """Docker shows the host's path and the container's files."""
    write_group(tmp_path / "memory", memory__limit_in_bytes="1000")

    groups = find_control_groups("5:cpu:/\n4:memory:/docker/abc\n", tmp_path)

    assert [group.read_limit() for group in groups] == [1000]
