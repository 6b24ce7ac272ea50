"""Batches as data loaders hand them out, shared by the tests of this folder."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch

Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - the untyped form is a case of its own


@dataclass(frozen=True)
class Sample:
    """A frozen batch with a field that its constructor does not take."""

    x: torch.Tensor
    name: list[str]
    total: int = field(init=False, default=3)


@dataclass(slots=True)
class SlottedSample:
    """A batch without an instance dictionary."""

    x: torch.Tensor


class Encoding(UserDict):
    """Like the batch of a tokenizer: a UserDict with attributes of its own."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Graphs:
    """A batch of an unknown type."""

    def __init__(self, nodes):
        self.nodes = nodes


def rows(num_rows: int, *trailing: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements are all different."""
    shape = (num_rows, *trailing)
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def images(*widths: int, channels: int = 3) -> list[torch.Tensor]:
    """Images of unequal sizes."""
    return [rows(channels, 4, width) for width in widths]


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    """Targets of a detector, with another number of boxes each."""
    return [{"boxes": rows(n, 4), "labels": rows(n, dtype=torch.long)} for n in counts]


X, Y = rows(5, 3), rows(5, dtype=torch.long)

COUNTED = {
    "tensor": (X, 5),
    "pair": ((X, Y), 5),
    "pair in a list": ([X, Y], 5),
    "regression pair": ([rows(5, 3), rows(5, 1)], 5),
    "three inputs": ([rows(5, 3), rows(5, 4), rows(5, 1)], 5),
    "token ids, masks, types, labels": ([rows(5, 7).long() for _ in range(3)] + [Y], 5),
    "two time series": ([rows(5, 9, 7), rows(5, 4, 7)], 5),
    "views of images with labels": (([rows(5, 3, 4, 4) for _ in range(4)], Y), 5),
    "two views of images": ([rows(5, 3, 4, 4), rows(5, 3, 4, 4)], 5),
    "five equal label vectors": ([Y.clone() for _ in range(5)], 5),
    "pair of two rows": ([rows(2, 3), rows(2, 3)], 2),
    "pair of one row": ([rows(1, 3), rows(1, 4)], 1),
    "single tensor in a list": ([X], 5),
    "tensor and None": ((X, None), 5),
    "mapping": ({"x": X, "y": Y}, 5),
    "nested mappings": ({"a": {"b": X}, "c": [Y, {"d": Y}]}, 5),
    "names beside a tensor": ({"x": X, "name": list("abcde")}, 5),
    "named tuple": (Pair(X, Y), 5),
    "dataclass": (Sample(X, list("abcde")), 5),
    "slotted dataclass": (SlottedSample(X), 5),
    "user dict": (Encoding({"input_ids": Y, "mask": Y}), 5),
    "ordered dict": (OrderedDict(x=X), 5),
    "default dict": (defaultdict(list, x=X), 5),
    "read-only mapping": (MappingProxyType({"x": X}), 5),
    "array": ({"x": np.zeros((5, 2)), "y": Y}, 5),
    "detection": ((images(5, 6, 7), boxes(2, 0, 1)), 3),
    "detection as tuples": ((tuple(images(5, 6)), tuple(boxes(2, 1))), 2),
    "detection, equal images": ((images(6, 6, 6), boxes(2, 0, 1)), 3),
    "images alone": (images(5, 6, 7, 8), 4),
    "images with labels": ((images(5, 6, 7, 8), rows(4)), 4),
    "images and float masks": ((images(5, 6, 7, 8), images(5, 6, 7, 8, channels=1)), 4),
    "samples as they come": ([(image, 1) for image in images(5, 6, 7, 8)], 4),
    "sample dicts": ([{"image": image, "height": 4} for image in images(5, 6, 7, 8)], 4),
    "ragged vectors": ([rows(4), rows(2), rows(7)], 3),
    "ragged points": ({"points": [rows(4, 3), rows(2, 3)], "y": rows(2)}, 2),
    "spectrograms with names": (([rows(80, t) for t in (3, 5, 4, 6)], list("abcd")), 4),
    "lists of chunks": ([[rows(3, 4), rows(2, 4)], [rows(5, 4)]], 2),
    "pair of views": ([{"x": rows(5, 4)}, {"x": rows(5, 4)}], 5),
    "empty": (rows(0, 3), 0),
    "0-d beside rows": ({"x": X, "scale": torch.tensor(2.0)}, 5),
    "names alone": (["a", "b", "c"], 3),
    "columns of names": ((["a", "b", "c"], [1, 2, 3]), 3),
    "text": ("a caption", None),
    "numbers": ({"a": 0.5, "b": None}, None),
    "0-d alone": (torch.tensor(1.0), None),
    "nothing": ([], 0),
}

AMBIGUOUS = {
    "three images": images(5, 6, 7),
    "spectrograms": [rows(80, t) for t in (3, 5, 4, 6)],
    "three dicts of equal rows": [{"x": rows(6, 2)} for _ in range(3)],
    "two samples of equal shapes": [{"x": rows(6, 2), "y": 1}, {"x": rows(6, 2), "y": 0}],
    "one sample": [(rows(6, 2), "name")],
    "four clips of equal length": [rows(6, 3, 4, 4) for _ in range(4)],
    "sixteen token sequences": [rows(6).long() for _ in range(16)],
    "two dicts of unequal shapes": [{"x": rows(6, 2)}, {"x": rows(6, 3)}],
}
