"""A short training with MaxFactor: write down the number that somebody dials.

Every key of a telephone sounds as two tones at once (DTMF). This script makes such calls up from
a seed, with noise on the line, and trains a small transformer with CTC to write down the keys,
once with MaxFactor and once with AdamW. It needs torch and maxfactor, no data and no GPU.

    python examples/touch_tones.py
    python examples/touch_tones.py --optimizer maxfactor --lr 0.03 --steps 500
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import ctc_loss

import maxfactor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

# ------------------------------------------------------------------------------- the calls

KEYPAD = ("123", "456", "789", "*0#")
LOW = (697.0, 770.0, 852.0, 941.0)  # Hz, one for each row of the keypad
HIGH = (1209.0, 1336.0, 1477.0)  # Hz, one for each column
KEYS = "".join(KEYPAD)
BLANK = 0  # CTC's blank; the keys are 1 to 12, and 0 also fills up short numbers
FREQUENCIES = torch.tensor([(0.0, 0.0), *((low, high) for low in LOW for high in HIGH)])

RATE = 8000  # samples per second
WINDOW, HOP = 256, 80  # samples: 32 ms windows, one every 10 ms
BINS = 64  # of 31.25 Hz each: up to 2 kHz, above which there is only noise


@dataclass(frozen=True)
class Line:
    """How people dial and how well the line carries it; pairs are the ends of a range."""

    digits: tuple[int, int] = (3, 6)
    press: tuple[float, float] = (0.05, 0.12)  # seconds
    gap: tuple[float, float] = (0.05, 0.12)  # seconds
    loudness: tuple[float, float] = (-12.0, 0.0)  # dB, of each of the two tones by itself
    detuning: float = 0.015  # share of the frequency, up or down
    snr: tuple[float, float] = (-5.0, 15.0)  # dB, tones to noise

    @property
    def samples(self) -> int:
        """Length of every call, enough for the slowest one."""
        longest = self.digits[1] * (self.press[1] + self.gap[1]) + self.gap[1]
        return round(RATE * longest)


LINE = Line()
HELD_OUT_SEED = 2**31  # far from any --seed in use


class Calls(NamedTuple):
    """Calls as the model sees them and what was dialled."""

    spectrogram: Tensor  # (calls, BINS, frames)
    keys: Tensor  # (calls, most digits), filled up with 0
    lengths: Tensor  # (calls,)


def make_calls(count: int, generator: Generator, line: Line) -> Calls:
    """Make up calls; the generator alone decides which."""
    fewest, most = line.digits
    lengths = torch.randint(fewest, most + 1, (count,), generator=generator)
    keys = torch.randint(1, len(KEYS) + 1, (count, most), generator=generator)
    keys = keys * (torch.arange(most) < lengths[:, None])
    return Calls(log_spectrogram(synthesize(keys, generator, line)), keys, lengths)


def synthesize(keys: Tensor, generator: Generator, line: Line) -> Tensor:
    """Waveforms (calls, samples) of the keys (calls, digits), 0 for a key that is not pressed."""
    press, pressed = timing(keys, generator, line)
    wave = tones(keys, press, generator, line) * pressed
    power = wave.square().sum(1, keepdim=True) / pressed.sum(1, keepdim=True).clamp(min=1)
    snr = 10.0 ** (uniform(line.snr, (len(keys), 1), generator) / 10.0)
    return wave + (power / snr).sqrt() * torch.randn(wave.shape, generator=generator)


def timing(keys: Tensor, generator: Generator, line: Line) -> tuple[Tensor, Tensor]:
    """For each sample the number of its press, and whether the key is down: (calls, samples)."""
    calls, digits = keys.shape
    gaps, presses = (uniform(x, (calls, digits), generator) for x in (line.gap, line.press))
    edges = torch.stack([gaps, presses], dim=-1).flatten(1).cumsum(1)  # down, up, down, up, ...
    seconds = (torch.arange(line.samples) / RATE).expand(calls, -1).contiguous()
    edges_before = torch.searchsorted(edges, seconds, right=True)
    press = (edges_before // 2).clamp(max=digits - 1)
    return press, (edges_before % 2 == 1) & (keys.gather(1, press) != BLANK)


def tones(keys: Tensor, press: Tensor, generator: Generator, line: Line) -> Tensor:
    """The two tones of each press, as if it lasted as long as the call."""
    shape = (*keys.shape, 2)
    detuned = 1.0 + uniform((-line.detuning, line.detuning), shape, generator)
    frequency = FREQUENCIES[keys] * detuned
    amplitude = 10.0 ** (uniform(line.loudness, shape, generator) / 20.0)
    phase = uniform((0.0, 2.0 * math.pi), shape, generator)
    radians = 2.0 * math.pi * torch.arange(press.shape[1]) / RATE
    wave = torch.zeros(press.shape)
    for tone in range(2):
        a, f, p = (x[..., tone].gather(1, press) for x in (amplitude, frequency, phase))
        wave += a * torch.sin(f * radians + p)
    return wave


def uniform(ends: tuple[float, float], shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Random numbers between the two ends."""
    return ends[0] + (ends[1] - ends[0]) * torch.rand(shape, generator=generator)


def log_spectrogram(wave: Tensor) -> Tensor:
    """Log power (calls, BINS, frames), with mean 0 and variance 1 over each call."""
    window = torch.hann_window(WINDOW)
    spectrum = torch.stft(wave, WINDOW, HOP, window=window, return_complex=True)[:, :BINS]
    power = (spectrum.abs().square() + 1e-8).log()
    centred = power - power.mean((1, 2), keepdim=True)
    return centred / power.std((1, 2), keepdim=True)


# ------------------------------------------------------------------------------- the model

Pair = tuple[str, str]  # what was dialled, and what the model heard


class Transcriber(nn.Module):
    """Two convolutions, a transformer encoder, and scores for each key in each 20 ms."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(BINS, width, 3, padding=1),
            nn.GELU(),
            nn.Conv1d(width, width, 3, stride=2, padding=1),
            nn.GELU(),
        )
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, len(KEYS) + 1)

    def forward(self, spectrogram: Tensor) -> Tensor:
        """Log probabilities (calls, frames / 2, keys + 1)."""
        frames = self.stem(spectrogram).transpose(1, 2)
        scores: Tensor = self.head(self.encoder(frames))
        return scores.log_softmax(-1)


def loss_of(model: nn.Module, calls: Calls) -> Tensor:
    """CTC loss: the probability of the number over all its timings."""
    log_probs = model(calls.spectrogram).transpose(0, 1)
    frames = torch.full_like(calls.lengths, log_probs.shape[0])
    return ctc_loss(log_probs, calls.keys, frames, calls.lengths, blank=BLANK)


def to_text(keys: Tensor) -> str:
    """Keys as they are printed on the telephone."""
    return "".join(KEYS[key - 1] for key in keys.tolist() if key != BLANK)


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and replacements that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        before, row = row, [i]
        for j, y in enumerate(b):
            row.append(min(before[j] + (x != y), before[j + 1] + 1, row[j] + 1))
    return row[-1]


@torch.no_grad()
def transcribe(model: nn.Module, calls: Calls) -> list[Pair]:
    """Decode greedily: the best key in each frame, without repeats and blanks."""
    model.eval()
    best = model(calls.spectrogram).argmax(-1).cpu()  # one transfer for all calls
    model.train()
    heard = (to_text(torch.unique_consecutive(frames)) for frames in best)
    return list(zip(map(to_text, calls.keys), heard, strict=True))


def error_rate(pairs: list[Pair]) -> float:
    """Wrong, missing and surplus digits as a share of the digits dialled."""
    return sum(edit_distance(*pair) for pair in pairs) / sum(len(dialled) for dialled, _ in pairs)


# ---------------------------------------------------------------------------- the training


@dataclass(frozen=True)
class Contestant:
    """An optimizer and how it is used."""

    name: str
    optimizer: Callable[..., Optimizer]
    lr: float
    settings: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None  # the norm to which gradients are clipped


CONTESTANTS = {
    "maxfactor": Contestant("MaxFactor", maxfactor.MaxFactor, lr=0.1),
    "adamw": Contestant("AdamW", torch.optim.AdamW, lr=0.003, clip=1.0),
    "adafactor": Contestant("Adafactor", maxfactor.Adafactor, 0.03, {"relative_step": True}),
}


@dataclass(frozen=True)
class Plan:
    """Everything about a training but the optimizer."""

    steps: int = 300
    seed: int = 0
    batch: int = 24
    held_out: int = 256
    report_every: int = 50
    device: str = "cpu"


class Point(NamedTuple):
    """Where a training stands after a step."""

    step: int
    loss: float  # mean since the point before
    error: float  # on the held-out calls
    lr: float  # as the step really used it
    seconds: float  # in forward, backward and step


@dataclass(frozen=True)
class Run:
    """A finished training."""

    curve: list[Point]
    state_bytes: float  # for each parameter
    pairs: list[Pair]


def train(contestant: Contestant, plan: Plan, report: Callable[[Point], None]) -> Run:
    """Train a new model; a plan gives every optimizer the same first weights and the same calls."""
    torch.manual_seed(plan.seed)
    model = Transcriber().to(plan.device)
    settings = {**contestant.settings, "lr": contestant.lr}
    optimizer = contestant.optimizer(model.parameters(), **settings)
    schedule = maxfactor.AdaptiveSchedule(
        optimizer, warmup_steps=plan.steps // 10, total_steps=plan.steps, decay_factor=0.05
    )
    generator, held_out = Generator().manual_seed(plan.seed), held_out_calls(plan)
    curve: list[Point] = []
    losses: list[float] = []
    seconds = 0.0
    for step in range(1, plan.steps + 1):
        calls = to_device(make_calls(plan.batch, generator, LINE), plan.device)
        started = time.perf_counter()
        losses.append(train_step(model, optimizer, calls, contestant.clip))
        seconds += time.perf_counter() - started
        if step % plan.report_every == 0 or step == plan.steps:
            pairs = transcribe(model, held_out)
            rate = schedule.effective_lr()[0]
            curve.append(Point(step, mean(losses), error_rate(pairs), rate, seconds))
            losses.clear()
            report(curve[-1])
        schedule.step()
    return Run(curve, state_bytes(optimizer), pairs)


def train_step(model: nn.Module, optimizer: Optimizer, calls: Calls, clip: float | None) -> float:
    """Take one step and return the loss before it."""
    optimizer.zero_grad()
    loss = loss_of(model, calls)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()  # waits for the device, so that the clock sees the whole step


def held_out_calls(plan: Plan) -> Calls:
    """Calls that no training sees, the same for every seed."""
    generator = Generator().manual_seed(HELD_OUT_SEED)
    return to_device(make_calls(plan.held_out, generator, LINE), plan.device)


def to_device(calls: Calls, device: str) -> Calls:
    """Calls are made on the CPU, so that a seed gives the same ones everywhere."""
    return Calls(*(part.to(device) for part in calls))


def state_bytes(optimizer: Optimizer) -> float:
    """Bytes that the optimizer keeps for each parameter, without the step counters."""
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    states = chain.from_iterable(state.items() for state in optimizer.state.values())
    kept = sum(value.nbytes for key, value in states if key != "step")
    return float(kept / sum(param.numel() for param in params))


# ------------------------------------------------------------------------ the command line

PROGRESS = "{:>6}  {:>6}  {:>7}  {:>12}  {:>7}"
TABLE = "{:<10} {:>6} {:>8} {:>17} {:>26}"


def main(arguments: list[str] | None = None) -> None:
    """Train as the command line says and print how it went."""
    options = parse(arguments)
    # The model is too small to gain much from more, and sums do not depend on the number of cores.
    torch.set_num_threads(1)
    names = ["maxfactor", "adamw"] if options.optimizer == "both" else [options.optimizer]
    contestants = [CONTESTANTS[name] for name in names]
    if options.lr is not None:
        contestants[0] = replace(contestants[0], lr=options.lr)
    plan = Plan(
        options.steps, options.seed, report_every=max(1, options.steps // 6), device=options.device
    )
    print(introduction(plan))
    runs = {contestant.name: train_aloud(contestant, plan) for contestant in contestants}
    print_results(runs)
    print(
        "\nTo change optimizers in a training of your own, put\n"
        "    maxfactor.for_model(model)\n"
        "where torch.optim.AdamW(...) was; its lr is a share of the size of the weights, and each\n"
        "recipe has one to begin with."
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small model to hear dialled numbers.")
    parser.add_argument("--steps", type=positive, default=Plan.steps)
    parser.add_argument("--lr", type=float, help="for the optimizer, or for MaxFactor of both")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--optimizer", choices=[*CONTESTANTS, "both"], default="both")
    parser.add_argument("--device", default=Plan.device, help="cpu (default), cuda, mps, ...")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def introduction(plan: Plan) -> str:
    """What is going to happen."""
    parameters = sum(param.numel() for param in Transcriber().parameters())
    return (
        f"Telephone numbers are dialled over a noisy line, and a transformer with {parameters:,}\n"
        f"parameters learns to write them down: {plan.steps} steps of {plan.batch} new calls each. "
        f"The error is the\nshare of wrong digits in {plan.held_out} other calls."
    )


def train_aloud(contestant: Contestant, plan: Plan) -> Run:
    """Train and print a line now and then."""
    print(f"\n{contestant.name}, lr {contestant.lr:g}")
    print(PROGRESS.format("step", "loss", "error", "effective lr", "seconds"))

    def report(point: Point) -> None:
        error = f"{point.error:.1%}"
        values = (point.step, f"{point.loss:.3f}", error, f"{point.lr:.1e}", f"{point.seconds:.1f}")
        print(PROGRESS.format(*values), flush=True)

    return train(contestant, plan, report)


def print_results(runs: dict[str, Run]) -> None:
    """The closing table, and a call heard right and one heard wrong by the first model."""
    print()
    print(
        TABLE.format("optimizer", "steps", "seconds", "digit error rate", "state bytes/parameter")
    )
    for name, run in runs.items():
        last = run.curve[-1]
        values = (last.step, f"{last.seconds:.1f}", f"{last.error:.1%}", f"{run.state_bytes:.2f}")
        print(TABLE.format(name, *values))
    print("Seconds of forward, backward and step alone; state without the step counters.\n")
    name, run = next(iter(runs.items()))
    right = [(dialled, heard) for dialled, heard in run.pairs if dialled == heard]
    wrong = [(dialled, heard) for dialled, heard in run.pairs if dialled != heard]
    for dialled, heard in right[:1] + wrong[:1]:
        print(f"{name}: dialled {dialled:<8} heard {heard}")


if __name__ == "__main__":
    main()
