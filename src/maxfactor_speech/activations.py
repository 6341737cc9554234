"""The activations that training a transformer keeps for backward, by a formula.

For transformers with fused attention, an element is saved

    9 times per token and unit of width: inputs and outputs of the norms, q, k, v, attention twice;
    5 times more in a decoder with cross-attention, and twice per encoder position: k and v;
    2 times per token and unit of the feed-forward layer, 4 times if it is gated.

With checkpointing only the inputs of the layers are saved, and one layer at a time is computed
again. The scores of the vocabulary come on top, usually in 16 bytes each: as they are, in float32,
their log-softmax, and a gradient. `maxfactor train` keeps 2 bytes of those of a Whisper in half
precision. Autocast keeps a copy of each matrix in half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

SECONDS, RATE = 30, 16_000  # of a recording
SCORE_BYTES, HALF_SCORE_BYTES = 16, 2


def activation_bytes(
    config: Any,
    tokens: int,
    itemsize: int,
    checkpointing: bool,
    is_half: bool = False,
    trains_encoder: bool = True,
) -> int:
    """Estimate what backward needs of one example, by the formula above.

    Args:
        config: A configuration of transformers.
        tokens: Tokens of text.
        itemsize: Bytes of an activation.
        checkpointing: Whether activations are computed again in backward.
        is_half: Whether the scores are computed in half precision.
        trains_encoder: False if an encoder before the decoder is frozen and keeps nothing.
    """
    width = int(config.hidden_size)
    layers = _layer_elements(config, tokens)
    encoder = _encoder_layers(config)
    inputs = [_length(config, tokens)] * encoder
    inputs += [tokens] * (len(layers) - encoder)
    if not trains_encoder:
        layers, inputs = layers[encoder:], inputs[encoder:]
    saved = width * sum(inputs) + max(layers) if checkpointing else sum(layers)
    keeps_one = is_half and config.model_type == "whisper"
    score_bytes = HALF_SCORE_BYTES if keeps_one else SCORE_BYTES
    return saved * itemsize + score_bytes * _scores(config, tokens)


def autocast_bytes(model: nn.Module) -> int:
    """Return the bytes of the copies that autocast keeps for backward."""
    return 2 * sum(param.numel() for param in model.parameters() if param.ndim > 1)


def _layer_elements(config: Any, tokens: int) -> list[int]:
    """Elements that each layer saves for backward."""
    width = int(config.hidden_size)
    encoder, length = _encoder_layers(config), _length(config, tokens)
    own = [length * (9 * width + _feed_forward(config, "encoder"))] * encoder
    decoder = _decoder_layers(config)
    per_token = (14 if encoder else 9) * width + _feed_forward(config, "decoder")
    across = 2 * width * length if encoder else 0
    return own + [tokens * per_token + across] * decoder


def _encoder_layers(config: Any) -> int:
    if config.is_encoder_decoder:
        return int(getattr(config, "encoder_layers", None) or config.num_hidden_layers)
    return int(config.num_hidden_layers) if _hears(config) else 0


def _decoder_layers(config: Any) -> int:
    if config.is_encoder_decoder:
        found = getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", 0)
        return int(found or config.num_hidden_layers)
    return 0 if _hears(config) else int(config.num_hidden_layers)


def _hears(config: Any) -> bool:
    """Whether an encoder without decoder takes sound, as wav2vec 2.0."""
    return hasattr(config, "inputs_to_logits_ratio")


def _length(config: Any, tokens: int) -> int:
    """Positions of the encoder."""
    if _hears(config):
        return SECONDS * RATE // int(config.inputs_to_logits_ratio)
    return int(getattr(config, "max_source_positions", tokens))


def _feed_forward(config: Any, part: str) -> int:
    """Elements that a feed-forward layer saves per token."""
    names = (f"{part}_ffn_dim", "intermediate_size", "d_ff", "n_inner")
    found = [getattr(config, name, None) for name in names]
    inner = next((int(each) for each in found if each), 4 * int(config.hidden_size))
    is_gated = bool(getattr(config, "is_gated_act", False)) or config.model_type in GATED
    return (4 if is_gated else 2) * inner


GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")


def _scores(config: Any, tokens: int) -> int:
    """Scores of an example's vocabulary."""
    positions = _length(config, tokens) if not _decoder_layers(config) else tokens
    return positions * int(getattr(config, "vocab_size", 0) or 0)
