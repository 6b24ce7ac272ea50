"""Recoveries that are known to be wrong, to show that the campaign can fail."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from lightning_oom._torch import OutOfMemoryError

__all__ = ["NaiveRetry"]


class NaiveRetry(Callback):
    """Run the closure again after an out-of-memory error, and put nothing back."""

    def setup(self, trainer, pl_module, stage) -> None:
        """Wrap the closures of the loop."""
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        make = loop._make_closure

        def make_retrying(*args: Any) -> Any:
            inner = make(*args)
            closure = inner.closure

            def retrying(*args: Any, **kwargs: Any) -> Any:
                try:
                    return closure(*args, **kwargs)
                except OutOfMemoryError:
                    pass
                return closure(*args, **kwargs)

            inner.closure = retrying
            return inner

        loop._make_closure = make_retrying

    def teardown(self, trainer, pl_module, stage) -> None:
        """Unwrap them."""
        trainer.fit_loop.epoch_loop.automatic_optimization.__dict__.pop("_make_closure", None)
