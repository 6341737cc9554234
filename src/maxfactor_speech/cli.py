"""The command `maxfactor`: train speech recognisers, compare and time optimizers."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path  # typer reads the annotations
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any, TextIO

try:
    import typer
except ImportError:
    sys.exit(
        "The command maxfactor needs more packages. In a clone of the repository, run: "
        "pip install '.[speech]'"
    )

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maxfactor_speech.compare.runs import RunResult
    from maxfactor_speech.memory import Row
    from maxfactor_speech.training.evaluation import Evaluation, Segment
    from maxfactor_speech.training.loop import TrainingResult
    from maxfactor_speech.training.settings import Settings

NOT_USABLE = 1
WRONG_INPUT = 2
INTERRUPTED = 130  # the exit status of shells for Ctrl-C

app = typer.Typer(
    help="Train Whisper-like speech recognisers with MaxFactor.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # square brackets are text, not markup
    pretty_exceptions_enable=False,
)


def _examples(*commands: str) -> str:
    """Return the end of a command's help. The first character keeps its lines as they are."""
    return "\n".join(["\b", "Examples:", *(f"  maxfactor {one}" for one in commands)])


def _print_version(wanted: bool) -> None:
    if wanted:
        import torch  # imported here, because it takes seconds

        import maxfactor

        typer.echo(f"maxfactor {maxfactor.__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def _maxfactor(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train Whisper-like speech recognisers with MaxFactor.

    Start with: maxfactor train
    """


# Options of several commands. None is the default of the setting, in square brackets.
Task = Annotated[
    str | None, typer.Option(help="Speech to synthesise: digits or sentences [digits]")
]
Language = Annotated[
    str | None,
    typer.Option(
        help="Spoken language, code or name; if synthesised, en, de or es [the model's, or en]"
    ),
]
Translate = Annotated[
    bool | None,
    typer.Option("--translate/--no-translate", help="The texts of --data are English translations"),
]
Data = Annotated[
    str | None,
    typer.Option(help="Your recordings: a folder, .tsv, .csv or .jsonl; see maxfactor data --help"),
]
Validation = Annotated[
    str | None,
    typer.Option(help="Recordings for validation [the validation part of --data, or 1 in 20]"),
]
Strict = Annotated[
    bool | None,
    typer.Option(
        "--strict", help="Refuse recordings that cannot be used, instead of leaving them out"
    ),
]
UtteranceCount = Annotated[
    int | None,
    typer.Option(help="Utterances to synthesise [all that the steps need, at most 24000]"),
]
ValidationCount = Annotated[
    int | None, typer.Option(help="Utterances to synthesise for validation [256]")
]
Model = Annotated[
    str | None,
    typer.Option(help="nano, tiny or base with random weights, or a model folder [nano]"),
]
LearningRate = Annotated[
    float | None,
    typer.Option(help="Peak learning rate [the optimizer's; a quarter of it for a model folder]"),
]
Decay = Annotated[float | None, typer.Option(help="Weight decay [the optimizer's default]")]
Schedule = Annotated[
    str | None, typer.Option(help="Decay of the learning rate: cosine, linear or constant [cosine]")
]
Warmup = Annotated[float | None, typer.Option(help="Warm-up, as a share of the steps [0.1]")]
Clip = Annotated[
    float | None,
    typer.Option(help="Clip gradients to this norm, 0 for no clipping [1; 0 for our recipes]"),
]
Steps = Annotated[int | None, typer.Option(help="Steps of the optimizer [500]")]
BatchSize = Annotated[int | None, typer.Option(help="Utterances per batch [16]")]
Accumulation = Annotated[int | None, typer.Option(help="Batches per step [1]")]
Dtype = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 [fp32]")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, … [auto]")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, order and augmentation [0]")]
Augment = Annotated[
    bool | None, typer.Option("--spec-augment", help="Mask random stretches of time and frequency")
]
CudaGraphs = Annotated[
    bool | None,
    typer.Option("--cuda-graphs/--no-cuda-graphs", help="Use CUDA graphs on a GPU [yes]"),
]
EvaluateEvery = Annotated[
    int | None, typer.Option(help="Steps between evaluations and checkpoints [100]")
]
Workers = Annotated[
    int | None, typer.Option(help="Processes that synthesise speech [one per core]")
]
Cache = Annotated[
    Path | None,
    typer.Option(help="Folder that caches synthesised speech [~/.cache/maxfactor/speech]"),
]


@app.command(
    epilog=_examples(
        "train",
        "train --task sentences --model tiny --steps 2000 --dtype bf16",
        "train --data recordings/ --model whisper-small --language german",
        "train --resume --out runs/digits-quality",
    )
)
def train(
    task: Task = None,
    language: Language = None,
    data: Data = None,
    validation: Validation = None,
    strict: Strict = None,
    utterances: UtteranceCount = None,
    validation_utterances: ValidationCount = None,
    model: Model = None,
    translate: Translate = None,
    freeze_encoder: Annotated[
        bool | None, typer.Option("--freeze-encoder", help="Train only the decoder")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            "--recipe",
            help="quality, fast, lean, published-1.0, …, adamw, adafactor, muon, lion [quality]",
        ),
    ] = None,
    lr: LearningRate = None,
    weight_decay: Decay = None,
    schedule: Schedule = None,
    warmup: Warmup = None,
    clip: Clip = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    grad_accum: Accumulation = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = None,
    spec_augment: Augment = None,
    cuda_graphs: CudaGraphs = None,
    evaluate_every: EvaluateEvery = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option("--gradient-checkpointing", help="Compute activations twice, to save memory"),
    ] = None,
    release_gradients: Annotated[
        bool | None,
        typer.Option(
            "--release-gradients", help="Use and free gradients during backward: less memory"
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="fp32, or bf16 with stochastic rounding: half the memory [fp32]"),
    ] = None,
    lora: Annotated[
        int | None, typer.Option(help="Train adapters of this rank, not the model folder itself")
    ] = None,
    lora_alpha: Annotated[
        float | None, typer.Option(help="Adapters count alpha / rank times [twice the rank]")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(help="Checkpoints to keep, besides the best [2]")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="End after that many evaluations without improvement [never]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write [runs/TASK-OPTIMIZER]")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the training in --out, with more --steps if you like"
        ),
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard logs")
    ] = False,
    shard: Annotated[str | None, typer.Option(help="Under torchrun: ddp, fsdp or hsdp")] = None,
    workers: Workers = None,
    cache: Cache = None,
) -> None:
    """Train a Whisper on synthesised speech, or on your recordings."""
    given = dict(locals())
    others = {
        name: given.pop(name)
        for name in ("out", "resume", "tensorboard", "shard", "workers", "cache")
    }
    with _one_line_errors():
        settings = _settings(given, out, resume)
        folder = out or _default_out(settings)
        _train(settings, **{**others, "out": folder})


@app.command(
    epilog=_examples(
        "compare --optimizers quality,fast,adamw",
        "compare --optimizers quality,muon --seeds 3 --tune --jobs 2",
    )
)
def compare(
    optimizers: Annotated[
        str,
        typer.Option(
            help="Names, separated by commas: quality, fast, lean, published-1.0, …, adamw, "
            "adafactor, muon, lion"
        ),
    ] = "quality,adamw",
    seeds: Annotated[
        int, typer.Option(help="Trainings of each optimizer, each with its own seed")
    ] = 1,
    tune: Annotated[
        bool, typer.Option("--tune", help="Search for the best learning rate of each optimizer")
    ] = False,
    same_time: Annotated[
        bool,
        typer.Option(
            "--same-time", help="Also train faster optimizers for the time of the first one"
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(help="Trainings that run at the same time")] = 1,
    task: Task = None,
    language: Language = None,
    data: Data = None,
    validation: Validation = None,
    strict: Strict = None,
    utterances: UtteranceCount = None,
    validation_utterances: ValidationCount = None,
    model: Model = None,
    translate: Translate = None,
    schedule: Schedule = None,
    warmup: Warmup = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    grad_accum: Accumulation = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = None,
    spec_augment: Augment = None,
    cuda_graphs: CudaGraphs = None,
    evaluate_every: EvaluateEvery = None,
    out: Annotated[
        Path, typer.Option(help="Folder to write; its finished trainings are reused")
    ] = Path("runs/compare"),
    cache: Cache = None,
) -> None:
    """Train several optimizers on the same data, and write a report."""
    given = dict(locals())
    for name in ("optimizers", "seeds", "tune", "same_time", "jobs", "out", "cache"):
        del given[name]
    with _one_line_errors():
        settings = _settings(given, None, resume=False)
        names = [name.strip() for name in optimizers.split(",") if name.strip()]
        _compare(settings, names, seeds, tune, same_time, jobs, out, cache)


@app.command(
    epilog=_examples(
        "data recordings/",
        "data recordings/ --validation more.tsv --decode",
        "data recordings.tsv --model whisper-small",
    )
)
def data(
    path: Annotated[Path, typer.Argument(help="A folder or a table of recordings")],
    validation: Annotated[Path | None, typer.Option(help="Recordings for validation")] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Decode all audio, to find all damaged files")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Model folder whose longest audio and texts count")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Look recordings over without training.

    Takes folders in the layout of LibriSpeech, Common Voice, audiofolder, LJSpeech and Kaldi, NeMo
    manifests, and .tsv, .csv and .jsonl files with the columns path and text.
    """
    with _one_line_errors():
        from maxfactor_speech.data_command import show_data

        if not show_data(path, validation, as_json, decode, model):
            typer.echo(f"maxfactor: {path}: no recording can be used", err=True)
            raise typer.Exit(NOT_USABLE)


@app.command(
    epilog=_examples(
        "transcribe runs/digits-quality recording.wav",
        "transcribe whisper-small talk.mp3 --timestamps --device cuda",
    )
)
def transcribe(
    model: Annotated[Path, typer.Argument(help="Folder of a training, a checkpoint or a model")],
    audio: Annotated[list[Path], typer.Argument(help="WAV, FLAC, OGG or MP3 files")],
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Print start, end and text of each segment")
    ] = False,
) -> None:
    """Transcribe audio files of up to four hours."""
    with _one_line_errors():
        from maxfactor_speech.training.transcription import transcribe_files

        for path, text, segments in transcribe_files(
            model, audio, device, timestamps, say=partial(typer.echo, err=True)
        ):
            lines = [f"{_span(one)}\t{one.text}" for one in segments] if timestamps else [text]
            for line in lines:
                typer.echo(line if len(audio) == 1 else f"{path}\t{line}")


@app.command(
    epilog=_examples(
        "bench --optimizers quality,fast,adamw",
        "bench --device cuda --model whisper-large-v3 --dtype bfloat16",
    )
)
def bench(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    model: Annotated[
        str, typer.Option(help="Shapes: whisper-tiny, -base, -small, -medium, -large-v3")
    ] = "whisper-tiny",
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32, bfloat16, float16; repeatable [float32]")
    ] = None,
    optimizers: Annotated[
        str,
        typer.Option(
            help="Names, separated by commas, as of maxfactor compare; all for every "
            "implementation [quality, fast, lean, adamw, adafactor, muon, lion]"
        ),
    ] = "",
    repeats: Annotated[int, typer.Option(help="Timed steps per optimizer")] = 11,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Try it with a tiny model and three steps")
    ] = False,
) -> None:
    """Measure the step times of MaxFactor and other optimizers."""
    from maxfactor_speech.bench.step_time import main as measure

    given = ["--device", device, "--model", model, "--repeats", str(repeats)]
    given += ["--dtype", *(dtype or ["float32"])]
    given += ["--optimizers", optimizers] if optimizers else []
    given += ["--quick"] if quick else []
    given += ["--out", str(out)] if out is not None else []
    measure(given, prog="maxfactor bench")


@app.command(
    epilog=_examples(
        "memory large-v3 --gradient-checkpointing --release-gradients",
        "memory small --batch-size 16 --dtype fp32",
    )
)
def memory(
    model: Annotated[
        str, typer.Argument(help="tiny, base, small, medium, large-v3, …, or a model folder")
    ],
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: bf16, fp16 or fp32")] = "bf16",
    batch_size: Annotated[int, typer.Option(help="Examples per batch; recordings of 30 s")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens of text per example")] = 448,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option("--gradient-checkpointing", help="Compute activations twice, to save memory"),
    ] = False,
    release_gradients: Annotated[
        bool,
        typer.Option("--release-gradients", help="Free gradients in backward, with our recipes"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes")] = False,
) -> None:
    """Estimate the GPU memory that training a model takes with each optimizer."""
    with _one_line_errors():
        from maxfactor_speech.memory import memory_table

        rows = memory_table(
            model, dtype, batch_size, tokens, gradient_checkpointing, release_gradients
        )
        if as_json:
            typer.echo(json.dumps([row.as_dict() for row in rows], indent=1))
        else:
            _print_memory(rows)


def _span(segment: Segment) -> str:
    times = (segment.start, segment.end)
    return "-".join("" if time is None else f"{time:.2f}" for time in times)


def main() -> None:
    """Run the command."""
    app()


def _settings(given: dict[str, Any], out: Path | None, resume: bool) -> Settings:
    """Return the given settings; the others are defaults, or those of the resumed training."""
    from maxfactor_speech.errors import InputError
    from maxfactor_speech.training.settings import Settings, read_settings

    if resume and out is None:
        raise InputError("--resume needs --out, the folder of the training to continue")
    before = read_settings(out) if resume and out is not None else None
    given = {name: value for name, value in given.items() if value is not None}
    try:
        settings = Settings(**given) if before is None else replace(before, **given)
    except ValueError as error:
        raise InputError(str(error)) from error
    if given.get("dtype") == "fp32" and settings.weights != "fp32":
        raise InputError(
            f"--dtype fp32: weights in {settings.weights} compute in {settings.weights}; leave it "
            "out, or choose --weights fp32"
        )
    for name in ("utterances", "validation_utterances"):
        if name in given and settings.data is not None:
            option = name.replace("_", "-")
            raise InputError(
                f"--{option} {given[name]} applies only to synthesised speech; leave it out, or "
                f"leave out --data {settings.data}"
            )
    return settings


def _default_out(settings: Settings) -> Path:
    what = settings.task if settings.data is None else Path(settings.data).stem
    return Path("runs") / f"{what}-{settings.optimizer}"


def _train(
    settings: Settings,
    out: Path,
    resume: bool,
    tensorboard: bool,
    shard: str | None,
    workers: int | None,
    cache: Path | None,
) -> None:
    from rich.console import Console

    from maxfactor_speech.training import loop
    from maxfactor_speech.training.parallel import is_first
    from maxfactor_speech.training.progress import Reporter, make_reporter

    reporter = make_reporter(Console()) if is_first() else Reporter()
    try:
        with _plain_warnings():
            result = loop.train(
                settings,
                out,
                resume,
                reporter,
                tensorboard=tensorboard,
                cache=cache,
                workers=workers,
                shard=shard,
            )
    finally:
        reporter.close()
    if result.evaluation is None:
        if is_first():
            launcher = _launcher(shard, result.trainer.processes.world)
            options = shlex.join(_resume_options(out, cache, workers, tensorboard))
            typer.echo(f"stopped and saved at step {result.step}; to continue:")
            typer.echo(f"  {launcher} {options}")
        raise typer.Exit(INTERRUPTED)
    if is_first():
        _print_summary(settings, out, result, result.evaluation)


def _launcher(shard: str | None, world: int) -> str:
    if shard is None:
        return f"{_command()} train"
    return f"torchrun --nproc-per-node {world} -m maxfactor_speech train --shard {shard}"


def _resume_options(
    out: Path, cache: Path | None, workers: int | None, tensorboard: bool
) -> list[str]:
    """Return the options to resume with: those that `settings.json` does not contain."""
    options = ["--resume", "--out", str(out)]
    options += ["--cache", str(cache)] if cache is not None else []
    options += ["--workers", str(workers)] if workers is not None else []
    return options + (["--tensorboard"] if tensorboard else [])


def _compare(
    settings: Settings,
    names: list[str],
    seeds: int,
    tune: bool,
    same_time: bool,
    jobs: int,
    out: Path,
    cache: Path | None,
) -> None:
    from rich.console import Console

    from maxfactor_speech.atomic import check_writable, write_atomically
    from maxfactor_speech.compare import comparison as comparing
    from maxfactor_speech.compare.progress import make_display
    from maxfactor_speech.compare.report import report
    from maxfactor_speech.compare.runs import Comparison
    from maxfactor_speech.data.audio import write
    from maxfactor_speech.errors import InputError
    from maxfactor_speech.training.loop import check_model, check_requirements
    from maxfactor_speech.training.preparation import prepare

    try:
        comparison = Comparison(settings, names, seeds, tune, same_time)
    except ValueError as error:
        raise InputError(str(error)) from error
    if jobs < 1:
        raise InputError(f"jobs must be at least 1, got {jobs}")
    for name in names:
        check_requirements(replace(settings, optimizer=name), cache)
    check_model(settings)
    check_writable(out, "--out")
    display = make_display(Console(), typer.echo)
    try:
        results = comparing.compare(comparison, out, jobs, cache, display)
    finally:
        display.close()
    prepared = prepare(settings, cache)
    data = settings.task if settings.data is None else settings.data
    title = f"Optimizers compared: {data}, {settings.model}"
    tried = comparing.tuning_results(comparison, out)
    page = report(results, title, comparing.describe(comparison, prepared), tried)
    write_atomically(out / "report.html", page.encode())
    write(out / "example.wav", prepared.validation[0].samples)
    typer.echo(f"report:  {out / 'report.html'}")
    _print_best(results, out)


def _print_best(results: list[RunResult], out: Path) -> None:
    """Print the best optimizer, and a command that tries its model."""
    from maxfactor_speech.compare.runs import (
        RUNS,
        best_errors,
        best_label,
        by_quality,
        finished,
        last_errors,
        mean_wer,
    )
    from maxfactor_speech.errors import InputError

    label = best_label(results)
    group = finished(one for one in results if one.label == label)
    if not group:
        raise InputError("all trainings diverged; try lower rates with --tune, or raise --warmup")
    chosen = min(group, key=by_quality)
    model = out / RUNS / chosen.folder
    best, last = mean_wer(best_errors(group)), mean_wer(last_errors(group))
    seeds = "" if len(group) == 1 else f" (mean of {len(group)} seeds)"
    typer.echo(f"best:    {label}, WER {best:.1%}{seeds}; after the last step {last:.1%}")
    if chosen.unsurpassed is not None:
        typer.echo(
            f"         it did not improve on the model that it began with, WER "
            f"{chosen.unsurpassed:.1%}, which is kept as its best"
        )
    typer.echo("try it:")
    typer.echo(f"  {_transcribe_command(model, out)}")


def _print_summary(
    settings: Settings, out: Path, result: TrainingResult, evaluation: Evaluation
) -> None:
    """Print the error rates, the files, and a command that tries the model."""
    from maxfactor_speech.data.audio import write
    from maxfactor_speech.training.checkpoint import BEST
    from maxfactor_speech.training.metrics import METRICS
    from maxfactor_speech.training.progress import rates

    trainer = result.trainer
    write(out / "example.wav", trainer.prepared.validation[0].samples)
    typer.echo(
        f"{settings.optimizer}: {rates(evaluation)} after {result.step} steps, "
        f"{result.seconds:.0f} s of training"
    )
    if result.step < settings.steps:
        typer.echo(f"ended early: no improvement in {settings.patience} evaluations")
    best = trainer.best
    if best is not None:
        typer.echo(f"best:    {out / BEST}, WER {best.wer:.1%} at step {best.step}")
        if best.step == 0:
            typer.echo("         the training did not improve on the model that it began with")
    typer.echo(f"last:    {result.checkpoint}")
    typer.echo(f"metrics: {out / METRICS}")
    typer.echo("try it:")
    typer.echo(f"  {_transcribe_command(out, out)}")


def _print_memory(rows: list[Row]) -> None:
    parts = ("weights", "gradients", "state", "borrowed", "activations", "total")
    is_small = max(row.weights for row in rows) < 1e8
    unit = 1e6 if is_small else 1e9
    lines: list[tuple[str, ...]] = [("MB" if is_small else "GB", *parts, "cards")]
    for row in rows:
        sizes = [f"{getattr(row, part) / unit:.2f}" for part in parts]
        cards = f"{row.cards[0]} GB and more" if row.cards else "none up to 80 GB"
        lines.append((row.optimizer, *sizes, cards))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *numbers, last in lines:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False)]
        typer.echo("  ".join([first.ljust(widths[0]), *cells, last]))


def _transcribe_command(model: Path, out: Path) -> str:
    return f"{_command()} transcribe {shlex.join([str(model), str(out / 'example.wav')])}"


def _command() -> str:
    """Return how to call this program from a shell: by its name if it is on PATH."""
    called = Path(sys.argv[0])
    if called.stem == "maxfactor":
        return "maxfactor" if which("maxfactor") else shlex.quote(str(called))
    names = [name for name in ("python", "python3") if which(name) == sys.executable]
    return f"{(names or [shlex.quote(sys.executable)])[0]} -m maxfactor_speech"


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings of ours, such as that of an unusual rate, without the place in the source."""
    ours = Path(__file__).parent
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if Path(filename).is_relative_to(ours):
                typer.echo(f"maxfactor: warning: {' '.join(str(message).split())}", err=True)
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Print an InputError in one line, and exit with status 2."""
    from maxfactor_speech.errors import DeviceMemoryError, InputError
    from maxfactor_speech.training.parallel import is_first

    try:
        yield
    except InputError as error:
        # All processes of a training fail with the same error, but for their memory.
        if is_first() or isinstance(error, DeviceMemoryError):
            typer.echo(f"maxfactor: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(WRONG_INPUT) from error
