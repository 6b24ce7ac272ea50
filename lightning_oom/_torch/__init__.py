"""The one door to private torch: every private name of torch that the package uses is taken here.

A new torch release that moves a name breaks this folder and ``tests/test_torch_door*.py``, nothing else.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = [
    "CPU_KEYS",
    "MODULE_INTERNALS",
    "SCALER_STATE",
    "SPARSE_CPU_KEYS",
    "NormBase",
    "OutOfMemoryError",
    "TorchDispatchMode",
    "WatchingMode",
    "around_backward",
    "aten_operators",
    "backend_slot_name",
    "base_of",
    "counts_list_writes",
    "cuda_history",
    "cuda_snapshot",
    "dlpack_of",
    "foreach_copy",
    "graph_node_order",
    "has_kernel",
    "host_storage_at",
    "identity_of",
    "is_backward_multithreaded",
    "is_compiled",
    "is_profiling",
    "let_hooks_be_disabled",
    "module_buffers",
    "module_members",
    "non_persistent_names",
    "python_backend_bases",
    "read_version",
    "redispatch_of",
    "replace_backward",
    "saved_by",
    "scaler_stages",
    "schema_of",
    "set_backward_multithreaded",
    "setup_python_backend",
    "sparse_parts",
    "step_hooks",
    "tensor_from_dlpack",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "without_autocast",
    "written_positions",
]

OutOfMemoryError: type[RuntimeError] = getattr(
    torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError
)
"""``torch.OutOfMemoryError``; before torch 2.5 it lives in ``torch.cuda``."""

read_version = attrgetter("_version")
"""How often a tensor was written to in place. Raises ``RuntimeError`` for inference tensors.

Not counted: ``native_batch_norm``'s running statistics, fused optimizers, writes through ``.data``.
"""

MODULE_INTERNALS = frozenset(vars(torch.nn.Module())) - {"training"}
"""Names that every module keeps in its ``__dict__`` on torch's own account."""


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, in one call where the backend can."""
    torch._foreach_copy_(targets, sources)


def module_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary itself in which ``module`` keeps its own buffers."""
    return module._buffers


def module_members(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries themselves in which ``module`` keeps its own children and parameters."""
    return module._modules, module._parameters


def non_persistent_names(module: torch.nn.Module) -> set[str]:
    """Return the set itself of the buffers that ``module`` leaves out of its state dict."""
    return module._non_persistent_buffers_set


class WatchingMode(TorchDispatchMode):
    """A dispatch mode without the frames that newer releases put around its handler.

    They keep dynamo from compiling the handler, which it does not try while a mode is active, import
    dynamo at the first operator, and hold the operator's arguments in the traceback of an error.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator as a dispatch mode sees it; ``None`` for a higher-order one."""
    return getattr(operator, "_schema", None)


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that a sparse tensor is made of, without coalescing it."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that ``tensor`` is a view of, or ``tensor`` itself."""
    base: torch.Tensor | None = tensor._base
    return tensor if base is None else base


@functools.cache
def written_positions(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that an operator writes into (``mul_``, ``out=``)."""
    schema = schema_of(operator)
    if schema is None:
        return ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""What :func:`redispatch_of` needs to reach the CPU kernel of an operator, autograd left out."""

SPARSE_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
"""The same for the kernels of sparse COO tensors."""

dlpack_of = torch._C._to_dlpack
tensor_from_dlpack = torch._C._from_dlpack
is_backward_multithreaded = torch._C._is_multithreading_enabled
backend_slot_name = torch._C._get_privateuse1_backend_name
without_autocast = torch._C._DisableAutocast
set_backward_multithreaded = torch._C._set_multithreading_enabled

setup_python_backend: Any = getattr(
    backend_registration, "_setup_privateuseone_for_python_backend", None
)
"""Fills torch's out-of-tree device slot from Python; ``None`` before torch 2.10."""


def python_backend_bases() -> tuple[Any, Any, Any]:
    """Return the classes of a backend's hooks and device guard, and the slot's device type."""
    parts = torch._C._acc
    return parts.PrivateUse1Hooks, parts.DeviceGuard, torch._C._autograd.DeviceType.PrivateUse1


def host_storage_at(address: int, num_bytes: int) -> torch.UntypedStorage:
    """Return a CPU storage over memory that something else owns and keeps alive."""
    cpu = torch.device("cpu")
    storage: Any = torch._C._construct_storage_from_data_pointer(address, cpu, num_bytes)
    return cast("torch.UntypedStorage", storage)


def aten_operators() -> Iterator[Any]:
    """Walk over the overloads of torch's own operators."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace == "aten":
            packet, _, overload = rest.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operator is not None:
                yield operator


def has_kernel(operator: Any, dispatch_key: str) -> bool:
    """Say whether ``operator`` has a kernel of its own for a dispatch key or alias key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), dispatch_key)


def redispatch_of(operator: Any) -> Any:
    """Return ``call(keys, *args, **kwargs)``, which runs the operator's kernel for those keys."""
    return operator._handle.redispatch_boxed


SCALER_STATE = ("_scale", "_growth_tracker")
"""Tensors that ``torch.amp.GradScaler`` makes when it is first used."""


def scaler_stages(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """Return the mapping itself of optimizer id -> whether its gradients were unscaled."""
    stages: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    return stages


def replace_backward(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let ``make(run)`` stand for ``run``, the autograd engine, for the rest of the process."""
    run = getattr(torch.autograd, "_engine_run_backward", None)
    if run is not None:
        torch.autograd._engine_run_backward = make(run)  # type: ignore[attr-defined]  # not in __all__


@contextmanager
def around_backward(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter ``context()`` around every run of the autograd engine inside the block.

    A torch function mode is switched off while torch runs ``backward`` or ``autograd.grad`` for it,
    and with them everything that a checkpoint recomputes. Does nothing where the name moved.
    """
    run = getattr(torch.autograd, "_engine_run_backward", None)
    if run is None:
        yield
        return

    def entering(*args: Any, **kwargs: Any) -> Any:
        with context():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = entering  # type: ignore[attr-defined]  # put back below
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]  # as found


def counts_list_writes(probe: torch.Tensor) -> bool:
    """Say whether writing to a list of tensors raises their versions here and now.

    It does not below most dispatch modes.

    Args:
        probe: Any tensor that wants no gradient; it is written to and stays as it is.
    """
    version = read_version(probe)
    torch._foreach_add_([probe], 0)
    return bool(read_version(probe) != version)


def step_hooks(
    optimizer: torch.optim.Optimizer,
) -> tuple[list[dict[int, Any]], list[dict[int, Any]]]:
    """Return the mappings of hooks before and after an optimizer's step, in order."""
    own: Any = optimizer
    return (
        [_global_optimizer_pre_hooks, own._optimizer_step_pre_hooks],
        [own._optimizer_step_post_hooks, _global_optimizer_post_hooks],
    )


def let_hooks_be_disabled(hooks: Any) -> Callable[[], None]:
    """Let ``disable_saved_tensors_hooks`` work while ``hooks`` are the only ones that are entered.

    ``torch.func`` transforms disable hooks around their work and refuse to run below any. Inside of
    such a block these ones are taken off and put back at its end.

    Args:
        hooks: An entered ``torch.autograd.graph.saved_tensors_hooks``.

    Returns:
        The undo. Nothing is changed where torch cannot say whose hooks are on top.
    """
    graph: Any = torch.autograd.graph
    disable = graph.disable_saved_tensors_hooks
    look = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if look is None:
        return lambda: None

    @contextmanager
    def disable_others(error_message: str) -> Iterator[None]:
        top = look(True)
        if top is None or top[0] != hooks.pack_hook:
            with disable(error_message):
                yield
            return
        hooks.__exit__(None, None, None)
        try:
            with disable(error_message):
                yield
        finally:
            hooks.__enter__()

    graph.disable_saved_tensors_hooks = disable_others

    def undo() -> None:
        if graph.disable_saved_tensors_hooks is disable_others:
            graph.disable_saved_tensors_hooks = disable

    return undo


def graph_node_order(node: Any) -> int | None:
    """Return a number that grows with each node that a thread adds to its graphs, if torch tells."""
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else int(number())


def is_compiled(function: Any) -> bool:
    """Say whether a function, or what it wraps, was made by ``torch.compile``.

    Once that has been used, the functions that it is not to look into carry its marks as well.
    """
    while function is not None:
        if hasattr(function, "_torchdynamo_orig_callable"):
            return not getattr(function, "_torchdynamo_disable", False)
        function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)
    return False


@functools.cache
def _saved_names(node_type: type) -> tuple[str, ...]:
    """Return the names under which nodes of a type give what they saved."""
    return tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))


def saved_by(node: Any) -> Iterator[torch.Tensor]:
    """Give the tensors that a node of an autograd graph keeps; nothing is unpacked or computed.

    Args:
        node: The ``grad_fn`` of a tensor, or one below it.

    Returns:
        What was saved without hooks, or under hooks that keep it as an object with a ``tensor``.
        Nothing where this torch release does not tell, or the node was released.
    """
    node_type: Any = type(node)
    for name in _saved_names(node_type):
        try:
            found = getattr(node, name)
        except RuntimeError:  # released by the backward pass
            return
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            if not hasattr(saved, "unpack_hook"):
                continue
            try:
                kept = saved.data
            except RuntimeError:
                continue
            kept = kept if isinstance(kept, torch.Tensor) else getattr(kept, "tensor", None)
            if isinstance(kept, torch.Tensor):
                yield kept


def cuda_snapshot(device: torch.device) -> dict[str, Any] | None:
    """Return every block of CUDA's allocator with its history; ``None`` where none is recorded."""
    is_recording = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if device.type != "cuda" or is_recording is None or not is_recording():
        return None
    return dict(torch.cuda.memory._snapshot(device))


def cuda_history() -> dict[str, Callable[..., Any]]:
    """Return what switches CUDA's record of allocations: ``is_on``, ``start``, ``stop``, ``dump``."""
    memory: Any = torch.cuda.memory
    return {
        "is_on": getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False),
        "start": memory._record_memory_history,
        "stop": functools.partial(memory._record_memory_history, enabled=None),
        "dump": memory._dump_snapshot,
    }


def is_profiling() -> bool:
    """Say whether a profiler of torch runs on this thread."""
    look = getattr(torch.autograd, "_profiler_enabled", None)
    return look is not None and bool(look())


def identity_of(storage: torch.UntypedStorage) -> int:
    """Return what tells a storage from others while it lives, whichever wrapper it is seen by."""
    identity: int = storage._cdata
    return identity
