"""What is known about batches, by their structure and their shapes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_oom.recovery.rows.bounds import Dims, RowBounds
from lightning_oom.recovery.rows.peak_model import PeakModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_oom.recovery.batches import BatchSignature

__all__ = ["Group", "Groups", "Place"]

_KEPT_SIGNATURES = 1024
_KEPT_GROUPS = 16


@dataclass(slots=True, kw_only=True)
class Group:
    """What is known about batches of one structure."""

    leaf_ndims: tuple[int, ...]
    peaks: PeakModel
    bounds: RowBounds = field(default_factory=RowBounds)
    num_failures: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Return lists, dicts and numbers."""
        return {
            "leaf_ndims": list(self.leaf_ndims),
            "num_failures": self.num_failures,
            "bounds": self.bounds.to_plain(),
            "peaks": self.peaks.to_plain(),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Group:
        """Return the group that :meth:`to_plain` described."""
        leaf_ndims = tuple(map(int, plain["leaf_ndims"]))
        peaks = PeakModel(leaf_ndims)
        peaks.load_plain(plain["peaks"])
        return cls(
            leaf_ndims=leaf_ndims,
            peaks=peaks,
            bounds=RowBounds.from_plain(plain["bounds"]),
            num_failures=int(plain["num_failures"]),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """Where a signature belongs."""

    group: Group
    dims: Dims
    read_rows: set[int] = field(default_factory=set)
    num_asked: int = 0
    largest_whole: int = 0


class Groups:
    """All groups, and the place of each signature in them; of bounded size."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._places: dict[BatchSignature, Place] = {}

    def place(self, signature: BatchSignature) -> Place:
        """Return where ``signature`` belongs; made when it is new."""
        place = self._places.get(signature)
        if place is None:
            if len(self._places) >= _KEPT_SIGNATURES:
                self.remember_whole_batches()
                self._places.clear()
            ndims = tuple(map(len, signature.shapes))
            key = f"{signature.structure} {' '.join(signature.dtypes)} {ndims}"
            dims = tuple(dim for shape in signature.shapes for dim in shape)
            place = self._places[signature] = Place(group=self._group(key, ndims), dims=dims)
        return place

    def remember_whole_batches(self) -> None:
        """Turn what ran whole before the first failure into bounds; the hot path only counts."""
        for place in self._places.values():
            if place.largest_whole:
                place.group.bounds.add_safe(place.dims, place.largest_whole)
                place.largest_whole = 0

    def to_plain(self) -> list[dict[str, Any]]:
        """Return lists, dicts, strings and numbers."""
        return [{"key": key, **group.to_plain()} for key, group in self._groups.items()]

    @classmethod
    def from_plain(cls, plain: Sequence[Mapping[str, Any]]) -> Groups:
        """Return the groups that :meth:`to_plain` described."""
        groups = cls()
        for group in plain:
            groups._groups[str(group["key"])] = Group.from_plain(group)
        return groups

    def _group(self, key: str, leaf_ndims: tuple[int, ...]) -> Group:
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= _KEPT_GROUPS:
                _, dropped = self._groups.popitem(last=False)
                self._places = {s: p for s, p in self._places.items() if p.group is not dropped}
            group = Group(leaf_ndims=leaf_ndims, peaks=PeakModel(leaf_ndims))
            self._groups[key] = group
        self._groups.move_to_end(key)
        return group
