"""Where in a step an error came from, read off the lines of its traceback."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lightning_oom.report.record import CodeLine

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PHASES", "find_phase", "find_stage", "parse_traceback", "users_line"]

PHASES: tuple[tuple[str, str, str], ...] = (
    ("setup", r"lightning.*strateg\w*\.py$", r"model_to_device|setup|setup_optimizers"),
    ("restore", r"lightning.*checkpoint_connector\.py$", r"_?restore\w*|resume_start"),
    ("restore", r"torch/serialization\.py$", r"load|_load|_legacy_load"),
    ("restore", r"torch/nn/modules/module\.py$", r"load_state_dict"),
    ("restore", r"torch/optim/optimizer\.py$", r"load_state_dict"),
    ("transfer", r"lightning.*", r"batch_to_device|_?transfer_batch_to_device"),
    ("forward", r"lightning.*strateg\w*\.py$", r"(?:training|validation|test|predict)_step"),
    ("forward", r"", r"(?:training|validation|test|predict)_step"),
    ("backward", r"torch/autograd/(?:graph|__init__)\.py$", r"_engine_run_backward|backward|grad"),
    ("backward", r"lightning.*", r"(?:run_)?backward"),
    ("optimizer", r"torch/optim/.*", r"step|_step\w*|_init_group|_(?:multi|single)_tensor_\w+"),
    ("clipping", r"torch/nn/utils/clip_grad\.py$", r".*"),
    ("metrics", r"torchmetrics/.*", r"update|compute|forward|wrapped_func|_wrap_\w+"),
    ("data", r"torch/utils/data/.*", r".*"),
)
"""Phase, file and function that stand for it. The innermost line of a traceback that fits decides:
a forward that a checkpoint repeats during the backward is part of the backward."""

_STAGES = (
    ("validate", re.compile(r"validation_step|_?run_validate|on_validation_\w+|val_\w*loop\w*")),
    ("test", re.compile(r"test_step|_?run_test|on_test_\w+|_test_impl")),
    ("predict", re.compile(r"predict_step|_?run_predict|on_predict_\w+|_predict_impl")),
    ("fit", re.compile(r"training_step|optimizer_step|on_train_\w+|_fit_impl|fit")),
)
_COMPILED = tuple((phase, re.compile(path), re.compile(name)) for phase, path, name in PHASES)
_LINE = re.compile(r'File "([^"\n]+)", line (\d+), in ([^\s]+)')
_LIBRARIES = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|lib/python3\.\d+|lightning_oom)/|^<frozen"
)
_MAX_CHARACTERS = 4_000_000


def find_phase(lines: Sequence[CodeLine]) -> str | None:
    """Name the phase of the step that a traceback ends in; ``None`` when nothing tells.

    Args:
        lines: The traceback, outermost call first.

    Example:
        >>> find_phase([
        ...     CodeLine(path="/site-packages/lightning/pytorch/strategies/strategy.py", line=9,
        ...              function="training_step"),
        ...     CodeLine(path="train.py", line=31, function="forward"),
        ... ])
        'forward'
    """
    for line in reversed(lines):
        path = line.path.replace("\\", "/")
        for phase, path_form, name_form in _COMPILED:
            if name_form.fullmatch(line.function) and path_form.search(path):
                return phase
    return None


def find_stage(lines: Sequence[CodeLine]) -> str | None:
    """Name what the trainer was doing, from the innermost line that tells."""
    for line in reversed(lines):
        for stage, form in _STAGES:
            if form.fullmatch(line.function):
                return stage
    return None


def users_line(lines: Sequence[CodeLine]) -> CodeLine | None:
    """Return the innermost line that is in no library; ``None`` when all of them are."""
    for line in reversed(lines):
        if not _LIBRARIES.search(line.path.replace("\\", "/")):
            return line
    return None


def parse_traceback(text: str) -> tuple[CodeLine, ...]:
    """Read the lines of the last traceback in a log.

    Args:
        text: Any text. Prefixes such as ``[rank0]:`` before each line do no harm.

    Returns:
        The lines, outermost call first; empty when there is no traceback.
    """
    _, _, last = text[-_MAX_CHARACTERS:].rpartition("Traceback (most recent call last)")
    return tuple(
        CodeLine(path=path, line=int(number), function=function)
        for path, number, function in _LINE.findall(last)
    )
