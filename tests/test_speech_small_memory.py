"""Trainings with little memory: released gradients, weights in bfloat16, adapters, and advice."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import WhisperForConditionalGeneration
from typer.testing import CliRunner

from maxfactor_speech.cli import app
from maxfactor_speech.data.tokens import IGNORED
from maxfactor_speech.errors import DeviceMemoryError, InputError
from maxfactor_speech.training import checkpoint, cross_entropy
from maxfactor_speech.training.adapters import load_adapters, merged
from maxfactor_speech.training.loop import check_processes, train
from maxfactor_speech.training.memory_needs import (
    describe_needs,
    explained_out_of_memory,
    memory_needs,
    savings,
)
from maxfactor_speech.training.metrics import read_metrics
from maxfactor_speech.training.model_folder import load_model
from maxfactor_speech.training.parallel import MultiProcess, SingleProcess
from maxfactor_speech.training.preparation import prepare
from maxfactor_speech.training.settings import Settings
from maxfactor_speech.training.trainer import Trainer
from noise import weights
from toy_whisper import heard, make_folder, plain_wer, raw_wer, record

SMALL = {"release_gradients": True, "gradient_checkpointing": True, "weights": "bf16"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper for 2 s of audio that makes some mistakes."""
    folder = tmp_path_factory.mktemp("toy") / "whisper"
    make_folder(folder, 2, 80)
    return folder


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken")
    record(folder, range(5000, 5016), range(9000, 9006))
    return folder


def settings(spoken: Path, model: Path | str, **changes: Any) -> Settings:
    base = Settings(
        data=str(spoken / "train.tsv"), validation=str(spoken / "check.tsv"), model=str(model),
        language="german", optimizer="fast", schedule="constant", warmup=0.0, steps=4,
        batch_size=4, evaluate_every=2,
    )  # fmt: skip
    return replace(base, **changes)


def options(chosen: Settings) -> list[str]:
    """The options of the command for settings that differ from the defaults."""
    found = ["--data", str(chosen.data)]
    for name, value in vars(chosen).items():
        if value != getattr(Settings(), name) and name != "data":
            found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return found


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def evaluations(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(out) if "wer" in line]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        assert torch.equal(value, other[name]), name


def assert_reported(out: Path, spoken: Path) -> None:
    """What the pipeline says with the last folder is what was reported, word by word."""
    last = checkpoint.checkpoints(out)[-1]
    line, pairs = evaluations(out)[-1], heard(last, spoken)
    assert (line["wer"], line["raw_wer"]) == (plain_wer(pairs), raw_wer(pairs))
    assert {(one["reference"], one["hypothesis"]) for one in line["examples"]} <= set(pairs)
    assert len({pair.hypothesis for pair in pairs}) > 2  # it does not always say the same


# -------------------------------------------------------------------------- released gradients


def test_released_gradients_change_no_bit_and_may_begin_later(
    toy: Path, spoken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(spoken, toy)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    plain = train(chosen, tmp_path / "plain")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # before anything uses a GPU
    train(replace(chosen, release_gradients=True), tmp_path / "released")
    assert_same(weights(tmp_path / "plain"), weights(tmp_path / "released"))
    train(replace(chosen, steps=2), tmp_path / "later")
    again = replace(chosen, release_gradients=True)
    trainer = train(again, tmp_path / "later", resume=True).trainer
    assert_same(weights(tmp_path / "plain"), weights(tmp_path / "later"))
    for one, expected in ((trainer, 0), (plain.trainer, len(list(trainer.model.parameters())) - 1)):
        batches = one.batches()
        one._pass(one._inputs(next(batches)[0]), 1.0)
        batches.close()
        assert sum(param.grad is not None for param in one.model.parameters()) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamw"}, "release_gradients cannot be used with optimizer adamw; choose"),
        ({"grad_accum": 2}, "release_gradients cannot be used with grad_accum 2, since"),
        ({"clip": 1.0}, "release_gradients cannot be used with clip 1.0, since the norm"),
        ({"dtype": "fp16"}, "release_gradients cannot be used with dtype fp16, which scales"),
    ],
)
def test_what_needs_all_gradients_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**{"release_gradients": True, **changes})
    assert Settings(release_gradients=True, clip=0.0).release_gradients


@pytest.mark.parametrize(
    ("changes", "shard", "message"),
    [
        ({"release_gradients": True}, "ddp", "--release-gradients is for one process"),
        ({"lora": 2}, "fsdp", "--lora 2 cannot be sharded; use --shard ddp"),
    ],
)
def test_several_processes_are_refused(
    one_rank: None, changes: dict[str, Any], shard: str, message: str
) -> None:
    chosen = Settings(model="folder", **changes)
    with pytest.raises(InputError, match=message):
        check_processes(chosen, MultiProcess(shard, "cpu"))
    check_processes(chosen, SingleProcess())
    check_processes(Settings(model="folder", lora=2), MultiProcess("ddp", "cpu"))


# --------------------------------------------------------------------------------- weights


def test_weights_in_bfloat16_are_evaluated_and_written_as_such(
    toy: Path, spoken: Path, tmp_path: Path
) -> None:
    chosen = settings(spoken, toy, **SMALL)
    out = tmp_path / "out"
    result = run("train", *options(chosen), "--out", out)
    assert result.exit_code == 0, result.output
    last = checkpoint.checkpoints(out)[-1]
    assert json.loads((last / "config.json").read_text())["dtype"] == "bfloat16"
    after, before = weights(out), load_model(toy, torch.bfloat16).model.state_dict()
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    changed = [name for name in after if not torch.equal(after[name], before[name])]
    assert len(changed) > 0.9 * len(after)
    assert_reported(out, spoken)
    transcript = run("transcribe", out, spoken / "9000.wav").output.strip()
    assert transcript == heard(out / "best", spoken)[0].hypothesis
    train(replace(chosen, steps=2), tmp_path / "parts")
    train(chosen, tmp_path / "parts", resume=True)
    assert_same(weights(tmp_path / "parts"), after)
    assert re.search(r"memory: about 1\.\d\d MB \(weights 0\.1\d, gradients ", result.output)


def test_a_model_from_scratch_can_have_weights_in_bfloat16(spoken: Path, tmp_path: Path) -> None:
    chosen = settings(spoken, "nano", language=None, weights="bf16", steps=1)
    train(replace(chosen, validation=None), tmp_path)
    assert {value.dtype for value in weights(tmp_path).values()} == {torch.bfloat16}


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype
) -> None:
    """The usual loss and gradient, whichever rows are computed at a time."""
    monkeypatch.setattr(cross_entropy, "AT_ONCE", rows * 37)
    torch.manual_seed(0)
    scores = (4 * torch.randn(2, 5, 37)).to(dtype)
    labels = torch.randint(0, 37, (2, 5))
    labels[1, 3:] = IGNORED
    usual, ours = (scores.clone().requires_grad_() for _ in range(2))
    expected = torch.nn.functional.cross_entropy(usual.float().flatten(0, 1), labels.flatten())
    (3.0 * expected).backward()
    found = cross_entropy.mean_cross_entropy(ours * 1.0, labels)
    (3.0 * found).backward()
    torch.testing.assert_close(found, expected)
    assert found.dtype == torch.float32
    torch.testing.assert_close(ours.grad, usual.grad)


def test_the_gradient_of_scores_takes_their_place(toy: Path, spoken: Path) -> None:
    """So a training keeps them once, in half precision."""
    scores = torch.randn(1, 4, 11, dtype=torch.bfloat16, requires_grad=True)
    inner = scores * 1.0
    grads: list[torch.Tensor] = []
    inner.register_hook(grads.append)
    cross_entropy.mean_cross_entropy(inner, torch.randint(0, 11, (1, 4))).backward()
    assert grads[0].data_ptr() == inner.data_ptr()


# -------------------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def adapted(toy: Path, spoken: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with adapters, trained by the command with everything that saves memory."""
    out = tmp_path_factory.mktemp("adapted") / "out"
    chosen = settings(spoken, toy, lora=4, lora_alpha=6.0, **SMALL)
    result = run("train", *options(chosen), "--out", out)
    assert result.exit_code == 0, result.output
    return out


def test_adapters_are_merged_into_an_ordinary_folder(
    toy: Path, adapted: Path, spoken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert_reported(adapted, spoken)
    after, before = weights(adapted), load_model(toy, torch.bfloat16).model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    layers = r"model\.(en|de)coder\.layers\..*\.([qkv]_proj|out_proj|fc\d)\.weight"
    assert changed == {name for name in before if re.fullmatch(layers, name)}


def test_adapters_are_saved_by_themselves(toy: Path, adapted: Path) -> None:
    """PEFT adds them to the model that they were trained for, which gives the merged one."""
    last = checkpoint.checkpoints(adapted)[-1]
    saved = load_file(last / "adapter" / "adapter_model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    base = WhisperForConditionalGeneration.from_pretrained(toy, dtype=torch.float32)
    again: Any = PeftModel.from_pretrained(base, str(last / "adapter"))
    plain = again.merge_and_unload().state_dict()
    for name, value in weights(adapted).items():
        torch.testing.assert_close(value.float(), plain[name], rtol=2**-7, atol=1e-3)
    config = json.loads((last / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6.0)
    state = checkpoint.load_training(last)["optimizers"][0]["state"]
    assert len(state) == len(saved)  # nothing else is trained


def test_a_training_with_adapters_is_resumed(
    toy: Path, adapted: Path, spoken: Path, tmp_path: Path
) -> None:
    chosen = settings(spoken, toy, lora=4, lora_alpha=6.0, **SMALL)
    train(replace(chosen, steps=2), tmp_path)
    again = train(chosen, tmp_path, resume=True)
    assert again.trainer.prepared.codec.encode("uh") == load_model(adapted).codec.encode("uh")
    assert_same(weights(tmp_path), weights(adapted))
    one, other = (
        load_file(checkpoint.checkpoints(out)[-1] / "adapter" / "adapter_model.safetensors")
        for out in (tmp_path, adapted)
    )
    assert_same(one, other)


def test_adapters_beside_a_frozen_encoder(toy: Path, spoken: Path) -> None:
    chosen = settings(spoken, toy, lora=2, freeze_encoder=True, optimizer="adamw")
    trainer = Trainer(chosen, prepare(chosen))
    trained = [name for name, one in trainer.model.named_parameters() if one.requires_grad]
    assert trained
    assert all(name.startswith("model.decoder.") and ".lora_" in name for name in trained)
    for name, param in trainer.model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(param)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    features, labels = torch.randn(1, 80, 200), torch.tensor([[3, 4, 5]])
    alone = trainer._forward(features, labels)
    with merged(trainer.model):
        assert not [name for name in trainer.model.state_dict() if "lora" in name]
        torch.testing.assert_close(trainer._forward(features, labels), alone)
    assert_same(before, trainer.model.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora", "4"], "lora must be given with the folder of a model, got 4 with model 'nano'"),
        (["--model", "TOY", "--lora", "0"], "lora must be a whole number of at least 1, got 0"),
        (["--lora-alpha", "4"], "lora_alpha must be given with lora, got 4.0"),
        (["--model", "TOY", "--lora", "4", "--lora-alpha", "0"], "lora_alpha must be finite and"),
        (["--weights", "int8"], "weights must be one of fp32, bf16, got 'int8'"),
        (["--weights", "bf16", "--dtype", "fp16"], "dtype must be bf16 with weights bf16, got"),
        (["--weights", "bf16", "--dtype", "fp32"], "--dtype fp32: weights in bf16 compute in bf16"),
        (["--weights", "bf16", "--optimizer", "adamw"], "weights must be fp32 with optimizer adam"),
        (["--release-gradients", "--optimizer", "muon"], "cannot be used with optimizer muon"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    toy: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    given = [str(toy) if one == "TOY" else one for one in arguments]
    result = run("train", *given, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    result = run("train", "--model", toy, "--lora", "4", "--out", tmp_path / "out")
    assert result.stderr == "maxfactor: --lora 4 needs the package peft: `pip install peft`\n"
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- needs and advice


def test_needs_are_those_of_the_real_training(toy: Path, spoken: Path) -> None:
    for changes in ({}, SMALL, {"lora": 4}, {"optimizer": "adamw", "freeze_encoder": True}):
        chosen = settings(spoken, toy, **changes)
        prepared = prepare(chosen)
        needs = memory_needs(chosen, prepared)
        trainer = Trainer(chosen, prepared)
        batches = trainer.batches()
        trainer.train_step(next(batches))
        batches.close()
        params = list(trainer.model.parameters())
        assert needs.weights == sum(param.nbytes for param in params)
        if not chosen.release_gradients:
            assert needs.gradients == sum(param.nbytes for param in params if param.requires_grad)
        [optimizer] = trainer.optimizers
        state = [value for own in optimizer.state.values() for value in own.values()]
        assert needs.state == pytest.approx(sum(value.nbytes for value in state), rel=0.01)


@contextmanager
def full_memory(applies: Callable[[nn.Module, torch.Tensor], bool]) -> Iterator[None]:
    """Layers fail as on a full GPU, where the condition applies."""

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs and applies(module, inputs[0]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_out_of_memory_names_what_would_help_and_keeps_the_checkpoint(
    toy: Path, spoken: Path, tmp_path: Path
) -> None:
    chosen, out = settings(spoken, toy), tmp_path / "out"
    train(chosen, tmp_path / "whole")
    passes = 0

    def in_third_step(module: nn.Module, inputs: torch.Tensor) -> bool:
        nonlocal passes
        passes += isinstance(module, nn.Linear) and module.out_features > 150 and module.training
        return passes == 3

    with full_memory(in_third_step):
        result = run("train", *options(chosen), "--out", out)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    text = result.stderr
    assert text.startswith("maxfactor: out of memory: the training needs about 2.")
    assert "); in MB, --" in text
    offered = {
        "--release-gradients", "--gradient-checkpointing", "--weights bf16", "--lora 8",
        "--batch-size 2 --grad-accum 2", "--freeze-encoder", "--optimizer lean",
    }  # fmt: skip
    assert set(re.findall(r"(--[-\w ]+) saves \d\.\d\d", text)) == offered
    last = checkpoint.checkpoints(out)[-1]
    assert last.name == "step-00000002"
    assert f"{last} is intact, and --resume takes --release-gradients" in text
    result = run("train", "--resume", "--out", out, "--release-gradients")
    assert result.exit_code == 0, result.output
    assert_same(weights(out), weights(tmp_path / "whole"))


def test_out_of_memory_before_the_first_checkpoint(toy: Path, spoken: Path, tmp_path: Path) -> None:
    """Nothing can be resumed, so nothing is said about it."""
    chosen = settings(spoken, toy)
    given = prepare(chosen)
    with (
        pytest.raises(DeviceMemoryError, match="out of memory: the training needs") as caught,
        explained_out_of_memory(chosen, given, tmp_path),
    ):
        raise torch.OutOfMemoryError
    assert "--release-gradients saves" in str(caught.value)
    assert "is intact" not in str(caught.value)


def test_needs_are_compared_with_the_memory_of_a_gpu(toy: Path, spoken: Path) -> None:
    chosen = settings(spoken, toy)
    needs = memory_needs(chosen, prepare(chosen))
    assert describe_needs(needs, None) == f"memory: {needs}"
    enough = describe_needs(needs, needs.total)
    assert enough == f"memory: {needs}; {needs.total / 1e9:.2f} GB of the GPU are available"
    assert describe_needs(needs, needs.total - 1).endswith(", which is probably too little")


def test_a_device_that_is_too_small_for_a_question(toy: Path, spoken: Path) -> None:
    """Whether texts begin with a space is then asked on the CPU, with the same answer."""
    chosen = settings(spoken, toy)
    expected = prepare(chosen).codec.encode("uh")
    calls = 0

    def only_the_first(module: nn.Module, _: torch.Tensor) -> bool:
        nonlocal calls
        calls += isinstance(module, nn.Conv1d)
        return calls == 1

    with full_memory(only_the_first):
        assert prepare(chosen).codec.encode("uh") == expected
    assert calls > 1


def test_a_damaged_adapter_is_named(adapted: Path, tmp_path: Path) -> None:
    last = checkpoint.checkpoints(adapted)[-1]
    model = WhisperForConditionalGeneration.from_pretrained(last)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"no weights")
    given: Any = PeftModel.from_pretrained(model, str(last / "adapter"))
    before = {name: value.clone() for name, value in given.state_dict().items()}
    with pytest.raises(InputError, match=r"adapter_model\.safetensors: cannot be read, .*delete"):
        load_adapters(given, tmp_path)
    assert_same(before, given.state_dict())


def test_advice_names_only_what_is_possible(toy: Path, spoken: Path) -> None:
    chosen = settings(spoken, toy, batch_size=1, optimizer="adamw", clip=1.0)
    found = savings(chosen, prepare(chosen))
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert not {"--release-gradients", "--weights bf16"} & found.keys()
    assert not [option for option in found if "--batch-size" in option]
    small = settings(spoken, toy, **SMALL, optimizer="lean", freeze_encoder=True, lora=4)
    assert savings(small, prepare(small)).keys() <= {"--batch-size 2"}


def test_an_evaluation_takes_smaller_batches_if_memory_is_short(toy: Path, spoken: Path) -> None:
    chosen = settings(spoken, toy)
    trainer = Trainer(chosen, prepare(chosen))
    expected = trainer.evaluate()
    sizes: list[int] = []

    def is_large(module: nn.Module, inputs: torch.Tensor) -> bool:
        if not isinstance(module, nn.Conv1d) or module.in_channels != 80:
            return False
        sizes.append(len(inputs))
        return len(inputs) > 2

    with full_memory(is_large):
        assert trainer.evaluate() == expected
    assert sizes == [6, 6, 4, 2, 2, 2]
