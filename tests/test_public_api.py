"""What the package exports, what its import touches, and what survives a pickle."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest

import lightning_oom
from lightning_oom import errors

PACKAGE = Path(lightning_oom.__file__).parent
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages([str(PACKAGE)], "lightning_oom.")
    if not found.name.endswith("__main__")
)


def exported(module_name: str) -> dict[str, Any]:
    """Give what a module lists in ``__all__``; nothing when it has no list."""
    module = importlib.import_module(module_name)
    return {name: getattr(module, name) for name in getattr(module, "__all__", ())}


def constants_classes_functions(name: str) -> tuple[int, str]:
    """Give the order in which the linter sorts ``__all__``."""
    return (0 if name.isupper() else 1 if name.lstrip("_")[0].isupper() else 2), name


def records() -> dict[str, type]:
    """Find every frozen dataclass that the package exports, by its qualified name."""
    found = {}
    for module_name in MODULES:
        for thing in exported(module_name).values():
            params = getattr(thing, "__dataclass_params__", None)
            if isinstance(thing, type) and params is not None and params.frozen:
                found[f"{thing.__module__}.{thing.__qualname__}"] = thing
    return found


def sample(annotation: Any) -> Any:
    """Make a plain value that fits an annotation; ``None`` where none is known."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in {typing.Union, types.UnionType}:
        return None if type(None) in args else sample(args[0])
    if origin is typing.Literal:
        return args[0]
    if dataclasses.is_dataclass(annotation):
        return instance(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return next(iter(annotation))
    plain = {int: 3, float: 0.5, str: "text", bool: True, bytes: b"x"}
    kind = origin or annotation
    if kind in plain:
        return plain[kind]
    return kind() if kind in {tuple, list, dict, set, frozenset} else None


def instance(record: type) -> Any:
    """Build a record with a sample in every field."""
    fields = dataclasses.fields(record)
    return record(**{field.name: sample(evaluated(field.type, record)) for field in fields})


def evaluated(annotation: Any, record: type) -> Any:
    """Turn the text of an annotation into the type; ``None`` for one that only mypy can see."""
    names = {**vars(sys.modules[record.__module__]), "Literal": typing.Literal, "Any": Any}
    try:
        return eval(annotation, names)  # noqa: S307 # the package's own annotations
    except NameError:
        return None


def run_python(code: str, *options: str) -> str:
    """Run ``code`` in an interpreter of its own and give back what it printed."""
    finished = subprocess.run(  # noqa: S603 # the code stands in this file
        [sys.executable, *options, "-c", code], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("module_name", ["lightning_oom", *MODULES])
def test_all_is_sorted_literal_and_resolves(module_name) -> None:
    """``__all__`` is a sorted list of texts, each the name of something in the module."""
    module = importlib.import_module(module_name)
    if not hasattr(module, "__all__"):
        return
    tree = ast.parse(Path(module.__file__).read_text())
    (literal,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]

    assert list(literal) == sorted(set(literal), key=constants_classes_functions)
    assert [name for name in literal if not hasattr(module, name)] == []


@pytest.mark.parametrize("module_name", ["lightning_oom", *MODULES])
def test_every_export_is_documented(module_name) -> None:
    """A class or function that a module exports says what it does; so does the module."""
    undocumented = [
        name
        for name, thing in exported(module_name).items()
        if (inspect.isclass(thing) or inspect.isroutine(thing))
        and str(thing.__module__).startswith("lightning_oom")
        and not inspect.getdoc(thing)
    ]

    assert undocumented == []
    assert importlib.import_module(module_name).__doc__


def test_errors_survive_a_pickle() -> None:
    """An error that crosses a process boundary keeps its class, its text and its notes."""
    for name in errors.__all__:
        kind = getattr(errors, name)
        if not isinstance(kind, type):
            continue
        error = kind("12 rows and 6 rows")
        errors.add_note(error, "tried: split")

        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 # made one line above

        assert (type(copy), copy.args) == (kind, error.args), name
        assert copy.__notes__ == ["tried: split"], name


def test_every_error_descends_from_the_two_bases() -> None:
    """One except clause catches what the package raises, one filter what it warns of."""
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type):
            assert issubclass(kind, (errors.LightningOOMError, errors.LightningOOMWarning)), name


@pytest.mark.parametrize("name", sorted(records()))
def test_records_survive_a_pickle_and_cannot_be_changed(name) -> None:
    """Records are data: equal after a pickle, frozen, and built by keywords alone."""
    record = instance(records()[name])

    assert pickle.loads(pickle.dumps(record)) == record  # noqa: S301 # made in this line
    first = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, first, None)


PROBE = """
import sys
import pynvml
sessions = []
for name in ("nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags"):
    if hasattr(pynvml, name):
        setattr(pynvml, name, lambda *args, name=name: sessions.append(name))
import lightning.pytorch
before = set(sys.modules), len(sessions)
{statement}
import torch
new = {{name.split(".")[0] for name in set(sys.modules) - before[0]}}
print(sorted(new & {{"tensorboard", "tensorflow", "matplotlib", "pytest", "jsonargparse"}}))
print(torch.cuda.is_initialized(), len(sessions) - before[1])
print(torch._C._get_privateuse1_backend_name())
"""


@pytest.mark.parametrize(
    ("statement", "touched"),
    [
        ("from lightning_oom import *", ["[]", "False 0", "privateuseone"]),
        ("from lightning_oom.testing import *", ["[]", "False 0", "privateuseone"]),
        (
            "import tensorboard; pynvml.nvmlInit()",
            ["['tensorboard']", "False 1", "privateuseone"],
        ),
    ],
    ids=["package", "testing", "the probe can fail"],
)
def test_import_touches_nothing(statement, touched) -> None:
    """Import adds no CUDA context, NVML session, device name or TensorBoard to Lightning's own."""
    assert run_python(PROBE.format(statement=statement)).splitlines() == touched


def test_import_is_free_for_a_session_that_does_not_use_it() -> None:
    """The pytest plugin is loaded in every session of an environment, and brings no torch along."""
    code = "import sys, lightning_oom.testing.plugin; print('torch' in sys.modules)"

    assert run_python(code) == "False\n"


FIT = """
import sys, warnings
{before}
# Lightning 2.6 on torch 2.13 warns of its own use of LeafSpec.
warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec", FutureWarning)
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_oom import OOMRecovery
trainer = Trainer(
    accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[OOMRecovery()],
)
trainer.fit(BoringModel())
print(trainer.global_step)
"""


@pytest.mark.parametrize(
    "before", ["", "sys.modules['pynvml'] = None"], ids=["with NVML", "without NVML"]
)
def test_no_future_warning(before) -> None:
    """A fit raises no FutureWarning, whether or not nvidia-ml-py is there (prime-rl#881)."""
    printed = run_python(FIT.format(before=before), "-W", "error::FutureWarning")

    assert printed.splitlines()[-1] == "2"
