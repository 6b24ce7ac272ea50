"""Trace timm models as the published measurements ran them, and keep the traces on disk.

Needs timm and torchvision, which the development environment lacks; see ``estimate.py``.
"""

from __future__ import annotations

import gzip
import pickle
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom.planning.fake_step import FakeStep
from lightning_oom.planning.kernels import cuda_autocast, cuda_choices, use_foreach

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_oom.planning.trace import MemoryTrace

ROWS = (8, 16)
"""Rows of the two traces of a model; every allocation is extended along its own line."""


@dataclass(frozen=True)
class Workload:
    """How a source of measurements trained its models.

    Attributes:
        name: Names the files in the cache.
        precision: As in ``Trainer(precision=...)``.
        fused_attention: Whether timm of that time used torch's fused attention.
        weight_decay: Of the SGD with momentum that both sources used.
        foreach: Whether torch of that time stepped groups of tensors.
        channels_last: Memory format of model and images.
    """

    name: str
    precision: str
    fused_attention: bool
    weight_decay: float
    foreach: bool
    channels_last: bool = False


A100 = Workload("a100", "32-true", fused_attention=True, weight_decay=2e-5, foreach=True)
RTX3090 = Workload("rtx3090", "16-mixed", fused_attention=False, weight_decay=0.0, foreach=False)


def traces_of(
    model: str, workload: Workload, cache: Path, size: int | None = None, *, cached: bool = False
) -> tuple[MemoryTrace, ...]:
    """Return the traces of a model at :data:`ROWS`, from the cache where they are there.

    Raises:
        FileNotFoundError: They are not there, and only cached ones are wanted.
    """
    path = cache / f"{workload.name}.{model}.{size or 0}.pkl.gz"
    if path.exists():
        with gzip.open(path) as file:
            return pickle.load(file)  # type: ignore[no-any-return] # noqa: S301 - our own file
    if cached:
        raise FileNotFoundError("not in the cache")
    traces = _trace(model, workload, size)
    partial_path = path.with_suffix(".part")
    with gzip.open(partial_path, "wb", compresslevel=1) as file:
        pickle.dump(traces, file, protocol=4)
    partial_path.rename(path)
    return traces


def image_size(model: str, size: int | None = None) -> int:
    """Return the height and width of the images that a model is trained on by default."""
    import timm

    return size or int(timm.get_pretrained_cfg(model).input_size[-1])


def _trace(model: str, workload: Workload, size: int | None) -> tuple[MemoryTrace, ...]:
    import timm

    timm.layers.set_fused_attn(workload.fused_attention)
    with torch.device("meta"):
        network = timm.create_model(model)
    network.train()
    side = image_size(model, size)
    layout = torch.channels_last if workload.channels_last else torch.contiguous_format
    network = network.to(memory_format=layout)
    images = torch.empty(ROWS[0], 3, side, side, device="meta").contiguous(memory_format=layout)
    batch = (images, torch.empty(ROWS[0], dtype=torch.int64, device="meta"))
    step = FakeStep(network, batch, loss=_loss)
    return tuple(
        step.run(
            rows=rows,
            precision=workload.precision,
            optimizer=partial(_optimizer, workload),
            zero_grad="early",
            context=lambda _: cuda_choices(),
            autocast=partial(cuda_autocast, torch.float16),
            prepare_optimizers=use_foreach if workload.foreach else None,
            record_operators=True,
        )
        for rows in ROWS
    )


def _loss(network: Any, batch: Any) -> torch.Tensor:
    output = network(batch[0])
    first = output[0] if isinstance(output, (tuple, list)) else output
    return torch.nn.functional.cross_entropy(first, batch[1])


def _optimizer(workload: Workload, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.ndim > 1]},
    ]
    return torch.optim.SGD(
        groups,
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=workload.weight_decay,
        foreach=None if workload.foreach else False,
    )
