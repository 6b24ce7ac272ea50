"""Run a program in a process whose memory the kernel limits, so that torch's own error comes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LIMIT_DATA", "run_under_data_limit"]

LIMIT_DATA = '''
def limit_data(headroom_bytes):
    """Let this process have ``headroom_bytes`` more private memory than it has now."""
    import gc, resource
    gc.collect()
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    used_bytes = int(fields["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + headroom_bytes,) * 2)
'''
"""Defines ``limit_data(headroom_bytes)``, which :func:`run_under_data_limit` puts before a program."""


def run_under_data_limit(
    program: str, *, arguments: Sequence[str] = (), timeout_seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a new interpreter in which ``limit_data(headroom_bytes)`` is defined.

    The program calls it when everything that it needs is imported and warm: threads, buffers of
    the maths libraries and the first training step take memory too. From then on ``mmap`` fails
    where memory would pass the limit, and torch's CPU allocator raises ``RuntimeError:
    [enforce fail at alloc_cpu.cpp...] DefaultCPUAllocator: can't allocate memory``.

    Args:
        program: Python source.
        arguments: Its ``sys.argv[1:]``.
        timeout_seconds: After which it is given up.

    Returns:
        The finished process with its output as text. Linux only.
    """
    return subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-W", "ignore", "-c", LIMIT_DATA + program, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
