"""Where an error came from is read off its traceback."""

from __future__ import annotations

import pytest

from lightning_oom.report.place import find_phase, find_stage, parse_traceback, users_line
from lightning_oom.report.record import CodeLine

SITE = "/venv/lib/python3.11/site-packages"
STRATEGY = f"{SITE}/lightning/pytorch/strategies/strategy.py"
TRAINING = (STRATEGY, "training_step")
FORWARD = ("/home/me/model.py", "forward")
ENGINE = (f"{SITE}/torch/autograd/graph.py", "_engine_run_backward")
UPDATE = (f"{SITE}/torch/optim/adamw.py", "step")


def lines(*places: tuple[str, str]) -> tuple[CodeLine, ...]:
    """A traceback through these files and functions."""
    return tuple(CodeLine(path=path, line=1, function=function) for path, function in places)


PHASES = {
    "forward": (lines(UPDATE, TRAINING, FORWARD), "forward"),
    "old package name": (
        lines((f"{SITE}/pytorch_lightning/strategies/ddp.py", "training_step"), FORWARD),
        "forward",
    ),
    "backward": (lines(UPDATE, TRAINING, ENGINE), "backward"),
    "recomputed in the backward": (lines(UPDATE, TRAINING, ENGINE, FORWARD), "backward"),
    "optimizer": (
        lines(UPDATE, (f"{SITE}/torch/optim/adam.py", "_multi_tensor_adam")),
        "optimizer",
    ),
    "clipping": (
        lines(UPDATE, (f"{SITE}/torch/nn/utils/clip_grad.py", "clip_grad_norm_")),
        "clipping",
    ),
    "transfer": (
        lines(
            (f"{SITE}/lightning/fabric/utilities/apply_func.py", "move_data_to_device"),
            (STRATEGY, "batch_to_device"),
        ),
        "transfer",
    ),
    "torch.load": (
        lines(("train.py", "<module>"), (f"{SITE}/torch/serialization.py", "_load")),
        "restore",
    ),
    "load_state_dict": (
        lines((f"{SITE}/torch/nn/modules/module.py", "load_state_dict")),
        "restore",
    ),
    "restored by the trainer": (
        lines(
            (
                f"{SITE}/lightning/pytorch/trainer/connectors/checkpoint_connector.py",
                "_restore_modules_and_callbacks",
            )
        ),
        "restore",
    ),
    "Windows": (lines((STRATEGY.replace("/", "\\"), "validation_step"), FORWARD), "forward"),
    "a plain loop": (lines(("train.py", "<module>"), ("train.py", "main")), None),
    "nothing": ((), None),
}


@pytest.mark.parametrize(("trace", "expected"), PHASES.values(), ids=PHASES)
def test_the_phase_is_that_of_the_innermost_line_that_tells(trace, expected) -> None:
    """A forward inside of a backward is part of the backward; the closure is not the update."""
    assert find_phase(trace) == expected


def test_a_validation_inside_of_a_fit_is_a_validation() -> None:
    """The innermost line decides about the stage as well."""
    trace = lines(
        (f"{SITE}/lightning/pytorch/trainer/trainer.py", "fit"), (STRATEGY, "validation_step")
    )

    assert find_stage(trace) == "validate"


def test_the_line_of_the_user_is_the_innermost_outside_of_libraries() -> None:
    """What torch does below it is not what has to be changed."""
    trace = lines(TRAINING, FORWARD, (f"{SITE}/torch/nn/functional.py", "linear"))

    assert str(users_line(trace)) == "model.py:1 in forward"


def test_the_last_traceback_of_a_log_is_read() -> None:
    """Earlier tracebacks, prefixes of ranks and text around do not matter."""
    text = """Traceback (most recent call last):
  File "old.py", line 1, in old
ValueError: handled
[rank3]: Traceback (most recent call last):
[rank3]:   File "new.py", line 22, in <module>
[rank3]:     main()
[rank3]:   File "C:\\\\me\\\\model.py", line 7, in forward
[rank3]: torch.OutOfMemoryError: CUDA out of memory.
"""

    assert [(line.path[-8:], line.line) for line in parse_traceback(text)] == [
        ("new.py", 22),
        ("model.py", 7),
    ]
