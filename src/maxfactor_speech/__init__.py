"""Train, compare and use Whisper-like speech recognisers with MaxFactor: the command `maxfactor`.

Install from a clone with `pip install '.[speech]'`. This package imports nothing here, so that
worker processes that only synthesise speech start quickly.
"""
