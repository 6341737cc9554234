"""The command `maxfactor`: train speech recognisers, compare and time optimizers."""

from __future__ import annotations

import shlex
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path  # typer reads the annotations
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except ImportError:
    sys.exit("maxfactor's commands need more packages: pip install 'maxfactor[speech]'")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maxfactor_speech.training.evaluation import Evaluation
    from maxfactor_speech.training.loop import Result
    from maxfactor_speech.training.settings import Settings

STEPS = 500  # as in the settings, which take long to import
WRONG_INPUT = 2
INTERRUPTED = 130  # as shells have it for Ctrl-C

app = typer.Typer(
    help="Train Whisper-like speech recognisers with MaxFactor.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # brackets are brackets
    pretty_exceptions_enable=False,
)


@app.callback()
def _maxfactor() -> None:
    """Train Whisper-like speech recognisers with MaxFactor.

    Start with: maxfactor train
    """


# Options that several commands have; None leaves a setting at its default.
Task = Annotated[str | None, typer.Option(help="digits (default) or sentences")]
Language = Annotated[str | None, typer.Option(help="en (default), de or es")]
Data = Annotated[
    str | None, typer.Option(help="LibriSpeech-like folder, or .tsv/.jsonl of path and text")
]
Validation = Annotated[
    str | None, typer.Option(help="the same, for validation [1 in 20 of --data]")
]
UtteranceCount = Annotated[int | None, typer.Option(help="how many to synthesise")]
ValidationCount = Annotated[int | None, typer.Option(help="the same [256]")]
Model = Annotated[str | None, typer.Option(help="nano (default), tiny, base, or a model's folder")]
Rate = Annotated[float | None, typer.Option(help="highest rate [the optimizer's own]")]
Decay = Annotated[float | None, typer.Option(help="[the optimizer's own]")]
Schedule = Annotated[str | None, typer.Option(help="cosine (default), linear or constant")]
Warmup = Annotated[float | None, typer.Option(help="share of the steps [0.1]")]
Clip = Annotated[float | None, typer.Option(help="gradient norm, 0 for none [1 for peers]")]
Steps = Annotated[int | None, typer.Option(help=f"[{STEPS}]")]
BatchSize = Annotated[int | None, typer.Option(help="[16]")]
Accumulation = Annotated[int | None, typer.Option(help="batches to a step [1]")]
Dtype = Annotated[str | None, typer.Option(help="fp32 (default), bf16 or fp16")]
Device = Annotated[str | None, typer.Option(help="auto (default), cpu, cuda, …")]
Seed = Annotated[int | None, typer.Option(help="[0]")]
Augment = Annotated[
    bool | None, typer.Option("--spec-augment", help="blank out stretches of the audio")
]
CudaGraphs = Annotated[
    bool | None,
    typer.Option("--cuda-graphs/--no-cuda-graphs", help="GPU: launch passes whole [yes]"),
]
EvaluateEvery = Annotated[int | None, typer.Option(help="steps [100]")]
Workers = Annotated[int | None, typer.Option(help="processes that synthesise")]
Cache = Annotated[
    Path | None, typer.Option(help="of synthesised speech [~/.cache/maxfactor/speech]")
]


@app.command()
def train(
    task: Task = None,
    language: Language = None,
    data: Data = None,
    validation: Validation = None,
    utterances: UtteranceCount = None,
    validation_utterances: ValidationCount = None,
    model: Model = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            "--recipe",
            help="speech (default), fam, lean, …, adamw, adafactor, muon, lion",
        ),
    ] = None,
    lr: Rate = None,
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
    keep: Annotated[int | None, typer.Option(help="checkpoints [2]")] = None,
    out: Annotated[Path | None, typer.Option(help="folder [runs/TASK-OPTIMIZER]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with --out")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="write for it")] = False,
    shard: Annotated[
        str | None, typer.Option(help="ddp, fsdp or hsdp: over the processes of torchrun")
    ] = None,
    workers: Workers = None,
    cache: Cache = None,
) -> None:
    """Train a Whisper on synthesised speech, or on your own.

    Example: maxfactor train --task sentences --model tiny --steps 2000 --dtype bf16
    """
    given = dict(locals())
    others = {
        name: given.pop(name)
        for name in ("out", "resume", "tensorboard", "shard", "workers", "cache")
    }
    with _one_line_errors():
        settings = _settings(given, out, resume)
        folder = out or _default_out(settings)
        _train(settings, **{**others, "out": folder})


@app.command()
def compare(
    optimizers: Annotated[
        str, typer.Option(help="names; with --same-time, the first one's time is what others get")
    ] = "speech,adamw",
    seeds: Annotated[int, typer.Option(help="how many for each")] = 1,
    tune: Annotated[bool, typer.Option("--tune", help="look for each one's best rate")] = False,
    same_time: Annotated[
        bool, typer.Option("--same-time", help="also with as much time as the first takes")
    ] = False,
    jobs: Annotated[int, typer.Option(help="trainings at the same time")] = 1,
    task: Task = None,
    language: Language = None,
    data: Data = None,
    validation: Validation = None,
    utterances: UtteranceCount = None,
    validation_utterances: ValidationCount = None,
    model: Model = None,
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
    out: Annotated[Path, typer.Option(help="folder; what is there is not done again")] = Path(
        "runs/compare"
    ),
    cache: Cache = None,
) -> None:
    """Train several optimizers on the same data, and write a report.

    Example: maxfactor compare --optimizers speech,fam,adamw,muon --seeds 3 --tune
    """
    given = dict(locals())
    for name in ("optimizers", "seeds", "tune", "same_time", "jobs", "out", "cache"):
        del given[name]
    with _one_line_errors():
        settings = _settings(given, None, resume=False)
        names = [name.strip() for name in optimizers.split(",") if name.strip()]
        _compare(settings, names, seeds, tune, same_time, jobs, out, cache)


@app.command()
def transcribe(
    model: Annotated[Path, typer.Argument(help="folder of a training, a checkpoint or a model")],
    audio: Annotated[list[Path], typer.Argument(help="WAV, FLAC or OGG files")],
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
) -> None:
    """Print what is said in audio files.

    Example: maxfactor transcribe runs/digits-speech recording.wav
    """
    with _one_line_errors():
        from maxfactor_speech.training.transcription import transcribe_files

        for path, text in transcribe_files(model, audio, device):
            typer.echo(text if len(audio) == 1 else f"{path}\t{text}")


@app.command()
def bench(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    model: Annotated[str, typer.Option(help="whose shapes")] = "whisper-tiny",
    dtype: Annotated[list[str] | None, typer.Option(help="[float32]; may be repeated")] = None,
    optimizers: Annotated[str, typer.Option(help="words from their names")] = "",
    repeats: Annotated[int, typer.Option(help="timed steps of each")] = 11,
    out: Annotated[Path | None, typer.Option(help="a JSON file for the results")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a tiny model and three steps, to see whether it works")
    ] = False,
) -> None:
    """Measure how long a step takes: ours, torch's, and other packages' optimizers.

    Example: maxfactor bench --device cuda --model whisper-large-v3 --optimizers fused
    """
    from maxfactor_speech.bench.step_time import main as measure

    given = ["--device", device, "--model", model, "--repeats", str(repeats)]
    given += ["--dtype", *(dtype or ["float32"]), "--optimizers", *optimizers.split()]
    given += ["--quick"] if quick else []
    given += ["--out", str(out)] if out is not None else []
    measure(given, prog="maxfactor bench")


def main() -> None:
    """Run the command."""
    app()


def _settings(given: dict[str, Any], out: Path | None, resume: bool) -> Settings:
    """What was given, and where it was not the defaults, or what the training began with."""
    from maxfactor_speech.data.audio import InputError
    from maxfactor_speech.training.settings import Settings, read_settings

    if resume and out is None:
        raise InputError("--resume needs --out, the folder of the training to go on with")
    before = read_settings(out) if resume and out is not None else None
    given = {name: value for name, value in given.items() if value is not None}
    try:
        settings = Settings(**given) if before is None else replace(before, **given)
    except ValueError as error:
        raise InputError(str(error)) from error
    for name in ("utterances", "validation_utterances"):
        if name in given and settings.data is not None:
            option = name.replace("_", "-")
            raise InputError(
                f"--{option} {given[name]} is for speech that is synthesised; leave it out, or "
                f"--data {settings.data}"
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

    from maxfactor_speech.training import loop as training
    from maxfactor_speech.training.parallel import is_first
    from maxfactor_speech.training.progress import Silent
    from maxfactor_speech.training.progress import reporter as make_reporter

    reporter = make_reporter(Console()) if is_first() else Silent()
    try:
        result = training.train(
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
            typer.echo(f"stopped and saved at step {result.step}; to go on:")
            launcher = _launcher(shard, result.trainer.ranks.world)
            again = shlex.join(_again(out, cache, workers, tensorboard))
            typer.echo(f"  {launcher} {again}")
        raise typer.Exit(INTERRUPTED)
    if is_first():
        _summary(settings, out, result, result.evaluation)


def _launcher(shard: str | None, world: int) -> str:
    if shard is None:
        return f"{_command()} train"
    return f"torchrun --nproc-per-node {world} -m maxfactor train --shard {shard}"


def _again(out: Path, cache: Path | None, workers: int | None, tensorboard: bool) -> list[str]:
    """The options that going on needs: those that are not among the settings of a folder."""
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
    from maxfactor_speech.compare.comparison import (
        RUNS,
        Plan,
        best_label,
        by_quality,
        compare,
        described,
        finished,
        mean_wer,
        tried,
    )
    from maxfactor_speech.compare.report import report
    from maxfactor_speech.data.audio import InputError, write
    from maxfactor_speech.data.shards import check_writable, write_whole
    from maxfactor_speech.training.loop import check_beforehand, check_model
    from maxfactor_speech.training.preparation import prepare

    try:
        plan = Plan(settings, names, seeds, tune, same_time)
    except ValueError as error:
        raise InputError(str(error)) from error
    if jobs < 1:
        raise InputError(f"jobs must be at least 1, got {jobs}")
    for name in names:
        check_beforehand(replace(settings, optimizer=name), cache)
    check_model(settings)
    check_writable(out, "--out")
    outcomes = compare(plan, out, jobs, cache, typer.echo)
    what = settings.task if settings.data is None else settings.data
    page = out / "report.html"
    title = f"Optimizers compared: {what}, {settings.model}"
    prepared = prepare(settings, cache)
    shown = report(outcomes, title, described(plan, prepared), tried(plan, out))
    write_whole(page, shown.encode())
    example = out / "example.wav"
    write(example, prepared.validation[0].samples)
    typer.echo(f"report:  {page}")
    label = best_label(outcomes)
    group = finished(one for one in outcomes if one.label == label)
    if not group:
        raise InputError("all trainings diverged; --tune tries lower rates, or raise --warmup")
    best = min(group, key=by_quality)
    counted = "" if len(group) == 1 else f" (mean of {len(group)} seeds)"
    typer.echo(f"best:    {label}, WER {mean_wer(group):.1%}{counted}. Try it:")
    paths = shlex.join([str(out / RUNS / best.folder), str(example)])
    typer.echo(f"  {_command()} transcribe {paths}")


def _summary(settings: Settings, out: Path, result: Result, evaluation: Evaluation) -> None:
    """The last lines: how good it is, where it is, and how to use it."""
    from maxfactor_speech.data.audio import write
    from maxfactor_speech.training.metrics import METRICS

    example = out / "example.wav"
    write(example, result.trainer.prepared.validation[0].samples)
    typer.echo(
        f"{settings.optimizer}: WER {evaluation.wer:.1%}, CER {evaluation.cer:.1%} "
        f"after {result.step} steps, {result.seconds:.0f} s of training"
    )
    typer.echo(f"model:   {result.checkpoint}")
    typer.echo(f"metrics: {out / METRICS}")
    typer.echo("try it:")
    typer.echo(f"  {_command()} transcribe {shlex.join([str(out), str(example)])}")


def _command() -> str:
    """How this program is called, for a shell: by a name that is found, else by its path."""
    called = Path(sys.argv[0])
    if called.stem == "maxfactor":
        return "maxfactor" if which("maxfactor") else shlex.quote(str(called))
    names = [name for name in ("python", "python3") if which(name) == sys.executable]
    return f"{(names or [shlex.quote(sys.executable)])[0]} -m maxfactor"


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """A wrong input is told in one line, with exit status 2."""
    from maxfactor_speech.data.audio import InputError
    from maxfactor_speech.training.parallel import is_first

    try:
        yield
    except InputError as error:
        if is_first():  # all processes of a training fail together, for the same reason
            typer.echo(f"maxfactor: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(WRONG_INPUT) from error


if __name__ == "__main__":
    main()
