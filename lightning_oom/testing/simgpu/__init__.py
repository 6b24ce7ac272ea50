"""A GPU in pure Python: host and device apart, a caching allocator, and an end to its memory."""

from lightning_oom.testing.simgpu.accelerator import SimulatedGPUAccelerator
from lightning_oom.testing.simgpu.gpu import SimulatedGPU
from lightning_oom.testing.simgpu.strategy import SimulatedGPUStrategy

__all__ = ["SimulatedGPU", "SimulatedGPUAccelerator", "SimulatedGPUStrategy"]
