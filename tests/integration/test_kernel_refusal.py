"""The kernel's own refusal, through torch's CPU allocator, is recovered from like any other."""

from __future__ import annotations

import json

from kernel_limit import run_under_data_limit

_PROGRAM = """
import json, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_oom import OOMRecovery

torch.set_num_threads(1)
limited = sys.argv[1] == "limited"
refused = []


class Wide(LightningModule):
    # 96 MiB of activations for each of two layers on 96 rows, 1 MiB a row
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 2**18), torch.nn.Tanh(), torch.nn.Linear(2**18, 1)
        )

    def training_step(self, batch, batch_idx):
        if limited and batch_idx == 2 and not refused:
            refused.append(True)
            limit_data(160 * 2**20)
        return self.body(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, foreach=False)


generator = torch.Generator().manual_seed(1)
rows = torch.randn(5 * 96, 4, generator=generator)
recovery = OOMRecovery(verbose=False)
trainer = Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[recovery],
)
model = Wide()
trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=96))
summary = recovery.summary
print(json.dumps({
    "steps": trainer.global_step,
    "oom": summary.num_oom + summary.num_optimizer,
    "recovered": summary.num_recovered + summary.num_optimizer,
    "weights": [p.double().sum().item() for p in model.parameters()],
}))
"""


def _run(which: str) -> dict[str, object]:
    finished = run_under_data_limit(_PROGRAM, arguments=[which])
    assert finished.returncode == 0, finished.stderr[-2000:]
    result: dict[str, object] = json.loads(finished.stdout.splitlines()[-1])
    return result


def test_a_fit_survives_memory_that_the_kernel_refuses():
    """From step 2 on the kernel grants too little for a whole batch; the fit ends as without."""
    expected, actual = _run("unlimited"), _run("limited")

    assert expected["oom"] == 0
    assert actual["oom"] >= 1
    assert actual["recovered"] == actual["oom"]
    assert actual["steps"] == expected["steps"] == 5
    for a, b in zip(expected["weights"], actual["weights"], strict=True):
        assert abs(a - b) <= 1e-5 * max(1.0, abs(a))
