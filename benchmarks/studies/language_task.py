"""A small Llama reads the source of Python's standard library byte by byte."""

from __future__ import annotations

import functools
import math
import sysconfig
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from studies.runs import SIZES, Run

if TYPE_CHECKING:
    from measurement import Record

CONTEXT = 128  # bytes of a piece
UNSEEN = 20  # every 20th file is for validation


class LanguageTask:
    """The model of a run, the loss of each step, and bits per byte on unseen files."""

    def __init__(self, run: Run, device: torch.device) -> None:
        torch.manual_seed(run.seed)
        self._run = run
        train, self._unseen = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in corpus()
        )
        self._train = train
        self.model = llama(run)
        self.model.to(device)  # type: ignore[arg-type]  # mistaken by a decorator's types
        starts = [torch.randint(len(train), (run.batch,)) for _ in range(run.steps)]
        self._starts = torch.stack(starts).to(device)  # (steps, batch)

    def loss(self, at: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte in a step's batch, in nats."""
        return self._loss_of(pieces(self._train, self._starts.index_select(0, at)[0]))

    @torch.no_grad()
    def measured(self) -> Record:
        """Bits per byte, the mean over pieces at even distances in the unseen files."""
        text, count = self._unseen, self._run.validation
        starts = torch.arange(count, device=text.device) * (len(text) // count)
        self.model.eval()
        losses = [float(self._loss_of(pieces(text, own))) for own in starts.split(self._run.batch)]
        return {"bits": round(mean(losses) / math.log(2.0), 5)}

    def _loss_of(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


@functools.cache
def corpus() -> tuple[bytes, bytes]:
    """The source of the standard library without its tests: for training, and unseen."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not {"site-packages", "test", "tests", "idle_test"} & set(path.relative_to(root).parts)
    ]
    train = b"".join(path.read_bytes() for at, path in enumerate(paths) if at % UNSEEN)
    return train, b"".join(path.read_bytes() for path in paths[::UNSEEN])


def llama(run: Run) -> LlamaForCausalLM:
    """A model of bytes, its head tied to its embedding, so that optimizers agree on `hidden`."""
    width, layers, heads = SIZES[run.size]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
        )
    )


def pieces(text: Tensor, starts: Tensor) -> Tensor:
    """Pieces of a text; one that would pass its end continues at its beginning."""
    places = starts[:, None] + torch.arange(CONTEXT, device=text.device)
    return text[places % len(text)].long()
