"""Trainers that users have: transformers, accelerate, Lightning, Hydra, hyperpyyaml; the examples.

Lightning is imported by the tests that need it, as it takes seconds. All tests run on one worker.
"""

from __future__ import annotations

import csv
import gc
import io
import pickle
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxfactor

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from transformers import TrainerCallback  # noqa: E402

from maxfactor.integrations.huggingface import ForModel, MaxFactorCallback  # noqa: E402

EXAMPLES = Path(__file__).parent.parent / "examples"
KINDS = ("hidden", "head", "vector")


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """A Trainer collects garbage after training: half a second if it looks at all of torch."""
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in class attributes."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Net(nn.Module):
    """A model as a Trainer expects it: it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.last(self.first(inputs).tanh())
        return {"loss": nn.functional.cross_entropy(outputs, labels)}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)


def rows() -> list[dict[str, Tensor]]:
    return [{"inputs": x, "labels": y} for x, y in zip(*batch(), strict=True)]


def trainer_of(model: nn.Module, folder: Path, **changes: Any) -> Any:
    """A Trainer with ForModel, without anything that this file does not ask for."""
    arguments: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 8, "train_sampling_strategy": "sequential",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "max_grad_norm": 0.0,
    }  # fmt: skip
    given: dict[str, Any] = {"optimizer_cls_and_kwargs": (ForModel, {"recipe": "fast"})}
    for name, value in changes.items():
        is_argument = name in transformers.TrainingArguments.__dataclass_fields__
        (arguments if is_argument else given)[name] = value
    chosen = transformers.TrainingArguments(str(folder), **arguments)
    return transformers.Trainer(model, chosen, **({"train_dataset": rows()} | given))


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


# --------------------------------------------------------------------- transformers: ForModel


@pytest.mark.parametrize("names_model", [False, True], ids=["from 5.2", "also before"])
def test_a_trainer_steps_as_a_loop_does(names_model: bool, tmp_path: Path) -> None:
    """Bit for bit, and the linear schedule scales the rates of all groups alike."""
    model, own = Net(), Net()
    kwargs: dict[str, Any] = {"recipe": "fast", "lr": 0.05}
    if names_model:
        kwargs["model"] = model
    trainer = trainer_of(model, tmp_path, optimizer_cls_and_kwargs=(ForModel, kwargs))
    trainer.train()
    optimizer = maxfactor.for_model(own, "fast", lr=0.05)
    began = [group["lr"] for group in optimizer.param_groups]
    assert len(set(began)) == 3  # each kind has its own share
    for step in range(4):
        for group, rate in zip(optimizer.param_groups, began, strict=True):
            group["lr"] = rate * (4 - step) / 4
        own(*batch())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, own)
    assert [group["kind"] for group in trainer.optimizer.param_groups] == list(KINDS)
    assert trainer.optimizer.optimizer.effective_lr() == optimizer.effective_lr()


def test_a_trainer_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, resumed = Net(), Net()
    trainer_of(whole, tmp_path, save_strategy="steps", save_steps=2).train()
    again = trainer_of(resumed, tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4
    assert_same(whole, resumed)


def test_older_trainers_call_the_class_with_the_model() -> None:
    """Up to 5.1 a Trainer calls it with what stands under "model", else with the parameters."""
    model = Net()
    optimizer = ForModel(model, recipe="lean", lr=0.02)
    assert type(optimizer) is maxfactor.MaxFactor
    assert optimizer.describe() == maxfactor.for_model(Net(), "lean", lr=0.02).describe()
    parameters = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    with pytest.raises(TypeError, match=r"got list; transformers before 5\.2 .* add it to the kw"):
        ForModel(parameters, recipe="lean")


def test_it_is_an_ordinary_class() -> None:
    assert repr(pickle.loads(pickle.dumps(ForModel()))) == "ForModel()"
    assert pickle.loads(pickle.dumps(ForModel)) is ForModel
    with pytest.raises(TypeError, match=r"settings only together with a model, got \['recipe'\]"):
        ForModel(recipe="fast")


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"recipe": "fsat"}, ValueError, "unknown recipe 'fsat'; known recipes: 'quality', 'fast'"),
        ({"leraning_rate": 1.0}, TypeError, r"for_model\(\) has no setting 'leraning_rate'"),
        ({"model": Net()}, ValueError, "a Net, does not have the parameters of the Trainer's"),
        ({"model": "whisper"}, ValueError, "a str, does not have the parameters of the Trainer's"),
    ],
)
def test_mistakes_are_found_before_training(
    kwargs: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = Net()
    before = weights(model)
    trainer = trainer_of(model, tmp_path, optimizer_cls_and_kwargs=(ForModel, kwargs))
    with pytest.raises(error, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_seq2seq_trainer_takes_it_as_an_attribute(tmp_path: Path) -> None:
    """Its constructor has no such argument; there `optimizers` is the usual way."""
    arguments = transformers.Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True)
    trainer = transformers.Seq2SeqTrainer(Net(), arguments, train_dataset=rows())
    trainer.optimizer_cls_and_kwargs = (ForModel, {"recipe": "fast"})
    with pytest.warns(UserWarning, match=r"max_grad_norm=1 .*; set max_grad_norm=0"):
        optimizer = trainer.create_optimizer()
    assert [group["kind"] for group in optimizer.param_groups] == list(KINDS)


# ------------------------------------------------------------------ transformers: the callback


class Probe(TrainerCallback):
    """Notes after each step how old the recorded metrics are; -1 before there are any."""

    def __init__(self) -> None:
        self.ages: list[int] = []

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        try:
            self.ages.append(kwargs["optimizer"].optimizer.metrics().age)
        except RuntimeError:
            self.ages.append(-1)


def test_step_sizes_are_in_the_logs(tmp_path: Path) -> None:
    """Of the Trainer, and of callbacks that came earlier."""
    seen: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, *_: Any, **kwargs: Any) -> None:
            seen.append(dict(kwargs["logs"]))

    callbacks = [Reporter(), MaxFactorCallback()]
    trainer = trainer_of(Net(), tmp_path, callbacks=callbacks, warmup_steps=2)
    trainer.train()
    keys = [f"effective_lr/{kind}" for kind in KINDS]
    steps, summary = trainer.state.log_history[:-1], trainer.state.log_history[-1]
    assert len(steps) == 4
    assert "train_loss" in summary
    assert not [key for key in summary if key.startswith(("effective_lr", "optimizer"))]
    assert [steps[-1][key] for key in keys] == trainer.optimizer.optimizer.effective_lr()
    assert [step[keys[0]] == 0.0 for step in steps] == [True, False, False, False]  # warm-up
    assert seen[:4] == [{key: step[key] for key in step if key != "step"} for step in steps]


def test_logs_have_the_metrics_of_their_step(tmp_path: Path) -> None:
    """The numbers are those of a loop, and no step is recorded that is not logged."""
    model, own, probe = Net().bfloat16(), Net().bfloat16(), Probe()
    trainer = trainer_of(
        model, tmp_path, logging_steps=2, max_steps=5, callbacks=[probe, MaxFactorCallback()],
        lr_scheduler_type="constant", data_collator=in_bfloat16,
    )  # fmt: skip
    trainer.train()
    assert probe.ages == [-1, 0, 1, 0, 1]
    optimizer = maxfactor.for_model(own, "fast")
    expected = []
    for _ in range(4):
        optimizer.record_metrics(None)
        own(**in_bfloat16(rows()))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(optimizer.metrics().summary())
    for logs, step in zip(trainer.state.log_history[:2], (2, 4), strict=True):
        summary = expected[step - 1]
        for name in ("update_ratio", "grad_rms", "clip", "beta", "lost"):
            assert logs[f"optimizer/hidden/{name}"] == summary[f"hidden/{name}"]
        assert logs["optimizer/grad_norm"] == summary["grad_norm"]
        assert logs["effective_lr/hidden"] == pytest.approx(summary["hidden/step_size"])


def in_bfloat16(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        "inputs": torch.stack([each["inputs"] for each in found]).bfloat16(),
        "labels": torch.stack([each["labels"] for each in found]),
    }


@pytest.mark.parametrize(
    ("changes", "ages", "logged"),
    [
        ({"logging_first_step": True, "logging_steps": 3}, [0, 1, 0, 1, 2, 0], [1, 3, 6]),
        # Two epochs of three steps, the third of which has half the batches.
        (
            {
                "logging_strategy": "epoch",
                "max_steps": -1,
                "num_train_epochs": 2,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "train_dataset": rows() + rows()[:2],
            },
            [0, 1, 0, 1, 2, 0],  # nothing is known of the first step: it might be an epoch
            [3, 6],
        ),
        ({"logging_strategy": "no"}, [-1] * 6, []),
    ],
)
def test_the_steps_that_are_recorded(
    changes: dict[str, Any], ages: list[int], logged: list[int], tmp_path: Path
) -> None:
    probe = Probe()
    callbacks = [probe, MaxFactorCallback()]
    trainer = trainer_of(Net(), tmp_path, **({"max_steps": 6, "callbacks": callbacks} | changes))
    trainer.train()
    assert probe.ages == ages
    history = trainer.state.log_history
    assert [logs["step"] for logs in history if "optimizer/head/update_ratio" in logs] == logged


def test_tensorboard_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))  # from 5.2 on
    trainer = trainer_of(Net(), tmp_path, report_to="tensorboard", callbacks=[MaxFactorCallback()])
    trainer.train()
    [file] = tmp_path.rglob("events.out.tfevents.*")
    events = event_accumulator.EventAccumulator(str(file)).Reload()
    for name in ("optimizer/hidden/update_ratio", "effective_lr/vector"):
        found = [event.value for event in events.Scalars(f"train/{name}")]
        logged = [logs[name] for logs in trainer.state.log_history if "loss" in logs]
        assert found == pytest.approx(logged)


@pytest.mark.parametrize("callbacks", [[], [MaxFactorCallback]], ids=["ForModel", "the callback"])
@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({}, []),
        ({"max_grad_norm": 1.0}, [r"max_grad_norm=1 .*; set max_grad_norm=0"]),
        ({"learning_rate": 1e-5}, ["learning_rate=1e-05 .* not used: .* give 'lr' in the kwargs"]),
        ({"weight_decay": 0.1}, ["weight_decay=0.1 .* not used: .* give 'weight_decay' in"]),
        (
            {"learning_rate": 1e-3, "max_grad_norm": 0.5},
            ["max_grad_norm=0.5", "learning_rate=0.001"],
        ),
        (
            {
                "weight_decay": 0.1,
                "optimizer_cls_and_kwargs": (maxfactor.MaxFactor, {"lr": 0.02}),
            },
            [],  # the Trainer's own groups have it
        ),
    ],
)
def test_arguments_that_do_not_fit_get_a_warning(
    changes: dict[str, Any], messages: list[str], callbacks: list[Any], tmp_path: Path
) -> None:
    """By ForModel, and not again by the callback."""
    trainer = trainer_of(Net(), tmp_path, callbacks=callbacks, max_steps=1, **changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
        trainer.train()  # says it only once
    own = [str(each.message) for each in caught if each.category is UserWarning]
    assert len(own) == len(messages)
    for message, said in zip(messages, own, strict=True):
        assert re.search(message, said)


def test_the_callback_warns_for_an_optimizer_that_was_given(tmp_path: Path) -> None:
    model = Net()
    trainer = trainer_of(
        model, tmp_path, callbacks=[MaxFactorCallback()], max_steps=1, max_grad_norm=1.0,
        optimizers=(maxfactor.for_model(model), None), optimizer_cls_and_kwargs=None,
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"max_grad_norm=1 .*; set max_grad_norm=0"):
        trainer.train()


@pytest.mark.parametrize("norm", [0.0, 1.0])
def test_released_gradients_cannot_be_clipped(norm: float, tmp_path: Path) -> None:
    """A Trainer's clipping is refused; without it, metrics are those of the step."""
    model = Net()
    optimizer = maxfactor.for_model(model)
    maxfactor.release_gradients(model, optimizer)
    trainer = trainer_of(
        model, tmp_path, callbacks=[MaxFactorCallback()], max_grad_norm=norm, max_steps=2,
        optimizers=(optimizer, None), optimizer_cls_and_kwargs=None,
    )  # fmt: skip
    if norm:
        before = weights(model)
        with pytest.raises(
            ValueError, match=r"max_grad_norm=1 .* released gradients.* set max_gra"
        ):
            trainer.train()
        assert all(map(torch.equal, before, model.parameters()))
    else:
        trainer.train()
        assert trainer.state.log_history[1]["optimizer/hidden/grad_rms"] > 0.0


def test_the_callback_refuses_other_optimizers(tmp_path: Path) -> None:
    trainer = trainer_of(
        Net(), tmp_path, callbacks=[MaxFactorCallback()], optimizer_cls_and_kwargs=None
    )
    with pytest.raises(TypeError, match="the Trainer has AdamW; set optimizer_cls_and_kwargs="):
        trainer.train()


# --------------------------------------------------------------------- transformers: an example


def test_whisper_resumes_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example: Any = import_module("whisper_seq2seq_trainer")
    trained, resumed = example.main(tmp_path, steps=24)
    assert_same(trained.model, resumed.model)
    optimizer = resumed.optimizer.optimizer
    assert type(optimizer) is maxfactor.MaxFactor
    assert list(optimizer.left_out) == ["model.encoder.embed_positions.weight"]
    assert resumed.state.global_step == 24
    losses = [logs["loss"] for logs in trained.state.log_history if "loss" in logs]
    assert losses[-1] < 0.8 < 1.6 < losses[0]  # of 8 tokens it knows nothing at first: 2.1
    told = re.findall(r"loss ([\d.]+) on the recordings", capsys.readouterr().out)
    assert told[0] == told[1]


def test_whisper_differs_from_adamw_in_one_line(tmp_path: Path) -> None:
    lines = (EXAMPLES / "whisper_seq2seq_trainer.py").read_text().splitlines()
    code = lines[lines.index('"""', 1) + 1 :]
    ours = [line for line in code if "maxfactor" in line and line != "import maxfactor"]
    assert len(ours) == 1
    assert ours[0].endswith("# <- instead of AdamW")
    usual: dict[str, Any] = {}
    kept = [line for line in code if line not in (*ours, "import maxfactor")]
    exec("\n".join(kept), usual)
    usual["make_checkpoint"](tmp_path)
    trainer = usual["make_trainer"](tmp_path, tmp_path / "out", 4)
    assert type(trainer.create_optimizer()) is torch.optim.AdamW


# --------------------------------------------------------------------------------- accelerate


def test_a_loop_of_accelerate_resumes_bit_for_bit(tmp_path: Path) -> None:
    """With accumulation and bfloat16; the printed losses are those of the same weights."""
    example: Any = import_module("accelerate_loop")
    training = example.Training(steps=16)
    first = [training.epoch(), training.epoch()]
    assert training.optimizer.optimizer.state[training.model[0].weight]["step"] == 8
    training.accelerator.save_state(str(tmp_path))
    second = [training.epoch(), training.epoch()]
    expected = weights(training.model)
    rate = training.schedule.get_last_lr()
    training.accelerator.load_state(str(tmp_path))
    assert training.schedule.get_last_lr() != rate
    assert [training.epoch(), training.epoch()] == second
    assert second[-1] < first[0] - 0.2
    assert training.schedule.get_last_lr() == rate
    for old, new in zip(expected, training.model.parameters(), strict=True):
        assert torch.equal(old, new)


# ---------------------------------------------------------------------------------- Lightning

by_lightning = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning", "ignore::FutureWarning:lightning", "ignore::DeprecationWarning"
)


@by_lightning
def test_lightning_resumes_bit_for_bit(tmp_path: Path) -> None:
    """With automatic and manual optimization, which are the same; the monitor names the groups."""
    pytest.importorskip("lightning")
    example: Any = import_module("lightning_module")
    modules = []
    for automatic in (True, False):
        folder, other = tmp_path / f"{automatic}", tmp_path / f"{automatic}-resumed"
        modules.append(example.fit(folder, epochs=4, automatic=automatic))
        example.fit(other, epochs=2, automatic=automatic)
        modules.append(example.fit(other, epochs=4, automatic=automatic, resume=True))
    for module in modules[1:]:
        assert_same(modules[0], module)
    logged = rows_of_csv(tmp_path / "True", "lr-MaxFactor/hidden")
    rates = [float(row["lr-MaxFactor/hidden"]) for row in logged]
    assert len(rates) == 32
    assert max(rates) == pytest.approx(0.04)  # the recipe's, after the warm-up
    assert rates[0] < 0.01
    for row in logged:  # vectors have a quarter
        assert float(row["lr-MaxFactor/vector"]) == pytest.approx(
            float(row["lr-MaxFactor/head"]) / 4
        )


def rows_of_csv(folder: Path, column: str) -> list[dict[str, str]]:
    [file] = folder.rglob("metrics.csv")
    with file.open() as lines:
        return [row for row in csv.DictReader(lines) if row[column]]


@by_lightning
@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_logs_metrics(automatic: bool, tmp_path: Path) -> None:
    """Of the steps that its logger logs, with the numbers of the optimizer."""
    lightning = pytest.importorskip("lightning")
    from maxfactor.integrations.lightning import MaxFactorCallback as LightningCallback

    example: Any = import_module("lightning_module")
    ages, summaries = [], []

    class Module(example.Classifier):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            optimizer = self.optimizers().optimizer
            try:
                ages.append(optimizer.metrics().age)
                summaries.append(optimizer.metrics().summary())
            except RuntimeError:
                ages.append(-1)

    inputs = torch.randn(64, 16)
    data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", log_every_n_steps=2, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[LightningCallback()],
        logger=lightning.pytorch.loggers.CSVLogger(str(tmp_path)),
        accumulate_grad_batches=2 if automatic else 1,
    )  # fmt: skip
    trainer.fit(Module(automatic=automatic), torch.utils.data.DataLoader(data, batch_size=8))
    logged = rows_of_csv(tmp_path, "optimizer/hidden/update_ratio")
    # Of eight batches: four steps, or eight.
    assert ages == ([-1, -1, -1, 0, 0, 1, 1, 0] if automatic else [-1, 0, 1, 0, 1, 0, 1, 0])
    assert [int(row["step"]) for row in logged] == ([1, 3] if automatic else [1, 3, 5, 7])
    for name in ("hidden/update_ratio", "head/grad_rms", "vector/clip", "grad_norm"):
        assert float(logged[-1][f"optimizer/{name}"]) == pytest.approx(summaries[-1][name])
    assert float(logged[-1]["effective_lr/hidden"]) == pytest.approx(
        summaries[-1]["hidden/step_size"]
    )


@by_lightning
def test_lightning_refuses_what_cannot_work(tmp_path: Path) -> None:
    """Other optimizers, and clipping of released gradients."""
    lightning = pytest.importorskip("lightning")
    from maxfactor.integrations.lightning import MaxFactorCallback as LightningCallback

    example: Any = import_module("lightning_module")

    class Adam(example.Classifier):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    class Released(example.Classifier):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = maxfactor.for_model(self)
            maxfactor.release_gradients(self, optimizer)
            return optimizer

    data = torch.utils.data.TensorDataset(torch.randn(8, 16), torch.zeros(8, dtype=torch.long))
    for module, error, message in (
        (Adam(), TypeError, r"the Trainer has Adam; return maxfactor.for_model\(self\)"),
        (Released(), ValueError, "gradient_clip_val=0.5 cannot act on released gradients"),
    ):
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", enable_progress_bar=False, logger=False,
            enable_model_summary=False, enable_checkpointing=False, gradient_clip_val=0.5,
            callbacks=[LightningCallback()], default_root_dir=str(tmp_path),
        )  # fmt: skip
        with pytest.raises(error, match=message):
            trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))


# ---------------------------------------------------------------------- configuration files


def resumes(example: Any, build: Any) -> None:
    """Train, save, load with `weights_only`, and compare the next steps bit for bit."""
    (model, optimizer), (other, fresh) = build(), build()
    example.train(model, optimizer, 5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    assert example.train(model, optimizer, 5) == example.train(other, fresh, 5)
    assert_same(model, other)


SETTINGS: dict[str, Any] = {
    "eps": [1e-10, 1e-3],
    "momentum": {"beta_max": 0.95},
    "switches": {"decay_by": "relative_step", "kappa_bounds": [0.0, 0.999]},
}


def test_types_of_omegaconf_are_settings() -> None:
    """They are stored as plain ones, and as such compared in every step."""
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(SETTINGS)
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = maxfactor.MaxFactor([weight], **config)
    plain = maxfactor.MaxFactor([nn.Parameter(torch.ones(3, 2))], **SETTINGS)
    for name in SETTINGS:
        for own, other in zip(optimizer.param_groups, plain.param_groups, strict=True):
            assert own[name] == other[name]
            assert type(own[name]) in (dict, list, tuple)
        assert optimizer.defaults[name] == plain.defaults[name]
        assert type(optimizer.defaults[name]) in (dict, list)
    weight.grad = torch.ones_like(weight)
    optimizer.param_groups[0]["momentum"] = config.momentum  # as a sweep may do
    optimizer.step()
    config.momentum.beta_max = 0.2
    with pytest.raises(ValueError, match=r"beta_min must not exceed beta_max, got 0.5 and 0.2"):
        optimizer.step()
    adafactor = maxfactor.Adafactor([weight], eps=config.eps)
    assert adafactor.param_groups[0]["eps"] == (1e-10, 1e-3)
    wrongs: list[Any] = [config.eps[:1], omegaconf.OmegaConf.create([1.0, 1.0, 1.0]), "ab"]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="eps must be a pair"):
            maxfactor.MaxFactor([weight], eps=wrong)


def test_hydra_builds_either_optimizer() -> None:
    hydra = pytest.importorskip("hydra")
    example: Any = import_module("hydra_config")
    with hydra.initialize_config_dir(str(EXAMPLES), version_base=None):
        by_kind = hydra.compose("hydra_config")
        rule = hydra.compose("hydra_config", overrides=["optimizer=rule", "rule.lr=0.03"])
    groups = example.build(by_kind)[1].param_groups
    assert [group["kind"] for group in groups] == list(KINDS)
    assert groups[0]["momentum"]["beta_max"] == 0.9
    [group] = example.build(rule)[1].param_groups
    assert (group["lr"], group["eps"], group["momentum"]["beta_max"]) == (0.03, (1e-10, 1e-3), 0.95)
    assert group["switches"]["kappa_bounds"] == (0.0, 0.999)
    for config in (by_kind, rule):
        resumes(example, lambda config=config: example.build(config))


def test_the_command_of_hydra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("hydra")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hydra_config.py", "optimizer=rule"])
    runpy.run_path(str(EXAMPLES / "hydra_config.py"), run_name="__main__")
    assert float(capsys.readouterr().out.split("loss ")[1]) < 1.0
    assert not list(tmp_path.iterdir())


def test_a_recipe_of_speechbrain() -> None:
    """Read by hyperpyyaml; SpeechBrain itself needs torchaudio, which the tests do without."""
    pytest.importorskip("hyperpyyaml")
    example: Any = import_module("speechbrain_hyperpyyaml")
    optimizer = example.build()[1]
    assert type(optimizer) is maxfactor.MaxFactor
    [group] = optimizer.param_groups
    assert (group["lr"], group["eps"], group["momentum"]["beta_max"]) == (0.02, (1e-10, 1e-3), 0.95)
    resumes(example, example.build)
