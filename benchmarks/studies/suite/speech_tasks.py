"""Speech to text: a Whisper, a Conformer with CTC, and an encoder of raw waves with CTC.

All are models of transformers with random weights, or a Whisper that has learnt English before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from studies.speech_task import edits
from studies.suite.speech_data import ALPHABET, load
from studies.suite.tasks import LORA, Task, adapted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from measurement import Record
    from studies.suite.speech_data import Speech
    from studies.suite.texts import Split

BLANK = PAD = 0
START, END = len(ALPHABET) + 1, len(ALPHABET) + 2
IGNORED = -100
MOST_TOKENS = 64
DECODED_AT_ONCE = 250


class SpeechTask(Task):
    """A task whose errors are counted in words."""

    measure = "wer"

    def __init__(self, spec: Any, trial: Any, cache: Path, device: torch.device) -> None:
        super().__init__(spec, trial, cache, device)
        self.data = self.read("train", spec.options.get("utterances"))
        order = np.random.default_rng(trial.seed)
        batch = self.size("batch", 4)
        needed = self.steps * batch
        epochs = -(-needed // len(self.data.texts))
        numbers = np.concatenate([order.permutation(len(self.data.texts)) for _ in range(epochs)])
        self.order = torch.from_numpy(numbers[:needed].reshape(self.steps, batch))
        self.order_on_device = self.order.to(device)

    def read(self, split: Split, count: int | None = None, name: str | None = None) -> Speech:
        """Utterances of the task's own set, or of another."""
        name = name or self.spec.options.get("speech", "english")
        return load(self.cache, name, split, self.device, self.trial.quick, count)

    def evaluate(self, split: Split) -> Record:
        """Word errors in per cent of the words; after fine-tuning in the old language, too."""
        record = {"wer": self._word_errors(self.read(split))}
        if self.spec.base is not None:
            record["old_wer"] = self._word_errors(self.read(split, name="english"))
        return record

    def _word_errors(self, data: Speech) -> float:
        self.model.eval()
        with torch.inference_mode():
            texts = [text for part in self.in_parts(data) for text in self.transcribe(part)]
        pairs = [(a.split(), b.split()) for a, b in zip(data.texts, texts, strict=True)]
        words = sum(len(reference) for reference, _ in pairs)
        return round(100.0 * sum(edits(*pair) for pair in pairs) / words, 4)

    def in_parts(self, data: Speech) -> Iterator[Tensor]:
        """Inputs of the model in parts."""
        return iter(self.inputs_of(data).split(DECODED_AT_ONCE))

    def inputs_of(self, data: Speech) -> Tensor:
        """What the model hears: features, or waves."""
        return data.features()

    def transcribe(self, inputs: Tensor) -> list[str]:
        """The model's texts."""
        raise NotImplementedError


def as_text(tokens: list[int]) -> str:
    """The text of tokens; those that are no letters are left out."""
    return "".join(ALPHABET[token - 1] for token in tokens if 1 <= token <= len(ALPHABET))


class WhisperTask(SpeechTask):
    """A small Whisper that writes letters."""

    fits_graph = True

    def __init__(self, spec: Any, trial: Any, cache: Path, device: torch.device) -> None:
        super().__init__(spec, trial, cache, device)
        self.features = self.inputs_of(self.data)
        self.labels = labels_of(self.data.tokens)
        torch.manual_seed(trial.seed)
        self.model = self.with_base(whisper(self.size("width", 16), self.size("layers", 1)))
        if spec.options.get("lora"):
            self.model = adapted(self.model, ["q_proj", "k_proj", "v_proj", "out_proj"])
        self.model.to(device)

    def loss(self, step: int, at: Tensor) -> Tensor:  # noqa: ARG002
        """Mean cross-entropy of the letters."""
        numbers = self.order_on_device.index_select(0, at)[0]
        labels = self.labels.index_select(0, numbers)
        features = self.features.index_select(0, numbers)
        inner = self.model.get_base_model() if LORA in self.spec.options else self.model
        shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=START)
        shifted = shifted.masked_fill(shifted == IGNORED, PAD)
        # With a mask of four dimensions the decoder does not look at its inputs on the host.
        size = labels.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool, device=labels.device).tril()
        heard = inner.model.encoder(features).last_hidden_state
        written = inner.model.decoder(
            input_ids=shifted,
            attention_mask=mask[None, None],
            encoder_hidden_states=heard,
            use_cache=False,
        )
        logits = inner.proj_out(written.last_hidden_state).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def transcribe(self, inputs: Tensor) -> list[str]:
        """Greedy decoding."""
        inner = self.model.get_base_model() if LORA in self.spec.options else self.model
        heard = inner.model.encoder(inputs.to(inner.dtype)).last_hidden_state
        tokens = torch.full((len(inputs), 1), START, device=inputs.device)
        ended = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
        written: list[Tensor] = []
        cache = None
        for _ in range(MOST_TOKENS - 2):
            output = inner.model.decoder(
                input_ids=tokens, encoder_hidden_states=heard, past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            best = inner.proj_out(output.last_hidden_state[:, -1]).argmax(dim=-1)
            best = best.masked_fill(ended, END)
            ended |= best == END
            written.append(best)
            tokens = best[:, None]
            if len(written) % 8 == 0 and bool(ended.all()):
                break
        return [as_text(row) for row in torch.stack(written, dim=1).tolist()]


def labels_of(tokens: Tensor) -> Tensor:
    """Letters and the end, padded with IGNORED."""
    labels = nn.functional.pad(tokens, (0, 1))
    ends = (tokens > 0).sum(dim=1, keepdim=True)
    labels = labels.scatter(1, ends, END)
    return labels.masked_fill(labels == PAD, IGNORED)


def whisper(width: int, layers: int) -> Any:
    """A Whisper whose initial weights follow the number of inputs, as a narrow model needs."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    from studies.suite.speech_data import LONGEST

    heads = max(1, width // 32)
    config = WhisperConfig(
        vocab_size=END + 1, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        max_source_positions=LONGEST // 320, max_target_positions=MOST_TOKENS, dropout=0.0,
        pad_token_id=PAD, bos_token_id=START, eos_token_id=END, decoder_start_token_id=START,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d)) and module is not model.proj_out:
            module.reset_parameters()
    nn.init.normal_(model.model.decoder.embed_tokens.weight, std=width**-0.5)
    return model


class CtcTask(SpeechTask):
    """An encoder with CTC. Its loss needs the texts' lengths on the host, so no graph holds it."""

    def __init__(self, spec: Any, trial: Any, cache: Path, device: torch.device) -> None:
        super().__init__(spec, trial, cache, device)
        self.inputs = self.inputs_of(self.data)
        self.text_lengths = (self.data.tokens > 0).sum(dim=1).cpu()
        torch.manual_seed(trial.seed)
        self.model = self.new_model().to(device)

    def new_model(self) -> Any:
        """A model with random weights."""
        raise NotImplementedError

    def logits(self, inputs: Tensor) -> Tensor:
        """(batch, frames, letters)."""
        raise NotImplementedError

    def loss(self, step: int, at: Tensor) -> Tensor:
        """CTC over the whole length, with silence as blanks."""
        numbers = self.order_on_device.index_select(0, at)[0]
        lengths = self.text_lengths[self.order[step]]
        scores = self.logits(self.inputs.index_select(0, numbers)).float().log_softmax(dim=-1)
        frames = torch.full((len(lengths),), scores.shape[1], dtype=torch.int64)
        tokens = self.data.tokens.index_select(0, numbers)
        return nn.functional.ctc_loss(
            scores.transpose(0, 1), tokens, frames, lengths, BLANK, zero_infinity=True
        )

    def transcribe(self, inputs: Tensor) -> list[str]:
        """The best letter of each frame, without repetitions and blanks."""
        best = self.logits(inputs).argmax(dim=-1)
        is_new = torch.ones_like(best, dtype=torch.bool)
        is_new[:, 1:] = best[:, 1:] != best[:, :-1]
        return [as_text(row) for row in best.masked_fill(~is_new, BLANK).tolist()]


class RecurrentTask(CtcTask):
    """Convolutions, then a GRU in both directions, as in Deep Speech 2, with CTC."""

    def new_model(self) -> Any:
        """A quarter of the frames."""
        return Recurrent(self.size("width", 16))

    def logits(self, inputs: Tensor) -> Tensor:
        """From features."""
        scores: Tensor = self.model(inputs)
        return scores


class Recurrent(nn.Module):
    """Two convolutions and two layers of a GRU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = ((80, width), (width, width))
        self.convs = nn.ModuleList(nn.Conv1d(a, b, 5, 2, padding=2) for a, b in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in sizes)
        self.gru = nn.GRU(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, len(ALPHABET) + 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, frames, letters)."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        scores: Tensor = self.head(self.gru(x.mT)[0])
        return scores


class ConformerTask(CtcTask):
    """A FastConformer (Parakeet) with CTC."""

    def new_model(self) -> Any:
        """Without dropout, a quarter of the frames."""
        from transformers import ParakeetCTCConfig, ParakeetForCTC

        width = self.size("width", 16)
        encoder = {
            "hidden_size": width, "num_hidden_layers": self.size("layers", 1),
            "num_attention_heads": max(1, width // 48), "intermediate_size": 4 * width,
            "num_key_value_heads": max(1, width // 48),
            "num_mel_bins": 80, "subsampling_factor": 4, "subsampling_conv_channels": width // 2,
            "dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0,
            "initializer_range": width**-0.5 / 2, "scale_input": False,
        }  # fmt: skip
        return ParakeetForCTC(
            ParakeetCTCConfig(vocab_size=len(ALPHABET) + 1, encoder_config=encoder)
        )

    def logits(self, inputs: Tensor) -> Tensor:
        """From features."""
        scores: Tensor = self.model(input_features=inputs.transpose(1, 2)).logits
        return scores


class WaveTask(CtcTask):
    """A wav2vec 2.0 with CTC on raw waves."""

    def new_model(self) -> Any:
        """Without dropout and masks."""
        from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

        width = self.size("width", 16)
        return Wav2Vec2ForCTC(
            Wav2Vec2Config(
                vocab_size=len(ALPHABET) + 1, hidden_size=width,
                num_hidden_layers=self.size("layers", 1), num_attention_heads=max(1, width // 48),
                intermediate_size=4 * width, conv_dim=(width // 2,) * 7,
                num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=4,
                hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
                feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
                initializer_range=width**-0.5 / 2, pad_token_id=BLANK, feat_extract_norm="layer",
                do_stable_layer_norm=True,
            )
        )  # fmt: skip

    def inputs_of(self, data: Speech) -> Tensor:
        """Waves."""
        return data.waves

    def logits(self, inputs: Tensor) -> Tensor:
        """From waves of variance 1."""
        waves = inputs.float()
        waves = waves / waves.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1.0)
        scores: Tensor = self.model(waves).logits
        return scores
