"""Every form in which a device says that it is full is survived; other errors pass through."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from fakes import CUDA_MESSAGE, FailsAt, TinyRegressor, batches_of, cuda_oom, failing
from fits import end_state, fit, notes_of, quiet, recovery
from states import compare

from lightning_oom import OOMRecovery
from lightning_oom._torch import OutOfMemoryError
from lightning_oom.errors import AmbiguousOOMWarning

NVML_ASSERT = (
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/conda/conda-bld/pytorch/work/c10/cuda/'
    'CUDACachingAllocator.cpp":1154, please report a bug to PyTorch.'
)
MORE_THAN_AN_EXABYTE = "CUDA out of memory. Tried to allocate more than 1EB memory."


def accelerator_error(text: str) -> Exception:
    """The class of newer torch releases for asynchronous device errors; older ones use RuntimeError."""
    return getattr(torch, "AcceleratorError", RuntimeError)(text)


FORMS = {
    "cuda": cuda_oom,
    "runtime": lambda: RuntimeError(CUDA_MESSAGE),
    "driver text": lambda: RuntimeError("CUDA error: out of memory"),
    "accelerator": lambda: accelerator_error("CUDA error: out of memory"),
    "bare": lambda: OutOfMemoryError("Allocation on device"),
    "hip": lambda: OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 MiB."),
    "cublas": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "nvml assert": lambda: RuntimeError(NVML_ASSERT),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_the_error_is_survived(form):
    """Class first, then text: the first batch is recovered whatever the driver says (MC#3397)."""
    guard = recovery()

    expected, _ = fit(TinyRegressor, batches_of([8, 8, 8]))
    doubtful = form == "nvml assert"
    with pytest.warns(AmbiguousOOMWarning) if doubtful else contextlib.nullcontext():
        actual, _ = fit(failing(0, make_error=FORMS[form]), batches_of([8, 8, 8]), guard)

    assert guard.summary.num_recovered == 1
    assert compare(_without_names(expected), _without_names(actual), tolerance=1e-5) == []


def _without_names(trainer: Any) -> Any:
    """The state without parameter names, which an inserted layer shifts."""
    state = end_state(trainer)
    return {**state, "weights": list(state["weights"].values())}


def test_an_ambiguous_error_that_comes_back_is_raised_with_a_note():
    """An internal NVML assert gets one smaller retry, then the error itself (PT#112377)."""
    guard = recovery()

    with (
        pytest.warns(AmbiguousOOMWarning),
        pytest.raises(RuntimeError, match="NVML_SUCCESS") as caught,
    ):
        fit(failing(make_error=FORMS["nvml assert"]), batches_of([8]), guard)

    assert "lightning_oom" in notes_of(caught.value)
    assert guard.summary.num_failed_attempts == 2


NOT_MEMORY = {
    "exabyte": lambda: OutOfMemoryError(MORE_THAN_AN_EXABYTE),
    "illegal access": lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
    "triton": lambda: RuntimeError(
        "out of resource: shared memory, Required: 108672, Hardware limit: 101376."
    ),
    "worker": lambda: RuntimeError("DataLoader worker (pid 12847) is killed by signal: Killed"),
    "user": lambda: ValueError("an ordinary mistake"),
    "collective": lambda: torch.distributed.DistBackendError(
        "NCCL error: unhandled cuda error, NCCL version 2.19.3 ncclUnhandledCudaError: Call to CUDA "
        "function failed. Last error: Failed to CUDA calloc async 608 bytes: out of memory"
    ),
}


@pytest.mark.parametrize("form", NOT_MEMORY)
def test_an_error_that_is_no_lack_of_memory_passes_through_at_once(form):
    """Not retried, not replaced, not annotated (NVIDIA/nccl#1284)."""
    guard = recovery()
    model = failing(0, make_error=NOT_MEMORY[form])()
    trainer = quiet(guard)

    with pytest.raises(type(NOT_MEMORY[form]())) as caught:
        trainer.fit(model, batches_of([8, 8]))

    assert len(model.body[1].calls.numbers) == 1
    assert not getattr(caught.value, "__notes__", [])
    assert guard.summary.num_oom == 0


@pytest.mark.parametrize(
    ("call", "loaders", "place"),
    [
        ("fit", 1, "sanity check, batch 0"),
        ("validate", 1, "validation, batch 1"),
        ("test", 2, "test, batch 1 of dataloader 1"),
        ("predict", 2, "predict, batch 1 of dataloader 1"),
    ],
)
def test_the_line_says_which_batch_it_was(call, loaders, place, monkeypatch):
    """Stage, batch and dataloader, in evaluation too."""

    class Model(TinyRegressor):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            return self.loss(batch)

        test_step = predict_step = validation_step

    calls = [0] if call == "fit" else [2 * loaders - 1]
    model = Model()
    model.body[1] = FailsAt(*calls)
    data = [batches_of([8, 8]) for _ in range(loaders)]
    lines: list[str] = []
    monkeypatch.setattr("lightning_oom.callbacks.oom_recovery.rank_zero_info", lines.append)
    trainer = quiet(OOMRecovery(), num_sanity_val_steps=1)
    if call == "fit":
        trainer.fit(model, batches_of([8]), data[0])
    else:
        getattr(trainer, call)(model, data if loaders > 1 else data[0])

    assert lines[0].startswith(f"OOMRecovery: {place}, out of memory with 8 rows")
