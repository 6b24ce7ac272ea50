"""The demo's text: real, long-tailed, and in the same order every time."""

from __future__ import annotations

import pytest
import torch

from lightning_oom.cli.demo_text import PADDING, StdlibFunctions, read_functions, tokenize


@pytest.fixture(scope="module")
def functions():
    """Tokenize the standard library once for this file."""
    text = StdlibFunctions()
    text.setup("fit")
    return text


def shapes(text: StdlibFunctions, num_batches: int) -> list[tuple[int, ...]]:
    """Give the shapes of the first batches."""
    batches = iter(text.train_dataloader())
    return [tuple(next(batches)["tokens"].shape) for _ in range(num_batches)]


def test_lengths_have_a_long_tail(functions) -> None:
    """One function in a hundred is several times as long as the median one."""
    lengths = torch.tensor([float(len(row)) for row in functions.functions])

    assert len(lengths) > 2000
    assert lengths.max() <= functions.block_length
    assert lengths.quantile(0.99) > 4 * lengths.median()


def test_the_order_depends_on_the_seed_alone(functions) -> None:
    """Two loaders of one seed give the same batches, whatever was drawn in between."""
    first = shapes(functions, 5)
    torch.rand(7)
    other = StdlibFunctions(seed=1)
    other.setup("fit")

    assert shapes(functions, 5) == first
    assert shapes(other, 5) != first


def test_batches_are_as_long_as_their_longest_row(functions) -> None:
    """Rows are padded on the right, and at least one row of a batch is not padded at all."""
    tokens = next(iter(functions.train_dataloader()))["tokens"]
    lengths = (tokens != PADDING).sum(1)

    assert tokens.shape == (functions.rows, int(lengths.max()))
    for row, length in zip(tokens, lengths, strict=True):
        assert bool((row[:length] != PADDING).all())


def test_functions_are_read_in_order_and_broken_files_left_out(tmp_path) -> None:
    """Each function is one text, nested ones included; a file that does not parse is no error."""
    (tmp_path / "b.py").write_text("def third():\n    pass\n")
    (tmp_path / "a.py").write_text("def first():\n    async def second():\n        pass\n")
    (tmp_path / "c.py").write_text("def broken(:\n")

    names = [text.split("(")[0].split()[-1] for text in read_functions(tmp_path)]

    assert names == ["first", "second", "third"]


def test_words_outside_the_vocabulary_are_spelled_in_bytes() -> None:
    """No text is lost: an unknown word becomes its bytes, none of which is the padding."""
    assert tokenize("é\x00", {}) == [1 + 0xC3, 1 + 0xA9, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows is at least 1, got 0"),
        ({"block_length": 1}, "block_length is at least 2, got 1"),
        ({"num_tokens": 256}, "num_tokens is at least 257, got 256"),
    ],
)
def test_values_out_of_range_are_refused(arguments, message) -> None:
    """The constructor names the value and the range."""
    with pytest.raises(ValueError, match=message):
        StdlibFunctions(**arguments)
