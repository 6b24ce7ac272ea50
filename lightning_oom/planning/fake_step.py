"""A training step on fake tensors: the user's own code, no memory, no GPU."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_oom._torch.fake import fake_mode, to_fake, without_any_mode
from lightning_oom.planning.answers import Answers
from lightning_oom.planning.clone_run import isolated_randomness, run_clone
from lightning_oom.planning.known_values import set_value, value_of
from lightning_oom.planning.precision import parse_precision
from lightning_oom.planning.refusals import not_traced
from lightning_oom.planning.rows import count_rows, resize_rows
from lightning_oom.planning.skeleton import Skeleton
from lightning_oom.planning.step_settings import StepSettings
from lightning_oom.planning.tracing import StepTracer
from lightning_oom.undo import Undo, shadow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from lightning_oom.planning.trace import MemoryTrace

__all__ = ["FakeStep", "trace_step"]

_FAKEABLE = ("cpu", "cuda", "xpu", "mps")


class FakeStep:
    """Runs training steps of a module on fake tensors, as often as asked, each time from the start.

    The module, its trainer, the batch and every random state stay as they are, and nothing is
    allocated on a device. What runs is a clone (:class:`~lightning_oom.planning.skeleton.Skeleton`)
    with the user's ``training_step``, ``configure_optimizers`` and hooks, in the order of
    Lightning's loop: forward, ``zero_grad``, backward, optimizer step.

    Args:
        module: A LightningModule, attached to a trainer or not, or any ``nn.Module``. Its train or
            eval mode is kept.
        batch: An example, real or fake; only types and shapes matter.
        loss: For a module without ``training_step``: ``loss(module, batch)`` returns the loss.
            ``None`` calls the module on the batch and takes its ``loss``, or the sum of its outputs.
        device: Where parameters, buffers and batch are taken to be; ``None`` is where they are. A
            device that torch cannot fake here is taken for the CPU.

    Raises:
        ValueError: ``device`` is a CUDA device and there is none: torch would end the process.

    Note:
        Cost of a run: the time that Python takes for each operator, some 0.1 ms; 1 to 4 s for two
        steps of BERT-base. Kernels are those of the device that the tensors are taken to be on.

    Example:
        >>> step = FakeStep(torch.nn.Linear(4, 2), torch.zeros(3, 4))
        >>> trace = step.run(optimizer=torch.optim.SGD)
        >>> trace.by_kind(event=2), trace.rows
        ({'parameter': 40, 'batch': 48}, 3)
        >>> step.run(rows=300).peak_bytes > trace.peak_bytes
        True
    """

    def __init__(
        self,
        module: torch.nn.Module,
        batch: Any,
        *,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._module = module
        self._batch = batch
        self._loss = loss
        self._device = None if device is None else torch.device(device)
        if self._device is not None and not _can_be_faked(self._device):
            raise ValueError(
                f"device={str(device)!r} cannot be taken on fake tensors here: torch sees no such device"
            )
        self._rows = count_rows(batch)

    @property
    def rows(self) -> int | None:
        """Rows of the example batch; ``None`` where it has none."""
        return self._rows

    def run(
        self,
        *,
        rows: int | None = None,
        precision: str | int | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        accumulate: int = 1,
        num_steps: int = 2,
        zero_grad: Literal["lightning", "early"] = "lightning",
        transform: Callable[[Any], object] | None = None,
        prepare_optimizers: Callable[[list[torch.optim.Optimizer]], object] | None = None,
        context: Callable[[Any], AbstractContextManager[Any]] | None = None,
        forward_context: Callable[[Any], AbstractContextManager[Any]] | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        record_operators: bool = False,
    ) -> MemoryTrace:
        """Run training steps on a fresh clone and return what they did to memory.

        Args:
            rows: Rows of the batch; ``None`` takes those of the example.
            precision: As in ``Trainer(precision=...)``; ``None`` is 32-bit.
            optimizer: Makes an optimizer from parameters (a class, a partial); ``None`` asks
                ``configure_optimizers``, and steps nothing where there is none.
            accumulate: Batches per optimizer step, at least 1.
            num_steps: Optimizer steps, at least 1. From the second on, gradients of the step before
                and the state of the optimizer are there.
            zero_grad: ``"lightning"`` drops gradients after the forward, ``"early"`` before it.
            transform: Called with the clone before anything runs, to change it: checkpointed blocks,
                replaced modules.
            prepare_optimizers: Called with the optimizers before the first step.
            context: ``context(clone)`` is entered around all steps, above the tracer: a dispatch mode
                there sees each operator first, and what it runs instead is what is traced.
            forward_context: ``forward_context(clone)`` is entered around each forward.
            autocast: Stands for ``torch.autocast`` in mixed precision, for the policy of another
                device.
            record_operators: Fill :attr:`~lightning_oom.planning.trace.MemoryTrace.operators`.

        Returns:
            The trace.

        Raises:
            ValueError: An argument is out of its range.
            StepNotTracedError: The step does what fake tensors cannot follow (``.numpy()``, an
                operator without a fake implementation), or is wrong; the message names the line.
        """
        settings = StepSettings(
            precision=parse_precision(precision),
            accumulate=accumulate,
            num_steps=num_steps,
            zero_grad=zero_grad,
            loss=self._loss,
            optimizer=optimizer,
            transform=transform,
            prepare_optimizers=prepare_optimizers,
            context=context,
            forward_context=forward_context,
            autocast=autocast,
        )
        if rows is not None and rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows!r}")

        def attempt(*, when_unknown: bool) -> tuple[MemoryTrace | Exception, int]:
            answers = Answers(when_unknown=when_unknown)
            tracer = StepTracer(
                device=self._device, answers=answers, record_operators=record_operators
            )
            try:
                with isolated_randomness(), _kept_gradients(self._module):
                    self._train(tracer, settings, rows)
            except Exception as error:
                return error, answers.num_unknown
            return tracer.trace(rows=self._rows if rows is None else rows), 0

        outcome, num_unknown = attempt(when_unknown=False)
        if isinstance(outcome, Exception) and num_unknown:
            second, _ = attempt(when_unknown=True)
            outcome = outcome if isinstance(second, Exception) else second
        if isinstance(outcome, Exception):
            raise not_traced(outcome, "on fake tensors") from outcome
        return outcome

    def _train(self, tracer: StepTracer, settings: StepSettings, rows: int | None) -> None:
        mode = fake_mode()
        faking = _Faking(mode, self._module, self._device, settings.precision.weights_dtype)
        clone = Skeleton(faking.member, faking.device_of).module(self._module)
        batch = Skeleton(faking.batch).value(self._batch)
        if rows is not None and rows != self._rows:
            with mode:
                batch = resize_rows(batch, rows, self._rows, faking.resize)
        undo = _let_libraries_run_eagerly()
        try:
            with mode:
                run_clone(clone, batch, tracer, settings)
        finally:
            undo()


def trace_step(
    module: torch.nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    **how: Any,
) -> MemoryTrace:
    """Run training steps on fake tensors once; see :class:`FakeStep`.

    Args:
        module: As for :class:`FakeStep`.
        batch: As for :class:`FakeStep`.
        loss: As for :class:`FakeStep`.
        device: As for :class:`FakeStep`.
        **how: What :meth:`FakeStep.run` takes.

    Returns:
        The trace.

    Raises:
        StepNotTracedError: As :meth:`FakeStep.run` says.

    Example:
        >>> trace = trace_step(torch.nn.Linear(4, 2), torch.zeros(3, 4), optimizer=torch.optim.SGD)
        >>> trace.peak_phase
        'forward'
    """
    return FakeStep(module, batch, loss=loss, device=device).run(**how)


class _Faking:
    """Makes fake tensors on the device and of the type that are wanted."""

    def __init__(
        self,
        mode: Any,
        module: torch.nn.Module,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._mode = mode
        self._device = device
        self._dtype = dtype
        self._members = {id(t) for t in (*module.parameters(), *module.buffers())}
        self._bases: dict[int, torch.Tensor] = {}
        self._kept: list[torch.UntypedStorage] = []

    def device_of(self, device: torch.device) -> torch.device:
        """Return where tensors of ``device`` are taken to be."""
        if self._device is not None and device.type != "cpu":
            return self._device
        return device if _can_be_faked(device) else torch.device("cpu")

    def member(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the counterpart of a parameter, a buffer or another tensor of the module."""
        if id(tensor) in self._members:
            return self.batch(tensor)
        return self._fake(tensor, self.device_of(tensor.device))

    def batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the counterpart of a tensor that moves with the module."""
        fake = self._fake(tensor, self._device or self.device_of(tensor.device))
        real = value_of(tensor)
        if real is not None and real.device.type == "cpu":
            set_value(fake, real.detach().clone())
        if self._dtype is None or not fake.is_floating_point() or fake.dtype is self._dtype:
            return fake
        with self._mode, torch.no_grad():
            return _like(tensor, fake.to(self._dtype))

    def resize(self, fake: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take rows of a fake tensor of the batch, and of its values where they are known."""
        resized = fake.index_select(0, positions.to(fake.device))
        real = value_of(fake)
        if real is not None:
            with without_any_mode():
                set_value(resized, real[torch.arange(len(positions)) % len(real)])
        return resized

    def _fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device == device and _can_be_faked(tensor.device):
            return to_fake(self._mode, tensor)
        with self._mode, torch.no_grad():
            return _like(tensor, self._elsewhere(tensor, device))

    def _elsewhere(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a fake tensor of the same layout on another device; shared storages stay shared."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        try:
            storage = tensor.untyped_storage()
            numel = storage.nbytes() // tensor.element_size()
        except (NotImplementedError, RuntimeError):  # a wrapper without a storage of its own
            return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)
        base = self._bases.get(id(storage))
        if base is None:
            base = torch.empty(numel, dtype=tensor.dtype, device=device)
            self._bases[id(storage)] = base
            self._kept.append(storage)
        if base.dtype is not tensor.dtype or not numel:
            return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)
        return base.as_strided(shape, stride, int(tensor.storage_offset()))


def _like(tensor: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Give ``fake`` the class and the wish for a gradient of ``tensor``."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake.detach(), requires_grad=tensor.requires_grad)
    return fake.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def _kept_gradients(module: torch.nn.Module) -> Iterator[None]:
    """Leave no fake gradient on the user's own parameters, which code may reach past the clone."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        yield
    finally:
        for parameter, grad in before:
            if parameter.grad is not grad:
                parameter.grad = grad


def _let_libraries_run_eagerly() -> Undo:
    """Let transformers take its ordinary way: fake tensors make it believe that it is compiled."""
    library = sys.modules.get("transformers.utils.import_utils")
    if library is None or not hasattr(library, "is_fake_tensor"):
        return Undo(lambda: None)
    return shadow(library, "is_fake_tensor", lambda _: False)


def _can_be_faked(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available()
    return device.type in _FAKEABLE
