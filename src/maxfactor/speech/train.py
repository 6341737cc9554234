"""Training a Whisper: what is needed for it, the loop, and going on after a stop."""

from __future__ import annotations

import json
import math
import signal
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from maxfactor.speech import checkpoint, corpus, files, synth
from maxfactor.speech.audio import InputError
from maxfactor.speech.data import (
    Batch,
    Order,
    Utterances,
    evaluation_batches,
    seconds_needed,
    training_batches,
)
from maxfactor.speech.evaluate import Evaluation, evaluate
from maxfactor.speech.features import log_mel, spec_augment
from maxfactor.speech.model import IGNORED, POSITIONS_PER_SECOND, SIZES, Codec, loss_of, whisper
from maxfactor.speech.optimizers import default_clip, default_lr, make_optimizer
from maxfactor.speech.progress import Pace, Reporter, Silent
from maxfactor.speech.shards import write_whole

if TYPE_CHECKING:
    from collections import abc

    from transformers import WhisperForConditionalGeneration

SETTINGS = "settings.json"
METRICS = "metrics.jsonl"
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_UTTERANCES = 24_000  # synthesised unless asked for more
MAX_TOKENS = {"digits": 16, "sentences": 96}


@dataclass(frozen=True)
class Settings:
    """All that decides what a training computes.

    Args:
        task: "digits" or "sentences", synthesised; left aside where `data` is given.
        language: "en", "de" or "es", of the task.
        data: Folder in LibriSpeech's layout, or TSV or JSONL file of path and text.
        validation: The same for validation; None keeps one in twenty of `data` back.
        utterances: How many to synthesise; None takes as many as are used, 24 000 at most.
        validation_utterances: How many to synthesise for validation.
        model: "nano", "tiny" or "base", with random weights, or the folder of a model.
        optimizer: A recipe of ours, or "adamw", "adafactor", "muon", "lion".
        lr: The highest rate; None takes the optimizer's own.
        weight_decay: Of matrices; None takes the optimizer's own.
        schedule: After the warm-up, "cosine" or "linear" to zero, or "constant".
        warmup: Share of the steps over which the rate rises.
        clip: Norm that gradients are clipped to; None takes the optimizer's own, 0 none.
        steps: Of the optimizer.
        batch_size: Utterances to a forward pass.
        grad_accum: Forward passes to a step.
        dtype: Of autocast: "fp32" for none, "bf16" or "fp16".
        device: "auto", "cpu", "cuda", …
        seed: Of weights, order and augmentation; what is synthesised stays the same.
        spec_augment: Whether to blank out stretches of the features.
        evaluate_every: Steps between evaluations, and between checkpoints.
        keep: How many checkpoints to keep.
    """

    task: str = "digits"
    language: str = "en"
    data: str | None = None
    validation: str | None = None
    utterances: int | None = None
    validation_utterances: int = 256
    model: str = "nano"
    optimizer: str = "speech"
    lr: float | None = None
    weight_decay: float | None = None
    schedule: str = "cosine"
    warmup: float = 0.1
    clip: float | None = None
    steps: int = 500
    batch_size: int = 16
    grad_accum: int = 1
    dtype: str = "fp32"
    device: str = "auto"
    seed: int = 0
    spec_augment: bool = False
    evaluate_every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        corpus.check(self.task, self.language)
        default_lr(self.optimizer)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("dtype", self.dtype, DTYPES)
        for name in ("steps", "batch_size", "grad_accum", "evaluate_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"warmup must lie in [0, 1), got {self.warmup}")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0.0):
            raise ValueError(f"lr must be finite and positive, got {self.lr}")

    @property
    def utterance_count(self) -> int:
        """How many utterances to synthesise for training."""
        used = self.steps * self.batch_size * self.grad_accum
        return self.utterances or min(used, MOST_UTTERANCES)

    @property
    def torch_device(self) -> torch.device:
        """The device to train on; "auto" is a GPU where there is one."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Prepared(NamedTuple):
    """What a training starts from."""

    train: Utterances
    validation: Utterances
    model: WhisperForConditionalGeneration
    codec: Codec


@dataclass(frozen=True)
class Result:
    """What a training came to."""

    step: int
    evaluation: Evaluation | None  # None when it was stopped
    seconds: float  # of training, evaluations left out
    checkpoint: Path
    trainer: Trainer


# ----------------------------------------------------------------------- what is needed


def prepare(
    settings: Settings,
    cache: Path | None = None,
    workers: int | None = None,
    reporter: Reporter | None = None,
) -> Prepared:
    """Make or find the data, and build or read the model; every wrong input shows here."""
    if settings.data is None:
        train, validation = _synthesised(settings, cache, workers, reporter or Silent())
    else:
        train, validation = _recorded(settings.data, settings.validation)
    torch.manual_seed(settings.seed)
    if settings.model in SIZES:
        codec, max_tokens = _codec_for(settings, train)
        seconds = seconds_needed(train, validation)
        model = whisper(codec, settings.model, seconds, max_tokens)
    else:
        model, codec = checkpoint.load_model(Path(settings.model))
    _check_fit(train, model, codec)
    _check_fit(validation, model, codec)
    return Prepared(train, validation, model, codec)


def task_codec(task: str) -> Codec:
    """Tokens of a task for all its languages, so that one model can learn another language."""
    units = {unit for language in corpus.DIGITS for unit in corpus.alphabet(task, language)}
    return Codec.build(units, "words" if task == "digits" else "characters")


def _synthesised(
    settings: Settings, cache: Path | None, workers: int | None, reporter: Reporter
) -> tuple[Utterances, Utterances]:
    train_count = settings.utterance_count
    parts: list[Utterances] = []
    reporter.begin("synthesising speech", train_count + settings.validation_utterances)
    wanted: list[tuple[corpus.Split, int]] = [
        ("train", train_count),
        ("validation", settings.validation_utterances),
    ]
    for split, count in wanted:
        script = synth.Script(settings.task, settings.language, split)
        parts.append(synth.synthesise(script, count, cache, workers, progress=reporter.advance))
    return parts[0], parts[1]


def _recorded(data: str, validation: str | None) -> tuple[Utterances, Utterances]:
    recordings = files.find_recordings(Path(data))
    if validation is not None:
        return files.Files(recordings), files.Files(files.find_recordings(Path(validation)))
    train, kept_back = files.held_out(recordings)
    return files.Files(train), files.Files(kept_back)


def _codec_for(settings: Settings, train: Utterances) -> tuple[Codec, int]:
    """Tokens for the data, and how many of them its longest text may have."""
    if settings.data is None:
        return task_codec(settings.task), MAX_TOKENS[settings.task]
    texts = [train.text(number) for number in range(len(train))]
    codec = Codec.build(set("".join(texts)), "characters")
    longest = max(len(codec.encode(text)) for text in texts)
    return codec, longest + longest // 4 + 1  # validation may be longer, and mistakes too


def _check_fit(data: Utterances, model: WhisperForConditionalGeneration, codec: Codec) -> None:
    """Refuse what the model has no tokens for; what we synthesise for our own tokens fits."""
    most = model.config.max_target_positions - len(codec.start)
    if isinstance(data, files.Files):
        files.check_texts(data.recordings, codec, most)
    else:
        texts = (data.text(number) for number in range(min(len(data), synth.SHARD)))
        missing = sorted({piece for text in texts for piece in codec.missing(text)})
        if missing:
            raise InputError(f"the model has no token for {', '.join(map(repr, missing[:5]))}")
    seconds = model.config.max_source_positions // POSITIONS_PER_SECOND
    if seconds_needed(data) > seconds:
        raise InputError(f"audio of {seconds_needed(data)} s, the model takes {seconds} at most")


# ------------------------------------------------------------------------------ the rate


def _cosine(share: float) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * share)


SCHEDULES: dict[str, abc.Callable[[float], float]] = {
    "cosine": _cosine,
    "linear": lambda share: 1.0 - share,
    "constant": lambda share: 1.0,  # noqa: ARG005
}


def rate_factor(settings: Settings, step: int) -> float:
    """The share of the highest rate that step 0, 1, … is taken with."""
    warmup = round(settings.warmup * settings.steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return SCHEDULES[settings.schedule]((step - warmup) / max(1, settings.steps - warmup))


# ------------------------------------------------------------------------------ the loop


class Trainer:
    """A training under way.

    Args:
        settings: What to do.
        prepared: What to do it with; the model is trained in place.
    """

    def __init__(self, settings: Settings, prepared: Prepared) -> None:
        self.settings = settings
        self.prepared = prepared
        self.device = settings.torch_device
        self.model = prepared.model
        self.model.to(self.device)  # type: ignore[arg-type]  # mistaken by a decorator's types
        self.model.train()
        self.optimizers = make_optimizer(
            self.model, settings.optimizer, settings.lr, settings.weight_decay
        )
        self._rates = [[group["lr"] for group in one.param_groups] for one in self.optimizers]
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=settings.dtype == "fp16")
        self._augmenting = Generator(self.device)
        self.step = 0
        self.seconds = 0.0

    def batches(self) -> abc.Generator[list[Batch], None, None]:
        """Yield what each step learns from, from the present step on."""
        settings, prepared = self.settings, self.prepared
        order = Order(prepared.train.lengths, settings.batch_size, settings.seed)
        first = self.step * settings.grad_accum
        pin = self.device.type == "cuda"
        single = training_batches(prepared.train, prepared.codec, order, first, pin)
        try:
            while True:
                yield list(islice(single, settings.grad_accum))
        finally:
            single.close()  # ends its thread

    def train_step(self, batches: list[Batch]) -> Tensor:
        """Take one step of the optimizer; return the loss, without waiting for it."""
        self._set_rates()
        self._augmenting.manual_seed(_mixed(self.settings.seed, self.step))
        tokens = [int((batch.labels != IGNORED).sum()) for batch in batches]
        total = torch.zeros((), device=self.device)
        for batch, count in zip(batches, tokens, strict=True):
            loss = self._loss(batch) * (count / sum(tokens))
            self._scaler.scale(loss).backward()
            total += loss.detach()
        self._clip()
        for optimizer in self.optimizers:
            self._scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self._scaler.update()
        self.step += 1
        return total

    def evaluate(self) -> Evaluation:
        """Measure the error rate on the validation set."""
        batches = evaluation_batches(
            self.prepared.validation, 4 * self.settings.batch_size, self.device
        )
        return evaluate(self.model, self.prepared.codec, batches, DTYPES[self.settings.dtype])

    def effective_lr(self) -> float:
        """The mean over groups of what the first optimizer really used."""
        optimizer = self.optimizers[0]
        own = getattr(optimizer, "effective_lr", None)
        rates = own() if own else [float(group["lr"]) for group in optimizer.param_groups]
        return float(sum(rates) / len(rates))

    def memory(self) -> dict[str, list[float]]:
        """The memory of each matrix under FAM, by name, one value for each band."""
        known: dict[str, Any] = getattr(self.optimizers[0], "spectrum", dict)()
        # Asked for at evaluations alone, which wait for the device anyway.
        return {name: spectrum.beta.tolist() for name, spectrum in known.items()}

    def state_dict(self) -> dict[str, Any]:
        """All that going on needs besides the weights."""
        cuda = self.device.type == "cuda"
        return {
            "step": self.step,
            "seconds": self.seconds,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self._scaler.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.device) if cuda else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; the weights are already there."""
        self.step, self.seconds = state["step"], state["seconds"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"])
        if state["cuda_random"] is not None:
            torch.cuda.set_rng_state(state["cuda_random"], self.device)

    def _loss(self, batch: Batch) -> Tensor:
        samples = batch.samples.to(self.device, non_blocking=True)
        labels = batch.labels.to(self.device, non_blocking=True)
        features = log_mel(samples, self.model.config.num_mel_bins)
        if self.settings.spec_augment:
            features = spec_augment(features, self._augmenting)
        dtype = DTYPES[self.settings.dtype]
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            return loss_of(self.model, features, labels)

    def _clip(self) -> None:
        norm = self.settings.clip
        norm = default_clip(self.settings.optimizer) if norm is None else norm
        if norm:
            for optimizer in self.optimizers:
                self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def _set_rates(self) -> None:
        factor = rate_factor(self.settings, self.step)
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = factor * rate


def train(
    settings: Settings,
    out: Path,
    resume: bool = False,
    reporter: Reporter | None = None,
    prepared: Prepared | None = None,
    tensorboard: bool = False,
    cache: Path | None = None,
    workers: int | None = None,
) -> Result:
    """Train, with checkpoints and metrics in a folder.

    On Ctrl-C the step under way is finished and saved, and the result has no evaluation.

    Args:
        settings: What to do; they must be the same when a training is resumed.
        out: Folder for `settings.json`, `metrics.jsonl` and the checkpoints.
        resume: Go on from the last checkpoint, to the same weights as without the stop.
        reporter: Is told how it goes.
        prepared: Data and model, where they are there already.
        tensorboard: Write for TensorBoard too.
        cache: Where synthesised speech is kept.
        workers: Processes that synthesise.
    """
    reporter = reporter or Silent()
    last = check_folder(out, settings, resume)
    prepared = prepared or prepare(settings, cache, workers, reporter)
    if last is not None:
        prepared = prepared._replace(model=checkpoint.load_model(last)[0])
    trainer = Trainer(settings, prepared)
    if last is not None:
        trainer.load_state_dict(checkpoint.load_training(last))
    write_whole(out / SETTINGS, json.dumps(asdict(settings), indent=2).encode() + b"\n")
    metrics = Metrics(out, trainer.step, tensorboard)
    try:
        return _run(trainer, out, metrics, reporter)
    finally:
        metrics.close()


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a folder's `metrics.jsonl`."""
    lines = (out / METRICS).read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_settings(out: Path) -> Settings:
    """The settings that a folder's training was started with."""
    path = out / SETTINGS
    try:
        saved = json.loads(path.read_text())
        known = {field.name for field in fields(Settings)}
        return Settings(**{name: value for name, value in saved.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: cannot be read, {error}") from error


def _run(trainer: Trainer, out: Path, metrics: Metrics, reporter: Reporter) -> Result:
    settings = trainer.settings
    reporter.begin("training", settings.steps, trainer.step)
    evaluation: Evaluation | None = None
    folder: Path | None = None
    with _stop_asked() as stopping:
        batches = trainer.batches()
        try:
            while trainer.step < settings.steps and not stopping():
                until = _next_stop(settings, trainer.step)
                metrics.pace(_some_steps(trainer, batches, until, stopping), reporter)
                if trainer.step == until and _is_evaluation(settings, until):
                    evaluation = trainer.evaluate()
                    metrics.evaluated(trainer, evaluation, reporter)
                    folder = _save(trainer, out)
        finally:
            batches.close()  # ends its thread
    finished = trainer.step == settings.steps
    if folder is None or not finished:
        folder = _save(trainer, out)
    if finished and evaluation is None:  # resumed after its end
        evaluation = trainer.evaluate()
    return Result(
        step=trainer.step,
        evaluation=evaluation if finished else None,
        seconds=trainer.seconds,
        checkpoint=folder,
        trainer=trainer,
    )


def _some_steps(
    trainer: Trainer,
    batches: abc.Iterator[list[Batch]],
    until: int,
    stopping: abc.Callable[[], bool],
) -> Pace:
    """Train up to a step, or until asked to stop; the device is waited for once, at the end."""
    start, first = time.perf_counter(), trainer.step
    losses: list[Tensor] = []
    while trainer.step < until and not (losses and stopping()):
        losses.append(trainer.train_step(next(batches)))
    loss = float(torch.stack(losses).mean())
    seconds = time.perf_counter() - start
    trainer.seconds += seconds
    return Pace(
        step=trainer.step,
        loss=loss,
        lr=float(trainer.optimizers[0].param_groups[0]["lr"]),
        effective_lr=trainer.effective_lr(),
        steps_per_second=(trainer.step - first) / seconds,
        seconds=trainer.seconds,
    )


LOG_EVERY = 10  # steps


def _next_stop(settings: Settings, step: int) -> int:
    """The next step after which there is something to tell."""
    ends = [every * (step // every + 1) for every in (LOG_EVERY, settings.evaluate_every)]
    return min(*ends, settings.steps)


def _is_evaluation(settings: Settings, step: int) -> bool:
    return step % settings.evaluate_every == 0 or step == settings.steps


def _save(trainer: Trainer, out: Path) -> Path:
    return checkpoint.save(
        out,
        trainer.step,
        trainer.model,
        trainer.prepared.codec,
        trainer.state_dict(),
        trainer.settings.keep,
    )


# ------------------------------------------------------------------------ what it leaves


class Metrics:
    """Writes `metrics.jsonl`, a line at a time, and for TensorBoard on request.

    Args:
        out: Folder.
        step: The step that is gone on from; lines of later ones are taken out.
        tensorboard: Whether to write for TensorBoard.
    """

    def __init__(self, out: Path, step: int, tensorboard: bool) -> None:
        self._path = out / METRICS
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        write_whole(self._path, "".join(f"{line}\n" for line in kept).encode())
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def pace(self, pace: Pace, reporter: Reporter) -> None:
        """Note how the training goes."""
        reporter.pace(pace)
        self._write(asdict(pace))

    def evaluated(self, trainer: Trainer, evaluation: Evaluation, reporter: Reporter) -> None:
        """Note error rates and examples."""
        reporter.evaluated(trainer.step, evaluation)
        examples = [example._asdict() for example in evaluation.examples]
        line: dict[str, Any] = {
            "step": trainer.step,
            "seconds": trainer.seconds,
            "wer": evaluation.wer,
        }
        line |= {"cer": evaluation.cer, "examples": examples}
        memory = trainer.memory()
        self._write({**line, "beta": memory} if memory else line)

    def close(self) -> None:
        """Finish what is still open."""
        if self._board is not None:
            self._board.close()

    def _write(self, line: dict[str, Any]) -> None:
        # JSON knows no NaN: a loss that is none becomes null.
        clean = {key: None if value != value else value for key, value in line.items()}
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(clean) + "\n")
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written, {error.strerror}") from error
        if self._board is not None:
            for key, value in clean.items():
                if key != "step" and isinstance(value, float):
                    self._board.add_scalar(key, value, line["step"])


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**62  # cut off by a crash: taken out


def check_folder(out: Path, settings: Settings, resume: bool) -> Path | None:
    """The checkpoint to go on from, if asked to; refuse to mix two trainings in a folder."""
    found = checkpoint.checkpoints(out)
    if not resume:
        if found:
            raise InputError(
                f"{out}: holds a training already; --resume goes on with it, --out names another"
            )
        return None
    check_same(out, settings)
    return found[-1] if found else None


def check_same(out: Path, settings: Settings) -> None:
    """Refuse settings that are not those a folder's training was started with."""
    before = read_settings(out)
    for field in fields(Settings):
        old, new = getattr(before, field.name), getattr(settings, field.name)
        if old != new:
            raise InputError(
                f"{out}: was started with {field.name}={old!r}, cannot go on with {new!r}"
            )


@contextmanager
def _stop_asked() -> abc.Iterator[abc.Callable[[], bool]]:
    """Turn the first Ctrl-C into an answer to a question; the second is as ever."""
    asked: list[int] = []

    def ask(number: int, _frame: object) -> None:
        asked.append(number)
        signal.signal(number, before)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not in the main thread, which alone may do this
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def _mixed(seed: int, step: int) -> int:
    """A seed for one step, far from those of other steps and seeds."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
