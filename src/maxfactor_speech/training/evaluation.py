"""Greedy decoding of audio, and error rates."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from maxfactor_speech.training.model import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transformers import WhisperForConditionalGeneration

    from maxfactor_speech.data.tokens import Codec

CHECK_EVERY = 8  # tokens between checks whether all texts have ended, which wait for the device


class Example(NamedTuple):
    """A reference text and the model's transcript."""

    reference: str
    hypothesis: str


@dataclass(frozen=True)
class Evaluation:
    """Error rates: errors per word or character. Insertions can raise them above 1."""

    wer: float
    cer: float
    examples: list[Example]

    @staticmethod
    def of(pairs: Sequence[Example], examples: int = 5) -> Evaluation:
        """Compare texts, and keep some of them, evenly spaced, as examples."""
        import jiwer  # decoding alone needs only torch and transformers

        references, hypotheses = [list(texts) for texts in zip(*pairs, strict=True)]
        apart = max(1, len(pairs) // max(1, examples))
        return Evaluation(
            wer=float(jiwer.wer(references, hypotheses)),
            cer=float(jiwer.cer(references, hypotheses)),
            examples=list(pairs[::apart][:examples]),
        )


def decode(
    model: WhisperForConditionalGeneration,
    codec: Codec,
    batches: Iterable[tuple[Tensor, Sequence[str]]],
    dtype: torch.dtype | None = None,
) -> list[list[Example]]:
    """Transcribe batches of features, (batch, mels, frames), and pair them with their texts.

    Args:
        model: The model; its training mode is restored.
        codec: Its tokens.
        batches: Pairs of features and texts.
        dtype: The dtype of autocast; None disables autocast.
    """
    return [
        [
            Example(*pair)
            for pair in zip(texts, transcribe(model, codec, features, dtype), strict=True)
        ]
        for features, texts in batches
    ]


def in_batches(
    features: Tensor, texts: Sequence[str], size: int = 256
) -> Iterator[tuple[Tensor, Sequence[str]]]:
    """Split features and texts into batches for `decode`."""
    for start in range(0, len(texts), size):
        yield features[start : start + size], texts[start : start + size]


def transcribe(
    model: WhisperForConditionalGeneration,
    codec: Codec,
    features: Tensor,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Transcribe a batch of features, (batch, mels, frames)."""
    device = next(model.parameters()).device
    autocast = torch.autocast(device.type, dtype) if dtype is not None else nullcontext()
    with torch.inference_mode(), _evaluating(model), autocast:
        tokens = _greedy(model, codec, features.to(device))
    # One copy to the host for the whole batch.
    return [codec.decode(row) for row in tokens.tolist()]


def _greedy(model: WhisperForConditionalGeneration, codec: Codec, features: Tensor) -> Tensor:
    """Return (batch, tokens): always the most likely token, until all texts have ended."""
    states = encode(model, features.to(model.dtype))
    batch = len(features)
    tokens = torch.tensor(codec.start, device=states.device).expand(batch, -1)
    ended = torch.zeros(batch, dtype=torch.bool, device=states.device)
    written: list[Tensor] = []
    cache = None
    for count in range(model.config.max_target_positions - len(codec.start)):
        output = model.model.decoder(
            input_ids=tokens, encoder_hidden_states=states, past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        likeliest = model.proj_out(output.last_hidden_state[:, -1]).argmax(dim=-1)
        likeliest = likeliest.masked_fill(ended, codec.end)
        ended = ended | (likeliest == codec.end)
        written.append(likeliest)
        tokens = likeliest[:, None]
        if count % CHECK_EVERY == 0 and bool(ended.all()):
            break
    return torch.stack(written, dim=1)


@contextmanager
def _evaluating(model: WhisperForConditionalGeneration) -> Iterator[None]:
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)
