"""Peaks of several readers, phases, samples in the background, aggregates over ranks."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch.multiprocessing as mp

from lightning_oom.memory import PeakWatch, reset_peak
from lightning_oom.memory.nvml import ProcessMemory
from lightning_oom.memory.phases import PhasePeaks
from lightning_oom.memory.process import ProcessProbe, ProcessSample, read_host_rss
from lightning_oom.memory.ranks import RankAggregates
from lightning_oom.memory.sampler import BackgroundSampler
from lightning_oom.recovery.learning import RowsLearning
from lightning_oom.testing import SimulatedGPU

KIB = 1024


@pytest.fixture
def gpu():
    """A simulated GPU, its peaks as low as what is held."""
    with SimulatedGPU("256 MiB") as gpu:
        reset_peak(gpu.device)
        yield gpu


def spike(device: torch.device, kib: int) -> None:
    """Hold some KiB for a moment."""
    torch.empty(kib * KIB, dtype=torch.uint8, device=device)


def test_a_reset_by_another_reader_hides_no_peak(gpu) -> None:
    """Each watch has the peak since its own start, whoever reset the counters in between."""
    held = torch.simgpu.memory_allocated()
    watch, other = PeakWatch(gpu.device), PeakWatch("simgpu")
    spike(gpu.device, 64)
    reset_peak(gpu.device)
    spike(gpu.device, 16)

    assert torch.simgpu.max_memory_allocated() == held + 16 * KIB
    assert other.take().allocated_bytes == held + 64 * KIB
    spike(gpu.device, 8)
    assert other.read().allocated_bytes == held + 8 * KIB
    assert watch.read().allocated_bytes == held + 64 * KIB
    assert watch.take().allocated_bytes == held + 64 * KIB
    assert watch.take().allocated_bytes == held


def test_the_rows_policy_and_the_monitor_share_a_device(gpu) -> None:
    """A new attempt of the recovery hides no peak of the monitor, and a phase none of the recovery."""
    held = torch.simgpu.memory_allocated()
    learning = RowsLearning(None, device=gpu.device, read=lambda: None)
    learning._watch = PeakWatch(gpu.device)
    phases = PhasePeaks(gpu.device)
    phases.enter("forward")
    spike(gpu.device, 64)
    learning.before_attempt()
    spike(gpu.device, 32)
    phases.enter("backward")
    spike(gpu.device, 16)

    assert learning._watch.read().allocated_bytes == held + 32 * KIB
    peaks = {name: found.allocated_bytes - held for name, found in phases.take().items()}
    assert peaks == {"forward": 64 * KIB, "backward": 16 * KIB}


def test_a_dead_watch_is_forgotten(gpu) -> None:
    """No registry keeps a watch alive, and the others go on."""
    watch, other = PeakWatch(gpu.device), PeakWatch(gpu.device)
    held = torch.simgpu.memory_allocated()
    del watch
    spike(gpu.device, 4)
    reset_peak(gpu.device)

    assert other.take().allocated_bytes == held + 4 * KIB


def test_a_device_without_peaks_has_none() -> None:
    """On the host there is nothing to keep."""
    assert PeakWatch("cpu").take().allocated_bytes is None


def test_the_first_sample_is_there_at_once_and_the_thread_ends() -> None:
    """Starting waits for one answer; later ones come from another thread, until it is stopped."""
    threads, again = [], threading.Event()

    def probe() -> int:
        threads.append(threading.current_thread())
        if len(threads) > 2:
            again.set()
        return len(threads)

    sampler = BackgroundSampler(probe, interval_seconds=0.001)
    sampler.start()
    sampler.start()  # nothing
    first = sampler.latest
    assert again.wait(10)
    sampler.stop()
    sampler.stop()

    assert first is not None
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()
    assert not threads[1].is_alive()


def test_a_probe_that_fails_ends_nothing() -> None:
    """Its answer is missing, no more."""
    sampler = BackgroundSampler(lambda: 1 // 0, interval_seconds=60)
    sampler.start()
    sampler.stop()

    assert sampler.latest is None


def test_interval_is_checked() -> None:
    """A thread that never rests is refused."""
    with pytest.raises(ValueError, match="interval_seconds is above 0, got 0"):
        BackgroundSampler(int, interval_seconds=0)


def test_a_sample_of_the_host_has_workers_included() -> None:
    """A child process raises what is counted."""
    before = read_host_rss()
    code = "print(flush=True); input()"
    with subprocess.Popen(  # noqa: S603 # the code stands here
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        with_child = read_host_rss()
        child.communicate(b"\n")

    assert with_child > before + 2**20


def test_a_probe_on_the_host_knows_no_other_processes() -> None:
    """Without an NVML device what it would say is absent."""
    probe = ProcessProbe("cpu")
    sample = probe()
    probe.close()
    probe.close()

    assert 0 < sample.host_rss_bytes < sample.host_limit_bytes
    assert (sample.processes, sample.other_processes_bytes, sample.outside_torch_bytes) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("used", "own", "reserved", "others", "outside"),
    [
        ((700, 300), 700, 500, 300, 200),
        ((300,), None, 0, 300, None),  # this process is not on the device yet
        ((300,), None, 500, None, None),  # it is, but under a number of the host
        ((700, None), 700, 500, None, 200),  # the driver does not tell
        ((), None, None, 0, None),
    ],
)
def test_what_is_not_known_of_processes_is_absent(used, own, reserved, others, outside) -> None:
    """Other processes are what is left without this one, where both are known."""
    sample = ProcessSample(
        processes=tuple(ProcessMemory(pid=i, used_bytes=size) for i, size in enumerate(used)),
        own_bytes=own,
        reserved_bytes=reserved,
    )

    assert (sample.other_processes_bytes, sample.outside_torch_bytes) == (others, outside)


def aggregate(rank: int, port: int, found: mp.SimpleQueue) -> None:
    """One rank: two readings, the second rank has no limit."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    aggregates = RankAggregates(["held", "limit"])
    for held in (1.0, 3.0):
        aggregates.add({"held": held + 10 * rank, **({} if rank else {"limit": 8.0})})
    found.put((rank, aggregates.compute()))
    torch.distributed.destroy_process_group()


def test_aggregates_are_over_all_ranks() -> None:
    """Every rank gets minimum, mean and maximum of all; what one rank lacks does not count."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = mp.get_context("spawn").SimpleQueue()
    mp.spawn(aggregate, args=(port, found), nprocs=2)
    answers = dict(found.get() for _ in range(2))

    assert answers[0] == answers[1]
    assert answers[0] == {
        "held_min": 1.0,
        "held_mean": 7.0,
        "held_max": 13.0,
        "limit_min": 8.0,
        "limit_mean": 8.0,
        "limit_max": 8.0,
    }
