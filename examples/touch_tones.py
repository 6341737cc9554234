"""A short training with MaxFactor: write down the number that somebody dials.

Every key of a telephone sounds as two tones at once (DTMF). This script makes such calls up from
a seed, with noise on the line, and trains a small transformer with CTC to write down the keys,
once with MaxFactor and once with AdamW. It needs torch and maxfactor, no data and no GPU.

    python examples/touch_tones.py
    python examples/touch_tones.py --optimizer maxfactor --lr 0.02 --steps 400
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import ctc_loss

import maxfactor

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
    snr: tuple[float, float] = (-3.0, 15.0)  # dB

    @property
    def samples(self) -> int:
        """Length of every call, enough for the slowest one."""
        longest = self.digits[1] * (self.press[1] + self.gap[1]) + self.gap[1]
        return round(RATE * longest)


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
    """Waveforms (calls, samples) of the keys (calls, digits), 0 for a key not pressed."""

    def draw(ends: tuple[float, float], *shape: int) -> Tensor:
        return ends[0] + (ends[1] - ends[0]) * torch.rand(shape, generator=generator)

    calls, digits = keys.shape
    pauses = torch.stack([draw(line.gap, calls, digits), draw(line.press, calls, digits)], dim=-1)
    edges = pauses.flatten(1).cumsum(1)  # seconds at which a press begins, ends, the next begins...
    seconds = torch.arange(line.samples) / RATE
    part = torch.searchsorted(edges, seconds.expand(calls, -1).contiguous(), right=True)
    press = (part // 2).clamp(max=digits - 1)  # (calls, samples)
    sounds = (part % 2 == 1) & (keys.gather(1, press) != BLANK)

    detuned = 1.0 + draw((-line.detuning, line.detuning), calls, digits, 2)
    frequency = FREQUENCIES[keys] * detuned
    amplitude = 10.0 ** (draw(line.loudness, calls, digits, 2) / 20.0)
    phase = draw((0.0, 2.0 * math.pi), calls, digits, 2)
    wave = torch.zeros(calls, line.samples)
    for tone in range(2):
        now = [x[..., tone].gather(1, press) for x in (amplitude, frequency, phase)]
        wave += now[0] * torch.sin(2.0 * math.pi * now[1] * seconds + now[2])
    wave *= sounds

    power = wave.square().sum(1, keepdim=True) / sounds.sum(1, keepdim=True).clamp(min=1)
    noise = torch.randn(wave.shape, generator=generator)
    return wave + noise * (power / 10.0 ** (draw(line.snr, calls, 1) / 10.0)).sqrt()


def log_spectrogram(wave: Tensor) -> Tensor:
    """Log power (calls, BINS, frames), with mean 0 and variance 1 over each call."""
    window = torch.hann_window(WINDOW)
    spectrum = torch.stft(wave, WINDOW, HOP, window=window, return_complex=True)[:, :BINS]
    power = (spectrum.abs().square() + 1e-8).log()
    mean = power.mean((1, 2), keepdim=True)
    return (power - mean) / power.std((1, 2), keepdim=True)


# ------------------------------------------------------------------------------- the model


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


def heard(log_probs: Tensor) -> list[str]:
    """The best key in each frame, repeats and blanks left out."""
    best = log_probs.argmax(-1)
    return [to_text(torch.unique_consecutive(frames)) for frames in best.cpu()]


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
def transcriptions(model: nn.Module, calls: Calls) -> list[tuple[str, str]]:
    """What was dialled and what the model heard, for each call."""
    model.eval()
    texts = heard(model(calls.spectrogram))
    model.train()
    return list(zip(map(to_text, calls.keys), texts, strict=True))


def error_rate(pairs: list[tuple[str, str]]) -> float:
    """Wrong, missing and surplus digits as a share of the digits dialled."""
    return sum(edit_distance(*pair) for pair in pairs) / sum(len(dialled) for dialled, _ in pairs)


# ---------------------------------------------------------------------------- the training


@dataclass(frozen=True)
class Contestant:
    """An optimizer and how it is used."""

    name: str
    make: Callable[[nn.Module, float], torch.optim.Optimizer]
    lr: float
    clip: float | None = None  # norm to which the gradient is clipped


CONTESTANTS = {
    "maxfactor": Contestant(
        "MaxFactor", lambda model, lr: maxfactor.MaxFactor(model.parameters(), lr=lr), lr=0.02
    ),
    "adamw": Contestant(
        "AdamW", lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr), lr=2e-3, clip=1.0
    ),
    "adafactor": Contestant(
        "Adafactor",
        lambda model, lr: maxfactor.Adafactor(model.parameters(), lr=lr, relative_step=True),
        lr=0.05,
    ),
}


@dataclass(frozen=True)
class Plan:
    """Everything about a training but the optimizer."""

    steps: int = 600
    seed: int = 0
    batch: int = 24
    held_out: int = 256
    report_every: int = 100
    device: str = "cpu"
    line: Line = field(default_factory=Line)


class Point(NamedTuple):
    """What is known after a step: the mean loss since the last point, and the held-out error."""

    step: int
    loss: float
    error: float
    lr: float
    seconds: float


@dataclass(frozen=True)
class Run:
    """A finished training."""

    curve: list[Point]
    state_bytes: float
    examples: list[tuple[str, str]]


HELD_OUT_SEED = 2**31  # no --seed gives the same calls


def train(contestant: Contestant, plan: Plan, report: Callable[[Point], None]) -> Run:
    """Train a new model; the same plan gives every optimizer the same weights and calls."""
    torch.manual_seed(plan.seed)
    model = Transcriber().to(plan.device)
    optimizer = contestant.make(model, contestant.lr)
    schedule = maxfactor.AdaptiveSchedule(
        optimizer, warmup_steps=plan.steps // 10, total_steps=plan.steps, decay_factor=0.05
    )
    generator = Generator().manual_seed(plan.seed)
    held_out = held_out_calls(plan)
    curve: list[Point] = []
    losses: list[Tensor] = []
    pairs: list[tuple[str, str]] = []
    seconds = 0.0
    for step in range(1, plan.steps + 1):
        calls = to_device(make_calls(plan.batch, generator, plan.line), plan.device)
        started = time.perf_counter()
        loss = loss_of(model, calls)
        optimizer.zero_grad()
        loss.backward()
        if contestant.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), contestant.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        seconds += time.perf_counter() - started
        if step % plan.report_every == 0 or step == plan.steps:
            mean_loss = float(torch.stack(losses).mean())
            losses.clear()
            pairs = transcriptions(model, held_out)
            curve.append(
                Point(step, mean_loss, error_rate(pairs), schedule.effective_lr()[0], seconds)
            )
            report(curve[-1])
    return Run(curve, state_bytes(optimizer), pairs)


def held_out_calls(plan: Plan) -> Calls:
    """The calls that no training sees, the same for every seed."""
    generator = Generator().manual_seed(HELD_OUT_SEED)
    return to_device(make_calls(plan.held_out, generator, plan.line), plan.device)


def to_device(calls: Calls, device: str) -> Calls:
    return Calls(*(part.to(device) for part in calls))


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Bytes that the optimizer keeps for each parameter, without the step counters."""
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    kept = sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )
    return float(kept / sum(param.numel() for param in params))
