"""The shapes of Whisper's parameters, from its configuration, without a download.

The shapes are those of `transformers.WhisperForConditionalGeneration`: keys have no bias, the
output projection is tied to the token embedding, and both position tables count. Nothing here needs
transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

Shape = tuple[int, ...]

HEAD = 64  # rows of an attention head
FRAMES, TOKENS = 1500, 448  # positions of the encoder and of the decoder


@dataclass(frozen=True)
class Whisper:
    """The numbers of a configuration that determine the shapes."""

    width: int
    layers: int  # of the encoder, and of the decoder
    mel_bins: int = 80
    vocabulary: int = 51_865


MODELS = {
    "whisper-tiny": Whisper(384, 4),
    "whisper-base": Whisper(512, 6),
    "whisper-small": Whisper(768, 12),
    "whisper-medium": Whisper(1024, 24),
    "whisper-large-v3": Whisper(1280, 32, mel_bins=128, vocabulary=51_866),
    "quick": Whisper(32, 1, mel_bins=8, vocabulary=200),  # for tests, not a published model
}


def shapes(model: str) -> dict[str, Shape]:
    """Return names and shapes of a model's parameters, in the order of the model.

    Example:
        >>> tiny = shapes("whisper-tiny")
        >>> len(tiny), elements(tiny)
        (167, 37760640)
        >>> tiny["model.encoder.conv1.weight"]
        (384, 80, 3)
    """
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; known models: {', '.join(MODELS)}")
    config = MODELS[model]
    return {
        f"model.{name}": shape
        for part in (_encoder(config), _decoder(config))
        for name, shape in part.items()
    }


def elements(model_shapes: dict[str, Shape]) -> int:
    """Return the number of parameters."""
    return sum(math.prod(shape) for shape in model_shapes.values())


def with_layers(params: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return a model with these parameters, in layers of Whisper's types; it cannot be called.

    Optimizers that sort parameters by the layers that own them need it.

    Args:
        params: Parameters by the names that `shapes` returns.
    """
    model = nn.Module()
    for name, param in params.items():
        *path, layer, kind = name.split(".")
        parent = model
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        if path[-1].endswith("_attn"):
            vars(parent)["num_heads"] = max(2, param.shape[0] // HEAD)
        if layer not in dict(parent.named_children()):
            parent.add_module(layer, _layer(layer, tuple(param.shape)))
        parent.get_submodule(layer).register_parameter(kind, param)
    head = nn.Linear(1, 1, bias=False, device="meta")
    head.weight = params["model.decoder.embed_tokens.weight"]  # tied
    head.out_features, head.in_features = head.weight.shape
    model.add_module("proj_out", head)
    return model


def _layer(name: str, shape: Shape) -> nn.Module:
    """Return a layer for a weight of this shape, without parameters of its own."""
    if name.endswith("layer_norm"):
        return nn.LayerNorm(shape, elementwise_affine=False)
    width, *rest = shape
    layer: nn.Module
    if name.startswith("embed_"):
        layer = nn.Embedding(width, rest[0], device="meta")
    elif name.startswith("conv"):
        layer = nn.Conv1d(rest[0], width, rest[1], device="meta")
    else:
        layer = nn.Linear(rest[0], width, device="meta")
    for parameter in list(dict(layer.named_parameters())):
        layer.register_parameter(parameter, None)
    return layer


def _encoder(config: Whisper) -> dict[str, Shape]:
    d = config.width
    found: dict[str, Shape] = {
        "encoder.conv1.weight": (d, config.mel_bins, 3),
        "encoder.conv1.bias": (d,),
        "encoder.conv2.weight": (d, d, 3),
        "encoder.conv2.bias": (d,),
        "encoder.embed_positions.weight": (FRAMES, d),
    }
    for layer in range(config.layers):
        name = f"encoder.layers.{layer}"
        found |= _attention(f"{name}.self_attn", d) | _feed_forward(name, d)
    return found | _norm("encoder.layer_norm", d)


def _decoder(config: Whisper) -> dict[str, Shape]:
    d = config.width
    found: dict[str, Shape] = {
        "decoder.embed_tokens.weight": (config.vocabulary, d),
        "decoder.embed_positions.weight": (TOKENS, d),
    }
    for layer in range(config.layers):
        name = f"decoder.layers.{layer}"
        found |= _attention(f"{name}.self_attn", d) | _attention(f"{name}.encoder_attn", d)
        found |= _feed_forward(name, d)
    return found | _norm("decoder.layer_norm", d)


def _attention(name: str, d: int) -> dict[str, Shape]:
    """Return four projections and the layer norm after them."""
    found: dict[str, Shape] = {f"{name}.k_proj.weight": (d, d)}
    for projection in ("v_proj", "q_proj", "out_proj"):
        found |= {f"{name}.{projection}.weight": (d, d), f"{name}.{projection}.bias": (d,)}
    return found | _norm(f"{name}_layer_norm", d)


def _feed_forward(name: str, d: int) -> dict[str, Shape]:
    hidden = 4 * d
    return {
        f"{name}.fc1.weight": (hidden, d),
        f"{name}.fc1.bias": (hidden,),
        f"{name}.fc2.weight": (d, hidden),
        f"{name}.fc2.bias": (d,),
        **_norm(f"{name}.final_layer_norm", d),
    }


def _norm(name: str, d: int) -> dict[str, Shape]:
    return {f"{name}.weight": (d,), f"{name}.bias": (d,)}
