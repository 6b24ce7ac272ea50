"""Which GPU of the machine ``cuda:N`` is: what ``CUDA_VISIBLE_DEVICES`` says, in every form."""

from __future__ import annotations

import re

__all__ = ["parse_visible_devices"]

_INDEX = re.compile(r"\s*\+?(\d+)")


def parse_visible_devices(text: str | None) -> tuple[str, ...] | None:
    """Read ``CUDA_VISIBLE_DEVICES`` as the CUDA driver does.

    Args:
        text: Its value; ``None`` where it is not set.

    Returns:
        One entry a visible device, in CUDA's order: an index of the machine, a UUID or the start of
        one (``GPU-...``), or a MIG id (``MIG-...``). Nothing after an entry that is no device is
        visible, and a list that names one device twice shows none. ``None``: every device is
        visible.

    Example:
        >>> parse_visible_devices("2,0"), parse_visible_devices("GPU-8f5e"), parse_visible_devices("")
        (('2', '0'), ('GPU-8f5e',), ())
        >>> parse_visible_devices("1,-1,0"), parse_visible_devices("0,0")
        (('1',), ())
        >>> parse_visible_devices(None) is None
        True
    """
    if text is None:
        return None
    entries: list[str] = []
    kind = next((name for name in ("GPU-", "MIG-") if text.strip().startswith(name)), None)
    for part in text.split(","):
        entry = _read_entry(part, kind)
        if entry is None:
            break
        if entry in entries:
            return ()
        entries.append(entry)
    return tuple(entries)


def _read_entry(part: str, kind: str | None) -> str | None:
    """Return the entry in one form, ``None`` where it names no device."""
    if kind is not None:
        part = part.strip()
        return part if part.startswith(kind) else None
    number = _INDEX.match(part)
    return None if number is None else str(int(number.group(1)))
