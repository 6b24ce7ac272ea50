"""What a verb is about: a module and a batch, from an import path or a LightningCLI config."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import argparse

__all__ = ["Subject", "add_subject_arguments", "load_subject", "parse_batch"]

_TENSOR = re.compile(r"\s*(?:(\w+)\s*=)?\s*(\w+)\s*\[([\d\s,]*)\]\s*")
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module with what its step gets.

    Attributes:
        module: The module, on the CPU.
        batch: An example.
        precision: Of the config's trainer, or as asked for; ``None`` is 32-bit.
        data: The LightningDataModule of the config, if there is one.
    """

    module: torch.nn.Module
    batch: Any
    precision: str | None = None
    data: Any = None


def add_subject_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Describe how a module and a batch are given.

    Args:
        parser: Of the verb.
        required: Whether the verb does nothing without.
    """
    parser.add_argument(
        "model",
        metavar="MODULE:CLASS",
        nargs="?",
        help="import path of a LightningModule, such as my_project.model:Net",
    )
    parser.add_argument(
        "--init", metavar="JSON", default="{}", help="arguments of its constructor, as JSON"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a LightningCLI config with class_path of model and data"
    )
    parser.add_argument(
        "--batch",
        metavar="TENSORS",
        help="types and shapes, such as 'float32[32,3,224,224], int64[32]' or "
        "'input_ids=int64[16,128]'; default: the first batch of the config's data",
    )
    parser.add_argument("--precision", help="as in Trainer(precision=...)")
    parser.set_defaults(subject_required=required)


def load_subject(arguments: argparse.Namespace) -> Subject | None:
    """Build the module and the batch.

    Args:
        arguments: As :func:`add_subject_arguments` describes them.

    Returns:
        ``None`` when none was given and none is required.

    Raises:
        ValueError: Something is missing, cannot be read, imported or built; one line.
    """
    if arguments.model is None and arguments.config is None:
        if arguments.subject_required:
            raise ValueError("give MODULE:CLASS or --config FILE")
        return None
    config = {} if arguments.config is None else _read_config(Path(arguments.config))
    if arguments.model is not None:
        module = _build(arguments.model, _parse_init(arguments.init))
    else:
        module = _build_section(config, "model", arguments.config)
    _configure(module)
    data = _build_section(config, "data", arguments.config) if "data" in config else None
    if arguments.batch is not None:
        batch = parse_batch(arguments.batch)
    elif data is not None:
        batch = _first_batch(data)
    elif _brings_loader(module):
        batch = _first_batch(module)
    else:
        raise ValueError("give --batch 'float32[32,3,224,224], ...', or a config with data")
    precision = arguments.precision or (config.get("trainer") or {}).get("precision")
    return Subject(
        module=module,
        batch=batch,
        precision=None if precision is None else str(precision),
        data=data,
    )


def parse_batch(text: str) -> Any:
    """Turn a description into a batch of zeros.

    Args:
        text: ``dtype[sizes]``, separated by commas; with names, a dictionary.

    Returns:
        A tensor, a tuple, or a dictionary.

    Raises:
        ValueError: The text has another form, or names a type that torch does not know.

    Example:
        >>> [tensor.shape for tensor in parse_batch("float32[2, 3], int64[2]")]
        [torch.Size([2, 3]), torch.Size([2])]
        >>> parse_batch("input_ids=int64[1,4]")
        {'input_ids': tensor([[0, 0, 0, 0]])}
    """
    found: list[tuple[str | None, torch.Tensor]] = []
    position = 0
    while position < len(text):
        match = _TENSOR.match(text, position)
        if match is None or match[2] not in _DTYPES:
            raise ValueError(
                f"a batch is written as 'float32[32,10], int64[32]', not as {text[position:]!r}"
            )
        sizes = [int(size) for size in match[3].split(",") if size.strip()]
        found.append((match[1], torch.zeros(sizes, dtype=_DTYPES[match[2]])))
        position = match.end()
        if position < len(text) and text[position] != ",":
            raise ValueError(f"a comma is missing before {text[position:]!r}")
        position += 1
    if not found:
        raise ValueError("a batch holds one tensor at least, such as 'float32[32,10]'")
    named = {name: tensor for name, tensor in found if name is not None}
    if named and len(named) != len(found):
        raise ValueError(f"name every tensor once, or none, in {text!r}")
    if named:
        return named
    return found[0][1] if len(found) == 1 else tuple(tensor for _, tensor in found)


def _parse_init(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--init is a JSON object, got {text!r}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--init is a JSON object, got {text!r}")  # noqa: TRY004 - one kind of error
    return values


def _build(path: str, values: dict[str, Any]) -> Any:
    name, _, attribute = path.partition(":")
    if not attribute:
        name, _, attribute = path.rpartition(".")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made: Any = importlib.import_module(name)
        for part in attribute.split("."):
            made = getattr(made, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import {path!r}: {error}") from error
    try:
        return made(**values)
    except Exception as error:
        raise ValueError(f"cannot build {path!r}: {type(error).__name__}: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 - comes with Lightning; only needed with a config

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no LightningCLI config")  # noqa: TRY004 - one kind of error
    return config.get("fit", config) if isinstance(config.get("fit", config), dict) else config


def _build_section(config: dict[str, Any], name: str, path: str) -> Any:
    section = config.get(name)
    if not isinstance(section, dict) or "class_path" not in section:
        raise ValueError(
            f"{path} has no class_path under '{name}'"
            + ("; name the class as MODULE:CLASS" if name == "model" else "")
        )
    values = {key: _nested(value) for key, value in (section.get("init_args") or {}).items()}
    return _build(str(section["class_path"]), values)


def _nested(value: Any) -> Any:
    if isinstance(value, dict):
        if "class_path" in value:
            inner = {key: _nested(item) for key, item in (value.get("init_args") or {}).items()}
            return _build(str(value["class_path"]), inner)
        return {key: _nested(item) for key, item in value.items()}
    return [_nested(item) for item in value] if isinstance(value, list) else value


def _configure(module: Any) -> None:
    """Let a LightningModule make the layers that it leaves to the start of a run."""
    configure = getattr(module, "configure_model", None)
    if configure is None:
        return
    try:
        configure()
    except Exception as error:
        raise ValueError(
            f"configure_model of {type(module).__name__} fails: {type(error).__name__}: {error}"
        ) from error


def _brings_loader(module: Any) -> bool:
    """Say whether a LightningModule has a loader of its own."""
    from lightning.pytorch import LightningModule  # noqa: PLC0415 - slow to import

    own = getattr(type(module), "train_dataloader", None)
    return isinstance(module, LightningModule) and own is not LightningModule.train_dataloader


def _first_batch(source: Any) -> Any:
    """Take the first batch of a data module, with hooks in the order of Lightning."""
    try:
        if hasattr(source, "prepare_data") and not isinstance(source, torch.nn.Module):
            source.prepare_data()
            source.setup("fit")
        return next(iter(source.train_dataloader()))
    except Exception as error:
        raise ValueError(
            f"{type(source).__name__} gives no batch: {type(error).__name__}: {error}"
        ) from error
