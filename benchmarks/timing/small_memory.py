"""Fine-tuning Whisper-large-v3 with `maxfactor train` on a GPU of 8 GB: memory and time per step.

    python benchmarks/timing/small_memory.py --device cuda --out FILE.json
    python benchmarks/timing/small_memory.py --device cuda --parts steps   # peaks and times
    python benchmarks/timing/small_memory.py --device cuda --parts largest # the largest batch
    python benchmarks/timing/small_memory.py --quick                       # a tiny model on a CPU

A folder with the shapes of Whisper-large-v3 and random weights is built first. Recordings are noise
of 30 seconds with texts that fill all 448 positions, the most that can occur. Each recipe is
trained with weights in bfloat16, gradient checkpointing and released gradients:

- `train`: the whole command with batch 1: evaluation and checkpoint before the first step and at
  the end, peaks of steps and of evaluations apart. torch's allocator is limited to `--limit` GB. A
  card of 8 GB has 8.6e9 bytes, of which CUDA itself takes about 0.6e9.
- `steps`: as `released`, its steps alone, after some that compile the kernels and capture graphs;
  as `plain`, steps with the same weights and checkpointing, without release and without limit;
  `ratio` is the time of the former by that of the latter. `step_ms` are the host's times of single
  steps, without a wait for the device, and `allocator` what torch asked of CUDA meanwhile: where it
  is not 0, memory was short.
- `largest`: the largest of `--batches` of which two steps fit within the limit.

`--parts` chooses among them. `--profile` adds where the host's time goes, see
host_profile.py.

Peaks are those of the bytes that torch allocated (`peak_gb`) and reserved (`reserved_gb`). On a CPU
they are null.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile
import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.models.whisper.modeling_whisper import sinusoids

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import Record, circumstances, write_json
from speech_application import (
    SAMPLE_RATE,
    DeviceMemoryError,
    Evaluation,
    Pace,
    Prepared,
    Reporter,
    Settings,
    Trainer,
    memory_needs,
    prepare,
    repeatable,
    train,
    train_until,
)
from timing.host_profile import profiled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GB = 1e9
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|nospeech|>",
    "<|notimestamps|>",
)  # fmt: skip
TARGETS = {"lean": 4.0, "fast": 5.7, "quality": 6.0}  # GB at batch 1
PARTS = ("train", "steps", "largest")
MOST_TIME = 1.25  # of a plain step
WARM_UP = 6  # steps that are not timed: they compile, and capture graphs
RECORDINGS = 8  # at least
PROFILED = 3  # steps
ALLOCATOR = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")


@dataclass(frozen=True)
class Size:
    """The numbers of a Whisper, and how much it hears and writes."""

    width: int
    layers: int
    heads: int
    mels: int
    vocabulary: int
    seconds: int
    positions: int
    evaluated_tokens: int  # a model with random weights does not end by itself


LARGE = Size(1280, 32, 20, 128, 51_866, 30, 448, 32)
QUICK = Size(32, 1, 2, 80, 64, 1, 16, 4)


# ------------------------------------------------------------------------ folder and recordings


def build_folder(folder: Path, size: Size, device: str) -> None:
    """Write an English-only Whisper with random weights in bfloat16, drawn on the device."""
    tokens = [*LETTERS, "Ġ", *SPECIAL]
    words = WhisperTokenizer(
        vocab={token: number for number, token in enumerate(tokens[: -len(SPECIAL) + 1])},
        merges=[],
        pad_token=SPECIAL[0],
        extra_special_tokens=list(SPECIAL[1:]),
    )
    number: Any = words.convert_tokens_to_ids
    end = number(SPECIAL[0])
    config = WhisperConfig(
        vocab_size=size.vocabulary,
        num_mel_bins=size.mels,
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=4 * size.width,
        decoder_ffn_dim=4 * size.width,
        max_source_positions=50 * size.seconds,
        max_target_positions=size.positions,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=number(SPECIAL[1]),
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    with torch.device("meta"):
        model: Any = WhisperForConditionalGeneration(config).to(torch.bfloat16)  # type: ignore[arg-type]
    model.to_empty(device=device)
    model.tie_weights()
    draw_weights(model)
    model.generation_config = GenerationConfig(
        max_length=size.evaluated_tokens,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=number(SPECIAL[1]),
        no_timestamps_token_id=number("<|notimestamps|>"),
        return_timestamps=False,
        is_multilingual=False,
    )
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=size.mels, chunk_length=size.seconds)
    WhisperProcessor(extractor, words).save_pretrained(folder)


@torch.no_grad()
def draw_weights(model: Any) -> None:
    """Draw all weights as Whisper does: matrices of deviation 0.02, norms of one."""
    torch.manual_seed(0)
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm):
                param.fill_(float(name == "weight"))
            elif name == "bias":
                param.zero_()
            else:
                param.normal_(std=0.02)
    positions = model.model.encoder.embed_positions.weight
    positions.copy_(sinusoids(*positions.shape))


def write_recordings(folder: Path, size: Size, count: int) -> Path:
    """Write noise of the full length, with texts that fill all positions."""
    random = np.random.default_rng(0)
    lines = []
    for number in range(count):
        noise = random.integers(-3000, 3000, size.seconds * SAMPLE_RATE).astype(np.int16)
        soundfile.write(folder / f"{number}.wav", noise, SAMPLE_RATE)
        text = "".join(random.choice(list(LETTERS), size.positions - 4))
        lines.append(f"{number}.wav\t{text}\n")
    (folder / "train.tsv").write_text("".join(lines))
    (folder / "check.tsv").write_text(lines[0])
    return folder / "train.tsv"


# ---------------------------------------------------------------------------------- measures


class Watch(Reporter):
    """Notes the speed of a training, and the peaks of its steps and of its evaluations."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.paces: list[Pace] = []
        self.steps = self.evaluations = Peak()
        self._clear()

    def pace(self, pace: Pace) -> None:
        """Note the steps since the last call."""
        self.paces.append(pace)
        self.steps = self.steps.with_present(self._device)
        self._clear()

    def evaluated(self, step: int, evaluation: Evaluation, is_best: bool = False) -> None:
        """Note an evaluation."""
        del step, evaluation, is_best
        self.evaluations = self.evaluations.with_present(self._device)
        self._clear()

    def say(self, line: str) -> None:
        """Print what the training says."""
        print(f"  {line}", flush=True)

    def _clear(self) -> None:
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class Peak:
    """The most bytes that torch has allocated and reserved."""

    allocated: int = 0
    reserved: int = 0

    def with_present(self, device: str) -> Peak:
        """Take the peak of torch's allocator into account."""
        if device != "cuda":
            return self
        return Peak(
            max(self.allocated, torch.cuda.max_memory_allocated()),
            max(self.reserved, torch.cuda.max_memory_reserved()),
        )

    def record(self) -> Record:
        """In GB, for JSON."""
        values = {"peak_gb": self.allocated, "reserved_gb": self.reserved}
        return {name: round(value / GB, 3) if value else None for name, value in values.items()}


@contextmanager
def limited(device: str, gigabytes: float) -> Iterator[None]:
    """Limit torch's allocator; before and after, free what is no longer used."""
    release(device)
    if device != "cuda":
        yield
        return
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * GB / whole))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        release(device)


def release(device: str) -> None:
    """Free the memory of earlier trainings."""
    gc.collect()  # hooks of released gradients refer to each other
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def whole_training(settings: Settings, out: Path) -> Record:
    """Run the command with all that belongs to it; its time has the compilation of kernels."""
    watch = Watch(settings.device)
    failure = None
    try:
        train(settings, out, reporter=watch)
    except DeviceMemoryError as error:
        failure = str(error)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return {
        "out_of_memory": failure,
        "ms_per_step": round(1e3 / watch.paces[-1].steps_per_second, 1) if watch.paces else None,
        **watch.steps.record(),
        "evaluation": watch.evaluations.record(),
    }


class TimedTrainer(Trainer):
    """Notes when the host has done with each step."""

    def __init__(self, settings: Settings, prepared: Prepared) -> None:
        super().__init__(settings, prepared)
        self.times = [0.0]

    def begin(self) -> None:
        """Forget the steps so far."""
        self.times = [time.perf_counter()]

    def train_step(self, batches: list[Any]) -> Tensor:
        """Take one step."""
        loss = super().train_step(batches)
        self.times.append(time.perf_counter())
        return loss

    def step_ms(self) -> list[float]:
        """The host's time of each step."""
        pairs = pairwise(self.times)
        return [round(1e3 * (after - before), 1) for before, after in pairs]


def steps_alone(settings: Settings, warm_up: int, steps: int, *, profile: bool = False) -> Record:
    """Train without evaluations and checkpoints; the time is that of the steps after warm-up."""
    # No step is the last of a training: that one would be recorded, by kernels of its own.
    whole = warm_up + steps + 1
    settings = replace(settings, steps=whole, evaluate_every=whole)
    prepared = prepare(settings, device=settings.torch_device)
    release(settings.device)
    found: Record = {"batch_size": settings.batch_size, "out_of_memory": False, "ms_per_step": None}
    try:
        trainer = TimedTrainer(settings, prepared)
        batches = trainer.batches()
        try:
            train_until(trainer, batches, warm_up)
            before = allocator_counts(settings.device)
            trainer.begin()
            pace = train_until(trainer, batches, warm_up + steps)
            after = allocator_counts(settings.device)
            found["ms_per_step"] = round(1e3 / pace.steps_per_second, 1)
            found |= {"median_ms": median(trainer.step_ms()), "step_ms": trainer.step_ms()}
            found["allocator"] = {name: after[name] - before[name] for name in after}
            found |= Peak().with_present(settings.device).record()
            if profile:
                found["profile"] = profile_of(trainer, batches)
        finally:
            batches.close()
    except torch.OutOfMemoryError:
        found |= {"out_of_memory": True, **Peak().with_present(settings.device).record()}
    return found


def profile_of(trainer: Trainer, batches: Iterator[list[Any]]) -> Record:
    """Where the host's time of some more steps goes."""
    settings = trainer.settings
    with repeatable(trainer.device):
        return profiled(
            lambda: trainer.train_step(next(batches)),
            PROFILED,
            settings.device,
            released=settings.release_gradients,
        )


def allocator_counts(device: str) -> dict[str, int]:
    """What torch's allocator has asked of CUDA so far."""
    if device != "cuda":
        return {}
    counts = torch.cuda.memory_stats()
    return {name: counts.get(name, 0) for name in ALLOCATOR}


def measured(recipe: str, base: Settings, args: argparse.Namespace, folder: Path) -> Record:
    """All measurements of a recipe."""
    settings = replace(base, optimizer=recipe)
    needs = memory_needs(settings, prepare(settings, device=settings.torch_device)).total
    found: Record = {"recipe": recipe, "estimated_gb": round(needs / GB, 3)}
    if "train" in args.parts:
        with limited(args.device, args.limit):
            found["train"] = whole_training(settings, folder / "out")
    if "steps" in args.parts:
        found |= with_and_without_release(settings, args)
    if "largest" in args.parts:
        found |= largest_batch(settings, args)
    return found


def with_and_without_release(settings: Settings, args: argparse.Namespace) -> Record:
    """Steps with released gradients within the limit, beside plain ones without a limit."""
    with limited(args.device, args.limit):
        released = steps_alone(settings, WARM_UP, args.steps, profile=args.profile)
    usual = replace(settings, release_gradients=False)
    with limited(args.device, 1e6):  # no limit
        plain = steps_alone(usual, WARM_UP, args.steps, profile=args.profile)
    return {
        "released": released,
        "plain": plain,
        "ratio": _ratio(released["ms_per_step"], plain["ms_per_step"]),
        "median_ratio": _ratio(released.get("median_ms"), plain.get("median_ms")),
        "target_gb": TARGETS[settings.optimizer],
        "target_ratio": MOST_TIME,
    }


def largest_batch(settings: Settings, args: argparse.Namespace) -> Record:
    """The largest batch that fits within the limit, and what was tried."""
    largest, tried = None, []
    for batch_size in args.batches:
        with limited(args.device, args.limit):
            found = steps_alone(replace(settings, batch_size=batch_size), 1, 1)
        tried.append(found)
        if found["out_of_memory"]:
            break
        largest = batch_size
    return {"largest": largest, "tried": tried}


def _ratio(one: float | None, other: float | None) -> float | None:
    return round(one / other, 3) if one and other else None


# ------------------------------------------------------------------------------ command line


def main(argv: Sequence[str] | None = None) -> Record:
    """Build, measure, print, write."""
    args = arguments(argv)
    size = QUICK if args.quick else LARGE
    rows: list[Record] = []
    kept = {name: value for name, value in vars(args).items() if name not in ("out", "folder")}
    result = {**circumstances(args.device), "arguments": kept, "rows": rows}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        build_folder(folder / "whisper", size, args.device)
        batches = args.batches if "largest" in args.parts else [1]
        data = write_recordings(folder, size, max(RECORDINGS, 2 * max(batches)))
        settings = Settings(
            data=str(data),
            validation=str(data.with_name("check.tsv")),
            model=str(folder / "whisper"),
            steps=args.steps,
            evaluate_every=args.steps,
            batch_size=1,
            keep=1,
            device=args.device,
            weights="bf16",
            release_gradients=True,
            gradient_checkpointing=True,
        )
        for recipe in args.recipes:
            rows.append(measured(recipe, settings, args, folder))
            for key, value in rows[-1].items():
                shown = value if isinstance(value, dict) else {"": value}
                print(key, *(f"{name} {own}" for name, own in shown.items()), sep="  ", flush=True)
            if args.out is not None:
                write_json(args.out, result)
    return result


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--recipes", nargs="+", default=list(TARGETS), choices=tuple(TARGETS))
    parser.add_argument("--limit", type=float, default=8.0, help="GB [8.0]")
    parser.add_argument("--steps", type=int, default=20, help="that are timed [20]")
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 6, 8, 12, 16, 24, 32])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--profile", action="store_true", help="tell where the host's time goes")
    parser.add_argument("--folder", type=Path, help="for 25 GB of temporary files")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device; use --device cpu")
    if args.device == "cpu" and not args.quick:
        parser.error("a model of this size needs --device cuda; --quick takes a tiny one")
    if args.quick:
        args.steps, args.batches = 2, [2]
    return args


if __name__ == "__main__":
    main()
