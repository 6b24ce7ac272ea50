"""A folder of reports: one file per format, rank and OOM, and never more than agreed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_oom.errors import LightningOOMWarning
from lightning_oom.report.html import render_html
from lightning_oom.report.record import OOMReport
from lightning_oom.report.text import render_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["FORMATS", "ReportFolder"]

FORMATS: dict[str, tuple[str, Callable[[OOMReport], str]]] = {
    "html": (".html", render_html),
    "json": (".json", OOMReport.to_json),
    "text": (".txt", render_text),
}
"""Format -> ending of the file and what writes it."""


class ReportFolder:
    """Writes reports into a folder that is made when the first one comes.

    Args:
        path: The folder.
        formats: Out of :data:`FORMATS`.
        max_reports: How many OOMs get files; one place is kept for one that ends the run.

    Attributes:
        num_written: OOMs that got files.
    """

    def __init__(self, path: str | Path, *, formats: Sequence[str], max_reports: int) -> None:
        self.path = Path(path)
        self.formats = tuple(formats)
        self.max_reports = max_reports
        self.num_written = 0
        self._has_warned = False

    def write(self, report: OOMReport, *, batch: Any = None) -> tuple[Path, ...]:
        """Write one report in every format.

        Args:
            report: The record.
            batch: A copy of the batch on the host, to be written beside it; ``None`` for none.

        Returns:
            The files; fewer, or none, when the folder has enough or cannot be written. What goes
            wrong becomes one warning: an error that is under way must not be replaced.
        """
        kept_free = 0 if report.outcome == "raised" else 1
        if self.num_written >= self.max_reports - kept_free and self.num_written:
            return ()
        written: list[Path] = []
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            stem = self._free_stem(report)
            for name in self.formats:
                ending, render = FORMATS[name]
                path = self.path / f"{stem}{ending}"
                path.write_text(render(report), encoding="utf-8")
                written.append(path)
            if batch is not None:
                written.append(_save_batch(batch, self.path / f"{stem}.batch.pt"))
        except Exception as error:
            self._warn_once(error)
        self.num_written += bool(written)
        return tuple(written)

    def _free_stem(self, report: OOMReport) -> str:
        """Name the files after when and where; never those of an earlier run."""
        moment = re.sub(r"\D", "", (report.made_at or "")[:19])
        moment = f"{moment[:8]}-{moment[8:]}" if moment else "report"
        places = [f"rank{report.rank}"]
        if report.epoch is not None:
            places.append(f"epoch{report.epoch}")
        if report.batch_index is not None:
            places.append(f"batch{report.batch_index}")
        stem = "-".join(("oom", moment, *places))
        taken = {path.name.partition(".")[0] for path in self.path.glob(f"{stem}*")}
        names = (stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3)))
        return next(name for name in names if name not in taken)

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the report of an OOM could not be written to {self.path}: "
                f"{type(error).__name__}: {error}",
                LightningOOMWarning,
                stacklevel=4,
            )


def _save_batch(batch: Any, path: Path) -> Path:
    import torch  # noqa: PLC0415 - the rest of the module does without

    torch.save(batch, path)
    return path
