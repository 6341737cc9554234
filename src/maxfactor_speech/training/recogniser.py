"""A Whisper that fits together: model, tokens, feature extractor, and how it generates text.

`transformers` takes the prompt of a Whisper, `<|startoftranscript|><|en|><|transcribe|>
<|notimestamps|>`, from its generation config. Labels here begin with the same prompt, so a model is
trained as it is used, by us and by `pipeline("automatic-speech-recognition")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import WhisperFeatureExtractor
from transformers.models.whisper.english_normalizer import (
    BasicTextNormalizer,
    EnglishTextNormalizer,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TASK_IDS

from maxfactor_speech.data.tokens import NO_TIMESTAMPS, Codec, TextLimit, language_code
from maxfactor_speech.errors import InputError
from maxfactor_speech.training.model import longest_audio

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig, WhisperForConditionalGeneration, WhisperTokenizer


class Recogniser(NamedTuple):
    """A Whisper with everything that it needs to be trained and used."""

    model: WhisperForConditionalGeneration
    codec: Codec
    extractor: WhisperFeatureExtractor

    @property
    def generation(self) -> Any:
        """The generation config; Whisper's own entries have no types."""
        return self.model.generation_config

    @property
    def is_multilingual(self) -> bool:
        """Whether the prompt has a language and a task."""
        return bool(getattr(self.generation, "is_multilingual", False))

    @property
    def text_limit(self) -> TextLimit:
        """How long texts may be; one place is left for a space before them."""
        positions = int(self.model.config.max_target_positions)
        return TextLimit(self.codec, positions - len(self.codec.start))

    @property
    def is_plain(self) -> bool:
        """Whether the model was trained from scratch here: no languages, tasks or time stamps."""
        return len(self.codec.start) == 1 and not self.is_multilingual

    @property
    def language(self) -> str | None:
        """The code of the language that the model is set to, if any."""
        return _language_of(self.generation, self.codec.tokenizer) if self.is_multilingual else None

    @property
    def has_timestamps(self) -> bool:
        """Whether the model can write time stamps, which long recordings need."""
        last = getattr(self.generation, "no_timestamps_token_id", None)
        return last is not None and self.model.config.vocab_size > last + 1


def new_recogniser(model: WhisperForConditionalGeneration, codec: Codec) -> Recogniser:
    """Return a recogniser with Whisper's features, as long as the model takes."""
    extractor = WhisperFeatureExtractor(
        feature_size=model.config.num_mel_bins, chunk_length=longest_audio(model)
    )
    return Recogniser(model, codec, extractor)


def complete_generation(
    model: WhisperForConditionalGeneration, tokenizer: WhisperTokenizer
) -> None:
    """Add the entries that generation configs of older checkpoints lack, in place."""
    generation: Any = model.generation_config
    vars(model.config).pop("forced_decoder_ids", None)  # an older prompt, which is not used
    size = model.config.vocab_size
    vocabulary = {token: number for token, number in tokenizer.get_vocab().items() if number < size}
    if generation.decoder_start_token_id is None:
        generation.decoder_start_token_id = model.config.decoder_start_token_id
    if generation.max_length is None and generation.max_new_tokens is None:
        generation.max_length = model.config.max_target_positions
    if NO_TIMESTAMPS in vocabulary and not hasattr(generation, "no_timestamps_token_id"):
        generation.no_timestamps_token_id = vocabulary[NO_TIMESTAMPS]
    generation.return_timestamps = False  # texts are trained without them
    languages = {name: vocabulary[name] for name in _tokens(LANGUAGES) if name in vocabulary}
    tasks = {name: vocabulary[f"<|{name}|>"] for name in TASK_IDS if f"<|{name}|>" in vocabulary}
    if not hasattr(generation, "is_multilingual"):
        generation.is_multilingual = bool(languages and tasks)
    if generation.is_multilingual:
        for name, found in (("lang_to_id", languages), ("task_to_id", tasks)):
            if not getattr(generation, name, None):
                setattr(generation, name, found)


def prompt(generation: GenerationConfig) -> list[int]:
    """Return the tokens that `generate` starts with."""
    own: Any = generation
    tokens = [own.decoder_start_token_id]
    if own.is_multilingual:
        language, task = getattr(own, "language", None), getattr(own, "task", None)
        if language is not None:
            tokens.append(own.lang_to_id[f"<|{_code(language)}|>"])
            tokens.append(own.task_to_id[task or "transcribe"])
    if getattr(own, "no_timestamps_token_id", None) is not None:
        tokens.append(own.no_timestamps_token_id)
    return tokens


def with_prompt(
    recogniser: Recogniser, language: str | None, translate: bool | None, name: str
) -> Recogniser:
    """Set language and task, for training, evaluation and the folder that is written.

    Args:
        recogniser: The model, not a plain one; its generation config is changed.
        language: Code or name of the spoken language; None is the one that it is set to.
        translate: Whether to write English; None is the task that it is set to.
        name: What to call the model in messages.

    Raises:
        InputError: If the model does not know the language or the task, or if there is none.
    """
    generation, tokenizer = recogniser.generation, recogniser.codec.tokenizer
    if not recogniser.is_multilingual:
        _check_english_only(language, translate, name)
        return recogniser
    known = [token[2:-2] for token in generation.lang_to_id]
    wanted = recogniser.language if language is None else language
    if wanted is None:
        raise InputError(
            f"{name}: is multilingual, so give the language of the recordings with --language; "
            f"it knows {', '.join(known)}"
        )
    code = _known_code(wanted, known, name)
    task = _task(generation, translate, name)
    generation.language, generation.task = code, task
    generation.forced_decoder_ids = None  # an older way to set the prompt
    start = prompt(generation)
    _set_prefix(tokenizer, code, task, start)
    return recogniser._replace(codec=Codec.of(tokenizer, start, len(recogniser.codec)))


def _check_english_only(language: str | None, translate: bool | None, name: str) -> None:
    if translate:
        raise InputError(f"{name}: is not multilingual and cannot translate; leave out --translate")
    if language is not None and _known_code(language, list(LANGUAGES), name) != "en":
        raise InputError(
            f"{name}: is not multilingual, so --language {language} is not possible; leave it out, "
            "or choose a multilingual model"
        )


def _known_code(language: str, known: list[str], name: str) -> str:
    try:
        code = language_code(language)
    except ValueError:
        code = ""
    if code not in known:
        raise InputError(
            f"{name}: does not know the language {language!r}; it knows {', '.join(known)}"
        )
    return code


def _task(generation: Any, translate: bool | None, name: str) -> str:
    task = getattr(generation, "task", None) or "transcribe"
    if translate is not None:
        task = "translate" if translate else "transcribe"
    if task not in generation.task_to_id:
        raise InputError(
            f"{name}: does not know the task {task!r}; it knows {', '.join(generation.task_to_id)}"
        )
    return task


def _language_of(generation: Any, tokenizer: WhisperTokenizer) -> str | None:
    """Return the language of a generation config, or else of the tokenizer."""
    language = getattr(generation, "language", None)
    if language is None:
        forced = dict(getattr(generation, "forced_decoder_ids", None) or [])
        codes = {number: token[2:-2] for token, number in generation.lang_to_id.items()}
        language = codes.get(forced.get(1)) or tokenizer.language
    return None if language is None else _code(language)


def _code(language: object) -> str:
    """Return the code of a language that is given by code, name or token."""
    return language_code(str(language).removeprefix("<|").removesuffix("|>"))


def _set_prefix(tokenizer: WhisperTokenizer, code: str, task: str, start: list[int]) -> None:
    """Let the tokenizer write the same prompt; it can only if it has all of Whisper's languages."""
    before = tokenizer.language, tokenizer.task
    tokenizer.language, tokenizer.task = code, task
    if tokenizer.prefix_tokens == start:
        tokenizer.set_prefix_tokens(language=code, task=task)
        tokenizer.init_kwargs |= {"language": code, "task": task}  # which are saved
    else:
        tokenizer.language, tokenizer.task = before


def text_normaliser(recogniser: Recogniser) -> Callable[[str], str]:
    """Return Whisper's normaliser for error rates.

    Its English one needs the list of spellings that published Whispers have, `normalizer.json`. It
    also writes "seven nine" as "79". All other models and languages get the basic one: lower case,
    no punctuation.
    """
    spellings = recogniser.codec.tokenizer.english_spelling_normalizer
    generation = recogniser.generation
    writes_english = (
        not recogniser.is_multilingual
        or generation.task == "translate"
        or recogniser.language == "en"
    )
    if writes_english and spellings is not None:
        return EnglishTextNormalizer(spellings)
    return BasicTextNormalizer()


def _tokens(codes: Any) -> list[str]:
    return [f"<|{code}|>" for code in codes]
