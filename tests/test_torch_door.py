"""Every private name of torch behind the door exists in the installed release and behaves as used."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from torch import nn

from lightning_oom import _torch as door

SOURCE = Path(door.__file__).read_text(encoding="utf-8")

TESTED_ELSEWHERE = {
    # behind the simulated GPU, which does not work at all without them: tests/testing/test_simgpu*
    "SPARSE_CPU_KEYS",
    "host_storage_at",
    "python_backend_bases",
}


@pytest.mark.parametrize("name", ["", *(part.name for part in iter_modules(door.__path__))])
def test_every_name_of_the_door_is_tested(name: str) -> None:
    """A name that is added to the door is used in a test of it, or listed with where it is tested.

    The tests of a part ``_torch/<part>.py`` stand in ``test_torch_door_<part>.py`` and call it ``door``.
    """
    pattern = f"test_torch_door_{name}.py" if name else "test_torch_door*.py"
    part = import_module(f"{door.__name__}.{name}") if name else door
    texts = [path.read_text("utf-8") for path in Path(__file__).parent.glob(pattern)]
    used = {
        node.attr
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "door"
    }

    assert set(part.__all__) - used - TESTED_ELSEWHERE == set()
    assert [name for name in part.__all__ if not hasattr(part, name)] == []


def test_the_error_is_the_one_that_torch_raises() -> None:
    """``OutOfMemoryError`` is a ``RuntimeError`` under both of its names."""
    assert issubclass(door.OutOfMemoryError, RuntimeError)
    assert door.OutOfMemoryError is torch.cuda.OutOfMemoryError


def test_a_dispatch_mode_sees_every_operator() -> None:
    """Both kinds of mode are called once for each operator with its overload."""

    def watched(base: type) -> list[str]:
        class Mode(base):  # type: ignore[misc] # a class from an argument
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        seen: list[str] = []
        with Mode():
            torch.zeros(2).add(1)
        return seen

    expected = ["aten.zeros.default", "aten.add.Tensor"]

    assert watched(door.TorchDispatchMode) == expected
    assert watched(door.WatchingMode) == expected


def test_a_watching_mode_adds_no_frames() -> None:
    """Nothing of torch stands between the operator's caller and the handler."""
    frames: list[str] = []

    class Mode(door.WatchingMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            caller = __import__("sys")._getframe(1)
            frames.append(caller.f_code.co_name)
            return func(*args, **(kwargs or {}))

    def calls() -> None:
        torch.zeros(1)

    with Mode():
        calls()

    assert frames == ["calls"]


def test_trees_are_flattened_and_put_together() -> None:
    """The four functions agree on what a leaf is."""
    tree = {"a": [torch.zeros(1), 2], "b": ("text", None)}
    leaves, spec = door.tree_flatten(tree)

    assert [type(leaf) for leaf in leaves[:3]] == [torch.Tensor, int, str]
    assert door.tree_unflatten(leaves, spec).keys() == tree.keys()
    assert len(door.tree_leaves(tree)) == len(leaves)
    assert door.tree_map(lambda leaf: 1, tree)["a"] == [1, 1]
    assert door.tree_map_only(int, lambda leaf: leaf + 1, tree)["a"][1] == 3


def test_versions_count_writes_in_place() -> None:
    """One for each, shared by views, unknown to inference tensors."""
    tensor = torch.zeros(4)
    view = tensor[1:]
    tensor.add_(1)

    assert door.read_version(tensor) == door.read_version(view) == 1
    with torch.inference_mode():
        inference = torch.zeros(1)
    with pytest.raises(RuntimeError):
        door.read_version(inference)


def test_writes_to_lists_are_counted_outside_a_mode() -> None:
    """Below a dispatch mode they are not, which is why the watcher counts them itself."""
    probe = torch.ones(2)

    class Mode(door.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    assert door.counts_list_writes(probe)
    with Mode():
        assert isinstance(door.counts_list_writes(probe), bool)
    assert probe.tolist() == [1.0, 1.0]


def test_foreach_copy_copies_and_counts() -> None:
    """Each target holds its source, and autograd knows."""
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    door.foreach_copy(targets, sources)

    assert [target.sum().item() for target in targets] == [2.0, 3.0]
    assert [door.read_version(target) for target in targets] == [1, 1]


def test_buffers_are_those_that_the_module_uses() -> None:
    """The mappings are the module's own, so that a change is a change of the module."""
    module = nn.BatchNorm1d(2)
    module.register_buffer("extra", torch.ones(1), persistent=False)

    assert isinstance(module, door.NormBase)
    assert door.module_buffers(module)["running_mean"] is module.running_mean
    assert door.module_members(module)[1]["weight"] is module.weight
    assert door.non_persistent_names(module) == {"extra"}
    door.module_buffers(module)["extra"] = torch.zeros(1)
    assert module.extra.item() == 0


def test_module_internals_are_what_a_bare_module_has() -> None:
    """Registries and hooks, not ``training``, which is the user's."""
    assert {"_parameters", "_buffers", "_modules"} <= door.MODULE_INTERNALS
    assert "training" not in door.MODULE_INTERNALS


def test_schemas_tell_what_is_written_and_what_is_an_output() -> None:
    """Alias annotations and ``is_out`` are where the package reads them."""
    add_out = door.schema_of(torch.ops.aten.add.out)
    view = door.schema_of(torch.ops.aten.view.default)

    assert add_out.name == "aten::add"
    assert [argument.is_out for argument in add_out.arguments][-1] is True
    assert view.returns[0].alias_info is not None
    assert view.returns[0].alias_info.is_write is False
    assert "Tensor" in str(view.returns[0].type)
    assert door.schema_of(object()) is None
    assert door.written_positions(torch.ops.aten.add_.Tensor) == ((0, "self"),)
    assert door.written_positions(torch.ops.aten.add.out) == ((3, "out"),)
    assert door.written_positions(torch.ops.aten.add.Tensor) == ()


def test_a_sparse_tensor_has_strided_parts() -> None:
    """Indices and values, also of a tensor that was not coalesced."""
    indices = torch.tensor([[0, 0]])
    coo = torch.sparse_coo_tensor(indices, torch.ones(2), (3,), check_invariants=False)
    csr = torch.eye(2).to_sparse_coo()

    assert [tuple(part.shape) for part in door.sparse_parts(coo)] == [(1, 2), (2,)]
    assert [tuple(part.shape) for part in door.sparse_parts(csr)] == [(2, 2), (2,)]
    assert door.sparse_parts(torch.zeros(1)) == ()


def test_views_know_their_base() -> None:
    """A tensor that is no view is its own base."""
    tensor = torch.zeros(4)

    assert door.base_of(tensor[1:]) is tensor
    assert door.base_of(tensor) is tensor


def test_kernels_can_be_found_and_called_below_autograd() -> None:
    """Operators are listed with their kernels, and run for chosen dispatch keys."""
    add = torch.ops.aten.add.Tensor
    x = torch.ones(2, requires_grad=True)

    assert add in set(door.aten_operators())
    assert door.has_kernel(add, "CPU")
    assert not door.has_kernel(torch.ops.aten.reshape.default, "CPU")
    assert door.redispatch_of(add)(door.CPU_KEYS, x, x).requires_grad is False


def test_memory_is_handed_over_by_dlpack() -> None:
    """A capsule becomes a tensor over the same memory."""
    tensor = torch.arange(3.0)
    other = door.tensor_from_dlpack(door.dlpack_of(tensor))
    tensor[0] = 7

    assert other[0] == 7


def test_backward_can_be_kept_on_its_thread() -> None:
    """The switch is read and set."""
    before = door.is_backward_multithreaded()
    door.set_backward_multithreaded(False)
    after = door.is_backward_multithreaded()
    door.set_backward_multithreaded(before)

    assert (after, door.is_backward_multithreaded()) == (False, before)


def test_autocast_can_be_left_out() -> None:
    """Inside the guard, an operator computes in the dtype of its inputs."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = (x @ x).dtype
        with door.without_autocast():
            plain = (x @ x).dtype

    assert (cast, plain) == (torch.bfloat16, torch.float32)


def test_the_slot_for_an_outside_device_has_a_name() -> None:
    """Empty, or taken by the simulated GPU of this process."""
    assert door.backend_slot_name() in ("privateuseone", "simgpu")
    assert door.setup_python_backend is None or callable(door.setup_python_backend)


def test_scaler_keeps_its_state_under_known_names() -> None:
    """Stage per optimizer, and two tensors that are made on first use."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    before = [getattr(scaler, name) for name in door.SCALER_STATE]
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)

    assert before == [None, None]
    assert all(isinstance(getattr(scaler, name), torch.Tensor) for name in door.SCALER_STATE)
    assert id(optimizer) in door.scaler_stages(scaler)


def test_the_engine_can_be_surrounded() -> None:
    """``backward`` and ``autograd.grad`` both run inside the context, and afterwards neither."""
    entered: list[str] = []

    class Context:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *_: object) -> None:
            entered.append("out")

    x = torch.ones(1, requires_grad=True)
    with door.around_backward(Context):
        (x * 2).backward()
        torch.autograd.grad(x * 2, x)
    (x * 2).backward()

    assert entered == ["in", "out"] * 2


def test_the_engine_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for it is called by ``backward``."""
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    calls: list[int] = []

    def counting(run: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return run(*args, **kwargs)

        return counted

    door.replace_backward(counting)
    x = torch.ones(1, requires_grad=True)
    (x * 2).backward()

    assert calls == [1]


def test_hooks_of_an_optimizer_are_found() -> None:
    """Those before and after a step, the optimizer's own and those of all."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    first = optimizer.register_step_pre_hook(lambda *_: None)
    second = optimizer.register_step_post_hook(lambda *_: None)
    before, after = door.step_hooks(optimizer)

    assert [len(hooks) for hooks in before] == [0, 1]
    assert [len(hooks) for hooks in after] == [1, 0]
    first.remove()
    second.remove()


def test_the_door_says_what_each_name_is_for() -> None:
    """Every function and class has a docstring."""
    tree = ast.parse(SOURCE)
    silent = [
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not ast.get_docstring(node)
    ]

    assert silent == []
