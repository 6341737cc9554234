"""`maxfactor memory`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks
from typer.testing import CliRunner

from forked import Command
from maxfactor import RECIPES
from maxfactor.backends.dispatch import has_triton
from maxfactor_speech import activations, memory
from maxfactor_speech.bench.shapes import elements, shapes
from maxfactor_speech.cli import app
from maxfactor_speech.training.memory_needs import memory_needs
from maxfactor_speech.training.settings import Settings

DOCS = Path(__file__).parent.parent / "docs"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["memory", *arguments])


def whisper() -> Any:
    return transformers.WhisperConfig(
        vocab_size=500, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=256, decoder_ffn_dim=256, num_mel_bins=16,
        max_source_positions=200, max_target_positions=100, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip


def test_the_table() -> None:
    usual = run("tiny", "--dtype", "fp32", "--json")
    assert usual.exit_code == 0, usual.output
    rows = {row["optimizer"]: row for row in json.loads(usual.output)}
    assert list(rows) == [label for label, _, _ in memory.ROWS]
    count = elements(shapes("whisper-tiny"))
    adamw = rows["AdamW, weights in fp32"]
    assert adamw["weights"] == 4 * count
    assert adamw["state"] == pytest.approx(2 * adamw["gradients"], rel=1e-3)
    for row in rows.values():
        parts = ("weights", "gradients", "state", "borrowed", "activations")
        assert row["total"] == sum(row[part] for part in parts) + memory.CONTEXT
        assert row["cards"] == [card for card in memory.CARDS if row["total"] <= card * 2**30]
    text = run("tiny", "--dtype", "fp32").output.splitlines()
    assert text[0].split() == ["GB", *parts, "total", "cards"]
    assert f"{rows['lean']['total'] / 1e9:.2f}" in text[3]


def test_large_whisper_fits_a_small_card() -> None:
    """Only with both savings; AdamW needs several times as much."""
    options = ["large-v3", "--json"]
    usual = json.loads(run(*options).output)
    saving = json.loads(run(*options, "--gradient-checkpointing", "--release-gradients").output)
    for row, less in zip(usual[:3], saving[:3], strict=True):
        assert row["cards"][0] > 8
        assert less["cards"][0] == 8
        assert less["gradients"] < row["gradients"] / 10
        assert less["activations"] < row["activations"] / 5
    assert saving[3]["cards"][0] == 40
    assert saving[3]["gradients"] == usual[3]["gradients"]


@pytest.mark.skipif(not has_triton(), reason="the estimates are those of the kernels")
def test_the_tables_of_the_documents(tmp_path: Path) -> None:
    """In a process of its own, since buffers of Triton's interpreter have other sizes."""
    saving = ["--gradient-checkpointing", "--release-gradients", "--json"]
    compiled = {"TRITON_INTERPRET": "0"}
    command = Command(["memory", "large-v3", *saving], tmp_path, environment=compiled)
    assert command.wait() == 0
    table = (DOCS / "speed-and-memory.md").read_text(encoding="utf-8")
    whisper = (DOCS / "whisper-8gb.md").read_text(encoding="utf-8")
    for row in json.loads(command.said()[0]):
        parts = [row[part] / 1e9 for part in ("weights", "gradients", "state", "borrowed")]
        cells = [f"{part:.2f}".removeprefix("0").replace(".00", "0") for part in parts]
        active, total = row["activations"] / 1e9, row["total"] / 1e9
        cells.append(f"{active:.2f}".removeprefix("0"))
        assert f" | {' | '.join([*cells, f'{total:.2f}'])} |" in table
        if row["optimizer"] in RECIPES:
            own = [f"`{row['optimizer']}`", *cells, f"{sum(parts) + active:.1f}", f"{total:.1f}"]
            assert f"| {' | '.join(own)} |" in whisper


def test_folders(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    rows = json.loads(run(str(tmp_path), "--json", "--tokens", "100").output)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert rows[0]["weights"] >= 2 * sum(param.numel() for param in model.parameters())
    assert rows[0]["activations"] == 100 * (2 * 2 * (9 * 32 + 4 * 64) + 16 * 60)


def test_a_folder_without_architectures(tmp_path: Path) -> None:
    """Its type tells which class it is."""
    for config, kind in [
        (whisper(), transformers.WhisperForConditionalGeneration),
        (transformers.T5Config(d_model=32, d_ff=64, num_layers=1, vocab_size=60), None),
        (transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=60), None),
    ]:
        config.save_pretrained(tmp_path)
        found = run(str(tmp_path), "--json", "--dtype", "fp32")
        assert found.exit_code == 0, found.output
        if kind is not None:
            count = sum(param.numel() for param in kind(config).parameters())
            assert json.loads(found.output)[0]["weights"] == 4 * count
    assert run(str(tmp_path)).output.startswith("MB ")


@pytest.mark.parametrize(
    ("name", "millions"),  # as published, with the encoder's table of positions
    [
        ("openai/whisper-large-v3", 1543.5), ("whisper-large-v3", 1543.5), ("tiny.en", 37.8),
        ("openai/whisper-medium.en", 763.9), ("large-v3-turbo", 808.9), ("turbo", 808.9),
        ("whisper-large-v2", 1543.3), ("openai/whisper-small", 241.7),
    ],
)  # fmt: skip
def test_names_of_whispers(name: str, millions: float) -> None:
    built = memory._build(name)
    assert sum(param.numel() for param in built.parameters()) / 1e6 == pytest.approx(
        millions, abs=0.06
    )


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_the_command_and_a_training_count_alike(tmp_path: Path, weights: str) -> None:
    """`maxfactor memory` and the line before a training."""
    config, tokens = whisper(), 90
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    options = ["--dtype", weights, "--tokens", str(tokens), "--batch-size", "2"]
    rows = {
        row["optimizer"]: row for row in json.loads(run(str(tmp_path), "--json", *options).output)
    }
    with torch.device("meta"):
        model: Any = transformers.WhisperForConditionalGeneration(config)
    prepared: Any = SimpleNamespace(model=model, longest_text=tokens)
    settings = Settings(model=str(tmp_path), optimizer="lean", weights=weights, batch_size=2)
    needs, row = memory_needs(settings, prepared), rows["lean"]
    assert needs.activations == row["activations"]
    assert needs.gradients == row["gradients"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["huge"], "huge is neither a size of Whisper (tiny, "),
        (["a/model"], "run `hf download a/model --local-dir model`, then give the folder model"),
        (["tiny", "--dtype", "int8"], "--dtype must be one of fp32, bf16, fp16, got int8"),
        (["tiny", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    ],
)
def test_errors(arguments: list[str], message: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2
    assert message in found.stderr


def test_unknown_architectures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["Mine"]}')
    assert "names no known architecture, but 'Mine'" in run(str(tmp_path)).stderr
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in run(str(tmp_path)).stderr


def test_the_formula_counts_what_a_whisper_saves() -> None:
    """Within 15 % of the tensors that autograd really keeps."""
    config, tokens = whisper(), 80
    model = transformers.WhisperForConditionalGeneration(config).train()
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(
            input_features=torch.randn(1, 16, 400),
            labels=torch.randint(3, 500, (1, tokens)),
            use_cache=False,
        )
    real = sum(storage.nbytes() for storage in kept.values())
    scores = activations.SCORE_BYTES * tokens * 500
    found = activations.activation_bytes(config, tokens, 4, checkpointing=False) - scores
    assert found == pytest.approx(real - 4 * tokens * 500, rel=0.15)
