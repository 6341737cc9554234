"""Text to tokens and back, with Whisper's tokenizer from `transformers`."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from tokenizers import pre_tokenizers
from transformers import WhisperTokenizer
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

IGNORED = -100  # label of padding, which torch's cross-entropy ignores by default
PAD, START, END = "<|pad|>", "<|startoftranscript|>", "<|endoftext|>"
NO_TIMESTAMPS = "<|notimestamps|>"

Unit = Literal["characters", "words"]

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@dataclass(frozen=True)
class Codec:
    """Text to tokens and back.

    Attributes:
        tokenizer: The tokenizer, which is saved with the model.
        start: The prompt, the tokens that decoding starts with.
        end: The token that ends a text.
        size: The number of tokens that the model has; the tokenizer may have more.
    """

    tokenizer: WhisperTokenizer
    start: list[int]
    end: int
    size: int

    @staticmethod
    def build(units: Iterable[str], unit: Unit = "characters") -> Codec:
        """Build a tokenizer of Whisper's class whose tokens are the given characters or words.

        Whisper's tokens are sequences of bytes that grow by merging two tokens, so a word needs a
        token for each of its beginnings. Those that are no units come last, and models do not have
        them. After them is `<|notimestamps|>`: transformers takes later tokens for time stamps.
        The prompt is `<|startoftranscript|>`: such a model knows no languages and no time stamps.

        Example:
            >>> codec = Codec.build(["one", "two"], "words")
            >>> codec.decode(codec.encode("two one"))
            'two one'
        """
        space = " " if unit == "words" else ""  # a word's token contains the space before it
        normal = {unicodedata.normalize("NFC", one) for one in units}
        spelled = [_spelled(space + one) for one in sorted(normal)]
        merged = {piece[:end] for piece in spelled for end in range(2, len(piece) + 1)}
        pieces = {byte for piece in spelled for byte in piece} | merged
        used = [PAD, START, END, *spelled]
        tokens = [*used, *sorted(pieces - set(spelled)), NO_TIMESTAMPS]
        tokenizer = WhisperTokenizer(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[(one[:-1], one[-1]) for one in sorted(merged, key=lambda one: (len(one), one))],
            add_prefix_space=unit == "words",
            predict_timestamps=True,  # the prompt has no <|notimestamps|>
            pad_token=PAD,
            extra_special_tokens=[START, NO_TIMESTAMPS],
        )
        return Codec.of(tokenizer, size=len(used))

    @staticmethod
    def of(
        tokenizer: WhisperTokenizer, start: Sequence[int] | None = None, size: int | None = None
    ) -> Codec:
        """Wrap a tokenizer; by default with its own prompt, for a model that has all its tokens."""
        start = tokenizer.prefix_tokens if start is None else start
        size = len(tokenizer) if size is None else size
        return Codec(tokenizer, list(start), int(tokenizer.eos_token_id), size)

    def __len__(self) -> int:
        return self.size

    def begin_with_space(self) -> None:
        """Encode all texts with a space before them; a folder of the tokenizer keeps it so."""
        self.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(True)
        self.tokenizer.add_prefix_space = True
        self.tokenizer.init_kwargs["add_prefix_space"] = True

    def encode(self, text: str) -> list[int]:
        """Return the labels of a text: all tokens after the first one, including the end."""
        return self._encode_all([text])[0]

    def labels(self, texts: Sequence[str]) -> Tensor:
        """Return (texts, longest): labels, padded with IGNORED."""
        rows = self._encode_all(texts)
        longest = max(map(len, rows))
        return torch.tensor([row + [IGNORED] * (longest - len(row)) for row in rows])

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode all texts in one call: a call costs more than the encoding itself."""
        normal = [unicodedata.normalize("NFC", text) for text in texts]
        encoded = self.tokenizer(normal, add_special_tokens=False)
        return [[*self.start[1:], *tokens, self.end] for tokens in encoded.input_ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, up to the first end token if there is one."""
        kept = list(tokens)
        if self.end in kept:
            kept = kept[: kept.index(self.end)]
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return " ".join(str(text).split())

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, with the end and without the prompt."""
        return len(self.encode(text)) - len(self.start) + 1

    def missing(self, text: str) -> list[str]:
        """Return the characters or words of a text that the model's tokens cannot spell."""
        return sorted(unit for unit in self.units(text) if not self._can_spell(unit))

    def units(self, text: str) -> set[str]:
        """Return the words of a text, or its characters if words need not have a space before."""
        normal = unicodedata.normalize("NFC", text)
        return set(normal.split() if self.tokenizer.add_prefix_space else normal)

    def _can_spell(self, text: str) -> bool:
        tokens = self.tokenizer(text, add_special_tokens=False).input_ids
        known = self.tokenizer.get_vocab().keys()
        return max(tokens, default=-1) < self.size and known >= set(_spelled(text))


class TextLimit(NamedTuple):
    """What the texts for a model may be."""

    codec: Codec
    most: int  # tokens, with the end and without the prompt

    def excess(self, text: str) -> int | None:
        """Return the number of tokens of a text that has too many; None for the others."""
        # A token is at least a byte, so most texts need not be encoded.
        if len(text.encode()) < self.most:
            return None
        tokens = self.codec.count(text)
        return tokens if tokens > self.most else None

    def unspelled(self, texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield the numbers of texts that the model cannot spell, and what it has no token for."""
        known: set[str] = set()
        for number, text in enumerate(texts):
            units = self.codec.units(text)
            missing = [] if known >= units else self.codec.missing(text)
            known |= units.difference(missing)
            if missing:
                yield number, missing


def _spelled(text: str) -> str:
    """Return the bytes of a text as Whisper's vocabulary writes them."""
    return "".join(piece for piece, _ in _BYTES.pre_tokenize_str(text))


def language_code(language: str) -> str:
    """Return Whisper's code of a language that is given by code or English name.

    Example:
        >>> language_code("German"), language_code("de")
        ('de', 'de')

    Raises:
        ValueError: If Whisper has no such language.
    """
    name = language.strip().lower()
    code = TO_LANGUAGE_CODE.get(name, name)
    if code not in LANGUAGES:
        raise ValueError(f"language must be one of {', '.join(LANGUAGES)}, got {language!r}")
    return code
