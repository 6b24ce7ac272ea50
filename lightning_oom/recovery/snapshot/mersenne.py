"""The Mersenne Twisters of Python and numpy, read as the 2,500 bytes they are.

``random.getstate()`` builds 625 Python integers (10 us) and ``numpy.random.get_state()`` copies
its words one by one (33 us). Both generators are one C struct of 624 words and an index, so a plain
copy of its bytes (0.5 us) holds the same state. Where the struct lies is checked, once per process,
against what the public functions say; an interpreter or numpy that keeps it elsewhere falls back to
them.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from typing import Any

__all__ = ["read_numpy", "read_python", "write_numpy", "write_python"]

_WORDS = 624
_STATE_BYTES = 4 * (_WORDS + 1)
_OBJECT_HEAD_BYTES = 16  # reference count and type
_NUMPY_NAME = "MT19937"


# ------------------------------------------------------------------ Python
def _python_raw(generator: random.Random) -> bytes:
    return ctypes.string_at(id(generator) + _OBJECT_HEAD_BYTES, _STATE_BYTES)


def _python_words(raw: bytes) -> tuple[int, ...]:
    index, *words = struct.unpack(f"=i{_WORDS}I", raw)
    return (*words, index)


@functools.cache
def _python_layout_known() -> bool:
    if sys.implementation.name != "cpython":
        return False
    generator = random.Random(12345)  # noqa: S311 - not for secrets
    if generator.__sizeof__() < _OBJECT_HEAD_BYTES + _STATE_BYTES:
        return False
    for _ in range(3):
        if _python_words(_python_raw(generator)) != generator.getstate()[1]:
            return False
        generator.gauss(0.0, 1.0)
    return True


def _python_generator() -> random.Random | None:
    generator = getattr(random.getstate, "__self__", None)
    return generator if type(generator) is random.Random else None


def read_python() -> Any:
    """Return the state of :mod:`random`'s own generator, for :func:`write_python`."""
    generator = _python_generator()
    if generator is None or not _python_layout_known():
        return random.getstate()
    return _python_raw(generator), vars(generator)["gauss_next"]


def write_python(state: Any) -> None:
    """Put back what :func:`read_python` returned."""
    if isinstance(state[0], bytes):
        raw, gauss_next = state
        state = (random.Random.VERSION, _python_words(raw), gauss_next)
    random.setstate(state)


# ------------------------------------------------------------------ numpy
def _object_bytes(legacy: Any) -> bytes:
    """Everything in the C object of a ``RandomState``: moves when the cached Gaussian does."""
    size = legacy.__sizeof__()
    return ctypes.string_at(id(legacy) + _OBJECT_HEAD_BYTES, size - _OBJECT_HEAD_BYTES)


def _numpy_raw(bit_generator: Any) -> bytes:
    return ctypes.string_at(bit_generator.ctypes.state_address, _STATE_BYTES)


def _numpy_state(raw: bytes, gauss: tuple[int, float]) -> tuple[Any, ...]:
    import numpy as np  # noqa: PLC0415 - only reached where it is imported already

    words = np.frombuffer(raw, dtype=np.uint32, count=_WORDS)
    (position,) = struct.unpack_from("=i", raw, 4 * _WORDS)
    return (_NUMPY_NAME, words, position, *gauss)


def _same_state(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[0] == other[0] and (one[1] == other[1]).all() and one[2:] == other[2:]


@functools.cache
def _numpy_layout_known() -> bool:
    import numpy as np  # noqa: PLC0415 - only reached where it is imported already

    if sys.implementation.name != "cpython" or not hasattr(np.random, "get_bit_generator"):
        return False
    bit_generator = np.random.MT19937(12345)
    legacy = np.random.RandomState(bit_generator)
    if legacy.__sizeof__() <= _OBJECT_HEAD_BYTES:
        return False
    before = _object_bytes(legacy)
    for _ in range(4):
        legacy.standard_normal()  # every second one is the cached value of the one before
        after = _object_bytes(legacy)
        state: Any = legacy.get_state()
        if after == before or not _same_state(
            _numpy_state(_numpy_raw(bit_generator), state[3:]), state
        ):
            return False
        before = after
    legacy.random_sample()
    return _object_bytes(legacy) == before


class _GaussCache:
    """The cached Gaussian of numpy's global generator, asked for only when its object moved."""

    seen = b""
    gauss: tuple[int, float] = (0, 0.0)

    @classmethod
    def read(cls, legacy: Any) -> tuple[int, float]:
        seen = _object_bytes(legacy) + id(legacy).to_bytes(8, "little")
        if seen != cls.seen:
            cls.gauss = legacy.get_state()[3:]
            cls.seen = seen
        return cls.gauss


def read_numpy() -> Any:
    """Return the state of numpy's global generator; ``None`` when numpy is not imported."""
    np = sys.modules.get("numpy")
    if np is None:
        return None
    legacy = getattr(np.random.get_state, "__self__", None)
    if legacy is None or not _numpy_layout_known():
        return np.random.get_state(legacy=False)
    bit_generator = np.random.get_bit_generator()
    if type(bit_generator).__name__ != _NUMPY_NAME:
        return np.random.get_state(legacy=False)
    return _numpy_raw(bit_generator), _GaussCache.read(legacy)


def write_numpy(state: Any) -> None:
    """Put back what :func:`read_numpy` returned; nothing for ``None``."""
    if state is None:
        return
    if isinstance(state, tuple):
        state = _numpy_state(*state)
    sys.modules["numpy"].random.set_state(state)
