"""A running training: its model, its optimizers, and one step of them."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor

from maxfactor import MaxFactor, release_gradients
from maxfactor_speech.data.audio import SAMPLE_RATE
from maxfactor_speech.data.batches import (
    Batch,
    BatchSlice,
    Order,
    Padding,
    collated_batches,
    training_batches,
)
from maxfactor_speech.data.features import GRAIN, draw_stretches, extract, is_log_mel, spec_augment
from maxfactor_speech.data.tokens import IGNORED
from maxfactor_speech.errors import InputError
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.adapters import load_adapters, merged
from maxfactor_speech.training.cuda_graphs import (
    PassGraphs,
    UpdateGraph,
    are_capturable,
    is_random,
)
from maxfactor_speech.training.evaluation import Evaluation, Example, PipelineDecoder
from maxfactor_speech.training.memory_needs import available_memory
from maxfactor_speech.training.model import SIZES
from maxfactor_speech.training.model_setup import set_up
from maxfactor_speech.training.optimizers import default_clip, make_optimizer
from maxfactor_speech.training.parallel import SingleProcess
from maxfactor_speech.training.preparation import fingerprint
from maxfactor_speech.training.recogniser import text_normaliser
from maxfactor_speech.training.settings import Settings, configure_cublas, lr_factor

if TYPE_CHECKING:
    from collections import abc
    from pathlib import Path

    from transformers import WhisperForConditionalGeneration

    from maxfactor_speech.training.preparation import Prepared

# Padding with CUDA graphs: audio in steps of half a second, at most six lengths of text.
PADDED_SAMPLES = SAMPLE_RATE // 2
PADDED_TOKENS = 16
DEVICE_SETTINGS = ("foreach", "fused", "capturable")  # not taken over from a checkpoint


class Best(NamedTuple):
    """The best checkpoint so far: the lowest word error rate, then character error rate."""

    step: int
    wer: float
    cer: float


class Trainer:
    """A running training.

    Args:
        settings: The settings.
        prepared: The data and the model, which is trained in place.
        processes: The processes that share the training; None is this one alone.
    """

    def __init__(
        self, settings: Settings, prepared: Prepared, processes: SingleProcess | None = None
    ) -> None:
        self.settings = settings
        self.prepared = prepared
        self._data = fingerprint(prepared.train)
        self.processes = processes or SingleProcess()
        self.device = self.processes.device(settings.torch_device)
        self.model, _, self._extractor = prepared.recogniser
        self._adapters = set_up(self.model, settings)
        self._full_model = copy.deepcopy(self.model) if self.processes.is_sharded else self.model
        self.model.to(self.device)  # type: ignore[arg-type]  # a decorator has wrong types
        self.model.train()
        self._forward = self.processes.distribute(self.model)
        uses_graphs = self._uses_graphs()
        self.optimizers = make_optimizer(
            self.model, settings.optimizer, settings.peak_lr, settings.weight_decay, uses_graphs
        )
        if settings.release_gradients:
            [optimizer] = self.optimizers
            assert isinstance(optimizer, MaxFactor)  # the settings refuse the others
            release_gradients(self.model, optimizer)
        self._peak_lrs = [float(group["lr"]) for group in self._groups]
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=settings.dtype == "fp16")
        self._augmentation = Generator()
        self._graphs = PassGraphs(self.model, self._gradients) if uses_graphs else None
        self._run_pass = self._graphs or self._pass
        captured = uses_graphs and are_capturable(self.optimizers)
        self._run_update = UpdateGraph(self._update) if captured else self._update
        # For a captured update: the learning rates of all groups, and views of each.
        count = len(self._peak_lrs)
        self._device_lrs = torch.zeros(count, device=self.device) if captured else None
        self._device_lr_views = [] if self._device_lrs is None else list(self._device_lrs)
        self.step = 0
        self.seconds = 0.0
        self.best: Best | None = None
        self.evaluated: int | None = None  # the step of the last evaluation
        self._recorded: int | None = None  # the step that `telemetry` is of
        self._without_progress = 0  # evaluations since the best one
        # The checkpoint that was written or loaded last, and what progress it has.
        self._saved: tuple[Path, tuple[object, ...]] | None = None
        self._full_model_step = -1  # the step that the weights of the full model are of

    def batches(self) -> abc.Generator[list[Batch], None, None]:
        """Yield the batches of each step, from the current step on."""
        settings, prepared = self.settings, self.prepared
        order = Order(prepared.train.lengths, settings.batch_size, settings.seed)
        first = self.step * settings.grad_accum
        pin = self.device.type == "cuda"
        single = training_batches(
            prepared.train, prepared.codec, order, first, pin, self._padding(), self._part
        )
        try:
            while True:
                yield list(islice(single, settings.grad_accum))
        finally:
            single.close()  # ends its thread

    def train_step(self, batches: list[Batch]) -> Tensor:
        """Take one step of the optimizer; return the loss without waiting for the device.

        Each process returns its own loss. Their mean is the loss of the step.
        """
        self._set_lrs()
        self._seed()
        tokens = [int((batch.labels != IGNORED).sum()) for batch in batches]
        # Gradients are averaged over processes, and each token must have the same weight.
        mean_tokens = self.processes.sum(sum(tokens)) / self.processes.world
        total = torch.zeros((), device=self.device)
        for number, (batch, count) in enumerate(zip(batches, tokens, strict=True), 1):
            with self.processes.accumulating(self._forward, number == len(batches)):
                total += self._run_pass(self._inputs(batch), count / mean_tokens)
        self._run_update()
        self._scaler.update()
        self.step += 1
        return total

    def evaluate(self) -> Evaluation:
        """Measure the error rates on the validation set, as `pipeline` has them."""
        model = self.full_model()
        model.to(self.device)  # type: ignore[arg-type]
        recogniser = self.prepared.recogniser._replace(model=model)
        with self._merged():
            mine = self._transcripts(PipelineDecoder(recogniser))
        if self.processes.is_sharded:
            model.to("cpu")  # type: ignore[arg-type]  # the device may be too small to keep it
        pairs = [pair for batch in self.processes.interleaved(mine) for pair in batch]
        return Evaluation.of(pairs, text_normaliser(recogniser))

    def _transcripts(self, decoder: PipelineDecoder) -> list[list[Example]]:
        """Transcribe this process's share, in batches that fit the device."""
        size = 4 * self.settings.batch_size
        available = None if self.processes.is_distributed else available_memory(self.device)
        if available is not None:
            free = available - torch.cuda.memory_allocated(self.device)
            # Half of it, because not only keys and values need memory.
            size = max(1, min(size, free // 2 // decoder.bytes_per_example))
        samples = self._extractor.n_samples
        while True:
            batches = collated_batches(self.prepared.validation, size, samples, self._part)
            try:
                return [list(map(Example, texts, decoder(waves))) for waves, texts in batches]
            except torch.OutOfMemoryError:
                # Processes must agree on the batches.
                if size == 1 or self.processes.is_distributed:
                    raise
            size //= 2

    def _merged(self) -> AbstractContextManager[None]:
        """Merge the adapters, if there are any, into the weights for a while."""
        return nullcontext() if self._adapters is None else merged(self.model)

    def note(self, evaluation: Evaluation) -> None:
        """Remember whether an evaluation of the current step is the best so far.

        Random weights are not worth a checkpoint, weights of a model folder are.
        """
        self.evaluated = self.step
        if self.step == 0 and self.settings.model in SIZES:
            return
        now = Best(self.step, evaluation.wer, evaluation.cer)
        if self.best is None or now[1:] < self.best[1:]:
            self.best, self._without_progress = now, 0
        else:
            self._without_progress += 1

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or too many evaluations brought no improvement."""
        patience = self.settings.patience
        has_stalled = patience is not None and self._without_progress >= patience
        return self.step >= self.settings.steps or has_stalled

    def full_model(self) -> WhisperForConditionalGeneration:
        """Return the model, or if it is sharded, a copy on the CPU with all weights."""
        if self.processes.is_sharded and self._full_model_step != self.step:
            self._full_model_step = self.step
            pairs = zip(self.model.parameters(), self._full_model.parameters(), strict=True)
            for param, full in pairs:
                full.data.copy_(param.full_tensor() if isinstance(param, DTensor) else param)
        return self._full_model

    def check_skipped(self) -> None:
        """Raise if too many steps in a row were skipped, because a graph cannot raise."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, MaxFactor):
                optimizer.check_skipped()

    def lr(self) -> float:
        """Return the learning rate of the last step: that of the settings, by the schedule."""
        return self.settings.peak_lr * lr_factor(self.settings, max(0, self.step - 1))

    def effective_lr(self) -> float:
        """Return the mean over groups of the step size that the first optimizer used."""
        optimizer = self.optimizers[0]
        if isinstance(optimizer, MaxFactor):
            rates = optimizer.effective_lr()
        else:
            rates = [float(group["lr"]) for group in optimizer.param_groups]
        return float(sum(rates) / len(rates))

    def fam_betas(self) -> dict[str, list[float]]:
        """Return FAM's beta of each matrix by name, one value for each band."""
        optimizer = self.optimizers[0]
        spectra = optimizer.spectrum() if isinstance(optimizer, MaxFactor) else {}
        # Called rarely, after the loss was read, which has waited for the device already.
        return {name: spectrum.beta.tolist() for name, spectrum in spectra.items()}

    def record_step(self) -> None:
        """Let MaxFactor record what the next step does; not in shards, nor in a CUDA graph."""
        optimizer = self.optimizers[0]
        can_record = not self.processes.is_sharded and self._device_lrs is None
        if isinstance(optimizer, MaxFactor) and can_record:
            optimizer.record_metrics(every=None)
            self._recorded = self.step + 1

    def telemetry(self) -> dict[str, float]:
        """Return what MaxFactor recorded of the last step, for each kind of layer."""
        optimizer = self.optimizers[0]
        if isinstance(optimizer, MaxFactor) and self._recorded == self.step:
            return optimizer.metrics().summary()
        return {}

    def save(self, out: Path) -> Path:
        """Write a checkpoint of the current step, unless it is there; return its folder."""
        partial = checkpoint.partial_folder(out, self.step)
        folder, is_first = checkpoint.final_folder(partial), self.processes.rank == 0
        if self._saved != (folder, self._progress):
            self._write(partial)
            self._saved = folder, self._progress
        best = None if self.best is None else self.best.step
        keep = self.settings.keep
        self.processes.run_on_all(lambda: checkpoint.tidy(out, keep, best) if is_first else None)
        return folder

    @property
    def _progress(self) -> tuple[object, ...]:
        """What differs between the checkpoints of a training."""
        return self.step, self.evaluated, self.best, self._without_progress

    def _write(self, partial: Path) -> None:
        """Write a checkpoint, in all processes."""
        processes, model, training = self.processes, self.full_model(), self._training_state()

        def finish() -> None:
            with self._merged():
                checkpoint.write(partial, self.prepared.recogniser._replace(model=model), training)
            if self._adapters is not None:
                checkpoint.write_adapters(partial, self._adapters)
            checkpoint.finish(partial)

        is_first, group = processes.rank == 0, processes.shard_group
        processes.run_on_all(lambda: checkpoint.begin(partial) if is_first else None)
        if group is not None:
            checkpoint.write_sharded_state(partial, self.model, self.optimizers, group)
        processes.run_on_all(lambda: finish() if is_first else None)

    def load(self, folder: Path) -> None:
        """Load the training state that `save` wrote; the model already has the weights.

        Adapters are loaded; the model has the weights that they were added to.
        """
        saved, group = checkpoint.load_training(folder), self.processes.shard_group
        if saved.get("data", self._data) != self._data:
            raise InputError(
                f"{folder}: was trained on other utterances than the data has now; restore the "
                f"data, or start a new training with another --out and --model {folder}"
            )
        if self._adapters is not None:
            load_adapters(self._adapters, folder)
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.evaluated, self._without_progress = saved["evaluated"], saved["without_progress"]
        self.best = None if saved["best"] is None else Best(*saved["best"])
        self._scaler.load_state_dict(saved["scaler"])
        if saved["optimizers"] is None:
            checkpoint.load_sharded_state(folder, self.model, self.optimizers, group)
        elif group is not None:
            checkpoint.load_full_state(self.model, self.optimizers, saved["optimizers"])
        else:
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                for own, group in zip(optimizer.param_groups, state["param_groups"], strict=True):
                    group.update({name: own[name] for name in DEVICE_SETTINGS if name in own})
                optimizer.load_state_dict(state)
        self._saved = folder, self._progress

    def _training_state(self) -> dict[str, Any]:
        """Return what resuming needs besides the weights and sharded optimizer states."""
        states = None
        if not self.processes.is_sharded:
            states = [one.state_dict() for one in self.optimizers]
            for group in [group for state in states for group in state["param_groups"]]:
                group["lr"] = float(group["lr"])  # a tensor if updates are captured
        return {
            "step": self.step,
            "seconds": self.seconds,
            "evaluated": self.evaluated,
            "best": None if self.best is None else [*self.best],
            "without_progress": self._without_progress,
            "optimizers": states,
            "scaler": self._scaler.state_dict(),
            "data": self._data,
        }

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers; not stored, because loading replaces them."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def _part(self) -> BatchSlice:
        return BatchSlice(self.processes.rank, self.processes.world)

    def _inputs(self, batch: Batch) -> list[Tensor]:
        """Return the inputs of a pass, on the host: samples, labels, and draws of SpecAugment."""
        if not self.settings.spec_augment:
            return [*batch]
        rank, world = self._part
        count = len(batch.samples)
        draws = draw_stretches(world * count, self._augmentation)  # for the whole batch
        return [*batch, draws[:, :, rank * count : (rank + 1) * count]]

    def _pass(self, inputs: list[Tensor], share: float) -> Tensor:
        """Move the inputs of a pass to the device, and run it."""
        moved = [tensor.to(self.device, non_blocking=True) for tensor in inputs]
        return self._gradients(moved, share)

    def _gradients(self, inputs: abc.Sequence[Tensor], share: Tensor | float) -> Tensor:
        """Add the gradients of `share` times the loss, and return that loss."""
        samples, labels, *draws = inputs
        features = extract(self._extractor, samples)
        if draws:
            features = spec_augment(features, draws[0])
        dtype = self.settings.autocast_dtype
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            loss: Tensor = self._forward(features, labels) * share
        self._scaler.scale(loss).backward()
        return loss.detach()

    def _uses_graphs(self) -> bool:
        """Whether passes run as graphs, which must not use random numbers or the host.

        GradScaler reallocates its scale, checkpointing reads the state of random numbers, and
        gradients that are released are stepped by the host. Adapters have not been tried.
        """
        settings = self.settings
        return (
            settings.cuda_graphs
            and self.device.type == "cuda"
            and settings.dtype != "fp16"
            and not settings.gradient_checkpointing
            and not settings.release_gradients
            and settings.lora is None
            and not self.processes.is_distributed
            and not is_random(self.model.config)
            and is_log_mel(self._extractor)
        )

    def _padding(self) -> Padding:
        """Return how far batches are padded: coarsely for CUDA graphs, so that few shapes occur.

        Audio for a model folder is padded as the model was trained, normally to 30 s. A model from
        scratch learns far faster from audio that is padded as little as possible.
        """
        samples, tokens = self._extractor.n_samples, self.model.config.max_target_positions
        is_coarse = self.settings.cuda_graphs and self.device.type == "cuda"
        width = PADDED_SAMPLES if is_coarse else GRAIN
        if not self.prepared.recogniser.is_plain:
            width = samples
        length = max(PADDED_TOKENS, tokens // 6) if is_coarse else 1
        return Padding(width, length, samples, tokens)

    def _seed(self) -> None:
        """Seed all random numbers of a step, from its number and the process only."""
        seed, (rank, world) = self.settings.seed, self._part
        self._augmentation.manual_seed(_mixed(seed, self.step))
        torch.manual_seed(_mixed(seed, self.step * world + rank))  # dropout

    def _update(self) -> None:
        """Clip the gradients, step, and set the gradients to zero."""
        self._clip()
        for optimizer in self.optimizers:
            self._scaler.step(optimizer)
            if self._graphs is None:
                optimizer.zero_grad()
        if self._graphs is not None:
            self._graphs.zero_grads()

    def _clip(self) -> None:
        norm = self.settings.clip
        norm = default_clip(self.settings.optimizer) if norm is None else norm
        if norm:
            for optimizer in self.optimizers:
                self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def _set_lrs(self) -> None:
        factor = lr_factor(self.settings, self.step)
        lrs: abc.Sequence[Any] = [factor * lr for lr in self._peak_lrs]
        if self._device_lrs is not None:
            now = torch.tensor(lrs, dtype=torch.float32).pin_memory()
            self._device_lrs.copy_(now, non_blocking=True)
            lrs = self._device_lr_views
        for group, lr in zip(self._groups, lrs, strict=True):
            group["lr"] = lr


def _mixed(seed: int, step: int) -> int:
    """Return a seed for one step, unlike those of other steps and seeds."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63


@contextmanager
def repeatable(device: torch.device) -> abc.Iterator[None]:
    """Use deterministic algorithms on a GPU; those of a CPU are deterministic already.

    Otherwise the last bits of the gradients of attention and convolutions differ from run to run,
    and a resumed training would not reach the same weights as one that was not stopped.
    """
    if device.type != "cuda":
        yield
        return
    configure_cublas()
    switches: Any = torch.utils.deterministic  # a module whose attributes are not typed
    before = torch.are_deterministic_algorithms_enabled(), switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    switches.fill_uninitialized_memory = False  # one more kernel for each allocation
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        switches.fill_uninitialized_memory = before[1]
