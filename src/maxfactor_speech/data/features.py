"""Whisper's log-mel spectrogram of a whole batch at once, on any device, and SpecAugment."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Generator, Tensor

from maxfactor_speech.data.audio import FULL_SCALE, SAMPLE_RATE

WINDOW = 400  # samples, 25 ms
HOP = 160  # samples, 10 ms
GRAIN = 2 * HOP  # samples: the encoder takes frames by twos
FLOOR = 1e-10  # of the power, before the logarithm
RANGE = 8.0  # powers of ten below the loudest that are kept


def log_mel(samples: Tensor, mels: int = 80) -> Tensor:
    """Return what Whisper's own feature extractor returns, for a batch and as long as the audio.

    Args:
        samples: (batch, samples), 16-bit integers or floats between -1 and 1, short ones filled
            up with zeros; a multiple of 160 samples.
        mels: Bands.

    Returns:
        (batch, mels, samples / 160), float32, on the device of the samples.

    Example:
        >>> log_mel(torch.zeros(2, 16_000, dtype=torch.int16)).shape
        torch.Size([2, 80, 100])
    """
    waves = samples / FULL_SCALE if samples.dtype == torch.int16 else samples.float()
    window, filters = _constants(mels, waves.device)
    spectrum = torch.stft(waves, WINDOW, HOP, window=window, return_complex=True)
    power = spectrum[..., :-1].abs() ** 2  # the last frame is centred on the end of the audio
    energy = filters @ power
    log = energy.clamp(min=FLOOR).log10()
    log = torch.maximum(log, log.amax(dim=(1, 2), keepdim=True) - RANGE)
    return (log + 4.0) / 4.0


@lru_cache
def _constants(mels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The window and the filters; each copy to a GPU would wait for all that it has to do."""
    return torch.hann_window(WINDOW, device=device), mel_filters(mels).to(device)


@lru_cache
def mel_filters(mels: int = 80) -> Tensor:
    """(mels, frequencies): triangles of equal area on Slaney's mel scale, up to 8 kHz."""
    frequencies = torch.linspace(0.0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    top = _hertz_to_mel(torch.tensor(SAMPLE_RATE / 2, dtype=torch.float64))
    corners = _mel_to_hertz(torch.linspace(0.0, float(top), mels + 2, dtype=torch.float64))
    widths = corners.diff()  # (mels + 1,)
    slopes = corners[:, None] - frequencies  # (mels + 2, frequencies)
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    triangles = torch.minimum(rising, falling).clamp(min=0.0)
    return (triangles * (2.0 / (corners[2:] - corners[:-2]))[:, None]).float()


def draw_stretches(batch: int, generator: Generator, masks: int = 2) -> Tensor:
    """Draw what `spec_augment` blanks out: `masks` stretches along each axis of each utterance.

    On the CPU, whatever the device of the features: the same everywhere, and a CUDA graph of what
    comes after needs nothing random in it.

    Returns:
        (2, 2, batch, masks), between 0 and 1: time and frequency, width and start.
    """
    axes = [torch.rand(2, batch, masks, 1, generator=generator) for _ in range(2)]
    return torch.stack(axes).squeeze(-1)


def spec_augment(
    features: Tensor, draws: Tensor, time_share: float = 0.1, mel_share: float = 0.2
) -> Tensor:
    """Blank out stretches of time and of frequency, others for each utterance.

    Args:
        features: (batch, mels, frames).
        draws: What `draw_stretches` returned, on the features' device.
        time_share: Most frames that one stretch takes, as a share of all.
        mel_share: Most bands that one stretch takes, as a share of all.
    """
    _, mels, frames = features.shape
    hidden = _stretches(draws[0], frames, time_share)[:, None, :]
    hidden = hidden | _stretches(draws[1], mels, mel_share)[:, :, None]
    return features.masked_fill(hidden, 0.0)


def _stretches(draws: Tensor, length: int, share: float) -> Tensor:
    """(batch, length): True inside stretches of at most `share` of the length."""
    widths, starts = draws[..., None]
    widths = (widths * (share * length + 1)).floor()
    starts = (starts * (length - widths + 1)).floor()
    places = torch.arange(length, device=draws.device)
    inside: Tensor = (places >= starts) & (places < starts + widths)
    return inside.any(dim=1)


# Slaney's scale: 200/3 Hz a mel up to 1 kHz, then logarithmic, 27 mel for a factor of 6.4.
_KNEE_HERTZ, _KNEE_MEL = 1000.0, 15.0
_LOG_STEP = torch.log(torch.tensor(6.4, dtype=torch.float64)) / 27.0


def _hertz_to_mel(hertz: Tensor) -> Tensor:
    above = _KNEE_MEL + (hertz.clamp(min=_KNEE_HERTZ) / _KNEE_HERTZ).log() / _LOG_STEP
    return torch.where(hertz < _KNEE_HERTZ, hertz * _KNEE_MEL / _KNEE_HERTZ, above)


def _mel_to_hertz(mel: Tensor) -> Tensor:
    above = _KNEE_HERTZ * (_LOG_STEP * (mel - _KNEE_MEL)).exp()
    return torch.where(mel < _KNEE_MEL, mel * _KNEE_HERTZ / _KNEE_MEL, above)
