"""The names of the speech application that benchmarks use; they import them from here."""

from maxfactor_speech.audio import SAMPLE_RATE
from maxfactor_speech.corpus import Split
from maxfactor_speech.data import Order, collate
from maxfactor_speech.evaluate import decode, in_batches
from maxfactor_speech.features import HOP, log_mel
from maxfactor_speech.model import IGNORED, Codec, Size, loss_of, whisper
from maxfactor_speech.optimizers import make_optimizer
from maxfactor_speech.preparation import MAX_TOKENS, Prepared, prepare, task_codec
from maxfactor_speech.settings import Settings
from maxfactor_speech.shards import Spoken
from maxfactor_speech.synth import Espeak, Location, Script, render
from maxfactor_speech.train import LOG_EVERY, train_until
from maxfactor_speech.trainer import Trainer

__all__ = [
    "HOP",
    "IGNORED",
    "LOG_EVERY",
    "MAX_TOKENS",
    "SAMPLE_RATE",
    "Codec",
    "Espeak",
    "Location",
    "Order",
    "Prepared",
    "Script",
    "Settings",
    "Size",
    "Split",
    "Spoken",
    "Trainer",
    "collate",
    "decode",
    "in_batches",
    "log_mel",
    "loss_of",
    "make_optimizer",
    "prepare",
    "render",
    "task_codec",
    "train_until",
    "whisper",
]
