"""The speech job on a real GPU: going on bit for bit, graphs, and no wait for the device.

Noise in place of speech, and no error rates: torch, numpy and transformers are enough for this.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cases import no_host_sync
from maxfactor.speech import checkpoint, train
from maxfactor.speech.evaluate import Evaluation
from maxfactor.speech.model import Codec, Size, whisper
from maxfactor.speech.preparation import Prepared
from maxfactor.speech.settings import Settings
from maxfactor.speech.shards import Spoken
from maxfactor.speech.trainer import Trainer, repeatable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
BASE = Settings(
    steps=6, batch_size=4, evaluate_every=3, dtype="bf16", device=DEVICE, spec_augment=True
)
CODEC = Codec.build("abcdefgh", "characters")


class Noise:
    """Utterances of several lengths in which nothing is said."""

    def __init__(self, count: int) -> None:
        random = np.random.default_rng(0)
        self.lengths = random.integers(4_000, 30_000, count).astype(np.int32)
        self.texts = ["".join(random.choice(list("abcdefgh"), 3 + n % 12)) for n in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Spoken:
        random = np.random.default_rng(number)
        samples = random.integers(-3000, 3000, self.lengths[number]).astype(np.int16)
        return Spoken(samples, self.texts[number])

    def text(self, number: int) -> str:
        return self.texts[number]


def prepared() -> Prepared:
    torch.manual_seed(0)
    model = whisper(CODEC, Size(64, 2, 2), seconds=2, max_tokens=32)
    return Prepared(Noise(24), Noise(4), model, CODEC)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.checkpoints(out)[-1] / "model.safetensors")


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("optimizer", ["speech", "fam", "adamw"])
def test_a_stopped_training_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, graphs: bool, dtype: str
) -> None:
    monkeypatch.setattr(Trainer, "evaluate", lambda _: Evaluation(1.0, 1.0, []))
    settings = replace(BASE, optimizer=optimizer, cuda_graphs=graphs, dtype=dtype)
    train.train(settings, tmp_path / "whole", prepared=prepared())
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyError):  # in step 5, after the checkpoint of step 3
        train.train(settings, stopped, prepared=_failing(prepared(), 4, monkeypatch))
    assert checkpoint.checkpoints(stopped)[-1].name == "step-00000003"
    monkeypatch.undo()
    monkeypatch.setattr(Trainer, "evaluate", lambda _: Evaluation(1.0, 1.0, []))
    train.train(settings, stopped, resume=True, prepared=prepared())
    one, other = weights(tmp_path / "whole"), weights(stopped)
    assert one.keys() == other.keys()
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differing


def _failing(given: Prepared, after: int, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    step = Trainer.train_step

    def failing(self: Trainer, batches: Any) -> torch.Tensor:
        if self.step == after:
            raise KeyError("as good as a power cut")
        return step(self, batches)

    monkeypatch.setattr(Trainer, "train_step", failing)
    return given


@pytest.mark.parametrize("accumulated", [1, 3])
def test_graphs_compute_what_passes_do(accumulated: int) -> None:
    settings = replace(BASE, optimizer="adamw", grad_accum=accumulated, steps=8)
    graphs, plain = Trainer(settings, prepared()), Trainer(settings, prepared())
    plain._run_pass = plain._gradients
    batches = graphs.batches()
    with repeatable(graphs.device):
        for _ in range(8):
            own = next(batches)
            losses = [one.train_step(own) for one in (graphs, plain)]
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    batches.close()
    for one, other in zip(graphs.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("optimizer", ["speech", "fam", "lean", "adamw"])
def test_a_step_does_not_wait_for_the_device(optimizer: str, graphs: bool) -> None:
    trainer = Trainer(replace(BASE, optimizer=optimizer, cuda_graphs=graphs), prepared())
    batches = trainer.batches()
    own = next(batches)
    batches.close()
    with repeatable(trainer.device):
        for _ in range(3):
            trainer.train_step(own)
        with no_host_sync():
            losses = [trainer.train_step(own) for _ in range(3)]
    assert all(bool(loss.isfinite()) for loss in losses)
