"""Text to tokens and back, with a tokenizer of `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label of padding, which torch's cross-entropy ignores by default
PAD, START, END = "<pad>", "<start>", "<end>"

Unit = Literal["characters", "words"]


@dataclass(frozen=True)
class Codec:
    """Text to tokens and back.

    Attributes:
        tokenizer: The tokenizer, which is saved with the model.
        start: The tokens that decoding starts with.
        end: The token that ends a text.
    """

    tokenizer: PreTrainedTokenizerBase
    start: list[int]
    end: int

    @staticmethod
    def build(units: Iterable[str], unit: Unit = "characters") -> Codec:
        """Build a tokenizer whose tokens are the given characters or words.

        Example:
            >>> codec = Codec.build(["one", "two"], "words")
            >>> codec.decode(codec.encode("two one"))
            'two one'
        """
        vocabulary = {token: i for i, token in enumerate((PAD, START, END, *sorted(set(units))))}
        tokenizer = Tokenizer(models.WordLevel(vocabulary))
        tokenizer.normalizer = normalizers.NFC()
        if unit == "characters":
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            tokenizer.decoder = decoders.Fuse()
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return Codec.of(
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer,
                pad_token=PAD,
                bos_token=START,
                eos_token=END,
                clean_up_tokenization_spaces=False,
            )
        )

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase) -> Codec:
        """Wrap a tokenizer from `build`, or Whisper's own with its language and task."""
        start = list(getattr(tokenizer, "prefix_tokens", [])) or [int(tokenizer.bos_token_id)]
        return Codec(tokenizer, start, int(tokenizer.eos_token_id))

    def __len__(self) -> int:
        return len(self.tokenizer)

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
        encoded = self.tokenizer(list(texts), add_special_tokens=False)
        return [[*self.start[1:], *tokens, self.end] for tokens in encoded.input_ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, up to the first end token if there is one."""
        kept = list(tokens)
        if self.end in kept:
            kept = kept[: kept.index(self.end)]
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return " ".join(str(text).split())

    def missing(self, text: str) -> list[str]:
        """Return the characters or words of a text that have no token."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or not isinstance(backend.model, models.WordLevel):
            return []  # Whisper's own tokenizer can spell every byte
        normal = backend.normalizer.normalize_str(text)
        pieces = {piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)}
        return sorted(pieces - backend.get_vocab().keys())
