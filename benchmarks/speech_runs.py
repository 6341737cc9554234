"""Trainings of a small Whisper for momentum_study.py: the speech, the optimizers, one run.

Speech is synthesised once and kept as features. In a run everything lies on the device: which
utterances a step takes, its learning rate, its loss. So on CUDA a whole step, or at least its
forward and backward pass, is one CUDA graph that is replayed, and the host has nothing to do.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import multiprocessing
import os
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import maxfactor
from maxfactor.settings import Execution
from maxfactor_speech import corpus, synth
from maxfactor_speech.data import collate
from maxfactor_speech.features import HOP, log_mel
from momentum_variants import variant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import WhisperForConditionalGeneration

    from maxfactor_speech.model import Codec
    from maxfactor_speech.shards import Spoken

Record = dict[str, Any]  # what is known of a run, as JSON has it

PIECE = 128  # utterances that a worker speaks at a time
SILENT_FRAMES = 4  # at the end of each utterance, more than a window is long
MODEL_SECONDS = 6  # what the model can take
MAX_TOKENS = 96
WARMUP_SHARE = 0.1
EAGER_STEPS = 3  # before a capture: allocations, handles and state have to be there
LOOK_EVERY = 25  # steps between looks at the loss, which wait for the device
SMOOTH = 50  # steps that a loss is averaged over
DECODED_AT_ONCE = 500
PEERS = ("adamw", "adafactor", "lion", "muon")
IGNORED = -100  # a label that the loss leaves out


# ------------------------------------------------------------------------------- the speech


@dataclass(frozen=True)
class Speech:
    """Which utterances of the task `sentences`."""

    language: str
    split: corpus.Split
    count: int

    def path(self, cache: Path) -> Path:
        """Where its features are kept."""
        return cache / f"{self.language}-{self.split}-{self.count}.pt"

    @property
    def script(self) -> synth.Script:
        """Nine English voices or seven others, noise at 10 to 30 dB."""
        return synth.Script("sentences", self.language, self.split, seed=0)


class Piece(NamedTuple):
    """Some utterances, on their way between processes."""

    features: NDArray[np.int16]  # (utterances, 80, frames), the bits of bfloat16
    texts: list[str]


class Features(NamedTuple):
    """Utterances on a device."""

    features: Tensor  # (utterances, 80, frames), bfloat16
    labels: Tensor  # (utterances, tokens), int64
    texts: list[str]


def prepare(wanted: Sequence[Speech], cache: Path, workers: int) -> None:
    """Speak what is not in the cache yet, in worker processes."""
    missing = [speech for speech in wanted if not speech.path(cache).exists()]
    cache.mkdir(parents=True, exist_ok=True)
    pieces = [
        (speech, range(start, min(start + PIECE, speech.count)))
        for speech in missing
        for start in range(0, speech.count, PIECE)
    ]
    found: dict[Speech, list[Piece]] = {}
    for (speech, _), piece in zip(pieces, mapped(spoken_piece, pieces, workers), strict=True):
        found.setdefault(speech, []).append(piece)
    for speech in missing:
        keep_features(speech.path(cache), found.pop(speech))


def mapped(function: Callable[[Any], Any], items: Sequence[Any], workers: int) -> Any:
    """`map`, in processes where there is more than one of them."""
    workers = min(workers, len(items))
    if workers <= 1:
        yield from map(function, items)
        return
    with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(function, items)


def spoken_piece(piece: tuple[Speech, range]) -> Piece:
    """Speak some utterances of a set."""
    speech, numbers = piece
    espeak = speaker()
    spoken = [synth.render(speech.script.utterance(number), espeak) for number in numbers]
    longest = max(len(one.samples) for one in spoken)
    # The last frames see nothing but silence: filled up with them, a piece can be made longer.
    batch = collate(Listed(spoken), range(len(spoken)), longest + SILENT_FRAMES * HOP)
    features = log_mel(batch.samples).to(torch.bfloat16)
    return Piece(features.view(torch.int16).numpy(), batch.texts)


class Listed:
    """Utterances in memory, as `collate` takes them."""

    def __init__(self, spoken: list[Spoken]) -> None:
        self._spoken = spoken
        self.lengths = np.array([len(one.samples) for one in spoken], np.int32)

    def __len__(self) -> int:
        return len(self._spoken)

    def __getitem__(self, number: int, /) -> Spoken:
        return self._spoken[number]

    def text(self, number: int, /) -> str:
        """What is said."""
        return self._spoken[number].text


@functools.lru_cache(maxsize=1)
def speaker() -> synth.Espeak:
    """This process's espeak-ng."""
    return synth.Espeak(synth.Location.find())


def keep_features(path: Path, pieces: list[Piece]) -> None:
    """Write a set as one file, whole or not at all, each utterance as long as the longest."""
    longest = max(features.shape[2] for features, _ in pieces)
    longest += -longest % 16
    features = np.concatenate([lengthened(features, longest) for features, _ in pieces])
    texts = [text for _, own in pieces for text in own]
    labels = study_codec().labels(texts)
    labels = nn.functional.pad(labels, (0, -labels.shape[1] % 8), value=IGNORED)
    kept = {"features": torch.from_numpy(features), "labels": labels, "texts": texts}
    partial = path.with_suffix(".partial")
    torch.save(kept, partial)
    partial.replace(path)


def lengthened(features: NDArray[np.int16], frames: int) -> NDArray[np.int16]:
    """Repeat the silence at the end."""
    return np.pad(features, ((0, 0), (0, 0), (0, frames - features.shape[2])), mode="edge")


def load_features(speech: Speech, cache: Path, device: torch.device) -> Features:
    """Read a set onto a device."""
    kept = torch.load(speech.path(cache), map_location="cpu", mmap=True, weights_only=True)
    features = kept["features"].view(torch.bfloat16).to(device)
    if device.type == "cpu":
        features = features.float()  # a bfloat16 convolution is slow there
    return Features(features, kept["labels"].to(device), kept["texts"])


@functools.lru_cache(maxsize=1)
def study_codec() -> Codec:
    """The characters of all languages, so that one model can learn another language."""
    from maxfactor_speech.model import Codec

    return Codec.build(
        {unit for language in corpus.DIGITS for unit in corpus.alphabet("sentences", language)}
    )


# ------------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Run:
    """All that decides what a training computes.

    Args:
        optimizer: A recipe of ours, or "adamw", "adafactor", "lion", "muon".
        lr: The highest rate.
        seed: Of the weights and of the order of utterances.
        settings: Of ours: arguments of `for_model`; of Muon: of its group.
        by_kind: Of ours: settings for groups of one kind, or for all but the hidden ones under
            "others"; `lr_share` is a share of the learning rate.
        clip: The norm that gradients are clipped to.
        variant: See momentum_variants.py.
        size: "small", "large" or "quick".
        batch: Utterances to a step.
        steps: Of the optimizer.
        language: What is learnt.
        start: "english" for a model that learnt English before, None for random weights.
        train: Utterances to learn from.
        validation: Utterances to measure by.
    """

    optimizer: str
    lr: float
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    by_kind: dict[str, dict[str, Any]] = field(default_factory=dict)
    clip: float | None = None
    variant: str | None = None
    size: str = "small"
    batch: int = 48
    steps: int = 1500
    language: str = "en"
    start: str | None = None
    train: int = 24_000
    validation: int = 1_000

    @property
    def key(self) -> str:
        """A name by which a run is found again, whatever its settings are called by."""
        return run_key(json.dumps(asdict(self), sort_keys=True))

    @property
    def training(self) -> Speech:
        """What it learns from."""
        return Speech(self.language, "train", self.train)

    def validating(self, language: str) -> Speech:
        """What it is measured by."""
        return Speech(language, "validation", self.validation)

    @property
    def speech(self) -> list[Speech]:
        """All the speech that it needs."""
        languages = dict.fromkeys([self.language, *(["en"] if self.start else [])])
        return [self.training, *(self.validating(language) for language in languages)]

    @property
    def jobs(self) -> int:
        """How many small runs it counts for, by the memory of its activations."""
        width, layers, _ = SIZES[self.size]
        return max(1, round(self.batch * width * layers / (48 * 192 * 3) / 2))


@functools.cache
def run_key(fields: str) -> str:
    """A digest of all that decides on a run; of ours the settings that its groups really have.

    So a run that two tables have is done once, and a recipe that was changed is run anew.
    """
    run = Run(**json.loads(fields))
    decisive = asdict(run)
    if run.optimizer not in PEERS:
        decisive |= {"optimizer": "maxfactor", "settings": group_settings(run), "by_kind": {}}
        decisive.pop("lr")  # the groups have it
    digest = hashlib.blake2b(json.dumps(decisive, sort_keys=True).encode(), digest_size=12)
    return digest.hexdigest()


def group_settings(run: Run) -> dict[str, dict[str, Any]]:
    """The settings of ours by kind of layer, where they are not the class's own defaults."""
    layers = nn.Embedding(9, 4), nn.Conv1d(4, 4, 3), nn.Linear(4, 4)  # a head would be tied
    optimizer = ours(run, nn.Sequential(*layers).to("meta"), cuda=False)
    usual = maxfactor.MaxFactor([nn.Parameter(torch.empty(1))]).defaults
    how = {*Execution.names(), "seed", "rounding"}  # how it is computed, not what
    return {
        group["kind"]: {
            name: group[name]
            for name in sorted(usual.keys() - how)
            if name == "lr" or group[name] != usual[name]
        }
        for group in optimizer.param_groups
    }


def run_of(record: Record) -> Run:
    """The run that a record is of."""
    return Run(**record["run"])


def told(run: Run) -> str:
    """A run in a line: what is not as usual."""
    usual = asdict(Run(run.optimizer, run.lr))
    odd = {key: value for key, value in asdict(run).items() if value != usual[key]}
    extra = json.dumps({key: odd[key] for key in odd if key != "seed"}) if odd else ""
    return f"{run.optimizer} lr {run.lr:g} seed {run.seed} {extra}"


SIZES = {"small": (192, 3, 6), "large": (384, 4, 6), "quick": (16, 1, 2)}  # width, layers, heads


def quick(run: Run) -> Run:
    """The same in a second on a CPU, to test the program and nothing else."""
    return replace(run, size="quick", batch=4, steps=6, train=24, validation=6)


def perform(run: Run, cache: Path, device: torch.device, sets: FeatureSets, mode: str) -> Record:
    """Train, measure, and return what is known; `mode` is the most that a graph may hold."""
    begun = time.perf_counter()
    model = new_model(run, cache, device)
    with variant(run.variant):
        training = Training(run, model, sets(run.training), device)
        training.run(mode)
    if run.start is None and run.key == english_base(run).key:
        keep_weights(model, base_path(run, cache))
    record = {"key": run.key, "run": asdict(run), **training.outcome()}
    if run.optimizer not in PEERS:
        record["groups"] = group_settings(run)
    for name, language in (("wer", run.language), ("english_wer", "en" if run.start else None)):
        if language is not None:
            validation = sets(run.validating(language))
            record[name] = 100.0 if record["nan"] else word_error_rate(model, validation)
    record["diverged"] = record["nan"] or record["loss"] > 1.5 * record["lowest_loss"]
    record["all_seconds"] = round(time.perf_counter() - begun, 2)
    return record


class FeatureSets:
    """Sets of utterances on a device, each read once."""

    def __init__(self, cache: Path, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self._sets: dict[Speech, Features] = {}

    def __call__(self, speech: Speech) -> Features:
        """The features of a set."""
        if speech not in self._sets:
            self._sets[speech] = load_features(speech, self._cache, self._device)
        return self._sets[speech]


def new_model(run: Run, cache: Path, device: torch.device) -> WhisperForConditionalGeneration:
    """A Whisper with random weights of the run's seed, or with those of the English one."""
    from maxfactor_speech.model import Size, whisper

    torch.manual_seed(run.seed)
    model = whisper(study_codec(), Size(*SIZES[run.size]), MODEL_SECONDS, MAX_TOKENS)
    if run.start is not None:
        weights = torch.load(base_path(run, cache), map_location="cpu", weights_only=True)
        model.load_state_dict(weights)
    model.to(device)  # type: ignore[arg-type]  # mistaken by a decorator's types
    return model


def english_base(run: Run) -> Run:
    """The run whose model a fine-tuning of the same size starts from."""
    base = Run("adamw", lr=2e-3, clip=1.0)
    return quick(base) if run.size == "quick" else base


def base_path(run: Run, cache: Path) -> Path:
    """Where the weights of that model are kept."""
    return cache / f"english-{run.size}.pt"


def keep_weights(model: nn.Module, path: Path) -> None:
    """Write weights, whole or not at all."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    torch.save(model.state_dict(), partial)
    partial.replace(path)


class Training:
    """One training; its tables of utterances, rates and losses lie on the device."""

    def __init__(
        self, run: Run, model: WhisperForConditionalGeneration, data: Features, device: torch.device
    ) -> None:
        self.settings, self.model, self.data, self.device = run, model, data, device
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.optimizers, self.fits_graph = make_optimizers(run, model, device)
        self.groups = [group for each in self.optimizers for group in each.param_groups]
        self.rates = [float(group["lr"]) for group in self.groups]
        self.factors = [rate_factor(step, run.steps) for step in range(run.steps)]
        self.order = torch.from_numpy(batch_order(run, len(data.texts))).to(device)
        self.factor_table = torch.tensor(self.factors, device=device)
        self.losses = torch.full((run.steps,), math.nan, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the step's number
        self.mode, self.fallback = "eager", ""
        self.seconds, self.taken, self.timed = 0.0, 0, 1

    def gradients(self) -> None:
        """Forward and backward; new gradients each time, which a graph then keeps for itself."""
        from maxfactor_speech.model import loss_of

        for param in self.params:
            param.grad = None
        numbers = self.order.index_select(0, self.at)[0]
        features = self.data.features.index_select(0, numbers)
        labels = self.data.labels.index_select(0, numbers)
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
            loss = loss_of(self.model, features, labels)
        loss.backward()
        self.losses.index_copy_(0, self.at, loss.detach().float().reshape(1))

    def update(self, step: int | None) -> None:
        """Take a step of the optimizers; without a number the rates are read on the device."""
        if step is None:
            factor = self.factor_table.index_select(0, self.at)[0]
            for group, rate in zip(self.groups, self.rates, strict=True):
                group["lr"].copy_(factor * rate)
        else:
            for group, rate in zip(self.groups, self.rates, strict=True):
                group["lr"] = self.factors[step] * rate
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.params, self.settings.clip, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
        self.at.add_(1)

    def run(self, mode: str) -> None:
        """Take all steps; what cannot be captured is recorded and done without.

        Args:
            mode: "whole" for the whole step in a graph, "half" for all but the optimizer, "eager"
                for no graph.
        """
        if self.device.type != "cuda":
            mode = "eager"
        elif mode == "whole" and not self.fits_graph:
            mode = "half"
        self.mode = mode
        if mode == "whole":
            for group in self.groups:
                group["lr"] = torch.zeros((), device=self.device)
        replay = self._captured() if mode != "eager" else None
        self._synchronize()
        begun, first = time.perf_counter(), self.taken
        while self.taken < self.settings.steps:
            self._one(replay)
            if self.taken % LOOK_EVERY == 0:
                self._synchronize()
                if not bool(self.losses[self.taken - 1].isfinite()):
                    break
        self._synchronize()
        self.seconds = time.perf_counter() - begun
        self.timed = max(1, self.taken - first)

    def _one(self, replay: Callable[[], None] | None) -> None:
        if replay is None:
            self.gradients()
        else:
            replay()
        if self.mode != "whole":
            self.update(self.taken)
        elif replay is None:
            self.update(None)
        self.taken += 1

    def _captured(self) -> Callable[[], None] | None:
        """Take the first steps on a stream of their own, then capture one; None if it fails."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(min(EAGER_STEPS, self.settings.steps)):
                self._one(None)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.gradients()
                if self.mode == "whole":
                    self.update(None)
        except RuntimeError as error:  # a capture executes nothing, so nothing is lost
            self.fallback = f"{self.mode}: {str(error).splitlines()[0][:200]}"
            if self.mode == "half":
                self.mode = "eager"
            torch.cuda.synchronize()
            return None
        return graph.replay

    def _synchronize(self) -> None:
        """Wait for the device asleep: a wait that spins takes a core from the other runs."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record()
            event.synchronize()

    def outcome(self) -> Record:
        """What is known once it is over."""
        losses = self.losses[: self.taken].cpu()
        nan = not bool(losses.isfinite().all())
        smooth = losses.unfold(0, min(SMOOTH, len(losses)), 1).mean(dim=1)
        parameters = sum(param.numel() for param in self.params)
        return {
            "loss": None if nan else round(float(smooth[-1]), 4),
            "lowest_loss": None if nan else round(float(smooth.min()), 4),
            "nan": nan,
            "steps_taken": self.taken,
            "seconds": round(self.seconds, 2),
            "ms_per_step": round(1000 * self.seconds / self.timed, 3),
            "state_bytes_per_parameter": round(state_bytes(self.optimizers) / parameters, 4),
            "parameters": parameters,
            "mode": self.mode,
            "fallback": self.fallback,
        }


def batch_order(run: Run, count: int) -> NDArray[np.int64]:
    """(steps, batch): which utterances each step takes, shuffled anew every epoch."""
    random = np.random.default_rng(run.seed)
    needed = run.steps * run.batch
    epochs = [random.permutation(count) for _ in range(-(-needed // count))]
    return np.concatenate(epochs)[:needed].reshape(run.steps, run.batch).astype(np.int64)


def rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine to zero."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def state_bytes(optimizers: Sequence[Optimizer]) -> int:
    """Bytes of optimizer state."""
    return sum(
        value.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


# ---------------------------------------------------------------------------- optimizers


def make_optimizers(
    run: Run, model: nn.Module, device: torch.device
) -> tuple[list[Optimizer], bool]:
    """The optimizers of a run, and whether a CUDA graph may hold their step."""
    cuda = device.type == "cuda"
    params = [param for param in model.parameters() if param.requires_grad]
    if run.optimizer == "adamw":
        adamw = torch.optim.AdamW(
            by_decay(params, 0.01), run.lr, betas=(0.9, 0.98), capturable=cuda, fused=cuda or None
        )
        return [adamw], True
    if run.optimizer == "lion":
        return [Lion(by_decay(params, 0.1), run.lr)], True
    if run.optimizer in ("adafactor", "muon"):  # both read numbers on the host
        from maxfactor_speech.optimizers import make_optimizer

        optimizers = make_optimizer(model, run.optimizer, run.lr)
        optimizers[0].param_groups[0].update(run.settings)
        return optimizers, False
    return [ours(run, model, cuda)], remembers(run)


def ours(run: Run, model: nn.Module, cuda: bool) -> Optimizer:
    """MaxFactor by recipe, with the run's settings in place of the recipe's."""
    settings = {**run.settings, "nonfinite": "ignore"}  # a check would wait for the device
    if cuda:
        settings["capturable"] = remembers(run)
    if run.variant is not None:  # which is a change of that backend
        settings["foreach"] = True
    optimizer = maxfactor.for_model(model, run.optimizer, run.lr, **settings)
    for group in optimizer.param_groups:
        wide = {} if group["kind"] == "hidden" else run.by_kind.get("others", {})
        changes = {**wide, **run.by_kind.get(group["kind"], {})}
        if (share := changes.pop("lr_share", None)) is not None:
            group["lr"] = run.lr * share
        group.update(changes)
    return optimizer


def remembers(run: Run) -> bool:
    """Whether there is momentum; without it, counters on the device make lists of one tensor."""
    if "momentum" in run.settings:
        return run.settings["momentum"] is not None
    return run.optimizer in ("fam", "speech")


def by_decay(params: Sequence[Tensor], decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with decay, norms and biases without."""
    return [
        {"params": [one for one in params if one.ndim >= 2], "weight_decay": decay},
        {"params": [one for one in params if one.ndim < 2], "weight_decay": 0.0},
    ]


class Lion(Optimizer):
    """Lion: the sign of a look-ahead of the momentum (Chen et al. 2023, algorithm 2)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.98)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step; `lr` may be a tensor."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = [param.grad for param in params]
            for param in params:
                self.state[param].setdefault("momentum", torch.zeros_like(param))
            momenta = [self.state[param]["momentum"] for param in params]
            lr, (beta1, beta2) = group["lr"], group["betas"]
            moves = torch._foreach_sign(torch._foreach_lerp(momenta, grads, 1 - beta1))
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, torch._foreach_mul(moves, -lr))
            torch._foreach_lerp_(momenta, grads, 1 - beta2)


# --------------------------------------------------------------------------- word errors


def word_error_rate(model: WhisperForConditionalGeneration, data: Features) -> float:
    """Word errors in per cent of the words, by greedy decoding."""
    from maxfactor_speech.evaluate import in_batches, transcribe

    dtype = torch.bfloat16 if data.features.is_cuda else None
    hypotheses: list[str] = []
    for features, _ in in_batches(data.features, data.texts, DECODED_AT_ONCE):
        hypotheses += transcribe(model, study_codec(), features, dtype)
    pairs = [(a.split(), b.split()) for a, b in zip(data.texts, hypotheses, strict=True)]
    words = sum(len(reference) for reference, _ in pairs)
    return round(100.0 * sum(edits(*pair) for pair in pairs) / words, 6)


def edits(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    """The fewest words to replace, leave out and put in."""
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(hypothesis, 1):
            changed = diagonal + (word != other)
            diagonal, row[j] = row[j], min(changed, row[j] + 1, row[j - 1] + 1)
    return row[-1]


# ------------------------------------------------------------------------ worker process


def serve(connection: Connection, cache: Path, device_name: str) -> None:
    """Do the runs that come through a connection, one after another, until None comes."""
    torch.set_num_threads(1)
    device = torch.device(device_name)
    sets = FeatureSets(cache, device)
    while (task := connection.recv()) is not None:
        run, mode = task
        try:
            record = perform(run, cache, device, sets, mode)
        except Exception:  # whatever it was, the other runs go on; the parent makes a new worker
            connection.send({"run": asdict(run), "error": traceback.format_exc()[-2000:]})
            return
        connection.send(record)
