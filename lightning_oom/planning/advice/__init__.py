"""What would lower the peak of a model, each with a figure from a dry run."""

from lightning_oom.planning.advice.advise import advise
from lightning_oom.planning.advice.record import Advice, AdviceList

__all__ = ["Advice", "AdviceList", "advise"]
