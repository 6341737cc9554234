"""Model folders of others: damaged, absurd, or made to run code. Each ends in one sentence."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from typer.testing import CliRunner

from fuzzing import EXAMPLES, fuzzed
from maxfactor_speech.cli import app
from maxfactor_speech.errors import InputError
from maxfactor_speech.memory import memory_table
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.model_folder import load_model
from toy_whisper import make_folder

LOADED = EXAMPLES // 10  # models that are loaded, which takes longer than a file
CONFIG, GENERATION, PROCESSOR = "config.json", "generation_config.json", "processor_config.json"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact") / "whisper"
    make_folder(folder, 5, 0)
    return folder


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(intact, tmp_path / "whisper"))


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    part = content["feature_extractor"] if path.name == PROCESSOR else content
    part |= changes
    path.write_text(json.dumps(content))


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


ABSURD: list[tuple[str, str, Any, str]] = [
    (CONFIG, "d_model", 10**9, "d_model must be at most 100000000, got 1000000000"),
    (CONFIG, "d_model", 10**7, "describes a model of .* parameters, but the weights have"),
    (CONFIG, "encoder_layers", 10**7, "encoder_layers must be at most 1000"),
    (CONFIG, "decoder_layers", 40, "describes a model of"),
    (CONFIG, "vocab_size", 10**8, "describes a model of"),
    (CONFIG, "max_source_positions", 10**8, "describes a model of"),
    (CONFIG, "d_model", "wide", "cannot be read as a Whisper model"),
    (CONFIG, "d_model", -1, "cannot be read as a Whisper model"),
    (CONFIG, "encoder_attention_heads", 0, "cannot be read as a Whisper model"),
    (CONFIG, "encoder_ffn_dim", 64, "cannot be read as a Whisper model"),
    (CONFIG, "pad_token_id", 10**6, "cannot be read as a Whisper model"),
    (CONFIG, "model_type", ["whisper"], r"a model of type \['whisper'\]"),
    (CONFIG, "attn_implementation", "someone/kernel", "names code of others"),
    (CONFIG, "attn_implementation", {"": "someone/kernel"}, "names code of others"),
    (GENERATION, "num_beams", 10**6, "num_beams must be at most 100"),
    (GENERATION, "max_length", 1.5, "max_length must be a whole number"),
    (GENERATION, "suppress_tokens", [10**6], "suppress_tokens has the token 1000000"),
    (GENERATION, "begin_suppress_tokens", ["x"], "begin_suppress_tokens has the token x"),
    (GENERATION, "lang_to_id", {"<|en|>": 10**6}, "lang_to_id has the token"),
    (GENERATION, "no_timestamps_token_id", [], "cannot be read as a Whisper model"),
    (GENERATION, "decoder_start_token_id", -1, "decoder_start_token_id has the token -1"),
    (PROCESSOR, "feature_size", 10**9, "feature_size must be between 1 and 1024"),
    (PROCESSOR, "n_fft", 10**9, "n_fft must be between 1 and 65536"),
    (PROCESSOR, "chunk_length", 10**9, "chunk_length must be between 1 and 3600"),
    (PROCESSOR, "hop_length", 0, "hop_length must be between 1 and 65536"),
    (PROCESSOR, "sampling_rate", None, "sampling_rate must be between"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "entry", "value", "message"), ABSURD)
def test_absurd_entries_are_refused(
    folder: Path, name: str, entry: str, value: Any, message: str
) -> None:
    """Before memory is taken for them."""
    edit(folder / name, **{entry: value})
    with pytest.raises(InputError, match=message) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "has no weights .*; download the model again",
    ),
    "half the weights": (
        lambda f: os.truncate(
            f / "model.safetensors", (f / "model.safetensors").stat().st_size - 1000
        ),
        r"weights are damaged or were not copied completely \(.*\); download or copy them again",
    ),
    "cut weights": (lambda f: os.truncate(f / "model.safetensors", 70_000), "one of the files is"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    "cut tokenizer": (lambda f: os.truncate(f / "tokenizer.json", 5_000), "cannot be read"),
    "another tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot be read"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), "must be a JSON object, got list"),
    "nesting": (lambda f: (f / CONFIG).write_text("[" * 10**6), r"config\.json: cannot be read"),
    "no text": (lambda f: (f / CONFIG).write_bytes(b"\xff\xfe{"), r"config\.json: cannot be read"),
    "a large config": (lambda f: os.truncate(f / CONFIG, 2**27), "128 MiB, too large"),
    "adapters": (
        lambda f: (f / "adapter_config.json").write_text('{"base_model_name_or_path": "/etc"}'),
        "a part of the model is elsewhere",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folders_are_refused(folder: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(InputError, match=message) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)


def test_the_commands_say_it_in_one_line(folder: Path, tmp_path: Path) -> None:
    sound, table, out = tmp_path / "a.wav", tmp_path / "a.tsv", tmp_path / "out"
    soundfile.write(sound, np.zeros(8_000), 16_000)
    table.write_text("a.wav\tone\n")
    edit(folder / CONFIG, d_model=10**9)
    for arguments in (
        ("train", "--model", folder, "--data", table, "--validation", table, "--out", out),
        ("transcribe", folder, sound),
        ("memory", folder),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith(f"maxfactor: {folder}/config.json: d_model must be at most")
        assert result.stderr.count("\n") == 1
    assert not out.exists()


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([10**9, 10**30, -1, 0, 1, 2, 3, 10**5, "x", "", None, [], {}, True, 1.5]),
    st.integers(-5, 500),
    st.lists(st.one_of(st.integers(-2, 10**6), st.text(max_size=3)), max_size=3),
)


def test_random_entries_load_or_are_refused(intact: Path, tmp_path: Path) -> None:
    names = {
        name: sorted(json.loads((intact / name).read_text()))
        for name in (CONFIG, GENERATION, "tokenizer_config.json")
    }
    entries = st.sampled_from([(name, entry) for name, all_ in names.items() for entry in all_])
    folder = Path(shutil.copytree(intact, tmp_path / "whisper"))
    outcomes: Counter[str] = Counter()

    @fuzzed(LOADED)
    @given(entries, VALUES)
    def check(chosen: tuple[str, str], value: Any) -> None:
        name, entry = chosen
        for each in names:
            shutil.copy(intact / each, folder / each)
        edit(folder / name, **{entry: value})
        uses: list[Callable[[], object]] = [lambda: load_model(folder)]
        uses += [lambda: memory_table(str(folder))] if name == CONFIG else []
        for use in uses:
            with suppress(InputError):
                use()
                outcomes["loaded"] += 1
            outcomes["tried"] += 1

    check()
    assert LOADED / 10 < outcomes["loaded"] < outcomes["tried"] - LOADED / 10


# --------------------------------------------------------------------------- nothing is run


class Touch:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_torch_files_are_read_as_weights_alone(folder: Path, tmp_path: Path) -> None:
    """As `pytorch_model.bin` and as the state of a training; the toy's weights pass that way."""
    ran, weights = tmp_path / "ran", folder / "pytorch_model.bin"
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, weights)
    assert load_model(folder).model.config.d_model == 48
    torch.save({**state, "x": Touch(ran)}, weights)
    with pytest.raises(InputError, match="cannot be read as a Whisper model"):
        load_model(folder)
    weights.write_bytes(pickle.dumps(Touch(ran)) + bytes(2**20))
    with pytest.raises(InputError, match="cannot be read as a Whisper model"):
        load_model(folder)
    torch.save({"step": Touch(ran)}, folder / checkpoint.TRAINING)
    with pytest.raises(InputError, match="the file is damaged"):
        checkpoint.load_training(folder)
    assert not ran.exists()
    pickle.loads(pickle.dumps(Touch(ran)))
    assert ran.exists()  # it would have been seen


def sharded(folder: Path, lr: Any = 0.5) -> Path:
    """Optimizer state as `torch.distributed.checkpoint` writes it, with a value of one's own."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state: Any = get_optimizer_state_dict(model, optimizer)
    state["param_groups"][0]["lr"] = lr
    save({checkpoint.STATE_KEY: state}, checkpoint_id=folder / checkpoint.SHARDED_STATE)
    return folder


def load_sharded(folder: Path) -> float:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    checkpoint.load_sharded_state(folder, model, [optimizer], None)
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sharded_state_is_read_as_plain_values(tmp_path: Path) -> None:
    """Torch itself would unpickle its metadata, and all values that are no tensors."""
    ran = tmp_path / "ran"
    assert load_sharded(sharded(tmp_path / "good")) == 0.5
    with pytest.raises(InputError, match=r"optimizer: cannot be read"):
        load_sharded(sharded(tmp_path / "value", Touch(ran)))
    metadata = sharded(tmp_path / "metadata") / checkpoint.SHARDED_STATE / ".metadata"
    for names in (Touch(ran), {"x": Touch(ran)}):
        metadata.write_bytes(pickle.dumps(names))
        with pytest.raises(InputError, match=r"\.metadata: .* names posix\.mkdir, which is no"):
            load_sharded(tmp_path / "metadata")
    assert not ran.exists()


def test_code_in_a_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    """And nobody is asked whether to run it."""
    ran = tmp_path / "ran"
    code = f"import os\nos.mkdir({str(ran)!r})\n"
    for name in ("own.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    names = ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoFeatureExtractor", "AutoProcessor")
    own = {"auto_map": dict.fromkeys(names, "own.Own")}
    for name in (CONFIG, "tokenizer_config.json", PROCESSOR):
        edit(folder / name, **own)
    assert load_model(folder).model.config.d_model == 48
    assert memory_table(str(folder))
    edit(folder / CONFIG, model_type="own")
    with pytest.raises(InputError, match="cannot be read"):
        memory_table(str(folder))
    assert not ran.exists()


@pytest.mark.parametrize("name", ["pipeline", "Trainer", "logging", "WhisperConfig", "", 5, None])
def test_an_architecture_must_be_a_model(folder: Path, name: Any) -> None:
    """`transformers` has other names, too, which would be called with the config."""
    edit(folder / CONFIG, architectures=[name])
    with pytest.raises(InputError, match="names no known architecture"):
        memory_table(str(folder))
