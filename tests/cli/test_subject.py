"""Modules and batches from the command line; every mistake is one line."""

from __future__ import annotations

import argparse

import pytest
import torch

from lightning_oom.cli.subject import add_subject_arguments, load_subject, parse_batch

BORING = "lightning.pytorch.demos.boring_classes:BoringModel"
CONFIG = """
trainer:
  precision: bf16-mixed
  max_epochs: 3
model:
  class_path: lightning.pytorch.demos.transformer.LightningTransformer
  init_args:
    vocab_size: 50
data:
  class_path: lightning.pytorch.demos.boring_classes.BoringDataModule
"""


def load(*words, required=True):
    """Parse and load."""
    parser = argparse.ArgumentParser()
    add_subject_arguments(parser, required=required)
    return load_subject(parser.parse_args([*words]))


def test_a_module_and_a_batch_by_words():
    """The class is imported and built with the given arguments."""
    subject = load(
        "torch.nn:Linear",
        "--init",
        '{"in_features": 3, "out_features": 2}',
        "--batch",
        "float32[5,3]",
    )

    assert subject.module.weight.shape == (2, 3)
    assert subject.batch.shape == (5, 3)
    assert subject.precision is None


def test_a_module_that_brings_its_data_needs_no_batch():
    """The first batch of its own loader."""
    assert load(BORING, "--precision", "bf16-mixed").batch.shape == (1, 32)


@pytest.mark.parametrize("fails", [False, True])
def test_layers_that_are_made_in_configure_model_are_there(tmp_path, monkeypatch, fails):
    """As in a run; what goes wrong there is one line too."""
    (tmp_path / f"late_{fails}.py").write_text(
        "import torch\n"
        "from lightning.pytorch import LightningModule\n"
        "class Late(LightningModule):\n"
        "    def configure_model(self):\n"
        f"        {'1 / 0' if fails else 'self.layer = torch.nn.Linear(3, 2)'}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = (f"late_{fails}:Late", "--batch", "float32[5,3]")

    if fails:
        with pytest.raises(ValueError, match="configure_model of Late fails: ZeroDivisionError"):
            load(*words)
    else:
        assert load(*words).module.layer.weight.shape == (2, 3)


def test_a_config_gives_all(tmp_path):
    """Classes, arguments, the first batch of the data, and the precision of the trainer."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)

    subject = load("--config", str(path))

    assert type(subject.module).__name__ == "LightningTransformer"
    assert isinstance(subject.batch, torch.Tensor)
    assert subject.precision == "bf16-mixed"
    assert load("--config", str(path), "--precision", "32").precision == "32"


def test_a_verb_that_can_do_without_gets_nothing():
    """The doctor looks at the machine alone."""
    assert load(required=False) is None


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("float32[2,3]", (2, 3)),
        ("float32[]", ()),
        ("bool[4], bfloat16[2, 2]", ((4,), (2, 2))),
        ("x=uint8[1],y = int64[2]", {"x": (1,), "y": (2,)}),
    ],
)
def test_batches_are_described_by_types_and_shapes(text, shapes):
    """One tensor, a tuple, or a dictionary."""
    batch = parse_batch(text)
    if isinstance(batch, dict):
        assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == shapes
    elif isinstance(batch, tuple):
        assert tuple(tuple(tensor.shape) for tensor in batch) == shapes
    else:
        assert tuple(batch.shape) == shapes


@pytest.mark.parametrize(
    "text", ["", "32,3", "float31[2]", "float32[2] int64[2]", "x=int8[1],int8[1]"]
)
def test_other_descriptions_are_refused(text):
    """With what was expected."""
    with pytest.raises(ValueError, match=r"batch|comma|name every"):
        parse_batch(text)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give MODULE:CLASS or --config FILE"),
        (["no.such:Thing", "--batch", "int8[1]"], "cannot import 'no.such:Thing'"),
        (["torch.nn:Nothing", "--batch", "int8[1]"], "cannot import 'torch.nn:Nothing'"),
        (["torch.nn:Linear", "--batch", "int8[1]"], "cannot build 'torch.nn:Linear': TypeError"),
        (["torch.nn:ReLU"], "give --batch"),
        (["torch.nn:ReLU", "--init", "[1]"], "--init is a JSON object"),
        (["torch.nn:ReLU", "--init", "{"], "--init is a JSON object"),
        (["--config", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
    ],
)
def test_mistakes_are_named(words, text):
    """One sentence each."""
    with pytest.raises(ValueError, match=text):
        load(*words)


def test_a_config_without_a_class_says_what_to_do(tmp_path):
    """A CLI with a fixed class writes no class_path."""
    path = tmp_path / "config.yaml"
    path.write_text("model:\n  width: 3\n")

    with pytest.raises(ValueError, match="no class_path under 'model'; name the class"):
        load("--config", str(path))
