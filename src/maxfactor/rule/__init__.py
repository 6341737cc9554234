"""The maths: MaxFactor and Adafactor as pure functions, equation by equation.

reference       one step, equations (1) to (10)
momentum, fam   the filter over time, (11) to (13)
newton_schulz   the orthogonal direction
int8, rounding  how momentum and 16-bit weights are stored
"""

from maxfactor.rule.reference import Result, init_state, step
from maxfactor.settings import FAM, AdafactorSettings, MaxFactorSettings, Switches

__all__ = [
    "FAM",
    "AdafactorSettings",
    "MaxFactorSettings",
    "Result",
    "Switches",
    "init_state",
    "step",
]
