"""A skeleton has the form of the module and none of its tensors."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, defaultdict, deque, namedtuple

import torch
from torch import nn

from lightning_oom.planning.skeleton import Skeleton


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    """A counterpart that is told from the original."""
    new = torch.zeros_like(tensor, requires_grad=False)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def test_ties_are_kept_and_nothing_is_shared() -> None:
    """Also between modules, plain attributes and containers."""
    module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    module[1].weight = module[0].weight
    module.seen = {"weights": [module[0].weight], "module": (module[1],)}

    clone = Skeleton(zeros).module(module)

    assert clone[1].weight is clone[0].weight is clone.seen["weights"][0]
    assert clone.seen["module"][0] is clone[1]
    assert clone[0].weight is not module[0].weight
    assert len(list(clone.parameters())) == 1


def test_an_lstm_computes_with_its_new_weights() -> None:
    """It keeps a second list of them."""
    module = nn.LSTM(2, 3)
    clone = Skeleton(zeros).module(module)

    assert all(a is b for a, b in zip(clone._flat_weights, clone.parameters(), strict=True))
    assert clone(torch.ones(1, 1, 2))[0].eq(0).all()


def test_containers_keep_their_kind_and_their_place() -> None:
    """What is changed in the clone does not reach the original."""
    point = namedtuple("point", "x y")  # noqa: PYI024 - as users write it
    value = {
        "list": [torch.ones(1)],
        "deque": deque([1, 2], maxlen=2),
        "default": defaultdict(list, a=[torch.ones(2)]),
        "ordered": OrderedDict(b=torch.ones(1)),
        "point": point(torch.ones(1), "name"),
        "keys": {torch.ones(1): 1},
    }

    clone = Skeleton(zeros).value(value)
    clone["list"].append(1)
    clone["deque"].append(3)

    assert {name: type(item) for name, item in clone.items()} == {
        name: type(item) for name, item in value.items()
    }
    assert (len(value["list"]), list(value["deque"])) == (1, [1, 2])
    assert clone["deque"].maxlen == 2
    assert clone["default"]["new"] == []
    assert clone["point"].x.item() == 0
    assert next(iter(clone["keys"])).item() == 0


def test_functions_are_bound_to_the_clone() -> None:
    """Methods, partials, closures, hooks, and objects that hold the module."""

    class Helper:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

    module = nn.Linear(1, 1)
    module.method = module.extra_repr
    module.partial = functools.partial(nn.functional.linear, weight=module.weight)
    module.closure = lambda x: 2 * module(x)
    module.helper = Helper(module)
    module.register_forward_hook(lambda *_: module.weight.sum())

    clone = Skeleton(zeros).module(module)

    assert clone.method.__self__ is clone
    assert clone.partial.keywords["weight"] is clone.weight
    assert clone.closure(torch.ones(1)).item() == 0
    assert clone.helper.module is clone
    assert next(iter(clone._forward_hooks.values()))().item() == 0


def test_what_cannot_be_copied_is_shared_and_generators_are_copied() -> None:
    """A lock, and a generator whose state must not move."""
    module = nn.Linear(1, 1)
    module.lock = threading.Lock()
    module.generator = torch.Generator().manual_seed(3)

    clone = Skeleton(zeros).module(module)
    torch.rand(1, generator=clone.generator)

    assert clone.lock is module.lock
    assert module.generator.initial_seed() == clone.generator.initial_seed()
    assert not torch.equal(module.generator.get_state(), clone.generator.get_state())


def test_devices_that_are_kept_as_attributes_are_mapped() -> None:
    """So that user code makes new tensors where the clone is."""
    module = nn.Linear(1, 1)
    module.place = torch.device("meta")

    clone = Skeleton(zeros, lambda _: torch.device("cpu")).module(module)

    assert (clone.place.type, module.place.type) == ("cpu", "meta")
