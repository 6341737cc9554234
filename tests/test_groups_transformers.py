"""Which parameter of which architecture lands in which group. Random weights, tiny sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.pytorch_utils import Conv1D

from maxfactor import RecipeName, for_model

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
STEM: dict[str, Any] = {"conv_dim": (16, 24), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
CONV_POSITIONS: dict[str, Any] = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=60,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=30,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config)


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        vocab_size=30, num_attention_heads=2, **SIZES, **STEM, **CONV_POSITIONS
    )
    return transformers.Wav2Vec2ForCTC(config)


def conformer() -> nn.Module:
    config = transformers.Wav2Vec2ConformerConfig(
        vocab_size=30, num_attention_heads=2, **SIZES, **STEM, **CONV_POSITIONS
    )
    return transformers.Wav2Vec2ConformerForCTC(config)


def llama(*, tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=60,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        **SIZES,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=60, num_attention_heads=2, max_position_embeddings=40, **SIZES
    )
    return transformers.BertForMaskedLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=60,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=40,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def under(prefix: str, names: str) -> list[str]:
    """Weights below a prefix, from their modules' names."""
    return [f"{prefix}.{name}.weight" for name in names.split()]


ATTENTION = "k_proj v_proj q_proj out_proj"
WEIGHT_NORM = "encoder.pos_conv_embed.conv.parametrizations.weight"
STEM_CONVS = ("feature_extractor.conv_layers.0.conv", "feature_extractor.conv_layers.1.conv")

# Everything that is not listed is a vector: of one dimension, or listed as a vector below.
EXPECTED: list[tuple[Callable[[], nn.Module], dict[str, list[str]]]] = [
    (
        whisper,
        {
            "conv": under("model.encoder", "conv1 conv2"),
            # The encoder's sinusoids are frozen, the output projection is tied to the tokens.
            "embedding": under("model.decoder", "embed_tokens embed_positions"),
            "hidden": [
                *under("model.encoder.layers.0.self_attn", ATTENTION),
                *under("model.encoder.layers.0", "fc1 fc2"),
                *under("model.decoder.layers.0.self_attn", ATTENTION),
                *under("model.decoder.layers.0.encoder_attn", ATTENTION),
                *under("model.decoder.layers.0", "fc1 fc2"),
            ],
        },
    ),
    (
        wav2vec2,
        {
            "conv": [
                *under("wav2vec2", " ".join(STEM_CONVS)),
                f"wav2vec2.{WEIGHT_NORM}.original1",  # the direction; original0 is the magnitude
            ],
            "hidden": [
                "wav2vec2.feature_projection.projection.weight",
                *under("wav2vec2.encoder.layers.0.attention", ATTENTION),
                *under("wav2vec2.encoder.layers.0.feed_forward", "intermediate_dense output_dense"),
            ],
            "head": ["lm_head.weight"],
        },
    ),
    (
        conformer,
        {
            "conv": [
                *under("wav2vec2_conformer", " ".join(STEM_CONVS)),
                f"wav2vec2_conformer.{WEIGHT_NORM}.original1",
                "wav2vec2_conformer.encoder.layers.0.conv_module.depthwise_conv.weight",
            ],
            "embedding": [
                f"wav2vec2_conformer.encoder.layers.0.self_attn.pos_bias_{name}" for name in "uv"
            ],
            "hidden": [
                "wav2vec2_conformer.feature_projection.projection.weight",
                *under(
                    "wav2vec2_conformer.encoder.layers.0.ffn1", "intermediate_dense output_dense"
                ),
                *under(
                    "wav2vec2_conformer.encoder.layers.0.self_attn",
                    "linear_q linear_k linear_v linear_out linear_pos",
                ),
                *under(
                    "wav2vec2_conformer.encoder.layers.0.conv_module",
                    "pointwise_conv1 pointwise_conv2",
                ),
                *under(
                    "wav2vec2_conformer.encoder.layers.0.ffn2", "intermediate_dense output_dense"
                ),
            ],
            "head": ["lm_head.weight"],
        },
    ),
    (
        llama,
        {
            "embedding": ["model.embed_tokens.weight"],
            "hidden": [
                *under("model.layers.0.self_attn", "q_proj k_proj v_proj o_proj"),
                *under("model.layers.0.mlp", "gate_proj up_proj down_proj"),
            ],
            "head": ["lm_head.weight"],
        },
    ),
    (
        bert,
        {
            "embedding": under(
                "bert.embeddings", "word_embeddings position_embeddings token_type_embeddings"
            ),
            "hidden": [
                *under("bert.encoder.layer.0.attention.self", "query key value"),
                *under(
                    "bert.encoder.layer.0", "attention.output.dense intermediate.dense output.dense"
                ),
                "cls.predictions.transform.dense.weight",
            ],
        },
    ),
    (
        gpt2,  # its linear layers are transformers' Conv1D
        {
            "embedding": under("transformer", "wte wpe"),
            "hidden": under("transformer.h.0", "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"),
        },
    ),
]
VECTORS_OF_MORE_DIMENSIONS = {
    f"{name}.{WEIGHT_NORM}.original0" for name in ("wav2vec2", "wav2vec2_conformer")
}


def groups_of(model: nn.Module, **settings: Any) -> dict[str, list[str]]:
    return {
        group["kind"]: group["param_names"] for group in for_model(model, **settings).param_groups
    }


@pytest.mark.parametrize(("build", "expected"), EXPECTED, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_groups(
    build: Callable[[], nn.Module], expected: dict[str, list[str]], device: str
) -> None:
    with torch.device(device):
        model = build()
    groups = groups_of(model, recipe="published-1.0")
    vectors = groups.pop("vector")
    assert groups == expected
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    listed = [name for names in expected.values() for name in names]
    assert sorted(listed + vectors) == sorted(trainable)
    flat = {name for name in vectors if trainable[name].ndim > 1}
    assert flat == VECTORS_OF_MORE_DIMENSIONS & set(trainable)


ANY: Any = transformers  # of which mypy reads a part
VIT: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_attention_heads": 2, **SIZES}
SPEECH: dict[str, Any] = {"num_attention_heads": 2, **SIZES, **STEM, **CONV_POSITIONS}
TEXT: dict[str, Any] = {"vocab_size": 60, "num_attention_heads": 2, **SIZES}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}


def parakeet() -> Any:
    encoder = {"num_mel_bins": 16, "subsampling_conv_channels": 8, **SIZES}
    config = ANY.ParakeetCTCConfig(
        vocab_size=32, pad_token_id=0, encoder_config={"num_attention_heads": 2, **encoder}
    )
    return ANY.ParakeetForCTC(config)


def speech_encoder_decoder() -> Any:
    """Its last layer projects from the encoder's width to the decoder's."""
    narrow = {**TEXT, "hidden_size": 16, "is_decoder": True, "add_cross_attention": True}
    config = ANY.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
        ANY.Wav2Vec2Config(**SPEECH), ANY.BertConfig(**narrow)
    )
    return ANY.SpeechEncoderDecoderModel(config)


def vit(labels: int) -> Any:
    return ANY.ViTForImageClassification(ANY.ViTConfig(num_labels=labels, **VIT))


def adapted(model: Any) -> nn.Module:
    """With LoRA, and a classifier that is trained as a whole."""
    config = LoraConfig(target_modules="all-linear", modules_to_save=["classifier"])
    return get_peft_model(model, config)


def ctc(vocabulary: int) -> Any:
    config = ANY.Wav2Vec2Config(vocab_size=vocabulary, **SPEECH)
    return ANY.Wav2Vec2ForCTC(config)


def speech_classifier(labels: int) -> Any:
    config = ANY.Wav2Vec2Config(num_labels=labels, classifier_proj_size=20, **SPEECH)
    return ANY.Wav2Vec2ForSequenceClassification(config)


def text_classifier(labels: int) -> Any:
    config = ANY.BertConfig(num_labels=labels, **TEXT)
    return ANY.BertForSequenceClassification(config)


def t5(vocabulary: int) -> Any:
    config = ANY.T5Config(vocab_size=vocabulary, tie_word_embeddings=False, **T5)
    return ANY.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("build", "heads"),
    [
        (lambda: vit(2), ["classifier.weight"]),
        (lambda: vit(3), ["classifier.weight"]),  # as many as colours
        (lambda: vit(32), ["classifier.weight"]),  # as wide as the layers
        (lambda: ANY.ViTModel(ANY.ViTConfig(**VIT)), []),
        (lambda: ctc(30), ["lm_head.weight"]),
        (lambda: ctc(32), ["lm_head.weight"]),
        (lambda: speech_classifier(1), ["classifier.weight"]),  # the audio has one channel
        (lambda: text_classifier(32), ["classifier.weight"]),
        (lambda: ANY.BertModel(ANY.BertConfig(**TEXT)), []),
        (lambda: adapted(vit(3)), ["base_model.model.classifier.modules_to_save.default.weight"]),
        (parakeet, ["ctc_head.weight"]),  # a convolution with a kernel of one
        (speech_encoder_decoder, []),  # tied
        (lambda: ANY.T5Model(ANY.T5Config(vocab_size=60, **T5)), []),
        (lambda: t5(32).get_submodule("encoder"), []),
    ],
)
def test_heads(build: Callable[[], Any], heads: list[str]) -> None:
    with torch.device("meta"):
        model = build()
    assert groups_of(model, recipe="published-1.0").get("head", []) == heads


def test_a_tied_head_is_an_embedding() -> None:
    groups = groups_of(llama(tied=True), recipe="published-1.0")
    assert groups["embedding"] == ["model.embed_tokens.weight"]
    assert "head" not in groups


def test_a_model_without_a_head() -> None:
    groups = groups_of(llama().get_submodule("model"), recipe="published-1.0")
    assert "head" not in groups
    assert "layers.0.self_attn.k_proj.weight" in groups["hidden"]


@pytest.mark.usefixtures("one_rank")
def test_a_transposed_linear_as_head() -> None:
    """Sharded too, which gives it a class of another name."""
    model = nn.Sequential(nn.Linear(4, 8), Conv1D(30, 8))
    expected = {"hidden": ["0.weight"], "head": ["1.weight"], "vector": ["0.bias", "1.bias"]}
    assert groups_of(model) == expected
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert type(model[1]).__name__ == "FSDPConv1D"
    assert groups_of(model) == expected


def test_a_frozen_encoder() -> None:
    model = whisper()
    model.get_submodule("model.encoder").requires_grad_(False)
    names = [name for group in groups_of(model, recipe="published-1.0").values() for name in group]
    assert names
    assert all(name.startswith("model.decoder.") for name in names)


@pytest.mark.parametrize("recipe", ["published-1.0", "lean", "fast", "quality"])
def test_training_whisper(recipe: Any) -> None:
    """Three steps: every parameter moves, state bytes as foreseen, a checkpoint goes round."""
    torch.manual_seed(0)
    model = whisper()
    optimizer = for_model(model, recipe=recipe)
    foreseen = optimizer.describe().total.state_bytes
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    features, labels = torch.randn(2, 16, 60), torch.randint(3, 60, (2, 8))
    for _ in range(3):
        optimizer.zero_grad()
        model(input_features=features, labels=labels).loss.backward()
        optimizer.step()
    for name, param in model.named_parameters():
        assert torch.isfinite(param).all(), name
        assert torch.equal(param, before[name]) != param.requires_grad, name
    states = optimizer.state.values()
    assert foreseen == sum(v.numel() * v.element_size() for state in states for v in state.values())
    resumed = for_model(model, recipe=recipe)
    resumed.load_state_dict(optimizer.state_dict())
    assert list(resumed.describe()) == list(optimizer.describe())
    for tensor, state in optimizer.state.items():
        assert all(torch.equal(resumed.state[tensor][key], state[key]) for key in state)


def test_spectrum_speaks_of_parameters_by_name() -> None:
    model = whisper()
    optimizer = for_model(model)
    features, labels = torch.randn(2, 16, 60), torch.randint(3, 60, (2, 8))
    model(input_features=features, labels=labels).loss.backward()
    optimizer.step()
    kinds = dict(EXPECTED)[whisper]  # FAM adapts matrices; the hidden ones have a fixed memory
    assert sorted(optimizer.spectrum()) == sorted(kinds["embedding"])


def test_new_tokens_of_peft_are_embeddings() -> None:
    """An orthogonal direction would go on moving those that are not seen any more."""
    config = LoraConfig(target_modules=["q_proj"], r=2, trainable_token_indices=[3, 5])
    model: Any = llama()
    optimizer = for_model(get_peft_model(model, config))
    names = {group["kind"]: group["param_names"] for group in optimizer.param_groups}
    [tokens] = names.pop("embedding")
    assert "trainable_tokens_delta" in tokens
    assert set(names) == {"adapter"}


def test_adapters_of_peft_are_a_kind_of_their_own() -> None:
    model: Any = llama()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    [group] = for_model(adapted, "quality").param_groups
    assert group["kind"] == "adapter"
    assert len(group["params"]) == 4
    assert all(".lora_" in name for name in group["param_names"])


@pytest.mark.parametrize("recipe", ["quality", "fast", "lean"])
def test_adapters_that_begin_at_zero_move_by_their_shape(recipe: RecipeName) -> None:
    torch.manual_seed(0)
    model: Any = llama()
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    optimizer = for_model(adapted, recipe, lr=0.01)
    tokens = torch.arange(12).reshape(2, 6)
    for _ in range(2):  # the first step leaves lora_A alone, as lora_B is zero
        adapted(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    [b] = [param for name, param in adapted.named_parameters() if ".lora_B" in name]
    # Two steps of lr / sqrt(3 * 4), in the same direction at most.
    step = optimizer.param_groups[0]["lr"] / math.sqrt(12)
    assert 0.5 < float(b.detach().square().mean().sqrt()) / step < 2.1
