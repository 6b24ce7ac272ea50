"""Everything an attempt can change and a retry must not see twice, one small class per kind.

Each part is taken before an attempt and can be put back after it, several times:

==========================  =====================================================================
part                        what it holds
==========================  =====================================================================
:class:`Structure`          children and parameters; tells the others when a run changes them
:class:`RandomState`        generators of torch, its devices, Python and numpy
:class:`Buffers`            module buffers: running statistics, queues
:class:`Metrics`            states of torchmetrics objects
:class:`Attributes`         counters, lists, small tensors and modes of user modules
:class:`BatchContainers`    the batch's containers
:class:`ParameterVersions`  nothing: it notices that a parameter was written to
==========================  =====================================================================

A snapshot never keeps alive what the step would free; see each class for what that costs.
"""

from __future__ import annotations

from lightning_oom.recovery.snapshot.attributes import Attributes, SavedAttributes
from lightning_oom.recovery.snapshot.batch import BatchContainers, SavedBatch
from lightning_oom.recovery.snapshot.buffers import Buffers
from lightning_oom.recovery.snapshot.compose import SavedSnapshot, Snapshot
from lightning_oom.recovery.snapshot.metrics import Metrics
from lightning_oom.recovery.snapshot.parameters import ParameterVersions
from lightning_oom.recovery.snapshot.part import LearningPart, Part, Saved
from lightning_oom.recovery.snapshot.rng import RandomState
from lightning_oom.recovery.snapshot.structure import SavedStructure, Structure
from lightning_oom.recovery.snapshot.tally import merge_attributes

__all__ = [
    "Attributes",
    "BatchContainers",
    "Buffers",
    "LearningPart",
    "Metrics",
    "ParameterVersions",
    "Part",
    "RandomState",
    "Saved",
    "SavedAttributes",
    "SavedBatch",
    "SavedSnapshot",
    "SavedStructure",
    "Snapshot",
    "Structure",
    "merge_attributes",
]
