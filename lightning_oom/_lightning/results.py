"""The result collection behind ``self.log``: its snapshot, and a recorder that merges.

Private names used, the same in Lightning 2.2 to 2.6: ``trainer._results`` (a dictionary of result
metrics, with ``log``, ``batch``, ``batch_size``, ``dataloader_idx``), the attributes of a result
metric, ``trainer._logger_connector._current_fx``, ``LightningModule._current_fx_name``.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightning_oom import _torchmetrics as metrics_door
from lightning_oom.recovery.logs import (
    LoggedValue,
    MergeRule,
    check_log_merge,
    merge_logged,
    reduction_of,
)
from lightning_oom.recovery.metric_merge import MetricMerge
from lightning_oom.recovery.snapshot.metrics import find_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from lightning.pytorch import Trainer
    from typing_extensions import Self

    _Matches: TypeAlias = list[tuple[str, Any]] | None

__all__ = ["LogRecorder", "ResultsPart"]

_UNSET: Any = object()


class ResultsPart:
    """What ``self.log`` has changed: the result collection and the names of the current hook.

    Lightning binds new tensors and never writes to old ones, so references are a complete copy.

    Args:
        trainer: The trainer; its collection is the one of the loop that runs when it is taken.

    Note:
        Cost: 1 us per logged name and 1 us in all.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer

    def take(self) -> SavedResults:
        """Refer to every logged value."""
        return SavedResults(self._trainer)


class SavedResults:
    """The result collection at one moment."""

    __slots__ = ("_connector", "_fx", "_logged", "_module", "_module_fx", "_position", "_results")

    def __init__(self, trainer: Any) -> None:
        results = self._results = trainer._results
        self._logged: list[tuple[str, Any, dict[str, Any]]] = []
        self._position: tuple[Any, ...] = ()
        if results is not None:
            self._logged = [(key, item, vars(item).copy()) for key, item in results.items()]
            self._position = (results.batch, results.batch_size, results.dataloader_idx)
        self._connector, self._module = trainer._logger_connector, trainer.lightning_module
        self._fx = self._connector._current_fx
        self._module_fx = None if self._module is None else self._module._current_fx_name

    def restore(self) -> tuple[str, ...]:
        """Bind every logged value again and drop the names that are new."""
        results = self._results
        if results is not None:
            results.clear()
            for key, item, values in self._logged:
                namespace = vars(item)
                namespace.clear()
                namespace.update(values)
                results[key] = item
            results.batch, results.batch_size, results.dataloader_idx = self._position
        self._connector._current_fx = self._fx
        if self._module is not None:
            self._module._current_fx_name = self._module_fx
        return ()


@dataclass(slots=True, kw_only=True)
class _Call:
    """One ``self.log`` of a step: the n-th of its name, over all micro-batches."""

    fx: str
    name: str
    dataloader_idx: int | None
    logged: list[LoggedValue] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    metric: Any = None
    """The metric object, where one was logged."""
    batch_value_of: _Matches = None
    """Metrics of which every micro-batch logged the value that ``forward`` returned."""
    result_of: _Matches = None
    """Metrics of which every micro-batch logged the result so far."""


class LogRecorder:
    """Keeps what micro-batches log, and logs for the whole batch once.

    While it is entered, ``self.log`` of any hook is recorded instead of stored, and metrics are
    listened to. :meth:`replay` then merges by the rules of :mod:`lightning_oom.recovery.logs` and
    calls Lightning's own ``log`` once per name, hook, dataloader and occurrence, in the order in
    which they were first seen; ``sync_dist`` communicates there, and only there.

    A metric gives the exact value of the batch (:mod:`lightning_oom.recovery.metric_merge`),
    logged as an object or as the value that its ``forward`` returned; a value that is a metric's
    result so far (``self.log("acc", self.acc.compute())``) is the last one. A plain value is
    recognised when it equals the metric's in every micro-batch; one that ``forward`` returned also
    needs a related name (``"train/f1"`` and ``self.f1``), since values of small micro-batches agree
    by chance.

    Args:
        trainer: The trainer; its collection is the one of the loop that runs when it is entered.
        rows: Rows of every micro-batch.
        weights: What every micro-batch counts in a mean; ``None`` means its rows.
        log_merge: How to merge names for which the rules do not do.

    Example:
        ``rows`` are known before the first micro-batch runs::

            recorder = LogRecorder(trainer, rows=[5, 4])
            with recorder:
                for index, part in enumerate(parts):
                    with recorder.micro_batch(index, part):
                        ...  # forward and backward
            recorder.replay()
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        rows: Sequence[int],
        weights: Sequence[float] | None = None,
        log_merge: Mapping[str, str] | None = None,
    ) -> None:
        self._trainer: Any = trainer
        self._rows = list(rows)
        self._weights = list(map(float, self._rows if weights is None else weights))
        self._log_merge: dict[str, MergeRule] = check_log_merge(log_merge)
        self._calls: dict[tuple[str, str, int | None, int], _Call] = {}
        self._occurrences: dict[tuple[str, str, int | None], int] = {}
        self._index = 0
        self._results: Any = None
        self._merge = MetricMerge((), rows=self._rows)
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        module = self._trainer.lightning_module
        self._merge = MetricMerge(find_metrics(module), rows=self._rows)
        self._undo.enter_context(self._merge)
        results = self._results = self._trainer._results
        if results is not None:
            shadowed = vars(results).get("log", _UNSET)
            position = (results.batch, results.batch_size, results.dataloader_idx)
            results.log = self._record
            self._undo.callback(_put_back, results, shadowed, position)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    @contextlib.contextmanager
    def micro_batch(self, index: int, batch: Any) -> Iterator[None]:
        """Say that what follows belongs to a micro-batch.

        Args:
            index: Its position in ``rows``.
            batch: Its batch, from which Lightning infers batch sizes.
        """
        self._index = self._merge.index = index
        self._occurrences.clear()
        results = self._results
        if results is not None:
            results.batch, results.batch_size = batch, None
        try:
            yield
        finally:
            if results is not None:
                results.batch = results.batch_size = None

    def replay(self) -> None:
        """Log every name once, as the whole batch would have.

        Call it after the recorder was left, with the collection's batch the whole one.
        """
        self._merge.finish()
        results = self._results
        for call in self._calls.values():
            value, batch_size = self._merged(call)
            before, results.dataloader_idx = results.dataloader_idx, call.dataloader_idx
            try:
                results.log(call.fx, call.name, value, **{**call.options, "batch_size": batch_size})
            finally:
                results.dataloader_idx = before
        self._calls.clear()

    def merged_values(self) -> dict[str, torch.Tensor]:
        """Return what :meth:`replay` would log, by name, without logging it.

        Metrics are left as the micro-batches left them, so the caller puts their state back.
        """
        self._merge.finish()
        merged = {}
        for call in self._calls.values():
            value, _ = self._merged(call)
            if isinstance(value, metrics_door.Metric):
                value = metrics_door.batch_value(value)
            if isinstance(value, torch.Tensor):
                merged[call.name] = value.detach()
        return merged

    # -- recording
    def _record(self, fx: str, name: str, value: Any, **options: Any) -> None:
        place = (fx, name, self._results.dataloader_idx)
        number = self._occurrences[place] = self._occurrences.get(place, -1) + 1
        call = self._calls.setdefault(
            (*place, number), _Call(fx=fx, name=name, dataloader_idx=place[2])
        )
        call.options = options
        plain = value
        if isinstance(value, metrics_door.Metric):
            call.metric = value
            plain = metrics_door.batch_value(value)
        if isinstance(plain, torch.Tensor):
            call.logged.append(
                LoggedValue(
                    value=plain.detach(),
                    rows=self._rows[self._index],
                    weight=self._weights[self._index],
                    batch_size=options.get("batch_size"),
                )
            )
        if call.metric is None:
            self._match(call, plain)

    def _match(self, call: _Call, value: Any) -> None:
        """Narrow down whose value is logged."""
        called = [match for match in self._merge.called() if _related(call.name, match[0])]
        call.batch_value_of = _narrow(call.batch_value_of, called, value, metrics_door.batch_value)
        call.result_of = _narrow(
            call.result_of, self._merge.computed(), value, metrics_door.computed_value
        )

    # -- merging
    def _merged(self, call: _Call) -> tuple[Any, int | None]:
        if not call.logged:  # a metric that was only updated: nothing but the object to log
            return call.metric, call.options.get("batch_size")
        asked = self._log_merge.get(call.name)
        rule = asked or reduction_of(call.options.get("reduce_fx", "mean"))
        if asked is None and call.metric is None and rule == "mean" and call.result_of:
            rule = "last"
        exact = None
        if asked is None and call.metric is not None:
            exact = self._merge.value_of(call.metric)
            rule = metrics_door.extremum_of(call.metric) or rule
        elif asked is None and rule == "mean" and call.batch_value_of:
            exact = self._merge.value_of(_closest(call.name, call.batch_value_of))
        earlier, earlier_batch_size = self._logged_earlier(call)
        value, batch_size = merge_logged(
            call.logged,
            rule=rule,
            total_rows=sum(self._rows),
            earlier=earlier,
            earlier_batch_size=earlier_batch_size,
        )
        if isinstance(exact, torch.Tensor):
            value = exact if call.metric is not None else exact.detach().squeeze()
        if call.metric is None:
            return value, batch_size
        metrics_door.set_batch_value(call.metric, value)
        return call.metric, batch_size

    def _logged_earlier(self, call: _Call) -> tuple[torch.Tensor | None, float | None]:
        """Return the value of the last whole batch and the mean batch size of the epoch so far."""
        key = f"{call.fx}.{call.name}"
        if call.dataloader_idx is not None and call.options.get("add_dataloader_idx", True):
            key += f".{call.dataloader_idx}"
        item = self._results.get(key)
        if item is None:
            return None, None
        value = item._forward_cache if item.meta.on_step else None
        size = getattr(item, "cumulated_batch_size", None)
        mean_size = None
        if size is not None and item._update_count and item.meta.on_epoch:
            mean_size = float(size) / item._update_count
        return value if isinstance(value, torch.Tensor) else None, mean_size


def _put_back(results: Any, shadowed: Any, position: tuple[Any, ...]) -> None:
    vars(results).pop("log", None)
    if shadowed is not _UNSET:
        results.log = shadowed
    results.batch, results.batch_size, results.dataloader_idx = position


def _narrow(
    before: _Matches,
    candidates: list[tuple[str, Any]],
    value: Any,
    read: Callable[[Any], Any],
) -> _Matches:
    """Keep those candidates that were not ruled out before and have the logged value."""
    if before is not None and not before:
        return []
    kept = None if before is None else {id(metric) for _, metric in before}
    return [
        (path, metric)
        for path, metric in candidates
        if (kept is None or id(metric) in kept) and _same_number(value, read(metric))
    ]


def _same_number(logged: Any, value: Any) -> bool:
    if not isinstance(logged, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if value.numel() != 1 or logged.device != value.device:
        return False
    return bool((logged.detach().reshape(()) == value.detach().reshape(())).item())


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _related(name: str, path: str) -> bool:
    logged, own = _letters(name), _letters(path.rpartition(".")[2])
    return bool(own) and (own in logged or logged in own)


def _closest(name: str, matches: list[tuple[str, Any]]) -> Any:
    """Return the metric whose own name shares most with the logged one."""

    def closeness(match: tuple[str, Any]) -> tuple[bool, int]:
        logged, own = _letters(name), _letters(match[0].rpartition(".")[2])
        return logged == own, min(len(logged), len(own))

    return max(matches, key=closeness)[1]
