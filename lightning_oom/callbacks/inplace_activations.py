"""Let named activation functions overwrite their input, where that is proven to be right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_oom.errors import StepNotTracedError
from lightning_oom.planning.inplace_proof import InplaceProof, prove_inplace
from lightning_oom.reduction.inplace import find_switchable, set_inplace
from lightning_oom.units import format_bytes

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_oom.undo import Undo

__all__ = ["InplaceActivations"]


class InplaceActivations(Callback):
    """Switch ``inplace`` on for named activation functions, those that are proven, during a fit.

    At the first batch, before it runs, a step on two of its rows is run on a copy of the module, with
    and without. A module is refused when loss, gradients or buffers are not the same bits, when it
    overwrites the batch, or when autograd objects; ``x + f(relu(x))`` is the usual case, which is
    silently wrong otherwise. What is proven is switched on when it lowers the peak of the step, and
    off again at the end of the fit.

    Seldom worth it: autograd keeps the output of most activation functions and not their input, so
    that nothing is saved at the peak (0 bytes in ResNet-50, EfficientNet-B0 and MobileNetV2).
    Dropout and GELU-like functions behind a layer that keeps its own output are where it may help.

    Args:
        modules: Class names, paths with wildcards (``"backbone.*"``), at least one; see
            :func:`~lightning_oom.reduction.checkpointing.match_blocks`.

    Attributes:
        proof: What was found in the last fit, an
            :class:`~lightning_oom.planning.inplace_proof.InplaceProof`; ``None`` before.

    Raises:
        ValueError: ``modules`` is empty or a text (raised by the constructor), or matches nothing
            with a switch ``inplace`` (raised when the fit starts).

    Note:
        Cost: once per fit, a step of two rows on a copy, or one per module where not all are right
        together, and two dry runs. Nothing afterwards. The proof holds for what the step does on
        these rows.

    Example:
        >>> import torch
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Model(BoringModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(32, 2))
        >>> inplace = InplaceActivations(modules=["ReLU"])
        >>> trainer = Trainer(
        ...     max_steps=1, callbacks=[inplace], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(Model())
        >>> inplace.proof.refused
        {'layer.0': 'it overwrites the batch'}
    """

    def __init__(self, *, modules: list[str]) -> None:
        if isinstance(modules, str) or not modules:
            raise ValueError(
                f"modules is a list of class names or paths such as ['ReLU'], got {modules!r}"
            )
        self.modules = list(modules)
        self.proof: InplaceProof | None = None
        self._paths: list[str] = []
        self._undo: Undo | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the modules."""
        self._put_back()
        self.proof, self._paths = None, find_switchable(pl_module, self.modules)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Prove them on the first batch, and switch on what is right and saves something."""
        if self.proof is not None:
            return
        try:
            self.proof = prove_inplace(pl_module, batch, self._paths, precision=trainer.precision)
        except StepNotTracedError as error:
            self.proof = InplaceProof(refused=dict.fromkeys(self._paths, str(error)))
        if self.proof.proven and self.proof.saved_bytes:
            self._undo = set_inplace(pl_module, self.proof.proven)
        rank_zero_info(f"InplaceActivations: {self._describe(self.proof)}")

    @staticmethod
    def _describe(proof: InplaceProof) -> str:
        of_all = f"{len(proof.proven)} of {len(proof.proven) + len(proof.refused)} modules"
        if not proof.proven:
            text = of_all
        elif proof.saved_bytes is None:
            text = f"{of_all} are right, left as they are: what they save is unknown"
        elif proof.saved_bytes <= 0:
            text = f"{of_all} are right, left as they are: nothing is saved at the peak"
        else:
            text = f"{of_all}, peak {format_bytes(proof.saved_bytes)} lower (dry run)"
        refusals = [f"{path}: {reason}" for path, reason in list(proof.refused.items())[:5]]
        more = len(proof.refused) - len(refusals)
        refusals += [f"and {more} more"] if more > 0 else []
        return f"{text}; refused: {'; '.join(refusals)}" if refusals else text

    def _put_back(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switch them off again."""
        self._put_back()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Switch them off again."""
        self._put_back()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Switch them off again."""
        self._put_back()
