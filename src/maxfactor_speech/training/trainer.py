"""A training under way: its model, its optimizers, and one step of them."""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn

from maxfactor.distributed.placement import is_sharded
from maxfactor.optimizer import FactoredOptimizer
from maxfactor_speech.data.audio import SAMPLE_RATE, InputError
from maxfactor_speech.data.batches import (
    Batch,
    Order,
    Part,
    Shape,
    evaluation_batches,
    training_batches,
)
from maxfactor_speech.data.features import draw_stretches, log_mel, spec_augment
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.cuda_graphs import PassGraphs, UpdateGraph, captures, is_random
from maxfactor_speech.training.evaluation import Evaluation, decode
from maxfactor_speech.training.model import IGNORED, POSITIONS_PER_SECOND
from maxfactor_speech.training.optimizers import default_clip, make_optimizer
from maxfactor_speech.training.parallel import Alone
from maxfactor_speech.training.preparation import fingerprint
from maxfactor_speech.training.settings import DTYPES, Settings, rate_factor

if TYPE_CHECKING:
    from collections import abc
    from pathlib import Path

    from transformers import WhisperForConditionalGeneration

    from maxfactor_speech.training.preparation import Prepared

SAMPLES_PER_POSITION = SAMPLE_RATE // POSITIONS_PER_SECOND
SHAPE_SAMPLES = SAMPLE_RATE // 2  # graphs are for audio of whole halves of a second,
SHAPE_TOKENS = 16  # and at most six lengths of text
OF_THE_DEVICE = ("foreach", "fused", "capturable")  # settings that a checkpoint does not bring


class Trainer:
    """A training under way.

    Args:
        settings: What to do.
        prepared: What to do it with; the model is trained in place.
        ranks: The processes that do it.
    """

    def __init__(self, settings: Settings, prepared: Prepared, ranks: Alone | None = None) -> None:
        self.settings = settings
        self.prepared = prepared
        self._data = fingerprint(prepared.train)
        self.ranks = ranks or Alone()
        self.device = self.ranks.device(settings.torch_device)
        self.model = prepared.model
        self._whole = copy.deepcopy(self.model) if self.ranks.cuts else self.model
        self.model.to(self.device)  # type: ignore[arg-type]  # mistaken by a decorator's types
        self.model.train()
        self._forward = self.ranks.spread(self.model)
        takes_graphs = self._takes_graphs()
        self.optimizers = make_optimizer(
            self.model, settings.optimizer, settings.lr, settings.weight_decay, takes_graphs
        )
        self._rates = [float(group["lr"]) for group in self._groups]
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=settings.dtype == "fp16")
        self._augmenting = Generator()
        self._graphs = PassGraphs(self.model, self._gradients) if takes_graphs else None
        self._run_pass = self._graphs or self._pass
        captured = takes_graphs and captures(self.optimizers)
        self._run_update = UpdateGraph(self._update) if captured else self._update
        # The rates of groups, where a graph finds them, and the same one by one.
        count = len(self._rates)
        self._rates_there = torch.zeros(count, device=self.device) if captured else None
        self._rate_there = [] if self._rates_there is None else list(self._rates_there)
        self.step = 0
        self.seconds = 0.0
        self._whole_at = -1  # the step that the whole model is of

    def batches(self) -> abc.Generator[list[Batch], None, None]:
        """Yield what each step learns from, from the present step on."""
        settings, prepared = self.settings, self.prepared
        order = Order(prepared.train.lengths, settings.batch_size, settings.seed)
        first = self.step * settings.grad_accum
        pin = self.device.type == "cuda"
        shape = self._shape()
        single = training_batches(
            prepared.train, prepared.codec, order, first, pin, shape, self._part
        )
        try:
            while True:
                yield list(islice(single, settings.grad_accum))
        finally:
            single.close()  # ends its thread

    def train_step(self, batches: list[Batch]) -> Tensor:
        """Take one step of the optimizer; return the loss, without waiting for it.

        Where there are several processes, each returns its own, and their mean is the step's.
        """
        self._set_rates()
        self._seed()
        tokens = [int((batch.labels != IGNORED).sum()) for batch in batches]
        # Gradients are averaged over the processes, but every token counts the same.
        whole = self.ranks.total(sum(tokens)) / self.ranks.world
        total = torch.zeros((), device=self.device)
        for number, (batch, count) in enumerate(zip(batches, tokens, strict=True), 1):
            with self.ranks.adding_up(self._forward, number == len(batches)):
                total += self._run_pass(self._inputs(batch), count / whole)
        self._run_update()
        self._scaler.update()
        self.step += 1
        return total

    def evaluate(self) -> Evaluation:
        """Measure the error rate on the validation set."""
        batches = evaluation_batches(
            self.prepared.validation,
            4 * self.settings.batch_size,
            self.device,
            self._part,
            self.model.config.num_mel_bins,
        )
        model = self.whole_model()
        model.to(self.device)  # type: ignore[arg-type]
        mine = decode(model, self.prepared.codec, batches, DTYPES[self.settings.dtype])
        if self.ranks.cuts:
            model.to("cpu")  # type: ignore[arg-type]  # there may be no room for it on the device
        return Evaluation.of([pair for batch in self.ranks.dealt(mine) for pair in batch])

    def whole_model(self) -> WhisperForConditionalGeneration:
        """The model with all its weights: itself, or where it is cut a copy on the CPU."""
        if self.ranks.cuts and self._whole_at != self.step:
            self._whole_at = self.step
            for part, whole in zip(self.model.parameters(), self._whole.parameters(), strict=True):
                whole.data.copy_(part.full_tensor() if is_sharded(part) else part)
        return self._whole

    def check(self) -> None:
        """Raise if too many steps in a row were skipped, which a graph cannot."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, FactoredOptimizer):
                optimizer.check_skipped()

    def effective_lr(self) -> float:
        """The mean over groups of what the first optimizer really used."""
        optimizer = self.optimizers[0]
        own = getattr(optimizer, "effective_lr", None)
        rates = own() if own else [float(group["lr"]) for group in optimizer.param_groups]
        return float(sum(rates) / len(rates))

    def memory(self) -> dict[str, list[float]]:
        """The memory of each matrix under FAM, by name, one value for each band."""
        known: dict[str, Any] = getattr(self.optimizers[0], "spectrum", dict)()
        # Asked for now and then, after the loss, which waits for the device anyway.
        return {name: spectrum.beta.tolist() for name, spectrum in known.items()}

    def save(self, out: Path) -> Path:
        """Write a checkpoint of the present step, whole or not at all; return its folder."""
        ranks, model, training = self.ranks, self.whole_model(), self._training()
        partial = checkpoint.partial_folder(out, self.step)

        def finish() -> None:
            checkpoint.write(partial, model, self.prepared.codec, training)
            checkpoint.finish(partial, self.settings.keep)

        is_first = ranks.rank == 0
        ranks.together(lambda: checkpoint.begin(partial) if is_first else None)
        if ranks.cutters is not None:
            checkpoint.write_parts(partial, self.model, self.optimizers, ranks.cutters)
        ranks.together(lambda: finish() if is_first else None)
        return checkpoint.whole_folder(partial)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote; the weights are already there."""
        ranks, saved = self.ranks, checkpoint.load_training(folder)
        if saved.get("data", self._data) != self._data:
            raise InputError(
                f"{folder}: was trained on other utterances than those that are there now; put "
                "them back as they were, or begin anew with another --out and --model of it"
            )
        self.step, self.seconds = saved["step"], saved["seconds"]
        self._scaler.load_state_dict(saved["scaler"])
        if saved["optimizers"] is None:
            checkpoint.load_parts(folder, self.model, self.optimizers, ranks.cutters)
        elif ranks.cuts:
            checkpoint.load_whole(self.model, self.optimizers, saved["optimizers"])
        else:
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                for own, group in zip(optimizer.param_groups, state["param_groups"], strict=True):
                    group.update({name: own[name] for name in OF_THE_DEVICE if name in own})
                optimizer.load_state_dict(state)

    def _training(self) -> dict[str, Any]:
        """All that going on needs besides the weights, and besides what is cut."""
        states = None
        if not self.ranks.cuts:
            states = [one.state_dict() for one in self.optimizers]
            for group in [group for state in states for group in state["param_groups"]]:
                group["lr"] = float(group["lr"])  # which may be a tensor, for a graph
        return {
            "step": self.step,
            "seconds": self.seconds,
            "optimizers": states,
            "scaler": self._scaler.state_dict(),
            "data": self._data,
        }

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, which a checkpoint that is loaded replaces."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def _part(self) -> Part:
        return Part(self.ranks.rank, self.ranks.world)

    def _inputs(self, batch: Batch) -> list[Tensor]:
        """What a pass takes, on the host: samples, labels, and what SpecAugment draws."""
        if not self.settings.spec_augment:
            return [*batch]
        rank, world = self._part
        count = len(batch.samples)
        draws = draw_stretches(world * count, self._augmenting)  # each part as with the others
        return [*batch, draws[:, :, rank * count : (rank + 1) * count]]

    def _pass(self, inputs: list[Tensor], share: float) -> Tensor:
        """Bring to the device what a pass takes, and run it."""
        moved = [tensor.to(self.device, non_blocking=True) for tensor in inputs]
        return self._gradients(moved, share)

    def _gradients(self, inputs: abc.Sequence[Tensor], share: Tensor | float) -> Tensor:
        """Forward and backward: return the loss as a share of the step's, add its gradients."""
        samples, labels, *draws = inputs
        features = log_mel(samples, self.model.config.num_mel_bins)
        if draws:
            features = spec_augment(features, draws[0])
        dtype = DTYPES[self.settings.dtype]
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            loss: Tensor = self._forward(features, labels) * share
        self._scaler.scale(loss).backward()
        return loss.detach()

    def _fills_up(self) -> bool:
        return self.settings.cuda_graphs and self.device.type == "cuda"

    def _takes_graphs(self) -> bool:
        """Whether passes are graphs; GradScaler's scale is made anew from time to time."""
        random, scaled = is_random(self.model.config), self.settings.dtype == "fp16"
        return self._fills_up() and not (self.ranks.spreads or random or scaled)

    def _shape(self) -> Shape:
        """Of batches: as they come, or filled up so that few graphs will do."""
        if not self._fills_up():
            return Shape()
        samples = self.model.config.max_source_positions * SAMPLES_PER_POSITION
        tokens = self.model.config.max_target_positions
        return Shape(SHAPE_SAMPLES, max(SHAPE_TOKENS, tokens // 6), samples, tokens)

    def _seed(self) -> None:
        """Make what is random in a step depend on nothing but its number, and on the process."""
        seed, (rank, world) = self.settings.seed, self._part
        self._augmenting.manual_seed(_mixed(seed, self.step))
        torch.manual_seed(_mixed(seed, self.step * world + rank))  # dropout

    def _update(self) -> None:
        """What ends a step: clip the gradients, step, set them to zero."""
        self._clip()
        for optimizer in self.optimizers:
            self._scaler.step(optimizer)
            if self._graphs is None:
                optimizer.zero_grad()
        if self._graphs is not None:
            self._graphs.clear()

    def _clip(self) -> None:
        norm = self.settings.clip
        norm = default_clip(self.settings.optimizer) if norm is None else norm
        if norm:
            for optimizer in self.optimizers:
                self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def _set_rates(self) -> None:
        factor = rate_factor(self.settings, self.step)
        rates: abc.Sequence[Any] = [factor * rate for rate in self._rates]
        if self._rates_there is not None:
            now = torch.tensor(rates, dtype=torch.float32).pin_memory()
            self._rates_there.copy_(now, non_blocking=True)
            rates = self._rate_there
        for group, rate in zip(self._groups, rates, strict=True):
            group["lr"] = rate


def _mixed(seed: int, step: int) -> int:
    """A seed for one step, far from those of other steps and seeds."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63


@contextmanager
def repeatable(device: torch.device) -> abc.Iterator[None]:
    """Have a GPU add up in the same order each time; a CPU does.

    Else the gradients of attention and convolutions differ from run to run in their last bits,
    and a training that was stopped would not go on to the same weights.
    """
    if device.type != "cuda":
        yield
        return
    # Torch insists on it, and looks at the first product of matrices in a process.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    switches: Any = torch.utils.deterministic  # a module whose attributes are not typed
    before = torch.are_deterministic_algorithms_enabled(), switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    switches.fill_uninitialized_memory = False  # it takes a kernel for every allocation
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        switches.fill_uninitialized_memory = before[1]
