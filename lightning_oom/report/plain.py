"""Records to JSON and back: every value is built from its annotation, nothing is guessed."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

__all__ = ["from_json", "to_json"]

_Record = TypeVar("_Record")
_VERSION_KEY = "format_version"
_KIND_KEY = "record"


def to_json(record: Any, *, version: int) -> str:
    """Write a record as JSON.

    Args:
        record: A dataclass of numbers, texts, ``None``, tuples, and other such dataclasses.
        version: Of the form; stands in the text.
    """
    head = {_KIND_KEY: type(record).__name__, _VERSION_KEY: version}
    return json.dumps({**head, **dataclasses.asdict(record)}, indent=1, allow_nan=False)


def from_json(record_type: type[_Record], text: str, *, version: int) -> _Record:
    """Read a record that :func:`to_json` wrote.

    Args:
        record_type: Its class. Fields that the text has too many are passed over; those that it
            lacks take their defaults.
        text: The JSON.
        version: The latest form that can be read.

    Raises:
        ValueError: The text is no JSON, another record, of a later form, or lacks a field.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no JSON: {error}") from None
    if not isinstance(found, dict) or found.get(_KIND_KEY) != record_type.__name__:
        raise ValueError(f"this JSON is no {record_type.__name__}")
    written = found.get(_VERSION_KEY)
    if not isinstance(written, int) or written > version:
        raise ValueError(
            f"this {record_type.__name__} has form {written!r}, this release reads up to {version}: "
            "use the release that wrote it"
        )
    return typing.cast("_Record", _build(record_type, found, record_type.__name__))


def _build(annotation: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        (only,) = (choice for choice in args if choice is not type(None))
        return None if value is None else _build(only, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), where, value)
        return tuple(_build(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(annotation):
        return _build_record(typing.cast("type[Any]", annotation), value, where)
    if annotation is float and type(value) is int:
        return float(value)
    _expect(value in args if origin is typing.Literal else type(value) is annotation, where, value)
    return value


def _build_record(record_type: type[Any], value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, value)
    hints = typing.get_type_hints(record_type)
    given = {}
    for field in dataclasses.fields(record_type):
        if field.name in value:
            given[field.name] = _build(
                hints[field.name], value[field.name], f"{where}.{field.name}"
            )
    try:
        return record_type(**given)
    except TypeError:
        raise ValueError(f"{where} lacks a field that it needs") from None


def _expect(holds: bool, where: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{where} cannot be {value!r:.80}")
