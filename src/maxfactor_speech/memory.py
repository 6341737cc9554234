"""`maxfactor memory`: the memory of a training with each optimizer, and the cards that it fits.

Weights, gradients, state and borrowed buffers come from `maxfactor.estimate_memory`. Activations
come from a formula for transformers with fused attention. An element is saved for backward

    9 times per token and unit of width: inputs and outputs of the norms, q, k, v, attention twice;
    5 times more in a decoder with cross-attention, and twice per encoder position: k and v;
    2 times per token and unit of the feed-forward layer, 4 times if it is gated.

With checkpointing only the inputs of the layers are saved, and one layer at a time is computed
again. The scores of the vocabulary come on top, in 16 bytes each: as they are, in float32, their
log-softmax, and a gradient.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

import maxfactor
from maxfactor_speech.bench.shapes import MODELS, Whisper
from maxfactor_speech.errors import InputError, download_hint, failure_reason

if TYPE_CHECKING:
    from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CARDS = (8, 12, 16, 24, 40, 48, 80)  # GiB
CONTEXT = 600 * 2**20  # bytes that CUDA, its libraries and fragmentation take, about
HEAD = 64  # width of an attention head of Whisper
SECONDS, RATE = 30, 16_000  # of a recording
SCORE_BYTES = 16
SIZES = {
    **{name.removeprefix("whisper-"): sizes for name, sizes in MODELS.items() if name != "quick"},
    "large": Whisper(1280, 32),
    "large-v2": Whisper(1280, 32),
}
# Label, name for `estimate_memory`, and whether the weights stay in float32 under autocast.
ROWS = (
    ("quality", "quality", False),
    ("fast", "fast", False),
    ("lean", "lean", False),
    ("AdamW, weights in fp32", "adamw", True),
    ("AdamW 8-bit", "adamw-8bit", False),
    ("Adafactor", "adafactor", False),
    ("Muon + AdamW", "muon", False),
)
RELEASABLE = maxfactor.RECIPES


@dataclass(frozen=True)
class Row:
    """The memory of a training with one optimizer, in bytes."""

    optimizer: str
    weights: int
    gradients: int
    state: int
    borrowed: int
    activations: int

    @property
    def total(self) -> int:
        """All of it, with what CUDA itself takes."""
        parts = self.weights + self.gradients + self.state + self.borrowed
        return parts + self.activations + CONTEXT

    @property
    def cards(self) -> list[int]:
        """The sizes of the cards that it fits, in GiB."""
        return [card for card in CARDS if self.total <= card * 2**30]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "total": self.total, "cards": self.cards}


def memory_table(
    model: str,
    dtype: str = "bf16",
    batch_size: int = 1,
    tokens: int = 448,
    checkpointing: bool = False,
    release: bool = False,
) -> list[Row]:
    """Return a row for each optimizer.

    Args:
        model: A size of Whisper, such as "large-v3", or a folder with a model of transformers.
        dtype: Of weights and activations: "fp32", "bf16" or "fp16".
        batch_size: Examples per batch, recordings of 30 seconds for a speech model.
        tokens: Tokens of text per example.
        checkpointing: Whether activations are computed again in backward.
        release: Whether gradients are released in backward, where the optimizer can.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    for name, value in (("--batch-size", batch_size), ("--tokens", tokens)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    built = _build(model)
    size = DTYPES[dtype].itemsize
    active = batch_size * activation_bytes(built.config, tokens, size, checkpointing)
    rows = []
    for label, name, in_float32 in ROWS:
        found = maxfactor.estimate_memory(
            built,
            cast("maxfactor.RecipeName", name),
            torch.float32 if in_float32 else DTYPES[dtype],
            gradient_release=release and name in RELEASABLE,
        )
        rows.append(Row(label, found.weights, found.gradients, found.state, found.borrowed, active))
    return rows


def _build(model: str) -> nn.Module:
    """Build the model on the meta device."""
    import transformers

    config: Any
    kind: Any
    if (size := SIZES.get(model.removeprefix("whisper-"))) is not None:
        config = _whisper_config(size)
        kind = transformers.WhisperForConditionalGeneration
    elif (Path(model) / "config.json").is_file():
        try:
            config = transformers.AutoConfig.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise InputError(f"{model} cannot be read: {failure_reason(error)}") from error
        name = (config.architectures or [""])[0]
        kind = getattr(transformers, name, None)
        if kind is None:
            raise InputError(f"{model}/config.json names no known architecture, but {name!r}")
    else:
        hint = "" if Path(model).exists() else download_hint(model)
        raise InputError(
            f"{model} is neither a size of Whisper ({', '.join(SIZES)}) nor a folder with a "
            "config.json" + (f"; {hint}" if hint else "")
        )
    with torch.device("meta"):
        built: nn.Module = kind(config)
    return built


def _whisper_config(size: Whisper) -> Any:
    import transformers

    heads, hidden = size.width // HEAD, 4 * size.width
    return transformers.WhisperConfig(
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=hidden,
        decoder_ffn_dim=hidden,
        num_mel_bins=size.mel_bins,
        vocab_size=size.vocabulary,
    )


# --------------------------------------------------------------------------------- activations


def activation_bytes(config: Any, tokens: int, itemsize: int, checkpointing: bool) -> int:
    """Estimate what backward needs of one example, by the formula above."""
    width = int(config.hidden_size)
    layers = _layer_elements(config, tokens)
    saved = sum(layers)
    if checkpointing:
        inputs = [_length(config, tokens)] * _encoder_layers(config)
        inputs += [tokens] * (len(layers) - len(inputs))
        saved = width * sum(inputs) + max(layers)
    return saved * itemsize + SCORE_BYTES * _scores(config, tokens)


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
