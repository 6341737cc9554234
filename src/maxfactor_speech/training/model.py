"""Whisper from `transformers`, built with random weights, and its forward pass.

Reference:
    Radford et al., Robust Speech Recognition via Large-Scale Weak Supervision, arXiv:2212.04356.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration
from transformers.models.whisper.modeling_whisper import sinusoids

from maxfactor_speech.data.tokens import IGNORED
from maxfactor_speech.training.cross_entropy import mean_cross_entropy

if TYPE_CHECKING:
    from maxfactor_speech.data.tokens import Codec

POSITIONS_PER_SECOND = 50  # of the encoder, after its convolution of stride 2


@dataclass(frozen=True)
class Size:
    """The size of a Whisper."""

    width: int
    layers: int  # of the encoder, and of the decoder
    heads: int


SIZES = {"nano": Size(128, 2, 4), "tiny": Size(384, 4, 6), "base": Size(512, 6, 8)}


def whisper(
    codec: Codec,
    size: str | Size = "nano",
    seconds: int = 30,
    max_tokens: int = 448,
    dropout: float = 0.0,
) -> WhisperForConditionalGeneration:
    """Build a Whisper with random weights, drawn from torch's global generator.

    Args:
        codec: Its tokens.
        size: "nano", "tiny", "base", or a `Size`.
        seconds: The longest audio that it takes.
        max_tokens: The longest text that it writes, in tokens.
        dropout: Fraction of activations that are dropped in training.
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
    model.generation_config = _greedy_generation(config)
    return model


def _greedy_generation(config: WhisperConfig) -> GenerationConfig:
    """Return settings for greedy decoding; `pipeline` would take five beams and 256 tokens."""
    return GenerationConfig(
        num_beams=1,
        max_length=config.max_target_positions,
        pad_token_id=config.eos_token_id,  # as in published models; transformers cuts off padding
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        is_multilingual=False,
    )


def longest_audio(model: WhisperForConditionalGeneration) -> int:
    """Return the length of the longest audio that a model takes, in seconds."""
    return int(model.config.max_source_positions) // POSITIONS_PER_SECOND


@torch.no_grad()
def _initialise(model: WhisperForConditionalGeneration) -> None:
    """Draw initial weights with which a small model learns within minutes.

    Whisper's own standard deviation of 0.02 suits wide models and long trainings; in a narrow
    model the positions drown out the audio. Here the deviation follows the number of inputs. The
    decoder's positions, which are trained, start as sinusoids like the encoder's.
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

    The encoder of `transformers` requires the full length, 30 seconds for published models. This
    is the same arithmetic with only the first positions.

    Args:
        model: The model.
        features: (batch, mels, frames), with an even number of frames.

    Returns:
        (batch, frames / 2, width).
    """
    encoder: Any = model.model.encoder
    hidden = nn.functional.gelu(encoder.conv1(features.to(encoder.conv1.weight.dtype)))
    hidden = nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
    hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
    hidden = nn.functional.dropout(hidden, encoder.dropout, encoder.training)
    for layer in encoder.layers:
        hidden = layer(hidden, None)
    return encoder.layer_norm(hidden)  # type: ignore[no-any-return]


def loss_of(model: WhisperForConditionalGeneration, features: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the labels, (batch, tokens), given the audio.

    The mask is given with four dimensions. Otherwise the decoder inspects its positions on the
    host in each step, which waits for the device, to find out whether texts are packed.
    """
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    assert start is not None
    assert pad is not None
    tokens = labels.shape[1]
    inputs = nn.functional.pad(labels[:, :-1], (1, 0), value=start)
    inputs = inputs.masked_fill(inputs == IGNORED, pad)
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=labels.device).tril()
    output = model.model.decoder(
        input_ids=inputs,
        attention_mask=mask[None, None],
        encoder_hidden_states=encode(model, features),
        use_cache=False,
    )
    return mean_cross_entropy(model.proj_out(output.last_hidden_state), labels)
