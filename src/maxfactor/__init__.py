"""MaxFactor: an optimizer with factored second moments for speech and language transformers."""

from maxfactor import rule
from maxfactor.adafactor import Adafactor
from maxfactor.maxfactor import MaxFactor
from maxfactor.memory import MemoryEstimate, estimate_memory
from maxfactor.model_groups import for_model
from maxfactor.recipes import RECIPES, RecipeName, recipe
from maxfactor.release import GradientRelease, release_gradients
from maxfactor.schedule import AdaptiveSchedule
from maxfactor.settings import FAM, Switches

__version__ = "0.2.0"

__all__ = [
    "FAM",
    "RECIPES",
    "Adafactor",
    "AdaptiveSchedule",
    "GradientRelease",
    "MaxFactor",
    "MemoryEstimate",
    "RecipeName",
    "Switches",
    "__version__",
    "estimate_memory",
    "for_model",
    "recipe",
    "release_gradients",
    "rule",
]
