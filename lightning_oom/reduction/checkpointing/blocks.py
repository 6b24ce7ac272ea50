"""Which modules of a model are its blocks: what checkpointing keeps or recomputes as a whole."""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Block", "block_levels", "find_blocks", "match_blocks"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_UNCALLABLE = (nn.ModuleList, nn.ModuleDict)
_COMPILED = "_orig_mod"


@dataclass(frozen=True)
class Block:
    """One module that can be checkpointed as a whole.

    Attributes:
        path: Its name below the root, as ``named_modules`` gives it.
        module: The module itself.
    """

    path: str
    module: nn.Module


def find_blocks(root: nn.Module) -> list[Block]:
    """Find the repeated blocks of a model: the layers of a transformer, the stages of a CNN.

    A block is a member of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` (or of several of them
    side by side in one module, or inside one another) that has children and parameters, and a
    sibling of the same class. Outermost blocks win: what is inside a block is none of its own.
    Where that finds nothing, plain ``Sequential`` members of a container are blocks, such as
    ``ModuleList([Sequential(conv, norm, relu), ...])``; otherwise they are looked into.

    Args:
        root: Usually the LightningModule.

    Returns:
        The blocks in the order of ``named_modules``; none where nothing repeats.

    Example:
        >>> from torch import nn
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)]
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ModuleList(layers))
        >>> [block.path for block in find_blocks(model)]
        ['1.0', '1.1', '1.2']
    """
    return list(_blocks_below(root, "")) or list(_sequentials_below(root))


def block_levels(root: nn.Module) -> list[list[Block]]:
    """Find the repeated blocks at every depth, outermost first.

    In each level, a block of the level before that has repeated blocks inside gives way to them:
    stages of a CNN, then its residual blocks, then the layers of these.

    Args:
        root: Usually the LightningModule.

    Returns:
        At least one block a level; no level where nothing repeats.
    """
    levels = []
    level = find_blocks(root)
    while level:
        levels.append(level)
        finer = [
            inner
            for block in level
            for inner in (list(_blocks_below(block.module, block.path)) or [block])
        ]
        level = finer if len(finer) > len(level) else []
    return levels


def match_blocks(root: nn.Module, patterns: Sequence[str | type[nn.Module]]) -> list[Block]:
    """Find the modules that are meant by class names, paths or classes.

    Args:
        root: Usually the LightningModule; never matched itself.
        patterns: Each is a class, the name of a class (``"GPT2Block"``) or the path of a module
            (``"encoder.layers.3"``), names and paths with the wildcards ``*``, ``?`` and ``[...]``
            if wanted; ``*`` also matches dots. A ``ModuleList`` or ``ModuleDict``, which cannot be
            called, stands for its members.

    Returns:
        The outermost of all modules that were matched, in the order of ``named_modules``.

    Raises:
        ValueError: A pattern matches no module. The message lists what comes near.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> [block.path for block in match_blocks(model, ["ReLU", "0"])]
        ['0', '1.1']
        >>> match_blocks(model, ["Relu"])
        Traceback (most recent call last):
            ...
        ValueError: no module matches 'Relu'. Near: 'ReLU'
    """
    modules = [(path, module) for path, module in root.named_modules() if path]
    meant: set[int] = set()
    for pattern in patterns:
        matched = [module for path, module in modules if _matches(path, module, pattern)]
        if not matched:
            raise ValueError(_no_match(pattern, modules))
        meant.update(id(member) for module in matched for member in _callable_members(module))
    found: list[Block] = []
    for path, module in modules:
        if id(module) in meant and not (found and path.startswith(f"{found[-1].path}.")):
            found.append(Block(path, module))
    return found


def _matches(path: str, module: nn.Module, pattern: str | type[nn.Module]) -> bool:
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    plain_path = ".".join(part for part in path.split(".") if part != _COMPILED)
    return any(
        fnmatchcase(name, pattern)
        for name in (path, plain_path, type(module).__name__)
        if name  # a compiled root
    )


def _callable_members(module: nn.Module) -> Iterator[nn.Module]:
    """Give the module, or the members of one that is never called."""
    if type(module) not in _UNCALLABLE:
        yield module
        return
    for member in module.children():
        yield from _callable_members(member)


def _no_match(pattern: str | type[nn.Module], modules: list[tuple[str, nn.Module]]) -> str:
    names = [*dict.fromkeys(type(module).__name__ for _, module in modules)]
    paths = [path for path, _ in modules]
    if isinstance(pattern, type):
        near = difflib.get_close_matches(pattern.__name__, names, n=5, cutoff=0.5)
        shown = pattern.__name__
    else:
        lowered = {name.lower(): name for name in [*paths, *names]}
        close = difflib.get_close_matches(pattern.lower(), lowered, n=5, cutoff=0.5)
        near, shown = [lowered[name] for name in close], pattern
    text = f"no module matches {shown!r}. "
    if near:
        return text + "Near: " + ", ".join(map(repr, near))
    return (
        text
        + "Classes with parts of their own: "
        + ", ".join(
            dict.fromkeys(
                repr(type(module).__name__) for _, module in modules if _has_parts(module)
            )
        )
    )


def _blocks_below(module: nn.Module, path: str) -> Iterator[Block]:
    """Give the outermost repeated blocks inside ``module``, which is no block itself."""
    members: list[Block] = []
    others: list[Block] = []
    is_container = type(module) in _CONTAINERS
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if type(child) in _CONTAINERS:
            members += _members(child, child_path)
        else:
            (members if is_container else others).append(Block(child_path, child))
    classes = Counter(type(block.module) for block in members if _has_parts(block.module))
    repeated = {kind for kind, count in classes.items() if count > 1}
    for block in [*members, *others]:
        if type(block.module) in repeated and _has_parts(block.module):
            yield block
        else:
            yield from _blocks_below(block.module, block.path)


def _sequentials_below(root: nn.Module) -> Iterator[Block]:
    """Give the ``Sequential`` members, two or more, of containers; nothing deeper inside them."""
    for path, container in root.named_modules():
        if type(container) not in _CONTAINERS:
            continue
        members = [
            Block(f"{path}.{name}" if path else name, child)
            for name, child in container.named_children()
            if type(child) is nn.Sequential and _has_parts(child)
        ]
        if len(members) > 1 and all(_holds_leaves(block.module) for block in members):
            yield from members


def _holds_leaves(module: nn.Module) -> bool:
    return all(next(child.children(), None) is None for child in module.children())


def _members(container: nn.Module, path: str) -> Iterator[Block]:
    """Give what is in a container, containers inside of it opened too."""
    for name, child in container.named_children():
        if type(child) in _CONTAINERS:
            yield from _members(child, f"{path}.{name}")
        else:
            yield Block(f"{path}.{name}", child)


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and (
        next(module.parameters(), None) is not None
    )
