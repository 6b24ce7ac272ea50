"""Callbacks that wire the engines to a Lightning trainer, one class a file."""

from lightning_oom.callbacks.oom_recovery import OOMRecovery

__all__ = ["OOMRecovery"]
