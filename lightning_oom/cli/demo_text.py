"""Real text that every machine has: the functions of the Python standard library."""

from __future__ import annotations

import ast
import functools
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

__all__ = ["PADDING", "StdlibFunctions", "read_functions", "tokenize"]

PADDING = 0
"""The token that fills a row up to the longest of its batch; no loss is computed on it."""

_BYTES = 256
_WORD = re.compile(r"[A-Za-z_]+|\s+|\d|.")


class StdlibFunctions(LightningDataModule):
    """Serve the standard library's source, one function a row, in batches as long as their longest.

    The lengths have a long tail (median 130 tokens, one in a hundred over 900), so that a few
    batches need several times the memory of the typical one. Which functions there are depends on
    the Python version; their order depends on ``seed`` alone.

    Args:
        rows: Functions in a batch, at least 1.
        block_length: Functions of more tokens than this are left out, at least 2.
        num_tokens: Size of the vocabulary: padding, the 256 bytes, and then the most frequent words;
            at least 257. A word outside it is spelled in bytes.
        seed: Seed of the order.

    Raises:
        ValueError: An argument is outside its range.

    Example:
        >>> data = StdlibFunctions(rows=4, block_length=256)
        >>> data.setup("fit")
        >>> tokens = next(iter(data.train_dataloader()))["tokens"]
        >>> tokens.shape[0], tokens.shape[1] <= 256, tokens.dtype
        (4, True, torch.int64)
    """

    def __init__(
        self, *, rows: int = 8, block_length: int = 2048, num_tokens: int = 1024, seed: int = 0
    ) -> None:
        super().__init__()
        for name, number, least in (
            ("rows", rows, 1),
            ("block_length", block_length, 2),
            ("num_tokens", num_tokens, 1 + _BYTES),
        ):
            if number < least:
                raise ValueError(f"{name} is at least {least}, got {number}")
        self.rows = rows
        self.block_length = block_length
        self.num_tokens = num_tokens
        self.seed = seed
        self.functions: list[Tensor] = []

    def setup(self, stage: str) -> None:
        """Tokenize once; later stages reuse it."""
        if not self.functions:
            every = _tokenize_all(self.num_tokens)
            self.functions = [row for row in every if 1 < len(row) <= self.block_length]

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffle by ``seed``, so that every fit sees the same batches in the same order."""
        return DataLoader(
            self.functions,  # type: ignore[arg-type]  # a list is a map-style dataset
            batch_size=self.rows,
            shuffle=True,
            drop_last=True,
            collate_fn=_pad,
            generator=torch.Generator().manual_seed(self.seed),
        )


def read_functions(folder: Path | None = None) -> list[str]:
    """Read the source of every function in the top-level modules of a folder.

    Args:
        folder: Where the ``*.py`` files are; ``None`` means this Python's standard library.

    Returns:
        One text a function, in order of file and line. Files that cannot be parsed are left out.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    functions = []
    for path in sorted(folder.glob("*.py")):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        spans = [
            (node.lineno - 1, node.end_lineno)
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        functions += ["\n".join(lines[start:stop]) for start, stop in sorted(spans)]
    return functions


def tokenize(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Turn text into tokens: known words by the vocabulary, all others byte by byte.

    Args:
        text: Any text.
        vocabulary: Word to token, each above 256.

    Returns:
        Tokens, none of them :data:`PADDING`.

    Example:
        >>> tokenize("def f", {"def": 257, " ": 258})
        [257, 258, 103]
    """
    tokens: list[int] = []
    for word in _WORD.findall(text):
        known = vocabulary.get(word)
        tokens += [1 + byte for byte in word.encode()] if known is None else [known]
    return tokens


@functools.cache
def _tokenize_all(num_tokens: int) -> tuple[Tensor, ...]:
    """Parsing takes seconds, and the demo trains three times on the same text."""
    functions = read_functions()
    counts = Counter(word for text in functions for word in _WORD.findall(text))
    words = sorted(counts, key=lambda word: (-counts[word], word))[: num_tokens - 1 - _BYTES]
    vocabulary = {word: 1 + _BYTES + index for index, word in enumerate(words)}
    return tuple(torch.tensor(tokenize(text, vocabulary)) for text in functions)


def _pad(rows: list[Tensor]) -> dict[str, Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    return {"tokens": tokens}
