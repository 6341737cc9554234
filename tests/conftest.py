"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before it loads.

Tests run side by side, on small tensors: one thread each.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)
