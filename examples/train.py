"""A small language model of bytes learns its own source text: `python examples/train.py`."""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import maxfactor

STEPS, BATCH, CONTEXT = 200, 64, 8

torch.manual_seed(0)
text = torch.tensor(list(Path(__file__).read_bytes()))
pieces = text.unfold(0, CONTEXT + 1, 1)  # every run of CONTEXT bytes with the byte that follows
model = nn.Sequential(
    nn.Embedding(256, 32),
    nn.Flatten(),
    nn.Linear(CONTEXT * 32, 128),
    nn.GELU(),
    nn.Linear(128, 256),
)
optimizer = maxfactor.for_model(model)  # in place of torch.optim.AdamW(model.parameters())
schedule = maxfactor.AdaptiveSchedule(optimizer, warmup_steps=20, total_steps=STEPS)

for step in range(STEPS):
    batch = pieces[torch.randint(len(pieces), (BATCH,))]
    loss = cross_entropy(model(batch[:, :-1]), batch[:, -1])
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 40 == 0 or step == STEPS - 1:
        print(f"step {step:3}  loss {loss.item():.3f}")
