"""Text to tokens and back, with Whisper's tokenizer from `transformers`."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from tokenizers import pre_tokenizers
from transformers import WhisperTokenizer
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

IGNORED = -100  # label of padding, which torch's cross-entropy ignores by default
START, END = "<|startoftranscript|>", "<|endoftext|>"

Unit = Literal["characters", "words"]

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@dataclass(frozen=True)
class Codec:
    """Text to tokens and back.

    Attributes:
        tokenizer: The tokenizer, which is saved with the model.
        start: The prompt, the tokens that decoding starts with.
        end: The token that ends a text.
    """

    tokenizer: WhisperTokenizer
    start: list[int]
    end: int

    @staticmethod
    def build(units: Iterable[str], unit: Unit = "characters") -> Codec:
        """Build a tokenizer of Whisper's class whose tokens are the given characters or words.

        Whisper's tokens are sequences of bytes that grow by merging two tokens. A character or
        word of several bytes becomes one token by a merge for each byte after the first. Special
        tokens come last, because transformers reads those after `<|endoftext|>` as time stamps.
        The prompt is `<|startoftranscript|>`: such a model knows no languages and no time stamps.

        Example:
            >>> codec = Codec.build(["one", "two"], "words")
            >>> codec.decode(codec.encode("two one"))
            'two one'
        """
        space = " " if unit == "words" else ""  # a word's token contains the space before it
        spelled = sorted({_spelled(space + unicodedata.normalize("NFC", one)) for one in units})
        merged = {piece[:end] for piece in spelled for end in range(2, len(piece) + 1)}
        tokens = [*sorted({byte for piece in spelled for byte in piece} | merged), END, START]
        return Codec.of(
            WhisperTokenizer(
                vocab={token: number for number, token in enumerate(tokens)},
                merges=[(one[:-1], one[-1]) for one in sorted(merged, key=lambda one: len(one))],
                add_prefix_space=unit == "words",
                predict_timestamps=True,  # the prompt has no <|notimestamps|>
                pad_token=END,
                extra_special_tokens=[START],
            )
        )

    @staticmethod
    def of(tokenizer: WhisperTokenizer, start: Sequence[int] | None = None) -> Codec:
        """Wrap a tokenizer; the default prompt is the tokenizer's own."""
        start = tokenizer.prefix_tokens if start is None else start
        return Codec(tokenizer, list(start), int(tokenizer.eos_token_id))

    def __len__(self) -> int:
        return len(self.tokenizer)

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

    def missing(self, text: str) -> list[str]:
        """Return the characters of a text that no tokens can spell."""
        known = self.tokenizer.get_vocab().keys()
        characters = set(unicodedata.normalize("NFC", text))
        return sorted(one for one in characters if not known >= set(_spelled(one)))


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
