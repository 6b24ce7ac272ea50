"""Changes worth trying on a module, before anyone knows what they save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_oom.planning.on_target import settings_on
from lightning_oom.reduction.checkpointing import find_blocks, install
from lightning_oom.reduction.drop_ins import replace_with_separable, tie_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_oom.planning.advice.record import Effect
    from lightning_oom.planning.target import TargetDevice
    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["Candidate", "changes_to_try"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_ATTENTION = "_attn_implementation"
"""Where transformers keeps which attention a model runs."""
_SMALLEST_CONVOLUTION = 1 << 16
"""Weights below which a convolution is not worth replacing."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A change of a step, to be tried on fake tensors.

    Attributes:
        title: See :class:`~lightning_oom.planning.advice.record.Advice`, as for the next four.
        place: Which modules or parameters.
        how: The line to write.
        effect: On the training.
        cost: In words.
        run: What :meth:`FakeStep.run <lightning_oom.planning.fake_step.FakeStep.run>` takes for it.
        factors: Instead of a run: storage -> fraction of its bytes that stays.
    """

    title: str
    place: str = ""
    how: str
    effect: Effect
    cost: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    factors: dict[int, float] | None = None


def changes_to_try(
    module: nn.Module,
    trace: MemoryTrace,
    *,
    rows: int | None,
    num_devices: int,
    precision: str | int | None,
    target: TargetDevice,
) -> Iterator[Candidate]:
    """Give the changes that can be made to a module by running it in another way.

    Args:
        module: The user's own; looked at, never changed.
        trace: Of the plain step, with its operators.
        rows: Of the batch, ``None`` for unknown.
        num_devices: That train side by side.
        precision: Of the trainer; ``None`` is 32-bit.
        target: The device that the step is for.
    """
    if getattr(module, "automatic_optimization", True):
        yield from _by_the_loop(module, rows, num_devices)
    yield from _checkpointing(module, trace)
    yield from _caches(module)
    yield from _attention(module)
    if precision is None or str(precision) in ("32", "32-true"):
        yield Candidate(
            title="compute in bfloat16",
            how='Trainer(precision="bf16-mixed"), or OOMRecovery() with AMPSwitcher(), which '
            "switches when memory runs out",
            effect="other numbers",
            cost="weights, gradients and optimizer state stay 32-bit",
            run=settings_on(target, "bf16-mixed"),
        )
    if target.kernels == "cuda":
        yield Candidate(
            title="an optimizer without copies of all gradients",
            how="fused=True, or foreach=False, in the optimizer's arguments",
            effect="rounding",
            run={"prepare_optimizers": None},
        )
    yield from _tying(module)
    yield from _separable(module)


def _by_the_loop(module: nn.Module, rows: int | None, num_devices: int) -> Iterator[Candidate]:
    """Give what only works where Lightning steps the optimizer."""
    yield Candidate(
        title="drop old gradients before the forward",
        how="callbacks: EarlyZeroGrad()",
        effect="same numbers",
        run={"zero_grad": "early"},
    )
    if rows is None or rows < 2:  # noqa: PLR2004 - one row cannot be halved
        return
    effective = rows * num_devices
    half = f"half the batch_size with GradientAccumulation(effective_batch_size={effective})"
    sees_rows = any(part.training and isinstance(part, _BATCH_NORMS) for part in module.modules())
    yield Candidate(
        title=f"run {rows // 2} rows at a time and accumulate",
        how=half if sees_rows else f"OOMRecovery(max_rows={rows // 2}), or {half}",
        effect="other numbers" if sees_rows else "rounding",
        cost="less parallel work"
        + ("; batch normalisation sees half the rows at a time" if sees_rows else ""),
        run={"rows": rows // 2, "accumulate": 2},
    )


def _checkpointing(module: nn.Module, trace: MemoryTrace) -> Iterator[Candidate]:
    paths = [block.path for block in find_blocks(module)]
    if not paths:
        return
    total = sum(call.flops or 0 for call in trace.operators)
    inside = sum(
        call.flops or 0
        for call in trace.operators
        if call.phase == "forward" and any(_is_within(call.module, path) for path in paths)
    )
    share = f", {inside / total:.0%} more operations" if total else ""
    yield Candidate(
        title="checkpoint activations",
        place=f"{len(paths)} blocks, {paths[0]} to {paths[-1]}" if len(paths) > 1 else paths[0],
        how="callbacks: ActivationCheckpointing()",
        effect="same numbers",
        cost=f"these blocks run their forward twice{share}",
        run={"transform": lambda clone: install(clone, paths)},
    )


def _is_within(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


def _caches(module: nn.Module) -> Iterator[Candidate]:
    configs = [
        (path, part.config)
        for path, part in module.named_modules()
        if getattr(getattr(part, "config", None), "use_cache", False) is True
    ]
    if not configs:
        return

    def switch_off(clone: nn.Module) -> None:
        for path, _ in configs:
            part: Any = clone.get_submodule(path)
            part.config = _Changed(part.config, use_cache=False)

    yield Candidate(
        title="make no key/value cache while training",
        place=configs[0][0],
        how=f"{_dotted(configs[0][0])}config.use_cache = False",
        effect="same numbers",
        run={"transform": switch_off},
    )


def _attention(module: nn.Module) -> Iterator[Candidate]:
    found = [
        path
        for path, part in module.named_modules()
        if getattr(getattr(part, "config", None), _ATTENTION, None) == "eager"
    ]
    if not found:
        return

    def switch(clone: nn.Module) -> None:
        for path in found:
            part: Any = clone.get_submodule(path)
            part.config = _Changed(part.config, **{_ATTENTION: "sdpa"})

    yield Candidate(
        title="attention without its score matrix",
        place=found[0],
        how=f'{_dotted(found[0])}set_attn_implementation("sdpa")',
        effect="rounding",
        run={"transform": switch},
    )


class _Changed:
    """A configuration with some values exchanged; the one it stands for stays as it is."""

    def __init__(self, config: Any, **values: Any) -> None:
        vars(self).update(values, wrapped=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["wrapped"], name)


def _tying(module: nn.Module) -> Iterator[Candidate]:
    embeddings = {
        path: part.weight for path, part in module.named_modules() if isinstance(part, nn.Embedding)
    }
    heads = {
        path: part.weight for path, part in module.named_modules() if isinstance(part, nn.Linear)
    }
    for path, table in embeddings.items():
        for head, weight in heads.items():
            if weight is table or weight.shape != table.shape or weight.dtype != table.dtype:
                continue
            names = [f"{path}.weight", f"{head}.weight"]
            yield Candidate(
                title="tie two weights of equal shape",
                place=" = ".join(names),
                how=f"lightning_oom.tie_weights(self, {names}) in the constructor",
                effect="another model",
                run={"transform": lambda clone, names=names: tie_weights(clone, names)},
            )


def _separable(module: nn.Module) -> Iterator[Candidate]:
    names = [
        path
        for path, part in module.named_modules()
        if isinstance(part, _CONVOLUTIONS)
        and part.groups == 1
        and max(part.kernel_size) > 1
        and part.weight.numel() >= _SMALLEST_CONVOLUTION
    ]
    if not names:
        return

    def replace(clone: nn.Module) -> None:
        for name in names:
            replace_with_separable(clone, name, initialize="fresh")

    yield Candidate(
        title="depthwise-separable convolutions",
        place=f"{len(names)} convolutions, {names[0]} to {names[-1]}",
        how="lightning_oom.replace_with_separable(self, name) in the constructor",
        effect="another model",
        cost="accuracy is to be seen; train anew",
        run={"transform": replace},
    )


def _dotted(path: str) -> str:
    return f"self.{path}." if path else "self."
