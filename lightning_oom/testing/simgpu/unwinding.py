"""Let Python errors through a backward pass over a device whose guard is written in Python.

While an error that Python code raised in a backward pass (a hook, a checkpoint that recomputes, a
dispatch mode) unwinds the autograd engine, the engine puts the stream of the device back. To do so it
asks the guard for its device type, in Python, with the error still pending. CPython refuses a call
that returns normally with an error pending, and torch, which cannot raise at that point, aborts the
process. So the guard sets a pending error aside, and the backward pass raises it again at its end.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from lightning_oom._torch import replace_backward

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["let_errors_through", "set_pending_error_aside"]

_raise_pending = ctypes.pythonapi.PyErr_Occurred  # ctypes raises what is pending after a call
_raise_pending.restype = ctypes.c_void_p

_aside = threading.local()


def set_pending_error_aside() -> None:
    """Keep an error that is pending in this thread for the end of its backward pass."""
    try:
        _raise_pending()
    except BaseException as error:
        _aside.error = error


def let_errors_through() -> None:
    """Let every backward pass of this process raise the error that was set aside in it."""
    replace_backward(_raising_again)


def _raising_again(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except SystemError:  # torch failed, and the reason is not pending any more
            error = vars(_aside).pop("error", None)
            if error is None:
                raise
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    return run_backward
