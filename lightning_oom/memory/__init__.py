"""MEASURE: what is in memory now.

:func:`read_memory` gives a :class:`MemoryReading` of any device; :func:`reset_peak` and
:func:`release_cached` act on the same backends; :func:`register_reader` adds one. Importing this
package touches no device.

What each backend can tell (a dash: ``None``):

==================  ====  ===  ======  ===  ===========================
Quantity            CUDA  XPU  simgpu  MPS  CPU
==================  ====  ===  ======  ===  ===========================
``allocated``       yes   yes  yes     yes  resident set of the process
``peak_allocated``  yes   yes  yes     --   under ``memory_limit``
``reserved``        yes   yes  yes     yes  --
``peak_reserved``   yes   yes  yes     --   --
``limit``           yes   yes  yes     yes  physical memory or cgroup
``free``            yes   yes  yes     --   available memory
``alloc_retries``   yes   --   yes     --   --
==================  ====  ===  ======  ===  ===========================
"""

from __future__ import annotations

from lightning_oom.memory.devices import read_memory, release_cached, reset_peak
from lightning_oom.memory.peaks import PeakWatch
from lightning_oom.memory.reading import MemoryReading
from lightning_oom.memory.registry import DeviceReader, register_reader

__all__ = [
    "DeviceReader",
    "MemoryReading",
    "PeakWatch",
    "read_memory",
    "register_reader",
    "release_cached",
    "reset_peak",
]
