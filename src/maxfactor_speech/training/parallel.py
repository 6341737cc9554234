"""One training in several processes: communication, and how the model is distributed.

`torchrun` starts the processes, and torch's DDP or FSDP2 distributes the model. The processes share
each batch that one process would take, so the result depends on their number only through the
order of sums.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxfactor_speech.errors import InputError, failure_reason
from maxfactor_speech.training.model import loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import WhisperForConditionalGeneration

SHARDINGS = ("ddp", "fsdp", "hsdp")
TIMEOUT = timedelta(hours=1)  # the others wait while the first process synthesises speech

# How gloo says that a connection is gone; torch has no class for it.
LOST = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection refused|Timed out waiting \d+ms"
)

T = TypeVar("T")


class LossModule(nn.Module):
    """The loss as a module, because DDP and FSDP hook into a module's forward pass."""

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the labels."""
        return loss_of(self.model, features, labels)


class SingleProcess:
    """A training in one process: no communication, the model as it is."""

    rank, world = 0, 1
    is_distributed = False  # whether DDP or FSDP reduces gradients
    shard_group: ProcessGroup | None = None  # processes that hold shards of the parameters

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only a shard of each parameter."""
        return self.shard_group is not None

    def device(self, wanted: torch.device) -> torch.device:
        """Return the device of this process."""
        return wanted

    def sum(self, number: int) -> int:
        """Return the sum over all processes."""
        return number

    def mean(self, number: float) -> float:
        """Return the mean over all processes."""
        return number

    def interleaved(self, mine: Sequence[T]) -> list[T]:
        """Gather items that were dealt to the processes in turn, in their original order."""
        return list(mine)

    def run_on_all(self, call: Callable[[], T]) -> T:
        """Call a function on all processes; if it fails on one, all of them raise."""
        return call()

    def run_first_then_others(self, call: Callable[[], T]) -> T:
        """Call a function on the first process of each machine, then on the others."""
        return call()

    def distribute(self, model: WhisperForConditionalGeneration) -> nn.Module:
        """Distribute a model in place, and return the module that computes its loss."""
        return LossModule(model)

    @contextmanager
    def accumulating(self, module: nn.Module, is_last: bool) -> Iterator[None]:  # noqa: ARG002
        """Accumulate gradients; reduce them over the processes in the last pass of a step."""
        yield


class MultiProcess(SingleProcess):
    """A training in several processes.

    Args:
        shard: "ddp": each process has the whole model. "fsdp": each has a shard of each parameter.
            "hsdp": shards within groups of processes, copies between groups.
        device_type: "cpu" or "cuda".
    """

    is_distributed = True

    def __init__(self, shard: str, device_type: str) -> None:
        self.shard = shard
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self._local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self._device_type = device_type
        # Gloo, for numbers on the host: sending them must not wait for the GPU.
        self._host_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.shard_group = None if shard == "ddp" else self._host_group

    def device(self, wanted: torch.device) -> torch.device:
        """Return the CPU, or one GPU of the machine for each of its processes."""
        if wanted.type != "cuda":
            return wanted
        gpus = torch.cuda.device_count()
        if self._local_world > gpus:
            raise InputError(
                f"torchrun started {self._local_world} processes on a machine with {gpus} GPUs; "
                f"start at most {gpus} with --nproc-per-node"
            )
        device = torch.device("cuda", self._local_rank)
        torch.cuda.set_device(device)
        return device

    def sum(self, number: int) -> int:
        """Return the sum over all processes."""
        return int(self._reduced(torch.tensor(number)))

    def mean(self, number: float) -> float:
        """Return the mean over all processes."""
        return float(self._reduced(torch.tensor(number, dtype=torch.float64))) / self.world

    def interleaved(self, mine: Sequence[T]) -> list[T]:
        """Gather items that were dealt to the processes in turn, in their original order."""
        boxed = [[[one] for one in own] for own in self._gathered(list(mine))]
        rounds = zip_longest(*boxed, fillvalue=[])
        return [one for box in chain.from_iterable(rounds) for one in box]

    def run_on_all(self, call: Callable[[], T]) -> T:
        """Call a function on all processes; if it fails on one, all of them raise."""
        failure: Exception | None = None
        try:
            result = call()
        except Exception as error:  # of any kind: the other processes must not wait forever
            failure = error
        reasons = [one for one in self._gathered(failure and str(failure)) if one is not None]
        if failure is not None and not isinstance(failure, InputError):
            raise failure
        if reasons:
            raise InputError(reasons[0]) from failure
        return result

    def run_first_then_others(self, call: Callable[[], T]) -> T:
        """Call a function on the first process of each machine, then on the others."""
        is_first = self._local_rank == 0
        first = self.run_on_all(call) if is_first else self.run_on_all(lambda: None)
        other = self.run_on_all(call) if not is_first else self.run_on_all(lambda: None)
        result = first if is_first else other
        assert result is not None
        return result

    def distribute(self, model: WhisperForConditionalGeneration) -> nn.Module:
        """Distribute a model in place, and return the module that computes its loss."""
        module = LossModule(model)
        if not self.is_sharded:
            devices = [self._local_rank] if self._device_type == "cuda" else None
            return nn.parallel.DistributedDataParallel(module, devices)
        from torch.distributed.fsdp import fully_shard

        mesh = self._mesh()
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module

    @contextmanager
    def accumulating(self, module: Any, is_last: bool) -> Iterator[None]:
        """Accumulate gradients; reduce them over the processes in the last pass of a step."""
        if self.is_sharded:
            module.set_requires_gradient_sync(is_last)
            yield
        elif is_last:
            yield
        else:
            with module.no_sync():
                yield

    def _mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        if self.shard == "fsdp":
            return init_device_mesh(self._device_type, (self.world,))
        # Shards within a machine, where communication is fast; a single machine is cut in half.
        group = self._local_world if self._local_world < self.world else self.world // 2
        shape = (self.world // group, group)
        return init_device_mesh(self._device_type, shape, mesh_dim_names=("replicate", "shard"))

    def _reduced(self, number: Tensor) -> Tensor:
        dist.all_reduce(number, group=self._host_group)
        return number

    def _gathered(self, mine: T) -> list[T]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self._host_group)
        return found


def is_first() -> bool:
    """Return whether this is the first process, the only one that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def training_processes(shard: str | None, device: torch.device) -> Iterator[SingleProcess]:
    """Yield the processes of a training, as `torchrun` started them, or this one.

    Args:
        shard: One of `SHARDINGS`; None is one process.
        device: The type of device to train on.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    _check(shard, world)
    if shard is None:
        yield SingleProcess()
        return
    is_mine = not dist.is_initialized()
    if is_mine:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield MultiProcess(shard, device.type)
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or LOST.search(str(error))):
            raise
        raise InputError(
            f"another process of this training has ended, or cannot be reached "
            f"({failure_reason(error)}); look for the reason in its output, then continue with "
            "--resume"
        ) from error
    finally:
        if is_mine:
            dist.destroy_process_group()


def check_batch(batch_size: int, world: int) -> None:
    """Raise InputError if a batch cannot be divided into equal parts."""
    if batch_size % world:
        near = -(-batch_size // world) * world
        raise InputError(
            f"--batch-size {batch_size} cannot be divided among {world} processes; choose a "
            f"multiple of {world}, such as {near}"
        )


def _check(shard: str | None, world: int) -> None:
    if shard is None:
        if world > 1:
            raise InputError(
                f"torchrun started {world} processes, and each would train its own model; add "
                f"--shard with one of {', '.join(SHARDINGS)}"
            )
        return
    if shard not in SHARDINGS:
        raise InputError(f"--shard must be one of {', '.join(SHARDINGS)}, got {shard!r}")
    if "RANK" not in os.environ:
        raise InputError(
            f"--shard {shard} needs several processes: torchrun --nproc-per-node 2 "
            f"-m maxfactor_speech train --shard {shard} …"
        )
    if shard == "hsdp" and (world < 4 or world % 2):
        raise InputError(
            f"--shard hsdp needs an even number of processes, at least 4, got {world}; "
            "--shard fsdp takes any number"
        )
