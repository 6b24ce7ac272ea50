"""Make ``tensorboard_memory.png``: the memory charts of a short run, as TensorBoard shows them.

::

    python tests/screenshots/tensorboard_memory.py

Trains on a simulated GPU that is too small for some of the batches (three more steps are made to run
out of memory), starts a TensorBoard server on the loopback interface, and takes its Custom Scalars
tab with headless Chromium, which must be installed, over aiohttp. Everything that is started is
ended, whatever happens.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from lightning_oom import MemoryMonitor, OOMRecovery
from lightning_oom.testing import SimulatedGPUStrategy, fail_at

if TYPE_CHECKING:
    from collections.abc import Iterator

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = (1500, 1330)
MOST_BYTES = 300_000


class Sequences(LightningModule):
    """A network over sequences of very different lengths, with much to keep and little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(16, 256)
        self.body = nn.Sequential(*(nn.Tanh() for _ in range(6)))
        self.table = nn.Embedding(20_000, 256)
        self.narrow = nn.Linear(256, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Predict the input."""
        hidden = self.body(self.widen(batch) + self.table.weight[:1])
        loss = (self.narrow(hidden) - batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With two states per parameter."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def long_tailed_batches(number: int) -> list[torch.Tensor]:
    """Give batches of 8 rows, most of them short; the long ones get longer."""
    generator = torch.Generator().manual_seed(7)
    lengths = [1000 + int(500 * torch.rand((), generator=generator)) for _ in range(number)]
    for step in range(6, number, 9):
        lengths[step] = 3000 + 45 * step
    return [torch.randn(8, length, 16, generator=generator) for length in lengths]


def train(folder: Path, *, steps: int) -> None:
    """Run into the limit a few times and recover."""
    torch.manual_seed(0)
    trainer = Trainer(
        strategy=SimulatedGPUStrategy("320 MiB"),
        max_epochs=1,
        log_every_n_steps=1,
        logger=TensorBoardLogger(folder, name="", version="run"),
        callbacks=[
            MemoryMonitor(breakdown=True),
            OOMRecovery(),
            # Now and then a neighbour on the device takes what the step was to get.
            *(fail_at(12, step=step) for step in (31, 47, 66)),
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sequences(), DataLoader(long_tailed_batches(steps), batch_size=None))


def free_port() -> int:
    """Ask for a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], *, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program for the length of the block, and end it and what it started."""
    process = subprocess.Popen(  # noqa: S603 - our own commands
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def wait_for(url: str, *, seconds: float, holds: str = "") -> str:
    """Read ``url`` until it answers with ``holds`` in its text."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - loopback
                text = answer.read().decode()
            if holds in text:
                return str(text)
        time.sleep(0.3)
    raise TimeoutError(f"{url} did not answer with {holds!r} in {seconds} s")


class Page:
    """One page of a browser, over its debugging protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async for message in self._socket:
            answer = json.loads(message.data)
            if answer.get("id") == self._number:
                return answer["result"]
        raise ConnectionError("the browser has closed the connection")

    async def evaluate(self, script: str) -> Any:
        """Run a script in the page and return its value."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    async def wait_until(self, script: str, *, seconds: float) -> None:
        """Wait until a script is true."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if await self.evaluate(script):
                return
            await asyncio.sleep(0.3)
        raise TimeoutError(f"the page is not there after {seconds} s: {script}")


DEEP = """
const all = (root, out = []) => {
  for (const node of root.querySelectorAll('*')) {
    out.push(node);
    if (node.shadowRoot) all(node.shadowRoot, out);
  }
  return out;
};
"""
"""Every element, those in shadow roots included."""

PLAIN = (
    f"(() => {{ {DEEP} for (const n of all(document)) {{"
    " if (n.tagName === 'TF-CUSTOM-SCALAR-DASHBOARD') {"
    " n.set('_smoothingWeight', 0); n.set('ignoreYOutliers', false); n.set('_ignoreYOutliers', false); }"
    " if (n.tagName === 'TF-CUSTOM-SCALAR-MULTI-LINE-CHART-CARD') n.set('_matchesListOpened', true);"
    " } })()"
)
"""Shows values as they are, and the names of the lines."""

DRAWN = (
    f"(() => {{ {DEEP} const found = all(document); return"
    " found.filter(n => n.tagName === 'TF-CUSTOM-SCALAR-MULTI-LINE-CHART-CARD').length >= 7"
    " && found.filter(n => n.tagName === 'path' && n.closest('.plottable')).length > 0; })()"
)


async def take(port: int, url: str, *, before: str) -> bytes:
    """Open ``url`` in the browser that listens on ``port`` and return its picture."""
    targets = json.loads(wait_for(f"http://127.0.0.1:{port}/json/list", seconds=30, holds="ws://"))
    address = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=0) as opened,
    ):
        page = Page(opened)
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=SIZE[0],
            height=SIZE[1],
            deviceScaleFactor=1,
            mobile=False,
        )
        await page.call("Page.navigate", url=url)
        await page.wait_until(DRAWN, seconds=90)
        await page.evaluate(before)
        await asyncio.sleep(4)  # charts animate
        shot = await page.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


def save(picture: bytes, path: Path) -> None:
    """Write a picture in 128 colours, which charts have no more of."""
    path.write_bytes(picture)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128)
    small.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than {MOST_BYTES}")


def main() -> None:
    """Train, serve, take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        train(folder / "logs", steps=options.steps)
        port, debug_port = free_port(), free_port()
        server = [sys.executable, "-m", "tensorboard.main", "--logdir=logs", "--host=127.0.0.1"]
        stack.enter_context(running([*server, f"--port={port}"], folder=folder))
        stack.enter_context(
            running(
                [
                    browser,
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--hide-scrollbars",
                    f"--remote-debugging-port={debug_port}",
                    f"--user-data-dir={folder / 'browser'}",
                    "about:blank",
                ],
                folder=folder,
            )
        )
        home = f"http://127.0.0.1:{port}"
        wait_for(f"{home}/data/plugin/custom_scalars/layout", seconds=60, holds="Memory")
        url = f"{home}/?darkMode=false&smoothing=0#custom_scalars"
        save(asyncio.run(take(debug_port, url, before=PLAIN)), options.out)
    print(f"{options.out}: {options.out.stat().st_size} bytes")  # noqa: T201 - a script


if __name__ == "__main__":
    main()
