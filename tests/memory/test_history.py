"""The allocator's history is switched on before, off after, and left alone when it is another's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_oom.memory.history import AllocatorHistory

CPU = torch.device("cpu")


class FakeRecorder:
    """Records what is asked of it."""

    def __init__(self, *, recording: bool = False, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.recording = recording
        self.fails = fails

    def is_recording(self) -> bool:
        """Say whether it records."""
        return self.recording

    def start(self, max_entries: int) -> None:
        """Record."""
        self.calls.append(f"start {max_entries}")
        if self.fails:
            raise RuntimeError("not built with CUDA")
        self.recording = True

    def stop(self) -> None:
        """Stop."""
        self.calls.append("stop")
        self.recording = False

    def dump(self, path: str) -> None:
        """Write, which needs the recording to be on."""
        assert self.recording
        Path(path).write_bytes(b"snapshot")
        self.calls.append("dump")


def test_the_snapshot_is_taken_while_recording(tmp_path) -> None:
    """Start, dump, stop; each once however often it is asked for."""
    recorder = FakeRecorder()
    history = AllocatorHistory(CPU, max_entries=7, recorder=recorder)
    history.start()
    history.start()
    assert history.dump(tmp_path / "a.pickle")
    history.stop()
    history.stop()
    assert recorder.calls == ["start 7", "dump", "stop"]


def test_a_recording_of_somebody_else_stays_on(tmp_path) -> None:
    """It is dumped as well, and neither started nor stopped."""
    recorder = FakeRecorder(recording=True)
    history = AllocatorHistory(CPU, recorder=recorder)
    history.start()
    assert history.dump(tmp_path / "a.pickle")
    history.stop()
    assert recorder.calls == ["dump"]


def test_a_recording_that_did_not_start_is_not_stopped() -> None:
    """The error of the start is the caller's to handle."""
    recorder = FakeRecorder(fails=True)
    history = AllocatorHistory(CPU, recorder=recorder)
    with pytest.raises(RuntimeError, match="not built"):
        history.start()
    history.stop()
    assert "stop" not in recorder.calls


def test_other_devices_have_no_history(tmp_path) -> None:
    """Nothing happens on the CPU and nothing is written."""
    history = AllocatorHistory(CPU)
    history.start()
    assert not history.is_available
    assert not history.dump(tmp_path / "a.pickle")
    history.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_cuda_writes_a_snapshot(tmp_path) -> None:
    """The real recorder, for memory_viz."""
    history = AllocatorHistory(torch.device("cuda"))
    history.start()
    x = torch.ones(1 << 20, device="cuda")
    del x
    assert history.dump(tmp_path / "a.pickle")
    history.stop()
    assert (tmp_path / "a.pickle").stat().st_size > 0
