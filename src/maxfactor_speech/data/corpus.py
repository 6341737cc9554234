"""The texts to be spoken: connected digits, and sentences from a grammar, in three languages.

A text depends only on the task, language, split, seed and its index, so a corpus of any size needs
no stored list. The text itself decides its split: for any seeds, no text of a validation set is in
a training set.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random
from string import Formatter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Split = Literal["train", "validation"]

TASKS = ("digits", "sentences")
VALIDATION_SHARE = 0.05
DIGITS_AT_A_TIME = (3, 7)
MOST_WORDS = 8

DIGITS = {
    "en": "zero one two three four five six seven eight nine",
    "de": "null eins zwei drei vier fünf sechs sieben acht neun",
    "es": "cero uno dos tres cuatro cinco seis siete ocho nueve",
}


@dataclass(frozen=True)
class Grammar:
    """Sentences made by filling the slots of a template with words."""

    templates: Sequence[str]
    words: Mapping[str, Sequence[str]]

    def draw(self, random: Random) -> str:
        """Return a random sentence, which depends only on the generator."""
        template = random.choice(self.templates)
        # Slot by slot instead of `str.format`: a slot may appear twice with different words.
        return "".join(
            literal + (random.choice(self.words[slot]) if slot else "")
            for literal, slot, _, _ in Formatter().parse(template)
        )


def draw(
    task: str, number: int, language: str = "en", split: Split = "train", seed: int = 0
) -> str:
    """Return text `number` of a corpus.

    Args:
        task: "digits" (three to seven digits) or "sentences" (three to eight words).
        number: The index of the text, from 0, without an upper limit.
        language: "en", "de" or "es".
        split: "train" or "validation", which have no text in common.
        seed: Each seed gives another corpus.

    Example:
        >>> draw("digits", 0)
        'seven nine nine nine'
    """
    check(task, language)
    random = Random(f"{task}/{language}/{split}/{seed}/{number}")
    while True:
        text = _digits(random, language) if task == "digits" else GRAMMARS[language].draw(random)
        if split_of(text) == split and len(text.split()) <= MOST_WORDS:
            return text


def texts(
    task: str, count: int, language: str = "en", split: Split = "train", seed: int = 0
) -> Iterator[str]:
    """Yield the first `count` texts of a corpus."""
    return (draw(task, number, language, split, seed) for number in range(count))


def alphabet(task: str, language: str = "en") -> list[str]:
    """Return all units that texts of the task consist of: digit words, or characters."""
    check(task, language)
    if task == "digits":
        return DIGITS[language].split()
    grammar = GRAMMARS[language]
    return sorted(
        {c for phrases in grammar.words.values() for c in "".join(phrases)} | _literals(grammar)
    )


def split_of(text: str) -> Split:
    """Return the split that a text belongs to."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "big") < VALIDATION_SHARE * 2**64 else "train"


def check(task: str, language: str) -> None:
    """Raise ValueError for an unknown task or language."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    if language not in DIGITS:
        raise ValueError(f"language must be one of {', '.join(DIGITS)}, got {language!r}")


def _digits(random: Random, language: str) -> str:
    words = DIGITS[language].split()
    return " ".join(random.choice(words) for _ in range(random.randint(*DIGITS_AT_A_TIME)))


def _literals(grammar: Grammar) -> set[str]:
    pieces = (piece for template in grammar.templates for piece, *_ in Formatter().parse(template))
    return set("".join(pieces))


# ------------------------------------------------------------------------------- English


def _third_person(verb: str) -> str:
    return verb + ("es" if verb.endswith(("ch", "sh", "ss", "x")) else "s")


def _past(verb: str) -> str:
    return verb + ("d" if verb.endswith("e") else "ed")


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("ch", "sh", "ss", "x")) else "s")


_NOUNS = """
    adapter alarm album amplifier answer antenna apple archive arrow banana barrel basket battery
    beach bell bench bicycle blanket boat book bottle bowl box bridge bucket buffer button cable
    camera candle captain carpet cartoon castle cell chair channel chapter checkpoint cheese circle
    circuit cloud coat coffee column compiler computer corner counter cousin curtain decoder desk
    detector doctor door dragon driver encoder engine evening farmer feather filter flower folder
    forest fork friend garden gate gradient guitar hammer harbor helmet hill horse hotel house
    index island jacket kernel kettle key keyboard king kitchen ladder lamp lantern layer lemon
    lesson letter lock machine magnet map market matrix melon message meter microphone mirror model
    monitor morning motor mountain museum needle neighbor network notebook number ocean office
    onion optimizer orange oven packet painter paper parameter pattern pencil pepper phone piano
    picture pilot pipe planet plate pocket potato printer processor program pump puzzle question
    radio rabbit record recorder river road robot rocket roof rope sample sandwich school sensor
    server shadow shirt signal singer sister sock sofa soldier song spectrum spider spoon station
    stone storm street student suitcase sweater switch symbol table teacher telescope tensor
    thermometer ticket tiger timer token tower train transformer tree truck tunnel turtle umbrella
    uncle valve vector village violin vowel wagon wallet weapon weather weight whistle window
    winter wire wizard word worker writer zebra
""".split()
_VERBS = """
    accept adjust admire answer approach attach avoid borrow check clean close collect color
    compare compute connect correct count cover decode deliver describe design discover encode
    examine explain filter finish fix follow guard handle help ignore improve inspect label launch
    lift load lock mark measure mention miss move notice observe open order paint place polish
    predict prepare print protect pull push reach record reduce remember remove rename repair
    repeat replace report request return review sample scale select shake sketch sort store
    surround switch test touch train trust update use visit wash watch
""".split()
_ADJECTIVES = """
    ancient basic big black blue bright broken brown careful cheap clean clever cold colorful
    common curious dark deep digital dirty dry early empty expensive fast final flat foreign
    fragile fresh friendly frozen gentle golden good gray green happy heavy hidden hollow hot huge
    important large lazy light linear little local lonely long loud lucky modern narrow new noisy
    normal old orange perfect plain polite poor portable proud purple quick quiet rare red remote
    rough round secret sharp short silent silver simple slow small smooth soft solid square stable
    strange strong sudden tall thick thin tiny tired useful warm weak wet white wide wild wooden
    yellow young
""".split()
_PEOPLE = """
    anna peter martha oliver helen victor emma simon laura felix nobody everyone somebody she he
""".split()
_GROUPS = "we they you children students engineers doctors farmers people pilots".split()
_NUMBERS = "two three four five six seven eight nine ten twelve twenty".split()
_WHEN = (
    "today,tomorrow,again,carefully,often,slowly,quickly,twice,now,later,outside,together,"
    "after lunch,at night,every morning,before winter,on monday,last week,for free,at home,"
    "by hand,in silence,with care,on friday,next year"
).split(",")
_PREPOSITIONS = "behind under near above below beside inside with without".split()

ENGLISH = Grammar(
    templates=(
        "{group} {verb} {nouns}",
        "the {noun} is {adjective}",
        "{person} {verb_ed} the {noun}",
        "please {verb} the {noun} {when}",
        "{group} {verb} the {adjective} {noun}",
        "the {adjective} {noun} {verb_s} the {noun}",
        "the {noun} {preposition} the {noun} is {adjective}",
        "{person} {verb_ed} the {adjective} {noun} {when}",
        "{person} will {verb} the {noun} {when}",
        "{number} {adjective} {nouns} {verb} the {noun}",
        "{group} {verb_ed} {number} {adjective} {nouns}",
        "{verb} the {noun} and the {noun}",
        "why does the {noun} {verb} the {noun}",
        "can you {verb} my {adjective} {noun}",
        "do not {verb} the {noun} {when}",
        "every {noun} needs this {adjective} {noun}",
        "{adjective} {nouns} {verb} {adjective} {nouns}",
        "our {noun} and their {noun} are {adjective}",
        "{person} {verb_s} {nouns} {when}",
    ),
    words={
        "noun": _NOUNS,
        "nouns": [_plural(noun) for noun in _NOUNS],
        "verb": _VERBS,
        "verb_s": [_third_person(verb) for verb in _VERBS],
        "verb_ed": [_past(verb) for verb in _VERBS],
        "adjective": _ADJECTIVES,
        "person": _PEOPLE,
        "group": _GROUPS,
        "number": _NUMBERS,
        "when": _WHEN,
        "preposition": _PREPOSITIONS,
    },
)

# -------------------------------------------------------------------------------- German

GERMAN = Grammar(
    templates=(
        "{who} {verb} {whom}",
        "{who} {verb} {when} {whom}",
        "{when} {verb} {who} {whom}",
        "warum {verb} {who} {whom}",
    ),
    words={
        "who": (
            "der alte mann,die junge frau,das kleine kind,der lehrer,die lehrerin,der arzt,"
            "die ärztin,der nachbar,die nachbarin,mein bruder,meine schwester,unser freund,"
            "der koch,der bauer,die katze,der große hund,das mädchen,der junge,der könig,"
            "die königin,peter,anna,niemand,jeder schüler,der müde fahrer"
        ).split(","),
        "verb": (
            "sieht sucht findet kauft öffnet holt bringt zeigt malt prüft misst trägt wäscht zählt "
            "liebt kennt braucht hört vergisst wählt schützt verkauft schließt benutzt"
        ).split(),
        "whom": (
            "den ball,das buch,die tür,den schlüssel,das fenster,die lampe,den tisch,das brot,"
            "die flasche,den grünen apfel,das alte haus,die schöne blume,den löffel,das bild,"
            "die brücke,den zug,das fahrrad,die straße,den brief,das messgerät,die zeitung,"
            "einen stuhl,eine frage,ein lied,den rechner,das neue radio,die tasse,den mantel"
        ).split(","),
        "when": (
            "heute,morgen,jetzt,immer,oft,manchmal,leise,am abend,im winter,am montag,später,"
            "nach der arbeit,vor dem essen,dort,gerne,zweimal"
        ).split(","),
    },
)

# ------------------------------------------------------------------------------- Spanish

SPANISH = Grammar(
    templates=(
        "{who} {verb} {whom}",
        "{who} {verb} {whom} {when}",
        "{when} {who} {verb} {whom}",
        "por qué {who} {verb} {whom}",
    ),
    words={
        "who": (
            "el niño,la niña,mi hermano,mi hermana,el viejo profesor,la profesora,el médico,"
            "la vecina,nuestro amigo,el cocinero,la reina,el rey,el perro,la gata blanca,"
            "el joven pintor,la señora,el ingeniero,pedro,ana,nadie,cada alumno,el pájaro"
        ).split(","),
        "verb": (
            "mira busca encuentra compra abre trae muestra pinta mide lleva lava cuenta quiere "
            "conoce necesita oye olvida elige protege vende cierra usa repara limpia"
        ).split(),
        "whom": (
            "la pelota,el libro,la puerta,la llave,la ventana,la lámpara,la mesa,el pan,la botella,"
            "la manzana verde,la casa vieja,la flor,la cuchara,el cuadro,el puente,el tren,"
            "la bicicleta,la calle,una carta,el teléfono,el periódico,una silla,una canción,"
            "el camión rojo,la radio nueva,la taza,el abrigo,el árbol"
        ).split(","),
        "when": (
            "hoy,mañana,ahora,siempre,a veces,por la noche,en invierno,el lunes,después,aquí,"
            "en casa,otra vez,con cuidado,muy temprano,dos veces"
        ).split(","),
    },
)

GRAMMARS = {"en": ENGLISH, "de": GERMAN, "es": SPANISH}
