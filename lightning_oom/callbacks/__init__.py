"""Callbacks that wire the engines to a Lightning trainer, one class a file."""

from lightning_oom.callbacks.cache_cleaner import CacheCleaner
from lightning_oom.callbacks.memory_monitor import MemoryMonitor
from lightning_oom.callbacks.oom_recovery import OOMRecovery
from lightning_oom.callbacks.oom_reporter import OOMReporter

__all__ = ["CacheCleaner", "MemoryMonitor", "OOMRecovery", "OOMReporter"]
