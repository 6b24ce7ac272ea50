"""What a finding is called, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_oom.memory.leaks_census import Holding

__all__ = ["advice_for", "kind_of_leak"]


def kind_of_leak(holding: Holding, *, grows_graph: bool) -> str:
    """Name the kind of a leak after what holds it.

    Args:
        holding: What was held at the last look.
        grows_graph: Its graph grows from step to step.
    """
    if holding.kind == "metric_state":
        return "metric_state"
    if grows_graph or holding.num_with_graph:
        return "graph"
    return "outputs" if holding.kind in ("list", "bounded") else "cache"


def advice_for(kind: str, holding: Holding | None, *, name: str) -> str:
    """Say in one sentence what to change.

    Args:
        kind: Of the leak.
        holding: What was held at the last look, if an attribute holds it.
        name: The attribute.
    """
    if kind == "graph":
        return (
            "it keeps the graphs of all these steps alive; "
            "keep tensor.detach() there, or tensor.item() of a loss"
        )
    if kind == "metric_state":
        metric = holding.owner if holding is not None else "the metric"
        graph = "update it with preds.detach(); " if holding and holding.num_with_graph else ""
        return (
            f"{graph}{metric} keeps what it is given until reset(); give it thresholds=... where it "
            "takes them, or compute_on_cpu=True, and reset it after each epoch"
        )
    if kind == "outputs":
        return f"clear {name} at the end of the epoch, or keep tensor.detach().cpu() there"
    if kind == "cache":
        return f"bound the size of {name}, or keep it on the host"
    return "it is no attribute of the module or a callback; look for the code that adds to it"
