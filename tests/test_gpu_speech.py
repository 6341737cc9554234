"""Training on a real GPU: bit-exact resuming, CUDA graphs, and no waits for the device.

Utterances are noise and error rates are not computed: torch, numpy and transformers are enough.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import no_host_sync
from maxfactor_speech.training import checkpoint, loop
from maxfactor_speech.training.cuda_graphs import UpdateGraph
from maxfactor_speech.training.evaluation import Evaluation
from maxfactor_speech.training.preparation import Prepared
from maxfactor_speech.training.settings import Settings
from maxfactor_speech.training.trainer import Trainer, repeatable
from noise import prepared, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
BASE = Settings(
    steps=6, batch_size=4, evaluate_every=3, dtype="bf16", device=DEVICE, spec_augment=True
)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("optimizer", ["quality", "fast", "adamw"])
def test_a_resumed_training_reaches_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, graphs: bool, dtype: str
) -> None:
    monkeypatch.setattr(Trainer, "evaluate", lambda _: Evaluation(1.0, 1.0, 1.0, []))
    settings = replace(BASE, optimizer=optimizer, cuda_graphs=graphs, dtype=dtype)
    loop.train(settings, tmp_path / "whole", prepared=prepared())
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyError):  # in step 5, after the checkpoint of step 3
        loop.train(settings, stopped, prepared=_failing(prepared(), 4, monkeypatch))
    assert checkpoint.checkpoints(stopped)[-1].name == "step-00000003"
    monkeypatch.undo()
    monkeypatch.setattr(Trainer, "evaluate", lambda _: Evaluation(1.0, 1.0, 1.0, []))
    loop.train(settings, stopped, resume=True, prepared=prepared())
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
@pytest.mark.parametrize("optimizer", ["adamw", "quality", "fast", "lean", "muon"])
def test_graphs_compute_the_same_steps(optimizer: str, accumulated: int) -> None:
    """With a learning rate that changes in each step, and Muon, whose steps are not captured."""
    settings = replace(BASE, optimizer=optimizer, grad_accum=accumulated, steps=8)
    graphs = Trainer(settings, prepared())
    plain = Trainer(replace(settings, cuda_graphs=False), prepared())
    assert graphs._graphs is not None
    assert plain._graphs is None
    assert isinstance(graphs._run_update, UpdateGraph) == (optimizer != "muon")
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
@pytest.mark.parametrize("optimizer", ["quality", "fast", "lean", "adamw"])
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


def test_a_graph_that_skips_every_step_raises() -> None:
    trainer = Trainer(replace(BASE, optimizer="fast", steps=40), prepared())
    batches = trainer.batches()
    next(trainer.model.parameters()).data.fill_(float("nan"))
    own = next(batches)
    batches.close()
    with repeatable(trainer.device):
        for _ in range(19):
            trainer.train_step(own)
        trainer.check_skipped()
        trainer.train_step(own)
    with pytest.raises(FloatingPointError, match="20 steps in a row were skipped"):
        trainer.check_skipped()


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_one_process_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str) -> None:
    """The same as without it, and a checkpoint that goes on without it."""
    monkeypatch.setattr(Trainer, "evaluate", lambda _: Evaluation(1.0, 1.0, 1.0, []))
    settings = replace(BASE, optimizer="adamw", cuda_graphs=False)
    loop.train(settings, tmp_path / "plain", prepared=prepared())
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    loop.train(settings, tmp_path / "out", prepared=prepared(), shard=shard)
    last = checkpoint.checkpoints(tmp_path / "out")[-1]
    assert last.name == "step-00000006"
    compare(tmp_path)
    last.rename(last.with_name("gone.partial"))
    loop.train(settings, tmp_path / "out", resume=True, prepared=prepared())
    compare(tmp_path)


def compare(folder: Path) -> None:
    one, other = weights(folder / "plain"), weights(folder / "out")
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)
