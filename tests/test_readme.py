"""What the README shows is what happens: its Python runs, its output is compared, its YAML exists."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from lightning_oom import memory

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


class Block(NamedTuple):
    """A fenced block: its language, its text, and the output block right below it, if any."""

    line: int
    language: str
    text: str
    output: str | None


def fenced_blocks(text: str) -> list[Block]:
    """Find the fenced blocks; ``text`` directly below ``python`` is that block's output."""
    pattern = re.compile(
        r"^```(\w+)\n(.*?)^```\n(?:\n?^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE
    )
    return [
        Block(text.count("\n", 0, match.start()) + 1, *match.groups())
        for match in pattern.finditer(text)
    ]


BLOCKS = fenced_blocks(README.read_text())


def of(language: str):
    """Parametrize over the blocks of one language, named by their line."""
    blocks = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", blocks, ids=lambda block: f"line {block.line}")


def is_subset(part, whole) -> bool:
    """Say whether each key and element of ``part`` is in ``whole``, at the same place."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and is_subset(value, whole[key]) for key, value in part.items()
        )
    if isinstance(part, list):
        return isinstance(whole, list) and all(
            any(is_subset(value, other) for other in whole) for value in part
        )
    return part == whole


def test_there_are_blocks() -> None:
    """The tests below run over something."""
    assert {"python", "yaml"} <= {block.language for block in BLOCKS}


@of("python")
def test_python_block_runs_and_prints_what_it_says(block, monkeypatch, tmp_path) -> None:
    """Each Python block runs on its own, and prints the block below it; ``...`` stands for anything."""
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    code = compile("\n" * block.line + block.text, str(README), "exec")
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")  # a user's run is not held to this suite's filters
        exec(code, {"__name__": "readme"})  # noqa: S102 # the README's own code

    if block.output is not None:
        checker = doctest.OutputChecker()
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert checker.check_output(block.output, printed.getvalue(), flags), printed.getvalue()


@of("yaml")
def test_yaml_block_is_part_of_a_config(block) -> None:
    """Each YAML block is a file in ``configs/``, or part of one."""
    part = yaml.safe_load(block.text)
    configs = [yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")]

    assert any(is_subset(part, config) for config in configs)


def test_support_matrix_is_the_one_in_the_source() -> None:
    """The README's table of readings is the table of ``lightning_oom.memory``, cell by cell."""
    in_source = [
        re.split(r"\s{2,}", line.replace("``", "`").replace("--", "-").strip())
        for line in (memory.__doc__ or "").splitlines()
        if line.startswith(("Quantity", "``"))
    ]
    in_readme = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in README.read_text()
        .partition("| quantity |")[2]
        .partition("\n\n")[0]
        .splitlines()
    ]

    assert in_readme[2:] == in_source[1:]


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)", README.read_text()))
def test_link_leads_to_a_file(target) -> None:
    """A relative link of the README leads to something in the repository."""
    assert (ROOT / target).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", README.read_text()))))
def test_make_target_exists(target) -> None:
    """A command that the README names is in the Makefile."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
