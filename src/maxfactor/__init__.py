"""MaxFactor: an optimizer with factored second moments for speech and language transformers."""

from maxfactor import rule
from maxfactor.adafactor import Adafactor
from maxfactor.model_groups import for_model
from maxfactor.optimizer import MaxFactor
from maxfactor.recipes import recipe
from maxfactor.rule.fam import FAM
from maxfactor.schedule import AdaptiveSchedule

__version__ = "0.2.0"

__all__ = [
    "FAM",
    "Adafactor",
    "AdaptiveSchedule",
    "MaxFactor",
    "__version__",
    "for_model",
    "recipe",
    "rule",
]
