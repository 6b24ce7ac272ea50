"""Ways to read a batch: each says how many rows there are and how every node is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SHARED_OPTION", "Clash", "Node", "Option", "combine_options", "one_option"]

_MOST_OPTIONS = 16


@dataclass(frozen=True, slots=True)
class Node:
    """How one node of the batch is cut.

    *share*: whole, to every part. *take*: by its type. *fields*: child by child. *cut*: one item
    per row. *plain*: items without rows, cut if there are as many as rows.
    """

    action: Literal["share", "take", "fields", "cut", "plain"]
    children: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to read a node.

    Attributes:
        node: How it is cut.
        rows: How many rows it has; ``None`` where it says nothing about them.
        said_by: The leaf that says so, with its shape.
        unlikely: Lists that are read against what is likely.
        fields_in_doubt: Doubtful lists that are read as fields.
        samples_in_doubt: Doubtful lists that are read as one item per row.
        samples_for_sure: Lists that can only be read as one item per row.
        doubted: The first doubtful list and its two readings.
        plain: Number of items and path of the lists without tensors.
        opaque: Path and object of the leaves of unknown type.
    """

    node: Node
    rows: int | None = None
    said_by: str = ""
    unlikely: int = 0
    fields_in_doubt: int = 0
    samples_in_doubt: int = 0
    samples_for_sure: int = 0
    doubted: str = ""
    plain: tuple[tuple[int, str], ...] = ()
    opaque: tuple[tuple[str, Any], ...] = ()

    def cost(self) -> int:
        """Lower is likelier. Where one list surely holds samples, so do the doubtful ones."""
        if self.samples_for_sure:
            return 2 * (self.unlikely + self.fields_in_doubt)
        return 2 * self.unlikely + self.fields_in_doubt + self.samples_in_doubt


@dataclass(frozen=True, slots=True)
class Clash:
    """Two parts of the batch that cannot have the same rows."""

    message: str


SHARED_OPTION = (Option(node=Node("share")),)
"""The only way to read a leaf without rows."""


def one_option(node: Node, *, rows: int | None = None, said_by: str = "") -> tuple[Option, ...]:
    """The only way to read a leaf that says how many rows it has."""
    return (Option(node=node, rows=rows, said_by=said_by),)


def combine_options(parts: Iterable[tuple[Option, ...] | Clash]) -> tuple[Option, ...] | Clash:
    """Read fields side by side: every choice of one option per part that agrees on the rows.

    Stops at the first part that agrees with none, without reading the rest.

    Args:
        parts: The options of each part, or its clash.

    Returns:
        At most 16 options, likeliest first, or the first clash.
    """
    choices = [_Choice()]
    for options in parts:
        if isinstance(options, Clash):
            return options
        if len(options) == 1 and len(choices) == 1:
            if not choices[0].agrees_with(options[0]):
                return Clash(f"{choices[0].said_by}, {options[0].said_by}")
            choices[0].add(options[0])
            continue
        agreeing = [
            choice.with_one_more(option)
            for choice in choices
            for option in options
            if choice.agrees_with(option)
        ]
        if not agreeing:
            return Clash(f"{choices[0].said_by}, {options[0].said_by}")
        choices = sorted(agreeing, key=_Choice.cost)[:_MOST_OPTIONS]
    return tuple(choice.as_option() for choice in choices)


class _Choice:
    """One option per part, for the parts so far."""

    __slots__ = ("options", "rows", "said_by")

    def __init__(self) -> None:
        self.options: list[Option] = []
        self.rows: int | None = None
        self.said_by = ""

    def agrees_with(self, option: Option) -> bool:
        return self.rows is None or option.rows is None or self.rows == option.rows

    def add(self, option: Option) -> None:
        self.options.append(option)
        if self.rows is None:
            self.rows, self.said_by = option.rows, option.said_by

    def with_one_more(self, option: Option) -> _Choice:
        longer = _Choice()
        longer.options = self.options.copy()
        longer.rows, longer.said_by = self.rows, self.said_by
        longer.add(option)
        return longer

    def cost(self) -> int:
        return self.as_option().cost()

    def as_option(self) -> Option:
        node = Node("fields", tuple([option.node for option in self.options]))
        base = Option(node=node, rows=self.rows, said_by=self.said_by)
        telling = [option for option in self.options if option is not SHARED_OPTION[0]]
        if not any(_says_more(option) for option in telling):
            return base
        return replace(
            base,
            unlikely=sum(option.unlikely for option in telling),
            fields_in_doubt=sum(option.fields_in_doubt for option in telling),
            samples_in_doubt=sum(option.samples_in_doubt for option in telling),
            samples_for_sure=sum(option.samples_for_sure for option in telling),
            doubted=next((option.doubted for option in telling if option.doubted), ""),
            plain=tuple(entry for option in telling for entry in option.plain),
            opaque=tuple(entry for option in telling for entry in option.opaque),
        )


def _says_more(option: Option) -> bool:
    return bool(option.doubted or option.samples_for_sure or option.plain or option.opaque)
