"""What autograd has saved for the backward pass, read off the graph itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_oom._torch import saved_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch

__all__ = ["SavedTensor", "walk_graph"]

_MAX_NODES = 50_000


class SavedTensor:
    """One tensor that a node of the graph keeps.

    Attributes:
        tensor: The tensor.
        node_name: The node's class, as in ``"SoftmaxBackward0"``.
        parameter: Name of the parameter that was used last before; ``None`` when there was none.
    """

    __slots__ = ("node_name", "parameter", "tensor")

    def __init__(self, tensor: torch.Tensor, node_name: str, parameter: str | None) -> None:
        self.tensor = tensor
        self.node_name = node_name
        self.parameter = parameter


def walk_graph(roots: Iterable[Any], names: Mapping[int, str]) -> Iterator[SavedTensor]:
    """Give every tensor that the graph below some nodes has saved and not yet released.

    What is saved through hooks of the user's (checkpoints, offloading) is left alone: to look at it
    would compute or copy it.

    Args:
        roots: The ``grad_fn`` of tensors.
        names: Name of each parameter by ``id``.
    """
    parameters: dict[Any, str | None] = {}
    only_parameters: dict[Any, bool] = {}
    for node, children in _children_first(roots):
        variable = getattr(node, "variable", None)
        if variable is not None:
            parameters[node] = names.get(id(variable))
            only_parameters[node] = parameters[node] is not None
            continue
        own = [child for child in children if only_parameters.get(child)]
        before = own[-1:] or [child for child in children if parameters.get(child)]
        parameters[node] = parameters[before[0]] if before else None
        only_parameters[node] = len(children) == 1 and bool(own)
        for tensor in saved_by(node):
            yield SavedTensor(tensor, type(node).__name__, parameters[node])


def _children_first(roots: Iterable[Any]) -> Iterator[tuple[Any, list[Any]]]:
    seen: set[Any] = set()
    stack: list[tuple[Any, list[Any] | None]] = [(root, None) for root in roots]
    while stack:
        node, children = stack.pop()
        if children is not None:
            yield node, children
        elif node not in seen and len(seen) < _MAX_NODES:
            seen.add(node)
            children = [child for child, _ in node.next_functions if child is not None]
            stack.append((node, children))
            stack += [(child, None) for child in reversed(children) if child not in seen]
