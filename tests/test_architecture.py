"""Imports point one way, foreign internals stay behind their doors, files stay small."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_oom"
MODULES = sorted(PACKAGE.rglob("*.py"))
LINES_CAP = 400

_BASE = {"errors", "units", "undo"}
_ENGINES = {*_BASE, "_torch", "_torchmetrics", "memory", "reduction", "planning", "recovery"}
_ALL = {*_ENGINES, "_lightning", "testing", "report", "callbacks", "cli"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "undo": {"errors"},
    "_torch": {"errors", "undo"},
    "_torchmetrics": {"errors"},
    "memory": {*_BASE, "_torch"},
    "reduction": {*_BASE, "_torch", "memory"},
    "planning": {*_BASE, "_torch", "_torchmetrics", "memory", "reduction"},
    "recovery": {*_BASE, "_torch", "_torchmetrics", "memory"},
    "testing": {*_BASE, "_torch", "memory"},
    "_lightning": _ENGINES,
    "report": _ENGINES,
    "callbacks": {*_ENGINES, "_lightning", "report"},
    "cli": _ALL,
    "__main__": {"cli"},
    "__init__": _ALL - {"cli", "_lightning", "_torch", "_torchmetrics"},
}
"""Root of the package to the roots it may import, beside itself."""

SEES_LIGHTNING = {"_lightning", "callbacks", "cli", "testing"}
"""Roots that may import Lightning at all; the others are engines and know tensors only."""

DOORS = {
    "torch": ("_torch",),
    "lightning": ("_lightning",),
    "torchmetrics": ("_torchmetrics",),
}
"""Library to the roots that may touch its private names."""

LIGHTNING_INTERNALS = ("lightning.pytorch.loops", "lightning.pytorch.trainer.connectors")
"""Public by name and private by habit."""

PUBLIC_DESPITE_UNDERSCORE = {
    *("_asdict", "_field_defaults", "_fields", "_make", "_replace"),  # protocol of named tuples
    "_version",  # a tensor's version counter: behind autograd's in-place check, no public spelling
}

OPERATORS = {"torch.ops.aten", "aten", "_aten"}
"""Namespaces of torch's operators: an underscore there is part of the name, not a warning."""


def root_of(path: Path) -> str:
    """Name the first level of the package that ``path`` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Give the dotted name of everything that is imported, wherever the statement stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward_imports(root: str, source: str) -> set[str]:
    """Find the roots of the package that ``root`` imports and may not."""
    own = {
        (*name.split("."), "__init__")[1]
        for name in imported_names(ast.parse(source))
        if name.split(".")[0] == "lightning_oom"
    }
    return {name for name in own if name in MAY_IMPORT} - MAY_IMPORT[root] - {root}


def private_imports(root: str, source: str) -> set[str]:
    """Find the imports of another library's internals that ``root`` is no door for."""
    found = set()
    for name in imported_names(ast.parse(source)):
        library, *rest = name.split(".")
        if root in DOORS.get(library, ()) or library not in DOORS:
            continue
        if any(is_private(part) for part in rest) or name.startswith(LIGHTNING_INTERNALS):
            found.add(name)
    return found


def is_private(name: str) -> bool:
    """Say whether ``name`` has one leading underscore; dunder names are public protocol."""
    return name.startswith("_") and not name.startswith("__")


def private_names_used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Give line and name of every private attribute that is read, set, or asked for by text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in OPERATORS:
                yield node.lineno, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"getattr", "setattr", "hasattr", "delattr"}
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and isinstance(node.args[1].value, str)
            and is_private(node.args[1].value)
        ):
            yield node.lineno, node.args[1].value


def private_names_defined(tree: ast.AST) -> Iterator[str]:
    """Give the private names that a module defines: its own business, to use as it likes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in {"self", "cls"}
        ):
            yield node.attr


def foreign_private_names(root: str, source: str) -> set[str]:
    """Find the private attributes that a module uses, does not define, and is no door for."""
    if root in {door for doors in DOORS.values() for door in doors}:
        return set()
    tree = ast.parse(source)
    own = {name for name in private_names_defined(tree) if is_private(name)}
    return {name for _, name in private_names_used(tree)} - own - PUBLIC_DESPITE_UNDERSCORE


def relative(path: Path) -> str:
    """Name a file in a failing test's id."""
    return path.relative_to(ROOT).as_posix()


def test_every_root_is_in_the_table() -> None:
    """A new folder or module at the first level says what it may import."""
    assert {root_of(path) for path in MODULES} <= set(MAY_IMPORT)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_point_one_way(path: Path) -> None:
    """No module imports a root that stands above its own."""
    assert upward_imports(root_of(path), path.read_text()) == set()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_the_doors_import_internals(path: Path) -> None:
    """Private modules and names of torch, Lightning and torchmetrics are imported by their door."""
    assert private_imports(root_of(path), path.read_text()) == set()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_the_doors_use_foreign_private_names(path: Path) -> None:
    """A private attribute is one that the module itself defines, or the module is a door."""
    assert foreign_private_names(root_of(path), path.read_text()) == set()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_engines_do_not_import_lightning(path: Path) -> None:
    """Engines never see a Trainer, not even for a type."""
    libraries = {name.split(".")[0] for name in imported_names(ast.parse(path.read_text()))}
    if root_of(path) not in SEES_LIGHTNING:
        assert not libraries & {"lightning", "pytorch_lightning", "lightning_fabric"}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_nothing_imports_pytest_but_the_plugin(path: Path) -> None:
    """The package runs where no test tool is installed."""
    libraries = {name.split(".")[0] for name in imported_names(ast.parse(path.read_text()))}
    if relative(path) != "lightning_oom/testing/plugin.py":
        assert not libraries & {"pytest", "hypothesis", "_pytest"}


def test_callbacks_do_not_import_their_siblings() -> None:
    """Each callback is a wire of its own; what two of them share is an engine."""
    for path in sorted((PACKAGE / "callbacks").glob("[!_]*.py")):
        siblings = {
            name
            for name in imported_names(ast.parse(path.read_text()))
            if name.startswith("lightning_oom.callbacks.")
            and not name.startswith((f"lightning_oom.callbacks.{path.stem}.", "_"))
            and not is_private(name.split(".")[2])
        }
        assert siblings == set(), relative(path)


@pytest.mark.parametrize("path", [*MODULES, *sorted((ROOT / "tests").rglob("*.py"))], ids=relative)
def test_files_stay_under_the_cap(path: Path) -> None:
    """A file that outgrows the cap is about two things."""
    assert len(path.read_text().splitlines()) < LINES_CAP


@pytest.mark.parametrize(
    ("check", "root", "source", "expected"),
    [
        (upward_imports, "memory", "from lightning_oom.recovery import classify", {"recovery"}),
        (upward_imports, "memory", "import lightning_oom.callbacks", {"callbacks"}),
        (upward_imports, "memory", "def f():\n    from lightning_oom import OOMRecovery", set()),
        (upward_imports, "cli", "from lightning_oom import OOMRecovery", set()),
        (
            private_imports,
            "recovery",
            "from torch.utils._pytree import tree_map",
            {"torch.utils._pytree.tree_map"},
        ),
        (private_imports, "_torch", "from torch.utils._pytree import tree_map", set()),
        (
            private_imports,
            "callbacks",
            "import lightning.pytorch.loops",
            {"lightning.pytorch.loops"},
        ),
        (
            foreign_private_names,
            "recovery",
            "import torch\ntorch._foreach_add_([])",
            {"_foreach_add_"},
        ),
        (foreign_private_names, "callbacks", "getattr(trainer, '_results')", {"_results"}),
        (foreign_private_names, "memory", "class A:\n    def f(self):\n        self._x = 1", set()),
        (foreign_private_names, "testing", "torch.ops.aten._to_copy", set()),
        (foreign_private_names, "_lightning", "trainer._results", set()),
    ],
)
def test_the_fence_sees_a_planted_violation(check, root, source, expected) -> None:
    """Each check finds what it is for, and leaves the door and own names alone."""
    assert check(root, source) == expected
