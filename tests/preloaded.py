"""What a server of processes imports before it forks them; see forked.py."""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

gc.disable()  # what is imported stays: nothing looks through it for garbage, here or in a fork
for name in (
    "pytest",
    "torch._dynamo",  # which comes with the first step of any optimizer
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "transformers.models.whisper.modeling_whisper",
    "transformers.models.whisper.processing_whisper",
    "triton",
):
    with suppress(ImportError):
        import_module(name)
gc.freeze()
gc.enable()
