"""Whisper's log-mel spectrogram of a batch, on any device, and SpecAugment.

References:
    Radford et al., Robust Speech Recognition via Large-Scale Weak Supervision, arXiv:2212.04356.
    Park et al., SpecAugment, arXiv:1904.08779.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from maxfactor_speech.data.audio import FULL_SCALE, SAMPLE_RATE

if TYPE_CHECKING:
    from transformers import WhisperFeatureExtractor

WINDOW = 400  # samples, 25 ms
HOP = 160  # samples, 10 ms
GRAIN = 2 * HOP  # samples: the encoder takes pairs of frames
FLOOR = 1e-10  # smallest power, before the logarithm
RANGE = 8.0  # dynamic range below the loudest value, in powers of ten


def log_mel(samples: Tensor, mels: int = 80) -> Tensor:
    """Return the features of Whisper's own extractor for a batch, without padding to 30 s.

    Args:
        samples: (batch, samples), 16-bit integers or floats between -1 and 1, short utterances
            padded with zeros; a multiple of 160 samples.
        mels: The number of mel bands.

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


def is_log_mel(extractor: WhisperFeatureExtractor) -> bool:
    """Return whether `log_mel` computes the features of an extractor."""
    expected = (WINDOW, HOP, SAMPLE_RATE, 0.0, 0.0)
    return expected == (
        extractor.n_fft,
        extractor.hop_length,
        extractor.sampling_rate,
        extractor.dither,
        extractor.padding_value,
    )


def extract(extractor: WhisperFeatureExtractor, samples: Tensor) -> Tensor:
    """Return the features of an extractor, on the device if `log_mel` computes them.

    Args:
        extractor: The feature extractor of a model.
        samples: (batch, samples), 16-bit integers, padded to the extractor's length.
    """
    if is_log_mel(extractor):
        return log_mel(samples, extractor.feature_size)
    waves = list((samples.cpu() / FULL_SCALE).numpy())
    made = extractor(waves, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    features: Tensor = made.input_features.to(samples.device)
    return features


@lru_cache
def _constants(mels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the window and the filters, cached, because each copy to a GPU would wait for it."""
    return torch.hann_window(WINDOW, device=device), mel_filters(mels).to(device)


@lru_cache
def mel_filters(mels: int = 80) -> Tensor:
    """Return (mels, frequencies): triangles of equal area on Slaney's mel scale, up to 8 kHz."""
    frequencies = torch.linspace(0.0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    top = _hertz_to_mel(torch.tensor(SAMPLE_RATE / 2, dtype=torch.float64))
    corners = _mel_to_hertz(torch.linspace(0.0, float(top), mels + 2, dtype=torch.float64))
    widths = corners.diff()  # (mels + 1,)
    slopes = corners[:, None] - frequencies  # (mels + 2, frequencies)
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    triangles = torch.minimum(rising, falling).clamp(min=0.0)
    return (triangles * (2.0 / (corners[2:] - corners[:-2]))[:, None]).float()


def draw_stretches(batch: int, generator: Generator, masks: int = 2) -> Tensor:
    """Draw the stretches that `spec_augment` masks: `masks` along each axis of each utterance.

    They are drawn on the CPU, so that they do not depend on the device of the features, and a CUDA
    graph of `spec_augment` contains no random numbers.

    Returns:
        (2, 2, batch, masks), between 0 and 1: (time, frequency), (width, start).
    """
    axes = [torch.rand(2, batch, masks, 1, generator=generator) for _ in range(2)]
    return torch.stack(axes).squeeze(-1)


def spec_augment(
    features: Tensor, draws: Tensor, time_share: float = 0.1, mel_share: float = 0.2
) -> Tensor:
    """Set stretches of time and of frequency to zero, different ones for each utterance.

    Args:
        features: (batch, mels, frames).
        draws: The result of `draw_stretches`, on the device of the features.
        time_share: The largest width of a stretch of time, as a fraction of all frames.
        mel_share: The largest width of a stretch of frequency, as a fraction of all bands.
    """
    _, mels, frames = features.shape
    hidden = _stretches(draws[0], frames, time_share)[:, None, :]
    hidden = hidden | _stretches(draws[1], mels, mel_share)[:, :, None]
    return features.masked_fill(hidden, 0.0)


def _stretches(draws: Tensor, length: int, share: float) -> Tensor:
    """Return (batch, length): True inside stretches of at most `share` of the length."""
    widths, starts = draws[..., None]
    widths = (widths * (share * length + 1)).floor()
    starts = (starts * (length - widths + 1)).floor()
    places = torch.arange(length, device=draws.device)
    inside: Tensor = (places >= starts) & (places < starts + widths)
    return inside.any(dim=1)


# Slaney's scale: linear up to 1 kHz with 200/3 Hz per mel, then logarithmic with 27 mel per
# factor of 6.4.
_KNEE_HERTZ, _KNEE_MEL = 1000.0, 15.0
_LOG_STEP = torch.log(torch.tensor(6.4, dtype=torch.float64)) / 27.0


def _hertz_to_mel(hertz: Tensor) -> Tensor:
    above = _KNEE_MEL + (hertz.clamp(min=_KNEE_HERTZ) / _KNEE_HERTZ).log() / _LOG_STEP
    return torch.where(hertz < _KNEE_HERTZ, hertz * _KNEE_MEL / _KNEE_HERTZ, above)


def _mel_to_hertz(mel: Tensor) -> Tensor:
    above = _KNEE_HERTZ * (_LOG_STEP * (mel - _KNEE_MEL)).exp()
    return torch.where(mel < _KNEE_MEL, mel * _KNEE_HERTZ / _KNEE_MEL, above)
