"""The maths: MaxFactor and Adafactor as pure functions, one equation after the other.

`reference` has the step itself, `momentum` and `fam` the filter over time, `newton_schulz` the
orthogonal direction, `int8` and `rounding` how results are stored.
"""

from maxfactor.rule.reference import Result, step
from maxfactor.settings import AdafactorHyper, MaxFactorHyper
from maxfactor.state import init_state

__all__ = ["AdafactorHyper", "MaxFactorHyper", "Result", "init_state", "step"]
