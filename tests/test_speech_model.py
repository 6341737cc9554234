"""Tokens, the small Whisper, decoding and error rates, optimizers by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, WhisperForConditionalGeneration, WhisperTokenizer

import maxfactor
from maxfactor_speech.data.tokens import IGNORED, Codec
from maxfactor_speech.errors import InputError
from maxfactor_speech.training import optimizers
from maxfactor_speech.training.cuda_graphs import is_random
from maxfactor_speech.training.evaluation import (
    Evaluation,
    Example,
    PipelineDecoder,
    decode,
    in_batches,
    transcribe,
)
from maxfactor_speech.training.model import SIZES, Size, encode, loss_of, whisper
from maxfactor_speech.training.preparation import task_codec
from maxfactor_speech.training.recogniser import new_recogniser

SMALL = Size(32, 2, 2)


def small_model(codec: Codec, max_tokens: int = 12) -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    return whisper(codec, SMALL, seconds=2, max_tokens=max_tokens)


@pytest.fixture
def codec() -> Codec:
    return Codec.build("abcde ")


# -------------------------------------------------------------------------------- tokens


def test_characters_are_tokens(codec: Codec) -> None:
    assert len(codec.encode("ab cd")) == 6  # and the end
    assert codec.decode(codec.encode("ab cd")) == "ab cd"
    assert codec.decode([*codec.encode("ab"), *codec.encode("cd")]) == "ab"  # up to the end
    assert codec.missing("abxz") == ["x", "z"]


def test_composed_and_decomposed_letters_are_the_same() -> None:
    codec = Codec.build("fü")
    assert codec.encode("u\u0308f") == codec.encode("üf")
    assert codec.missing("u\u0308") == []


def test_labels_are_padded_with_ignored(codec: Codec) -> None:
    labels = codec.labels(["abc", "d"])
    assert labels.shape == (2, 4)
    assert labels[1, 2:].tolist() == [IGNORED, IGNORED]  # the end is not ignored
    assert labels[1, 1] == codec.end


def test_tokenizers_are_restored_from_a_folder(codec: Codec, tmp_path: Path) -> None:
    codec.tokenizer.save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(found, WhisperTokenizer)
    again = Codec.of(found)
    assert again.encode("ab cd") == codec.encode("ab cd")
    assert again.decode(again.encode("ab cd")) == "ab cd"
    assert (again.start, again.end) == (codec.start, codec.end)


def test_a_task_has_tokens_for_all_its_languages() -> None:
    assert not task_codec("digits").missing("zero null cero")
    assert not task_codec("sentences").missing("größe año the")


# --------------------------------------------------------------------------------- model


def test_encoder_is_whispers_own(codec: Codec) -> None:
    model = small_model(codec).eval()
    features = torch.randn(2, 80, 200)
    whole = model.model.encoder(features).last_hidden_state
    torch.testing.assert_close(encode(model, features), whole)
    assert encode(model, features[..., :60]).shape == (2, 30, 32)


def test_loss_is_whispers_own(codec: Codec) -> None:
    model = small_model(codec).eval()
    features, labels = torch.randn(2, 80, 200), codec.labels(["ab c", "de"])
    expected = model(input_features=features, labels=labels).loss
    torch.testing.assert_close(loss_of(model, features, labels), expected)


@pytest.mark.parametrize(("name", "millions"), [("nano", 1.0), ("tiny", 17.0), ("base", 46.0)])
def test_sizes(codec: Codec, name: str, millions: float) -> None:
    with torch.device("meta"):
        model = whisper(codec, name, seconds=3, max_tokens=64)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.1)
    assert model.config.d_model == SIZES[name].width


def test_random_passes_are_recognised(codec: Codec) -> None:
    """A CUDA graph would not draw it anew."""
    assert not is_random(small_model(codec).config)
    for name in ("dropout", "attention_dropout", "decoder_layerdrop"):
        config = small_model(codec).config
        setattr(config, name, 0.1)
        assert is_random(config)


def test_unknown_size_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="nano, tiny, base, got 'huge'"):
        whisper(codec, "huge")


# ------------------------------------------------------------------------------ decoding


def decode_slowly(
    model: WhisperForConditionalGeneration, codec: Codec, features: Tensor
) -> list[str]:
    """One utterance at a time, everything anew for each token."""
    texts = []
    for one in features:
        tokens = list(codec.start)
        while len(tokens) < model.config.max_target_positions and tokens[-1] != codec.end:
            output = model(input_features=one[None], decoder_input_ids=torch.tensor([tokens]))
            tokens.append(int(output.logits[0, -1].argmax()))
        texts.append(codec.decode(tokens[len(codec.start) :]))
    return texts


def test_greedy_decoding_takes_the_likeliest_tokens(codec: Codec) -> None:
    model = small_model(codec)
    features, spoken = torch.randn(6, 80, 200), ["a", "b c", "dd", "e a b", "cab", "bed"]
    [adamw] = optimizers.make_optimizer(model, "adamw", lr=0.01)
    for _ in range(40):  # so that texts differ, and end at different places
        loss_of(model, features, codec.labels(spoken)).backward()
        adamw.step()
        adamw.zero_grad()
    model.train()
    texts = transcribe(model, codec, features)
    assert model.training  # left as it was
    with torch.no_grad():
        expected = decode_slowly(model.eval(), codec, features)
    assert texts == expected
    assert len(set(texts)) > 1
    assert len({len(text) for text in texts}) > 1


def test_error_rates() -> None:
    pairs = [Example("one two three four", "one too three"), Example("five", "five five")]
    evaluation = Evaluation.of(pairs)
    assert evaluation.wer == pytest.approx(3 / 5)
    assert evaluation.cer == pytest.approx((1 + 5 + 5) / 22)
    assert evaluation.examples[0].hypothesis == "one too three"


def test_evaluation_takes_batches(codec: Codec) -> None:
    model = small_model(codec)
    features, texts = torch.randn(5, 80, 200), ["ab", "c", "d e", "a", "b"]
    [whole] = decode(model, codec, in_batches(features, texts, 5))
    pieces = decode(model, codec, in_batches(features, texts, 2))
    assert [len(batch) for batch in pieces] == [2, 2, 1]
    assert whole == [example for batch in pieces for example in batch]
    assert [example.reference for example in whole] == texts


# ---------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("name", [name for name in optimizers.names() if name != "lion"])
def test_every_optimizer_trains_every_parameter(codec: Codec, name: str) -> None:
    model = small_model(codec)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    made = optimizers.make_optimizer(model, name)
    loss_of(model, torch.randn(2, 80, 200), codec.labels(["ab", "cde"])).backward()
    for optimizer in made:
        optimizer.step()
    ours = {id(param) for one in made for group in one.param_groups for param in group["params"]}
    count = sum(len(group["params"]) for one in made for group in one.param_groups)
    wanted = {id(param) for param in model.parameters() if param.requires_grad}
    assert ours == wanted
    assert count == len(wanted)  # none twice
    still = [
        key
        for key, param in model.named_parameters()
        if torch.equal(param, before[key]) and param.grad is not None and param.grad.any()
    ]
    assert still == []


def test_muon_leaves_embeddings_to_adamw(codec: Codec) -> None:
    model = small_model(codec)
    muon, adamw = optimizers.make_optimizer(model, "muon", lr=0.02)
    rest = [param for group in adamw.param_groups for param in group["params"]]
    assert any(param is model.proj_out.weight for param in rest)
    assert all(group["lr"] == pytest.approx(0.002) for group in adamw.param_groups)
    assert all(param.ndim == 2 for group in muon.param_groups for param in group["params"])


@pytest.mark.parametrize(("given", "muons", "adamws"), [(None, 0.1, 0.01), (0.0, 0.0, 0.0)])
def test_weight_decay_of_muon_and_adamw(
    codec: Codec, given: float | None, muons: float, adamws: float
) -> None:
    muon, adamw = optimizers.make_optimizer(small_model(codec), "muon", weight_decay=given)
    assert {group["weight_decay"] for group in muon.param_groups} == {muons}
    assert {group["weight_decay"] for group in adamw.param_groups} == {adamws, 0.0}


def test_vectors_are_not_decayed() -> None:
    [adamw] = optimizers.make_optimizer(nn.Linear(3, 2), "adamw", weight_decay=0.3)
    decays = {group["params"][0].ndim: group["weight_decay"] for group in adamw.param_groups}
    assert decays == {2: 0.3, 1: 0.0}


def test_missing_lion_names_its_package() -> None:
    try:
        import lion_pytorch  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match="pip install lion-pytorch"):
            optimizers.make_optimizer(nn.Linear(3, 2), "lion")


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="adamw, adafactor, muon, lion, got 'sgd'"):
        optimizers.make_optimizer(nn.Linear(3, 2), "sgd")


def test_recipes_are_those_of_the_library() -> None:
    assert set(maxfactor.RECIPES) < set(optimizers.names())


def test_default_rates_are_those_of_the_library() -> None:
    rates = {name: optimizers.default_lr(name) for name in ("quality", "fast", "lean")}
    assert rates == {"quality": 0.04, "fast": 0.08, "lean": 0.04}
    assert optimizers.default_lr("published-1.0") == maxfactor.recipe("published-1.0")["lr"]


def test_weight_decay_of_a_recipe(codec: Codec) -> None:
    [optimizer] = optimizers.make_optimizer(small_model(codec), "fast", weight_decay=0.25)
    decays = {group["kind"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays["hidden"] == 0.25
    [usual] = optimizers.make_optimizer(small_model(codec), "fast")
    assert {group["weight_decay"] for group in usual.param_groups} != set(decays.values())


def test_muon_needs_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(InputError, match=r"optimizer muon needs torch 2\.9 or newer, this is "):
        optimizers.make_optimizer(nn.Linear(3, 2), "muon")


def test_keys_and_values_of_a_decoder_are_counted(codec: Codec) -> None:
    """Those of self-attention and of cross-attention, in every layer."""
    model = small_model(codec)
    decoder = PipelineDecoder(new_recogniser(model, codec))
    cache = model.generate(
        torch.zeros(1, 80, 200), return_dict_in_generate=True, max_new_tokens=2
    ).past_key_values
    [first, *_] = cache.cross_attention_cache.layers
    a_position = 2 * first.keys[0, :, 0].numel() * 4  # keys and values, float32
    positions = model.config.max_source_positions + model.config.max_target_positions
    assert decoder.bytes_per_example == 2 * a_position * positions
    decoder._pipeline.generation_config.num_beams = 3
    assert decoder.bytes_per_example == 3 * 2 * a_position * positions
