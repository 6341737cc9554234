"""Text alone: a Llama of bytes, a BERT of masked words, and letters to phonemes by a T5."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from studies.speech_task import espeak
from studies.suite.tasks import Task, adapted
from studies.suite.texts import cpp_source, python_source, words

if TYPE_CHECKING:
    from pathlib import Path

    from measurement import Record
    from studies.suite.texts import Split

SOURCES = {"python": python_source, "cpp": cpp_source}
IGNORED = -100
EVALUATED = 400  # pieces of text
TOKEN = re.compile(r"[A-Za-z_]+|[0-9]+|[^\sA-Za-z0-9_]")
VOCABULARY = 4_000
MASK, UNKNOWN = 0, 1
MASKED_SHARE = 0.15


class LanguageTask(Task):
    """A task whose errors are nats per token: the logarithm of the perplexity."""

    measure = "nats"
    fits_graph = True

    def mean_loss(self, batches: list[Any]) -> float:
        """The mean loss of batches."""
        self.model.eval()
        with torch.inference_mode():
            losses = [float(self.loss_of(batch)) for batch in batches]
        return round(sum(losses) / len(losses), 5)

    def loss_of(self, batch: Any) -> Tensor:
        """The loss of one batch."""
        raise NotImplementedError


class LlamaTask(LanguageTask):
    """A Llama reads source code byte by byte."""

    def __init__(self, spec: Any, trial: Any, cache: Path, device: torch.device) -> None:
        super().__init__(spec, trial, cache, device)
        torch.manual_seed(trial.seed)
        self.context, self.batch = self.size("context", 16), self.size("batch", 4)
        self.model = self.with_base(self.new_model())
        if spec.options.get("lora"):
            names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            self.model = adapted(self.model, names)
        self.model.to(device)
        self.text = self.text_of("train")
        generator = torch.Generator().manual_seed(trial.seed)
        starts = torch.randint(
            len(self.text) - self.context, (self.steps, self.batch), generator=generator
        )
        self.starts = starts.to(device)

    def new_model(self) -> Any:
        """A model with random weights."""
        return llama(self.size("width", 16), self.size("layers", 1))

    def text_of(self, split: Split, source: str | None = None) -> Tensor:
        """Bytes on the device."""
        found = SOURCES[source or self.spec.options.get("source", "python")](split)
        return torch.frombuffer(bytearray(found), dtype=torch.uint8).to(self.device)

    def loss(self, step: int, at: Tensor) -> Tensor:  # noqa: ARG002
        """Mean cross-entropy of the next byte."""
        return self.loss_of(self.pieces(self.text, self.starts.index_select(0, at)[0]))

    def loss_of(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte."""
        logits = self.model(input_ids=batch[:, :-1]).logits.float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def pieces(self, text: Tensor, starts: Tensor) -> Tensor:
        """Pieces of a text."""
        places = starts[:, None] + torch.arange(self.context, device=text.device)
        return text[places].long()

    def evaluate(self, split: Split) -> Record:
        """Nats per byte; after a change of domain in the old one, too."""
        record = {"nats": self._nats(self.text_of(split))}
        if self.spec.base is not None:
            record["old_nats"] = self._nats(self.text_of(split, "python"))
        return record

    def _nats(self, text: Tensor) -> float:
        count = 8 if self.trial.quick else EVALUATED
        starts = torch.arange(count, device=text.device) * ((len(text) - self.context) // count)
        return self.mean_loss([self.pieces(text, part) for part in starts.split(100)])


def llama(width: int, layers: int) -> Any:
    """A model of bytes whose head is its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, width // 32)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=3 * width,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
            max_position_embeddings=512, tie_word_embeddings=False, use_cache=False,
            initializer_range=min(0.02, width**-0.5 / 2),
        )
    )  # fmt: skip


class BertTask(LanguageTask):
    """A BERT guesses masked words of source code."""

    def __init__(self, spec: Any, trial: Any, cache: Path, device: torch.device) -> None:
        super().__init__(spec, trial, cache, device)
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(trial.seed)
        self.context, self.batch = self.size("context", 16), self.size("batch", 4)
        width = self.size("width", 16)
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=self.size("layers", 1),
            num_attention_heads=max(1, width // 32), intermediate_size=4 * width,
            max_position_embeddings=self.context, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model: Any = BertForMaskedLM(config)
        self.model = model
        self.model.to(device)
        self.text = torch.tensor(masked_vocabulary_ids("train"), device=device)
        self.table = self.drawn(self.text, self.steps, trial.seed)

    def drawn(self, text: Tensor, batches: int, seed: int) -> tuple[Tensor, Tensor]:
        """Where the pieces of each batch begin, and which of their words are masked."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batches, self.batch)
        starts = torch.randint(len(text) - self.context, shape, generator=generator)
        masks = torch.rand(*shape, self.context, generator=generator) < MASKED_SHARE
        return starts.to(self.device), masks.to(self.device)

    def loss(self, step: int, at: Tensor) -> Tensor:  # noqa: ARG002
        """Mean cross-entropy of the masked words."""
        starts, masks = (each.index_select(0, at)[0] for each in self.table)
        return self.loss_of((self.text, starts, masks))

    def loss_of(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of the masked words."""
        text, starts, masks = batch
        tokens = text[starts[:, None] + torch.arange(self.context, device=text.device)]
        logits = self.model(input_ids=tokens.masked_fill(masks, MASK)).logits.float()
        labels = tokens.masked_fill(~masks, IGNORED)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def evaluate(self, split: Split) -> Record:
        """Nats per masked word."""
        text = torch.tensor(masked_vocabulary_ids(split), device=self.device)
        starts, masks = self.drawn(
            text, max(1, EVALUATED // self.batch // (50 if self.trial.quick else 1)), 1
        )
        return {"nats": self.mean_loss([(text, *pair) for pair in zip(starts, masks, strict=True)])}


@functools.cache
def masked_vocabulary_ids(split: Split) -> list[int]:
    """The source as words of the training data's vocabulary."""
    known = {word: at for at, word in enumerate(_vocabulary(), 2)}
    return [known.get(word, UNKNOWN) for word in _tokens(split)]


@functools.cache
def _vocabulary() -> list[str]:
    return [word for word, _ in Counter(_tokens("train")).most_common(VOCABULARY - 2)]


def _tokens(split: Split) -> list[str]:
    return TOKEN.findall(python_source(split).decode(errors="replace"))


class PhonemeTask(LanguageTask):
    """A T5 writes the phonemes of a word; espeak-ng knows them."""

    def __init__(self, spec: Any, trial: Any, cache: Path, device: torch.device) -> None:
        super().__init__(spec, trial, cache, device)
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(trial.seed)
        width, layers = self.size("width", 16), self.size("layers", 1)
        head = min(width, spec.options.get("head", 32))
        config = T5Config(  # type: ignore[call-arg]  # one of a base class
            vocab_size=128, d_model=width, d_kv=head, d_ff=4 * width, num_layers=layers,
            num_decoder_layers=layers, num_heads=width // head, dropout_rate=0.0,
            relative_attention_num_buckets=16, pad_token_id=0, eos_token_id=1,
            decoder_start_token_id=0, use_cache=False,
        )  # fmt: skip
        model: Any = T5ForConditionalGeneration(config)
        self.model = model
        self.model.to(device)
        self.batch = self.size("batch", 4)
        self.pairs = self.read("train")
        generator = torch.Generator().manual_seed(trial.seed)
        shape = (self.steps, self.batch)
        self.order = torch.randint(len(self.pairs[0]), shape, generator=generator).to(device)

    def read(self, split: Split) -> tuple[Tensor, Tensor]:
        """Letters and phonemes as tokens; the same number of columns in all splits."""
        spelt = words(split)
        if self.trial.quick:
            spelt = spelt[:40]
        spoken = espeak().phonemes(spelt, "gmw/en-US")
        pairs = zip(spelt, spoken, strict=True)
        rows = [(ids_of(word, 16), ids_of(sound, 24)) for word, sound in pairs]
        return tuple(torch.tensor(column, device=self.device) for column in zip(*rows, strict=True))  # type: ignore[return-value]

    def loss(self, step: int, at: Tensor) -> Tensor:  # noqa: ARG002
        """Mean cross-entropy of the phonemes."""
        numbers = self.order.index_select(0, at)[0]
        return self.loss_of(tuple(each.index_select(0, numbers) for each in self.pairs))

    def loss_of(self, batch: Any) -> Tensor:
        """Mean cross-entropy of the phonemes and the end."""
        letters, sounds = batch
        shifted = nn.functional.pad(sounds[:, :-1], (1, 0))
        logits = self.model(
            input_ids=letters, attention_mask=(letters > 0).long(), decoder_input_ids=shifted
        ).logits.float()
        labels = sounds.masked_fill(sounds == 0, IGNORED)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def evaluate(self, split: Split) -> Record:
        """Nats per phoneme."""
        letters, sounds = self.read(split)
        return {
            "nats": self.mean_loss(list(zip(letters.split(1000), sounds.split(1000), strict=True)))
        }


def ids_of(text: str, length: int) -> list[int]:
    """Characters as tokens 2 to 127, then the end, then padding."""
    ids = [2 + ord(letter) % 126 for letter in text][: length - 1]
    return [*ids, 1] + [0] * (length - len(ids) - 1)
