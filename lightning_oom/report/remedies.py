"""What to do about an out-of-memory error, with what each remedy frees and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from lightning_oom.report import remedies_of_step as of_step
from lightning_oom.report.diagnosis import diagnose
from lightning_oom.report.leaking import growth_per_step
from lightning_oom.report.needs import expect_shortfall
from lightning_oom.report.pressure import held_by_others
from lightning_oom.report.record import Diagnosis, OOMReport, Remedy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["REMEDIES", "find_remedies", "with_advice"]

_MAX_REMEDIES = 8
_NOTABLE_WEIGHT = 0.4
_FREE, _CHEAP, _SLOWER = range(3)
_NEWER_NAME = (2, 9)

Found: TypeAlias = "tuple[int, Remedy]"
"""How dear a remedy is (0 costs nothing, 3 most), and the remedy."""


def with_advice(report: OOMReport) -> OOMReport:
    """Return the report with what caused the error and what to do about it.

    Args:
        report: The record; what it says of both is replaced.
    """
    diagnoses = diagnose(report)
    return report.but(diagnoses=diagnoses, remedies=find_remedies(report, diagnoses))


def find_remedies(report: OOMReport, diagnoses: Sequence[Diagnosis]) -> tuple[Remedy, ...]:
    """List what to do, what should be tried first first.

    Args:
        report: The record.
        diagnoses: What :func:`~lightning_oom.report.diagnosis.diagnose` said of it.

    Returns:
        Up to 8. Remedies of the likeliest cause come first; of one cause, those that free enough
        come first, then the cheaper ones.
    """
    found: list[Remedy] = []
    for diagnosis in diagnoses:
        if diagnosis.weight < _NOTABLE_WEIGHT and found:
            continue
        ranked = []
        for dearness, remedy in REMEDIES[diagnosis.cause](report):
            suffices = _suffices(report, remedy)
            ranked.append((suffices is not True, dearness, _with_verdict(remedy, suffices)))
        found += [remedy for *_, remedy in sorted(ranked, key=lambda entry: entry[:2])]
    first = {remedy.setting or remedy.action: remedy for remedy in reversed(found)}
    return tuple(r for r in found if first[r.setting or r.action] is r)[:_MAX_REMEDIES]


def _suffices(report: OOMReport, remedy: Remedy) -> bool | None:
    shortfall = expect_shortfall(report)
    if remedy.saving_bytes is None or shortfall is None:
        return None
    return remedy.saving_bytes >= shortfall


def _with_verdict(remedy: Remedy, suffices: bool | None) -> Remedy:
    return Remedy(
        action=remedy.action,
        cost=remedy.cost,
        setting=remedy.setting,
        saving_bytes=remedy.saving_bytes,
        suffices=suffices,
    )


def _for_too_big(report: OOMReport) -> Iterator[Found]:
    yield from of_step.keep_no_graph(report)
    yield from of_step.recover(report)
    yield from of_step.fewer_rows(report)
    yield from of_step.lower_precision(report)
    yield from of_step.checkpoint_activations(report)
    yield from of_step.smaller_state(report)


def _for_fragmentation(report: OOMReport) -> Iterator[Found]:
    unallocated = report.unallocated_bytes
    already = "expandable_segments:True" in (report.allocator_settings or "")
    is_nvidia = (report.device or report.cause.device or "cuda").startswith("cuda")
    if is_nvidia and not already and not report.is_mig and report.platform != "win32":
        yield (
            _FREE,
            Remedy(
                action="Let the allocator grow its segments instead of adding new ones. It reads this "
                "before CUDA starts: set it in the shell, not in the script.",
                setting=f"{_settings_variable(report)}=expandable_segments:True",
                saving_bytes=unallocated,
                cost="none that can be measured; not for processes that share tensors by CUDA IPC",
            ),
        )
    if report.is_mig:
        yield (
            _FREE,
            Remedy(
                action="Keep large blocks whole. (Expandable segments are not safe on a MIG "
                "instance.) It is read before CUDA starts.",
                setting=f"{_settings_variable(report)}=max_split_size_mb:128",
                cost="some more calls into the driver",
            ),
        )
    if not report.has_recovery:
        yield (
            _CHEAP,
            Remedy(
                action="Add OOMRecovery: its first rung empties the cache and repeats the step.",
                setting="Trainer(callbacks=[OOMRecovery()])",
                saving_bytes=unallocated,
                cost="one repeated step for each such OOM; the result stays the same",
            ),
        )
    yield (
        _SLOWER,
        Remedy(
            action="Let batches have few different shapes: pad to a multiple, or sort by length.",
            cost="some padding",
        ),
    )


def _settings_variable(report: OOMReport) -> str:
    version = tuple(int(p) for p in (report.torch_version or "2.4").split(".")[:2] if p.isdigit())
    return "PYTORCH_ALLOC_CONF" if version >= _NEWER_NAME else "PYTORCH_CUDA_ALLOC_CONF"


def _for_other_processes(report: OOMReport) -> Iterator[Found]:
    yield (
        _FREE,
        Remedy(
            action="End the other processes, or take another device. A notebook or a crashed run "
            "keeps its memory until its process ends.",
            setting="nvidia-smi",
            saving_bytes=held_by_others(report),
            cost="none for this run",
        ),
    )
    yield (
        _CHEAP,
        Remedy(
            action="If the others are ranks of the same run: give each rank a device of its own "
            "(devices=..., or torch.cuda.set_device(local_rank) before anything is put there).",
            cost="none",
        ),
    )


def _for_leak(report: OOMReport) -> Iterator[Found]:
    grown = sum(thing.num_bytes for thing in report.growing)
    points = report.timeline[2:]
    if not grown and growth_per_step(points) is not None:
        grown = points[-1].allocated_bytes - points[0].allocated_bytes
    where = f" ({report.growing[0].path})" if report.growing else ""
    yield (
        _FREE,
        Remedy(
            action=f"Keep numbers, not tensors with their graph, from step to step{where}: "
            "loss.detach(), loss.item(), or self.log.",
            setting="self.history.append(loss.detach().cpu())",
            saving_bytes=grown or None,
            cost="none",
        ),
    )
    if not report.growing:
        yield (
            _FREE,
            Remedy(
                action="Let the leak finder name what grows.",
                setting="Trainer(callbacks=[MemoryMonitor(find_leaks=True)])",
                cost="little",
            ),
        )


def _for_optimizer_state(report: OOMReport) -> Iterator[Found]:
    yield from of_step.smaller_state(report)
    if not report.has_recovery:
        yield (
            _CHEAP,
            Remedy(
                action="Add OOMRecovery: it finishes the update parameter by parameter.",
                setting="Trainer(callbacks=[OOMRecovery()])",
                cost="slower updates where memory is short; the result stays the same",
            ),
        )


def _for_request(report: OOMReport) -> Iterator[Found]:
    where = f" in {report.module_path}" if report.module_path else ""
    yield (
        _FREE,
        Remedy(
            action=f"Look at the shapes{where}: a tensor of this size is mostly a mistake, such as "
            "broadcasting (N, 1) with (1, N), one_hot over a large vocabulary, or a mask over pairs.",
            cost="none",
        ),
    )
    yield from of_step.fewer_rows(report)


def _for_restore(report: OOMReport) -> Iterator[Found]:
    parameters = report.kinds.parameters_bytes if report.kinds is not None else None
    yield (
        _FREE,
        Remedy(
            action="Load the checkpoint to the host; load_state_dict copies it to where it belongs.",
            setting='torch.load(path, map_location="cpu")',
            saving_bytes=parameters or None,
            cost="host memory for one copy of the checkpoint while it is read",
        ),
    )
    yield (
        _FREE,
        Remedy(
            action="Delete the loaded dictionary and other models before the training starts.",
            setting="del checkpoint",
            cost="none",
        ),
    )


def _for_host(_report: OOMReport) -> Iterator[Found]:
    yield (
        _CHEAP,
        Remedy(
            action="Use fewer DataLoader workers, or let each hold fewer batches ready.",
            setting="DataLoader(num_workers=2, prefetch_factor=2)",
            cost="slower loading, where loading is what the GPU waits for",
        ),
    )
    yield (
        _CHEAP,
        Remedy(
            action="Keep the data set in arrays or memory-mapped files, not in Python lists: each "
            "worker copies a list as it counts references to its items.",
            cost="some work on the data set",
        ),
    )
    yield (
        _SLOWER,
        Remedy(
            action="Write predictions and outputs out as they come instead of collecting them.",
            setting="trainer.predict(..., return_predictions=False)",
            cost="a writer callback",
        ),
    )


def _for_shared_memory(_report: OOMReport) -> Iterator[Found]:
    yield (
        _FREE,
        Remedy(
            action="Give the container more shared memory.",
            setting="docker run --shm-size=8g (or --ipc=host)",
            cost="none",
        ),
    )
    yield (
        _FREE,
        Remedy(
            action="Let workers hand over files instead of shared-memory segments.",
            setting='torch.multiprocessing.set_sharing_strategy("file_system")',
            cost="little",
        ),
    )
    yield from _for_host(_report)


def _for_collective(_report: OOMReport) -> Iterator[Found]:
    yield (
        _FREE,
        Remedy(
            action="Look at the log of the other ranks: one of them stopped, or ran out of memory.",
            setting="NCCL_DEBUG=INFO",
            cost="none",
        ),
    )


def _for_disguised(_report: OOMReport) -> Iterator[Found]:
    yield (
        _FREE,
        Remedy(
            action="Repeat the step with fewer rows: if it works, it was memory; if not, look at the "
            "error itself.",
            setting="CUDA_LAUNCH_BLOCKING=1",
            cost="slower while it is set",
        ),
    )


REMEDIES: dict[str, Callable[[OOMReport], Iterator[Found]]] = {
    "too_big": _for_too_big,
    "fragmentation": _for_fragmentation,
    "other_processes": _for_other_processes,
    "leak": _for_leak,
    "optimizer_state": _for_optimizer_state,
    "request_exceeds_device": _for_request,
    "checkpoint_restore": _for_restore,
    "host_memory": _for_host,
    "shared_memory": _for_shared_memory,
    "collective": _for_collective,
    "disguised": _for_disguised,
}
"""What can be done about each of the :data:`~lightning_oom.report.diagnosis.CAUSES`."""
