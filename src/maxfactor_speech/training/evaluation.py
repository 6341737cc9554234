"""Transcription as `pipeline` does it, error rates, and greedy decoding of features for studies."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maxfactor_speech.data.features import extract
from maxfactor_speech.training.checkpoint import quiet
from maxfactor_speech.training.model import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transformers import WhisperForConditionalGeneration

    from maxfactor_speech.data.audio import Wave
    from maxfactor_speech.data.tokens import Codec
    from maxfactor_speech.training.recogniser import Recogniser

CHECK_EVERY = 8  # tokens between checks whether all texts have ended, which wait for the device


class Example(NamedTuple):
    """A reference text and the model's transcript."""

    reference: str
    hypothesis: str


@dataclass(frozen=True)
class Evaluation:
    """Error rates: errors per word or character. Insertions can raise them above 1."""

    wer: float  # of normalised texts
    raw_wer: float  # of the texts as they are
    cer: float  # of normalised texts
    examples: list[Example]

    @staticmethod
    def of(
        pairs: Sequence[Example],
        normalise: Callable[[str], str] = str,
        examples: int = 5,
    ) -> Evaluation:
        """Compare texts, and keep some of them, evenly spaced, as examples.

        Args:
            pairs: References and transcripts.
            normalise: Removes differences that do not count, such as upper case.
            examples: How many to keep.
        """
        import jiwer  # decoding alone needs only torch and transformers

        normal = [Example(*(normalise(text).strip() for text in pair)) for pair in pairs]
        # A text of hesitations alone is empty when it is normalised, and has no words to count.
        counted = [pair for pair in normal if pair.reference] or pairs
        references, hypotheses = _columns(counted)
        apart = max(1, len(pairs) // max(1, examples))
        return Evaluation(
            wer=float(jiwer.wer(references, hypotheses)),
            raw_wer=float(jiwer.wer(*_columns(pairs))),
            cer=float(jiwer.cer(references, hypotheses)),
            examples=list(pairs[::apart][:examples]),
        )


def _columns(pairs: Sequence[Example]) -> tuple[list[str], list[str]]:
    return [pair.reference for pair in pairs], [pair.hypothesis for pair in pairs]


class PipelineDecoder:
    """Transcribes as `pipeline("automatic-speech-recognition")` does with a recogniser's folder.

    The pipeline has defaults of its own, such as five beams, for what a generation config leaves
    open; they are taken from the pipeline. Like it, this decodes in the dtype of the weights.

    Args:
        recogniser: The model and everything that belongs to it.
    """

    def __init__(self, recogniser: Recogniser) -> None:
        from transformers import AutomaticSpeechRecognitionPipeline  # not needed by benchmarks

        model, codec, extractor = recogniser
        self._model, self._extractor = model, extractor
        with quiet():
            self._pipeline: Any = AutomaticSpeechRecognitionPipeline(
                model=model,
                tokenizer=codec.tokenizer,  # type: ignore[arg-type]  # has the type of older ones
                feature_extractor=extractor,
                device=model.device,
            )

    @property
    def bytes_per_example(self) -> int:
        """What the keys and values of the decoder take for one recording, with all its beams."""
        model: Any = self._model
        config, beams = model.config, self._pipeline.generation_config.num_beams or 1
        positions = config.max_source_positions + config.max_target_positions
        values = 2 * config.decoder_layers * positions * config.d_model
        return int(beams * values * model.dtype.itemsize)

    def __call__(self, samples: Tensor) -> list[str]:
        """Transcribe a batch, (batch, samples), padded to the extractor's length."""
        model: Any = self._model
        with torch.inference_mode(), _evaluating(model), quiet():
            features = extract(self._extractor, samples.to(model.device)).to(model.dtype)
            tokens = model.generate(features, generation_config=self._pipeline.generation_config)
        # One copy to the host for the whole batch.
        return [self._text(row) for row in tokens.cpu()]

    def long(self, wave: Wave, timestamps: bool) -> tuple[str, list[Segment]]:
        """Transcribe one recording of any length; segments only with time stamps."""
        is_long = len(wave) > self._extractor.n_samples
        with torch.inference_mode(), _evaluating(self._model), quiet():
            found = self._pipeline(wave, return_timestamps=True if timestamps or is_long else None)
        segments = [
            Segment(chunk["timestamp"][0], chunk["timestamp"][1], " ".join(chunk["text"].split()))
            for chunk in (found.get("chunks", []) if timestamps else [])
        ]
        return " ".join(found["text"].split()), segments

    def _text(self, tokens: Tensor) -> str:
        found = self._pipeline.postprocess([{"tokens": tokens[None]}])
        return " ".join(found["text"].split())


class Segment(NamedTuple):
    """A part of a transcript, with its place in the recording in seconds."""

    start: float | None  # None where the model wrote no time stamp
    end: float | None
    text: str


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
