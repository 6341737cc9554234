"""Small models of other kinds, on which no setting of a recipe was chosen: they show what is new.

Each is small enough for one core of a CPU. Errors are nats, of bytes, images, words or pairs.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from studies.speech_task import espeak
from studies.suite.language_tasks import LanguageTask, LlamaTask, ids_of
from studies.suite.speech_data import load
from studies.suite.texts import docstrings, words

if TYPE_CHECKING:
    from measurement import Record
    from studies.suite.texts import Split

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
SIDE = 24  # pixels of an image
COUNTS: dict[Split, int] = {"train": 12_000, "dev": 1_000, "test": 2_000}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


# ------------------------------------------------------------------------------ bytes of English


class BytesTask(LlamaTask):
    """A model reads docstrings byte by byte."""

    fits_graph = False

    def new_model(self) -> Any:
        """A GPT-2, a Mixtral, a Mamba or an LSTM."""
        return READERS[self.spec.options["model"]](self.size("width", 16), self.context)

    def text_of(self, split: Split, source: str | None = None) -> Tensor:  # noqa: ARG002
        """Bytes on the device."""
        return torch.frombuffer(bytearray(docstrings(split)), dtype=torch.uint8).to(self.device)


def gpt2(width: int, context: int) -> Any:
    """Two layers; the head is the table of embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=context, n_embd=width, n_layer=2, n_head=width // 16,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def mixtral(width: int, context: int) -> Any:
    """Two layers of four experts, two of which see a byte."""
    from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
            num_attention_heads=width // 16, num_key_value_heads=width // 16, num_local_experts=4,
            num_experts_per_tok=2, max_position_embeddings=context, use_cache=False,
        )
    )  # fmt: skip


def mamba(width: int, context: int) -> Any:  # noqa: ARG001
    """Two layers, in torch operations."""
    from transformers.models.mamba import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            vocab_size=256, hidden_size=width, state_size=8, num_hidden_layers=2, use_cache=False
        )
    )


class Logits:
    """What models of transformers return."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class LstmReader(nn.Module):
    """Two layers of an LSTM."""

    def __init__(self, width: int, context: int) -> None:  # noqa: ARG002
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids: Tensor) -> Logits:
        """Scores of the next byte."""
        return Logits(self.head(self.lstm(self.embed(input_ids))[0]))


READERS: dict[str, Any] = {"gpt2": gpt2, "mixtral": mixtral, "mamba": mamba, "lstm": LstmReader}


# ------------------------------------------------------------------------- pairs of input, target


class PairsTask(LanguageTask):
    """A task with inputs and targets of one size each, in random order."""

    fits_graph = False

    def __init__(self, spec: Any, trial: Any, cache: Path, device: torch.device) -> None:
        super().__init__(spec, trial, cache, device)
        torch.manual_seed(trial.seed)
        self.model = self.new_model().to(device)
        self.batch = self.size("batch", 4)
        self.data = self.read("train")
        generator = torch.Generator().manual_seed(trial.seed)
        shape = (self.steps, self.batch)
        self.order = torch.randint(len(self.data[0]), shape, generator=generator).to(device)

    def new_model(self) -> nn.Module:
        """A model with random weights."""
        raise NotImplementedError

    def read(self, split: Split) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        raise NotImplementedError

    def loss(self, step: int, at: Tensor) -> Tensor:  # noqa: ARG002
        """The loss of a step."""
        numbers = self.order.index_select(0, at)[0]
        return self.loss_of(tuple(each.index_select(0, numbers) for each in self.data))

    def loss_of(self, batch: Any) -> Tensor:
        """Mean cross-entropy of classes."""
        inputs, targets = batch
        return functional.cross_entropy(self.model(inputs), targets)

    def evaluate(self, split: Split) -> Record:
        """Nats for each input."""
        inputs, targets = self.read(split)
        size = math.gcd(len(inputs), 100)  # batches of equal size, so that means may be averaged
        parts = zip(inputs.split(size), targets.split(size), strict=True)
        return {"nats": self.mean_loss(list(parts))}


class LettersTask(PairsTask):
    """A vision transformer, or a convolutional network, reads printed letters and digits."""

    def new_model(self) -> nn.Module:
        """Of transformers."""
        return Classifier(self.spec.options["model"], self.size("width", 16))

    def read(self, split: Split) -> tuple[Tensor, Tensor]:
        """Images (count, 1, side, side) and letters."""
        images, letters = drawn_letters(split, 100 if self.trial.quick else COUNTS[split])
        return images.to(self.device), letters.to(self.device)


class Classifier(nn.Module):
    """A model of transformers for images."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.inner = vit(width) if name == "vit" else resnet(width)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the letters."""
        scores: Tensor = self.inner(pixel_values=images).logits
        return scores


def vit(width: int) -> Any:
    """Three layers, patches of 4 x 4."""
    from transformers.models.vit import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=SIDE, patch_size=4, num_channels=1, hidden_size=width, num_hidden_layers=3,
            num_attention_heads=width // 16, intermediate_size=2 * width, num_labels=len(LETTERS),
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def resnet(width: int) -> Any:
    """Three stages with batch norms."""
    from transformers.models.resnet import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            num_channels=1, embedding_size=width, hidden_sizes=[width, 2 * width, 3 * width],
            depths=[1, 1, 1], layer_type="basic", downsample_in_first_stage=False,
            num_labels=len(LETTERS),
        )
    )  # fmt: skip


@functools.cache
def drawn_letters(split: Split, count: int) -> tuple[Tensor, Tensor]:
    """Letters in the fonts of matplotlib: turned, moved, of several sizes, and noisy."""
    from PIL import Image, ImageDraw, ImageFont

    random = Random(f"letters/{split}")
    images, letters = np.zeros((count, SIDE, SIDE), np.float32), []
    for image in images:
        letters.append(random.randrange(len(LETTERS)))
        font = ImageFont.truetype(random.choice(fonts()), random.randint(12, 20))
        large = Image.new("L", (2 * SIDE, 2 * SIDE))
        draw = ImageDraw.Draw(large)
        draw.text((SIDE, SIDE), LETTERS[letters[-1]], fill=255, font=font, anchor="mm")
        turned = large.rotate(random.uniform(-15.0, 15.0), Image.Resampling.BILINEAR)
        left, top = (SIDE // 2 + random.randint(-4, 4) for _ in range(2))
        image[:] = np.asarray(turned.crop((left, top, left + SIDE, top + SIDE)), np.float32)
    noise = np.random.default_rng(random.getrandbits(64)).normal(0.0, 0.25, images.shape)
    noisy = torch.from_numpy(images / 64.0 - 1.0 + noise.astype(np.float32))
    return noisy[:, None], torch.tensor(letters)


@functools.cache
def fonts() -> list[Path]:
    """The fonts with letters that matplotlib brings."""
    import matplotlib as mpl

    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    return sorted(path for path in folder.glob("DejaVu*.ttf") if "Display" not in path.name)


class KeywordTask(PairsTask):
    """Dilated convolutions over time (TDNN) hear which digit a phrase begins with."""

    def new_model(self) -> nn.Module:
        """Four convolutions, then mean and spread over time."""
        return Tdnn(self.size("width", 16))

    def read(self, split: Split) -> tuple[Tensor, Tensor]:
        """Features (utterances, 80, frames) and digits."""
        most = self.spec.options["utterances"] if split == "train" else None
        data = load(self.cache, "digits", split, self.device, self.trial.quick, most)
        count = len(data.texts) // 10 * 10
        first = [DIGITS.index(text.split()[0]) for text in data.texts[:count]]
        return data.features()[:count], torch.tensor(first, device=self.device)


class Tdnn(nn.Module):
    """An x-vector network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [(80, 1), (width, 2), (width, 3), (width, 4)]
        self.layers = nn.ModuleList(nn.Conv1d(n, width, 3, 1, dilation=d) for n, d in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in sizes)
        self.inner = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, len(DIGITS))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the digits."""
        x = x[..., ::2]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x).relu())
        x = torch.cat([x.mean(dim=-1), x.var(dim=-1).add(1e-5).sqrt()], dim=-1)
        scores: Tensor = self.head(self.inner(x).relu())
        return scores


class MatchingTask(PairsTask):
    """Two encoders, of letters and of phonemes, find which belong together, as CLIP does."""

    def new_model(self) -> nn.Module:
        """Two towers."""
        return Towers(self.size("width", 16))

    def read(self, split: Split) -> tuple[Tensor, Tensor]:
        """Letters and phonemes as tokens."""
        spelt = words(split)[: 100 if self.trial.quick else None]
        spelt = spelt[: len(spelt) // 100 * 100]
        spoken = espeak().phonemes(spelt, "gmw/en-US")
        letters = torch.tensor([ids_of(word, 16) for word in spelt], device=self.device)
        return letters, torch.tensor([ids_of(sound, 24) for sound in spoken], device=self.device)

    def loss_of(self, batch: Any) -> Tensor:
        """Mean cross-entropy of the right partner, both ways."""
        scores = self.model(*batch)
        right = torch.arange(len(scores), device=scores.device)
        return (
            functional.cross_entropy(scores, right) + functional.cross_entropy(scores.T, right)
        ) / 2


class Towers(nn.Module):
    """Two transformers of torch, and a temperature that is learnt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(128, width) for _ in range(2))
        self.places = nn.ParameterList(torch.randn(24, width) * 0.02 for _ in range(2))
        self.towers = nn.ModuleList(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(
                    width, width // 16, 2 * width, dropout=0.0, batch_first=True
                ),
                num_layers=1,
                enable_nested_tensor=False,
            )
            for _ in range(2)
        )
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, letters: Tensor, sounds: Tensor) -> Tensor:
        """How well each word and each sound belong together."""
        vectors = [self._vector(side, tokens) for side, tokens in enumerate((letters, sounds))]
        return vectors[0] @ vectors[1].T * self.temperature.exp()

    def _vector(self, side: int, tokens: Tensor) -> Tensor:
        x = self.embed[side](tokens) + self.places[side][: tokens.shape[1]]
        padding = tokens == 0
        x = self.towers[side](x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)
        return functional.normalize(self.out[side](x.sum(dim=1)), dim=-1)
