"""The names of the speech application that benchmarks use; they import them from here."""

from maxfactor_speech.compare.progress import RunBars, RunProgress
from maxfactor_speech.compare.runs import RUNS, Comparison, Run
from maxfactor_speech.data.audio import SAMPLE_RATE
from maxfactor_speech.data.batches import (
    Order,
    Utterances,
    collate,
    evaluation_batches,
    seconds_needed,
)
from maxfactor_speech.data.corpus import Split, draw
from maxfactor_speech.data.espeak import Espeak, Location
from maxfactor_speech.data.features import HOP, log_mel
from maxfactor_speech.data.shards import Utterance
from maxfactor_speech.data.synthesis import VOICES, Script, SpeechRequest, render
from maxfactor_speech.data.synthesis import synthesise as synthesise_shards
from maxfactor_speech.data.tokens import IGNORED, Codec
from maxfactor_speech.errors import DeviceMemoryError
from maxfactor_speech.training.evaluation import Evaluation, decode, in_batches
from maxfactor_speech.training.loop import LOG_EVERY, train, train_until
from maxfactor_speech.training.memory_needs import memory_needs
from maxfactor_speech.training.metrics import read_metrics
from maxfactor_speech.training.model import Size, loss_of, whisper
from maxfactor_speech.training.optimizers import make_optimizer
from maxfactor_speech.training.preparation import MAX_TOKENS, Prepared, prepare, task_codec
from maxfactor_speech.training.progress import Pace, Reporter
from maxfactor_speech.training.settings import Settings
from maxfactor_speech.training.trainer import Trainer, repeatable

__all__ = [
    "HOP",
    "IGNORED",
    "LOG_EVERY",
    "MAX_TOKENS",
    "RUNS",
    "SAMPLE_RATE",
    "VOICES",
    "Codec",
    "Comparison",
    "DeviceMemoryError",
    "Espeak",
    "Evaluation",
    "Location",
    "Order",
    "Pace",
    "Prepared",
    "Reporter",
    "Run",
    "RunBars",
    "RunProgress",
    "Script",
    "Settings",
    "Size",
    "SpeechRequest",
    "Split",
    "Trainer",
    "Utterance",
    "Utterances",
    "collate",
    "decode",
    "draw",
    "evaluation_batches",
    "in_batches",
    "log_mel",
    "loss_of",
    "make_optimizer",
    "memory_needs",
    "prepare",
    "read_metrics",
    "render",
    "repeatable",
    "seconds_needed",
    "synthesise_shards",
    "task_codec",
    "train",
    "train_until",
    "whisper",
]
