"""What to do about an out-of-memory error, with what each remedy frees and costs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_oom.report import remedies_of_host as of_host
from lightning_oom.report import remedies_of_rows as of_rows
from lightning_oom.report import remedies_of_step as of_step
from lightning_oom.report.dearness import CHEAP, FREE, SLOWER, Found, place_in_list
from lightning_oom.report.diagnosis import diagnose
from lightning_oom.report.leaking import growth_per_step
from lightning_oom.report.needs import expect_shortfall
from lightning_oom.report.outside import CONTEXT_BYTES, backend_of, outside_bytes
from lightning_oom.report.pressure import held_by_others
from lightning_oom.report.record import Diagnosis, OOMReport, Remedy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["REMEDIES", "find_remedies", "with_advice"]

_MAX_REMEDIES = 8
_NOTABLE_WEIGHT = 0.4
_NEWER_NAME = (2, 9)
_MONITORS = {"cuda": "nvidia-smi", "hip": "rocm-smi", "xpu": "xpu-smi ps"}
_NAMED_VARIABLE = re.compile(r"\b(PYTORCH_\w*ALLOC_CONF)=expandable")


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
        Up to 8. Remedies of the likeliest cause come first; of one cause, those after which the step
        computes the same; of these, those that free enough, then the cheaper ones.
    """
    found: list[Remedy] = []
    for diagnosis in diagnoses:
        if diagnosis.weight < _NOTABLE_WEIGHT and found:
            continue
        ranked = []
        for dearness, remedy in REMEDIES[diagnosis.cause](report):
            judged = _judge(report, remedy)
            ranked.append((place_in_list(dearness, judged.suffices), judged))
        found += [remedy for _, remedy in sorted(ranked, key=lambda entry: entry[0])]
    first = {remedy.setting or remedy.action: remedy for remedy in reversed(found)}
    return tuple(r for r in found if first[r.setting or r.action] is r)[:_MAX_REMEDIES]


def _judge(report: OOMReport, remedy: Remedy) -> Remedy:
    """Say whether a remedy frees enough, where it does not say so itself."""
    shortfall = expect_shortfall(report)
    if remedy.suffices is not None or remedy.saving_bytes is None or shortfall is None:
        return remedy
    return replace(remedy, suffices=remedy.saving_bytes >= shortfall)


def _for_too_big(report: OOMReport) -> Iterator[Found]:
    if report.phase == "setup":
        yield from of_step.smaller_model(report)
        return
    yield from of_step.keep_no_graph(report)
    yield from of_rows.recover(report)
    yield from of_step.drop_gradients_early(report)
    yield from of_step.checkpoint_activations(report)
    yield from of_step.offload_activations(report)
    yield from of_step.lower_precision(report)
    yield from of_rows.fewer_rows(report)
    yield from of_step.smaller_state(report)


def _for_driver(report: OOMReport) -> Iterator[Found]:
    yield (
        FREE,
        Remedy(
            action="Look who else is on the device, and end it or take another device.",
            setting=_MONITORS.get(backend_of(report)),
            cost="none for this run",
        ),
    )
    yield from of_rows.recover(report)
    if backend_of(report) in ("cuda", "hip"):
        yield (
            CHEAP,
            Remedy(
                action="Leave some memory to the libraries: what PyTorch caches is not there for them.",
                setting="torch.cuda.set_per_process_memory_fraction(0.95)",
                cost="that much less for tensors",
            ),
        )
    yield from of_rows.fewer_rows(report)


def _for_fragmentation(report: OOMReport) -> Iterator[Found]:
    unallocated = report.unallocated_bytes
    already = "expandable_segments:True" in (report.allocator_settings or "")
    if (
        backend_of(report) in ("cuda", "hip")
        and not already
        and not report.is_mig
        and report.platform != "win32"
    ):
        yield (
            FREE,
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
            FREE,
            Remedy(
                action="Keep large blocks whole. (Expandable segments are not safe on a MIG "
                "instance.) It is read before CUDA starts.",
                setting=f"{_settings_variable(report)}=max_split_size_mb:128",
                cost="some more calls into the driver",
            ),
        )
    if not report.has_recovery:
        yield (
            CHEAP,
            Remedy(
                action="Add OOMRecovery: its first rung empties the cache and repeats the step.",
                setting="Trainer(callbacks=[OOMRecovery()])",
                saving_bytes=unallocated,
                cost="one repeated step for each such OOM; the result stays the same",
            ),
        )
    yield (
        SLOWER,
        Remedy(
            action="Let batches have few different shapes: pad to a multiple, or sort by length.",
            cost="some padding",
        ),
    )


def _settings_variable(report: OOMReport) -> str:
    named = _NAMED_VARIABLE.search(report.cause.message)
    if named is not None and report.torch_version is None:
        return named[1]
    version = tuple(int(p) for p in (report.torch_version or "2.4").split(".")[:2] if p.isdigit())
    return "PYTORCH_ALLOC_CONF" if version >= _NEWER_NAME else "PYTORCH_CUDA_ALLOC_CONF"


def _for_other_processes(report: OOMReport) -> Iterator[Found]:
    yield (
        FREE,
        Remedy(
            action="End the other processes, or take another device. A notebook or a crashed run "
            "keeps its memory until its process ends.",
            setting=_MONITORS.get(backend_of(report)),
            saving_bytes=held_by_others(report),
            cost="none for this run",
        ),
    )
    yield (
        CHEAP,
        Remedy(
            action="If the others are ranks of the same run: give each rank a device of its own "
            "(devices=..., or torch.cuda.set_device(local_rank) before anything is put there).",
            cost="none",
        ),
    )


def _for_outside(report: OOMReport) -> Iterator[Found]:
    held = outside_bytes(report) if report.cause.free_bytes is not None else None
    if backend_of(report) == "mps":
        yield (
            FREE,
            Remedy(
                action="Restart the process, and end other things in it that use Metal.",
                cost="none for the run",
            ),
        )
    else:
        yield (
            FREE,
            Remedy(
                action="Look who else is on the device, and end it or take another device. A notebook "
                "or a crashed run keeps its memory until its process ends.",
                setting=_MONITORS.get(backend_of(report)),
                saving_bytes=None if held is None else max(held - CONTEXT_BYTES, 0) or None,
                cost="none for this run",
            ),
        )
    yield from of_rows.recover(report)
    yield from of_rows.fewer_rows(report)


def _for_refusal(report: OOMReport) -> Iterator[Found]:
    yield (
        FREE,
        Remedy(
            action="Look for a cap: torch.cuda.set_per_process_memory_fraction, limits of the container "
            "or the job, mappings and locked memory (ulimit -l, vm.max_map_count).",
            cost="none",
        ),
    )
    yield (
        FREE,
        Remedy(
            action="Look at the other processes of the device while the run starts: one may have held "
            "the memory for a moment.",
            setting=_MONITORS.get(backend_of(report)),
            cost="none",
        ),
    )
    if not report.has_recovery:
        yield (
            CHEAP,
            Remedy(
                action="Add OOMRecovery: its first rung empties the cache and repeats the step.",
                setting="Trainer(callbacks=[OOMRecovery()])",
                cost="one repeated step for each such OOM; the result stays the same",
            ),
        )


def _for_leak(report: OOMReport) -> Iterator[Found]:
    grown = sum(thing.num_bytes for thing in report.growing)
    points = report.timeline[2:]
    if not grown and growth_per_step(points) is not None:
        grown = points[-1].allocated_bytes - points[0].allocated_bytes
    where = f" ({report.growing[0].path})" if report.growing else ""
    yield (
        FREE,
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
            FREE,
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
            CHEAP,
            Remedy(
                action="Add OOMRecovery: it finishes the update parameter by parameter.",
                setting="Trainer(callbacks=[OOMRecovery()])",
                cost="slower updates where memory is short; the result stays the same",
            ),
        )


def _for_request(report: OOMReport) -> Iterator[Found]:
    where = f" in {report.module_path}" if report.module_path else ""
    yield (
        FREE,
        Remedy(
            action=f"Look at the shapes{where}: a tensor of this size is mostly a mistake, such as "
            "broadcasting (N, 1) with (1, N), one_hot over a large vocabulary, or a mask over pairs.",
            cost="none",
        ),
    )
    yield from of_rows.fewer_rows(report)


def _for_restore(report: OOMReport) -> Iterator[Found]:
    parameters = report.kinds.parameters_bytes if report.kinds is not None else None
    yield (
        FREE,
        Remedy(
            action="Load the checkpoint to the host; load_state_dict copies it to where it belongs.",
            setting='torch.load(path, map_location="cpu")',
            saving_bytes=parameters or None,
            cost="host memory for one copy of the checkpoint while it is read",
        ),
    )
    yield (
        FREE,
        Remedy(
            action="Delete the loaded dictionary and other models before the training starts.",
            setting="del checkpoint",
            cost="none",
        ),
    )


def _for_collective(_report: OOMReport) -> Iterator[Found]:
    yield (
        FREE,
        Remedy(
            action="Look at the log of the other ranks: one of them stopped, or ran out of memory.",
            setting="NCCL_DEBUG=INFO",
            cost="none",
        ),
    )


def _for_disguised(report: OOMReport) -> Iterator[Found]:
    yield (
        FREE,
        Remedy(
            action="Repeat the step with fewer rows: if it works, it was memory; if not, look at the "
            "error itself.",
            setting="CUDA_LAUNCH_BLOCKING=1" if backend_of(report) == "cuda" else None,
            cost="slower while it is tried",
        ),
    )


REMEDIES: dict[str, Callable[[OOMReport], Iterator[Found]]] = {
    "too_big": _for_too_big,
    "fragmentation": _for_fragmentation,
    "other_processes": _for_other_processes,
    "outside_torch": _for_outside,
    "driver_full": _for_driver,
    "refused_with_room": _for_refusal,
    "leak": _for_leak,
    "optimizer_state": _for_optimizer_state,
    "request_exceeds_device": _for_request,
    "checkpoint_restore": _for_restore,
    "host_memory": of_host.for_host,
    "shared_memory": of_host.for_shared_memory,
    "collective": _for_collective,
    "disguised": _for_disguised,
}
"""What can be done about each of the :data:`~lightning_oom.report.diagnosis.CAUSES`."""
