"""Whisper from `transformers`, built from a size or read from a folder, and its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper.modeling_whisper import sinusoids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # a label that the loss leaves out, torch's own default
PAD, START, END = "<pad>", "<start>", "<end>"
POSITIONS_PER_SECOND = 50  # of the encoder, after its convolution of stride 2

Unit = Literal["characters", "words"]


@dataclass(frozen=True)
class Size:
    """How large a Whisper is."""

    width: int
    layers: int  # of the encoder, and as many of the decoder
    heads: int


SIZES = {"nano": Size(128, 2, 4), "tiny": Size(384, 4, 6), "base": Size(512, 6, 8)}


@dataclass(frozen=True)
class Codec:
    """Text to tokens and back.

    Attributes:
        tokenizer: Of `transformers`; it is what is saved with a model.
        start: The tokens that decoding begins with.
        end: The token that ends it.
    """

    tokenizer: PreTrainedTokenizerBase
    start: list[int]
    end: int

    @staticmethod
    def build(units: Iterable[str], unit: Unit = "characters") -> Codec:
        """Make a tokenizer whose tokens are the given characters or words.

        Example:
            >>> codec = Codec.build(["one", "two"], "words")
            >>> codec.decode(codec.encode("two one"))
            'two one'
        """
        vocabulary = {token: i for i, token in enumerate((PAD, START, END, *sorted(set(units))))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary))
        tokenizer.normalizer = normalizers.NFC()
        if unit == "characters":
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            tokenizer.decoder = decoders.Fuse()
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return Codec.of(
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer,
                pad_token=PAD,
                bos_token=START,
                eos_token=END,
                clean_up_tokenization_spaces=False,
            )
        )

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase) -> Codec:
        """Take a tokenizer of ours, or Whisper's own with its language and task."""
        start = list(getattr(tokenizer, "prefix_tokens", [])) or [int(tokenizer.bos_token_id)]
        return Codec(tokenizer, start, int(tokenizer.eos_token_id))

    def __len__(self) -> int:
        return len(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """The labels of a text: what follows the first token, up to and with the end."""
        return self._encode_all([text])[0]

    def labels(self, texts: Sequence[str]) -> Tensor:
        """(texts, longest): labels, filled up with what the loss ignores."""
        rows = self._encode_all(texts)
        longest = max(map(len, rows))
        return torch.tensor([row + [IGNORED] * (longest - len(row)) for row in rows])

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The labels of texts, by one call of the tokenizer, which takes longer than its work."""
        encoded = self.tokenizer(list(texts), add_special_tokens=False)
        return [[*self.start[1:], *tokens, self.end] for tokens in encoded.input_ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, up to the end if there is one among them."""
        kept = list(tokens)
        if self.end in kept:
            kept = kept[: kept.index(self.end)]
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return " ".join(str(text).split())

    def missing(self, text: str) -> list[str]:
        """The characters or words of a text that there are no tokens for."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or not isinstance(backend.model, models.WordLevel):
            return []  # Whisper's own tokens spell out every byte
        normal = backend.normalizer.normalize_str(text)
        pieces = {piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)}
        return sorted(pieces - backend.get_vocab().keys())


def whisper(
    codec: Codec,
    size: str | Size = "nano",
    seconds: int = 30,
    max_tokens: int = 448,
    dropout: float = 0.0,
) -> WhisperForConditionalGeneration:
    """Build a Whisper with random weights, from torch's random numbers.

    Args:
        codec: Its tokens.
        size: "nano", "tiny", "base", or a size of your own.
        seconds: The longest audio it can take.
        max_tokens: The longest text it can write, in tokens.
        dropout: Share of activations left out in training.
    """
    if isinstance(size, str):
        if size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
        size = SIZES[size]
    config = WhisperConfig(
        vocab_size=len(codec),
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=4 * size.width,
        decoder_ffn_dim=4 * size.width,
        max_source_positions=seconds * POSITIONS_PER_SECOND,
        max_target_positions=max_tokens,
        dropout=dropout,
        pad_token_id=codec.tokenizer.pad_token_id,
        bos_token_id=codec.start[0],
        eos_token_id=codec.end,
        decoder_start_token_id=codec.start[0],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    _initialise(model)
    return model


@torch.no_grad()
def _initialise(model: WhisperForConditionalGeneration) -> None:
    """Start from weights that let a small model learn in minutes.

    Whisper's own standard deviation of 0.02 is meant for wide models and long trainings: in a
    narrow one the positions drown out the audio. Here it follows the number of inputs, and the
    decoder's positions, which are learnt, start as the encoder's, so that neighbours are alike.
    """
    decoder = model.model.decoder
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.proj_out:  # tied to the tokens
            module.reset_parameters()
        elif isinstance(module, nn.Conv1d):
            nn.init.kaiming_normal_(module.weight)
    nn.init.normal_(decoder.embed_tokens.weight, std=model.config.d_model**-0.5)
    positions = decoder.embed_positions.weight
    positions.copy_(sinusoids(*positions.shape))


def encode(model: WhisperForConditionalGeneration, features: Tensor) -> Tensor:
    """Run Whisper's encoder on audio of any length up to the model's own.

    `transformers` insists on the longest audio that the model can take, 30 seconds of mostly
    silence in a checkpoint from the web. The arithmetic is the same, with the first positions.

    Args:
        model: The model.
        features: (batch, mels, frames), an even number of frames.

    Returns:
        (batch, frames / 2, width).
    """
    encoder: Any = model.model.encoder
    hidden = nn.functional.gelu(encoder.conv1(features))
    hidden = nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
    hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
    hidden = nn.functional.dropout(hidden, encoder.dropout, encoder.training)
    for layer in encoder.layers:
        hidden = layer(hidden, None)
    return encoder.layer_norm(hidden)  # type: ignore[no-any-return]


def loss_of(model: WhisperForConditionalGeneration, features: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the labels, (batch, tokens), given the audio.

    Left to itself the decoder looks at its positions on the host, in every step, to find out that
    texts are not packed. With a mask of four dimensions it does not.
    """
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    assert start is not None
    assert pad is not None
    tokens = labels.shape[1]
    before = nn.functional.pad(labels[:, :-1], (1, 0), value=start)
    before = before.masked_fill(before == IGNORED, pad)
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=labels.device).tril()
    output = model.model.decoder(
        input_ids=before,
        attention_mask=mask[None, None],
        encoder_hidden_states=encode(model, features),
        use_cache=False,
    )
    logits = model.proj_out(output.last_hidden_state).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
