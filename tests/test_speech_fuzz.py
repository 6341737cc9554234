"""Data that is malformed by chance or on purpose: audio, tables, paths, bombs.

`fuzzing` says how many examples there are. Files are decoded in a process of its own, so that a
crash of libsndfile is seen.
"""

from __future__ import annotations

import io
import json
import os
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from decoding_child import DecodingChild, Outcome
from fuzzing import EXAMPLES, fuzzed
from maxfactor_speech.data import audio, tables
from maxfactor_speech.data.audio import SAMPLE_RATE, read, read_header, samples_in
from maxfactor_speech.data.layouts import find_data
from maxfactor_speech.data.recordings import LONGEST_TEXT, Recording
from maxfactor_speech.data.screening import REASONS, screen
from maxfactor_speech.errors import InputError

pytest.importorskip("resource")  # limits of POSIX

MEGABYTE = 10**6


@pytest.fixture(scope="module")
def child() -> Iterator[DecodingChild]:
    process = DecodingChild()
    yield process
    process.stop()


# --------------------------------------------------------------------------------- mutations

FORMATS = (
    ("wav", "WAV", "PCM_16", 1),
    ("wav", "WAV", "FLOAT", 2),
    ("wav", "WAV", "IMA_ADPCM", 1),
    ("wav", "WAVEX", "PCM_24", 2),
    ("flac", "FLAC", "PCM_16", 1),
    ("flac", "FLAC", "PCM_24", 2),
    ("mp3", "MP3", "MPEG_LAYER_III", 1),
    ("ogg", "OGG", "VORBIS", 2),
    ("ogg", "OGG", "OPUS", 1),
    ("aiff", "AIFF", "PCM_16", 1),
)
SIZES = [
    number.to_bytes(4, order)
    for number in (0, 1, 0x7FFF_FFFF, 0x8000_0000, 2**32 - 1, 12_345)
    for order in ("little", "big")
]
HEADER = 120  # bytes in which most of the header is

Change = Callable[[bytearray], None]


@cache
def intact(format_number: int) -> bytes:
    """A third of a second of a tone, as soundfile writes it."""
    _, form, subtype, channels = FORMATS[format_number]
    wave = 0.3 * np.sin(np.arange(5_333) / 9.0)
    file = io.BytesIO()
    soundfile.write(file, np.stack([wave] * channels, 1), 16_000, subtype=subtype, format=form)
    return file.getvalue()


def _at(content: bytearray, place: int) -> int:
    return place % (len(content) + 1)


def cut(place: int) -> Change:
    def change(content: bytearray) -> None:
        del content[_at(content, place) :]

    return change


def overwrite(place: int, new: bytes) -> Change:
    def change(content: bytearray) -> None:
        start = _at(content, place)
        content[start : start + len(new)] = new

    return change


def repeat(place: int, length: int, times: int) -> Change:
    """A chunk or a line that is there several times."""

    def change(content: bytearray) -> None:
        start = _at(content, place)
        content[start:start] = content[start : start + length] * times

    return change


def remove(place: int, length: int) -> Change:
    def change(content: bytearray) -> None:
        start = _at(content, place)
        del content[start : start + length]

    return change


def insert(place: int, new: bytes) -> Change:
    def change(content: bytearray) -> None:
        start = _at(content, place)
        content[start:start] = new

    return change


PLACE = st.one_of(st.integers(0, HEADER), st.integers(0, 20_000))
CHANGE = st.one_of(
    st.builds(cut, PLACE),
    st.builds(overwrite, st.integers(0, HEADER), st.sampled_from(SIZES)),
    st.builds(overwrite, PLACE, st.binary(min_size=1, max_size=4)),
    st.builds(repeat, PLACE, st.integers(1, 2_000), st.integers(1, 5)),
    st.builds(remove, PLACE, st.integers(1, 300)),
    st.builds(insert, PLACE, st.binary(max_size=40)),
)


def changed(content: bytes, changes: list[Change]) -> bytes:
    made = bytearray(content)
    for change in changes:
        change(made)
    return bytes(made)


def test_mutated_audio_is_read_or_named(child: DecodingChild, tmp_path: Path) -> None:
    """It neither crashes nor hangs nor takes memory; the memory is that of the whole process."""
    outcomes: Counter[str] = Counter()

    @fuzzed(EXAMPLES, shrinks=False)
    @given(st.integers(0, len(FORMATS) - 1), st.lists(CHANGE, min_size=1, max_size=4))
    def check(number: int, changes: list[Change]) -> None:
        path = tmp_path / f"mutated.{FORMATS[number][0]}"
        path.write_bytes(changed(intact(number), changes))
        found = child.decode(path)
        assert not found.raw, found.raw
        assert found.training in ("kept", *REASONS)
        for said in (found.detail, found.whole):
            assert said in ("", "read") or said.startswith(f"{path}: ")
        assert found.peak - found.base < 400 * MEGABYTE
        outcomes[found.training] += 1

    check()
    assert outcomes.total() >= EXAMPLES
    assert min(outcomes["kept"], outcomes["damaged"]) > EXAMPLES / 10


def test_intact_audio_is_kept(child: DecodingChild, tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    for number, (suffix, *_) in enumerate(FORMATS):
        path = tmp_path / f"{number}.{suffix}"
        path.write_bytes(intact(number))
        assert child.decode(path)[:4] == ("kept", "", "read", "")


# ------------------------------------------------------------------------------------ tables

ROWS = [("a.wav", "one two"), ("b.flac", 'say "three", four; five'), ("gone.wav", "é\u0301")]


def as_tsv(path: str, text: str) -> list[str]:
    return [f"{path}\t{text}", *(f"{name}\t{said}" for name, said in ROWS)]


def as_csv(path: str, text: str) -> list[str]:
    quoted = ((name, said.replace('"', '""')) for name, said in ROWS)
    return [f"id,{path},{text},offset", *(f'7,{name},"{said}",0.1' for name, said in quoted)]


def as_json(path: str, text: str) -> list[str]:
    return [json.dumps({path: name, text: said, "duration": 0.2}) for name, said in ROWS]


TABLES: dict[str, tuple[str, list[str]]] = {
    "TSV": ("list.tsv", as_tsv("path", "sentence")),
    "CSV": ("list.csv", as_csv("file", "text")),
    "JSON lines": ("list.jsonl", as_json("path", "text")),
    "NeMo": ("list.json", as_json("audio_filepath", "text")),
    "audiofolder": ("metadata.csv", as_csv("file_name", "transcription")),
    "audiofolder, JSON": ("metadata.jsonl", as_json("file_name", "transcription")),
    "Common Voice": ("train.tsv", as_tsv("path", "sentence")),
    "LJSpeech": ("metadata.csv", [f"{name}|{said}|{said}" for name, said in ROWS]),
    "LibriSpeech": ("7.trans.txt", [f"{name} {said}" for name, said in ROWS]),
    "Kaldi": ("wav.scp", [f"u{n} {name}" for n, (name, _) in enumerate(ROWS)]),
    "Kaldi, texts": ("text", [f"u{n} {said}" for n, (_, said) in enumerate(ROWS)]),
    "Kaldi, segments": ("segments", [f"u{n} u{n} 0.1 0.2" for n in range(len(ROWS))]),
}
BY_ITSELF = ("TSV", "CSV", "JSON lines", "NeMo")  # the others are folders
PIECES = [
    b"\t", b",", b";", b"|", b"\n", b"\r", b"\0", b'"', b'""', b"{", b"[", b"}", b"]", b":", b"\\",
    b"..", b"/", b"~", b"../", b"-1", b"1e999", b"NaN", b"null", b"\xff", b"\xff\xfe", b"\xed\xa0",
    b"\\ud800", b"\\u0000", b"\xe2\x80\xa8", "\u202e".encode(), b" ", b"[" * 3_000, b"9" * 5_000,
]  # fmt: skip
TABLE_CHANGE = st.one_of(CHANGE, *[st.builds(insert, PLACE, st.sampled_from(PIECES))] * 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each layout, with two recordings."""
    made = {}
    for number, (name, (table, lines)) in enumerate(TABLES.items()):
        folder = made[name] = tmp_path_factory.mktemp(f"layout{number}")
        inside = {"Common Voice": "clips", "LJSpeech": "wavs"}.get(name, ".")
        (folder / inside).mkdir(exist_ok=True)
        (folder / inside / "a.wav").write_bytes(intact(0))
        (folder / inside / "b.flac").write_bytes(intact(4))
        if name.startswith("Kaldi"):
            for other in ("Kaldi", "Kaldi, texts", "Kaldi, segments"):
                (folder / TABLES[other][0]).write_text("\n".join(TABLES[other][1]))
        (folder / table).write_text("\n".join(lines))
    return made


def data_path(name: str, folder: Path) -> Path:
    return folder / TABLES[name][0] if name in BY_ITSELF else folder


def listed_or_error(path: Path) -> list[Recording] | InputError:
    try:
        return find_data(path).train
    except InputError as error:
        return error


def test_intact_tables_are_read(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        kept, left_out = screen(find_data(data_path(name, folder)).train)
        assert [one.path.name for one in kept] == ["a.wav", "b.flac"], name
        assert [one.reason for one in left_out] == ["missing"]


def test_mutated_tables_are_read_or_named(folders: dict[str, Path]) -> None:
    outcomes: Counter[str] = Counter()

    @fuzzed(EXAMPLES)
    @given(st.sampled_from(list(TABLES)), st.lists(TABLE_CHANGE, min_size=1, max_size=3))
    def check(name: str, changes: list[Change]) -> None:
        folder, (table, lines) = folders[name], TABLES[name]
        (folder / table).write_bytes(changed("\n".join(lines).encode(), changes))
        listed = listed_or_error(data_path(name, folder))
        if isinstance(listed, InputError):
            assert str(folder) in str(listed)
            assert len(str(listed)) < 1_000
            outcomes["refused"] += 1
            return
        kept, left_out = screen(listed)
        assert len(kept) + len(left_out) == len(listed) > 0
        assert all(one.reason in REASONS and one.detail for one in left_out)
        outcomes["read"] += 1

    check()
    assert outcomes.total() >= EXAMPLES
    assert min(outcomes["read"], outcomes["refused"]) > EXAMPLES / 10


# ------------------------------------------------------------------------------------- paths

PARTS = st.sampled_from(
    ["..", ".", "/", "//", "\\", "\\\\server\\share", "C:", "c:\\", "~", "~root", "$HOME", "%2e%2e",
     "a.wav", "sub", "sub/", "../", "..\\", "/etc", "file:///", "\u2024\u2024", "\uff0e\uff0e/",
     "\uff0f", "\u202e", "\u200b", "\ufeff", " ", "\xa0", "e\u0301", "|", "a\x00b", "x" * 300, "-"]
)  # fmt: skip
CLOSED: dict[str, tuple[str, Callable[[str], str]]] = {
    "audiofolder": ("metadata.jsonl", lambda name: json.dumps({"file_name": name, "text": "x"})),
    "Common Voice": ("train.tsv", lambda name: f"path\tsentence\n{name}\tx"),
    "LibriSpeech": ("7.trans.txt", lambda name: f"{name} x"),
    "LJSpeech": ("metadata.csv", lambda name: f"a|x\n{name}|x"),
}


def test_no_path_leaves_a_closed_folder(tmp_path: Path) -> None:
    """Whatever is opened is inside, as the operating system resolves it."""
    outcomes: Counter[str] = Counter()
    for name in CLOSED:
        for inside in (".", "sub", "clips", "wavs"):
            folder = tmp_path / name / inside
            folder.mkdir(parents=True, exist_ok=True)
            if name in ("Common Voice", "LJSpeech") or inside in (".", "sub"):
                (folder / "a.wav").write_bytes(intact(0))
    (tmp_path / "a.wav").write_bytes(intact(0))

    @fuzzed(EXAMPLES)
    @given(st.sampled_from(list(CLOSED)), st.lists(PARTS, min_size=1, max_size=5).map("".join))
    def check(layout: str, name: str) -> None:
        root, (table, line) = tmp_path / layout, CLOSED[layout]
        (root / table).write_text(line(name), encoding="utf-8")
        listed = listed_or_error(root)
        if isinstance(listed, InputError):
            assert str(root) in str(listed)
            outcomes["refused"] += 1
            return
        for recording in listed:
            real = os.path.realpath(recording.path) + os.sep
            assert real.startswith(os.path.realpath(root) + os.sep), (name, real)
        outcomes["inside"] += 1

    check()
    assert min(outcomes["refused"], outcomes["inside"]) > EXAMPLES / 10


def test_a_link_does_not_change_what_dots_mean(tmp_path: Path) -> None:
    """`link/../a.wav` is the file beside the link, not one beside the folder it leads to."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere" / "deep"
    data.mkdir()
    elsewhere.mkdir(parents=True)
    (elsewhere.parent / "a.wav").write_bytes(intact(0))
    (data / "link").symlink_to(elsewhere)
    (data / "metadata.csv").write_text("file_name,text\nlink/../a.wav,x\n")
    [found] = screen(find_data(data).train).left_out
    assert found.reason == "missing"
    (data / "a.wav").write_bytes(intact(0))
    [kept] = screen(find_data(data).train).kept
    assert kept.path.samefile(data / "a.wav")


def test_names_that_are_no_unicode(tmp_path: Path) -> None:
    """As in archives from other systems."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the file system has no such names")
    (folder / "a.wav").write_bytes(intact(0))
    (folder / "list.tsv").write_text("a.wav\tone\n")
    assert len(screen(find_data(folder / "list.tsv").train).kept) == 1
    assert len(read(folder / "a.wav")) == 5_333


def test_pipes_are_never_opened(tmp_path: Path) -> None:
    """Opening one waits until somebody writes to it."""
    os.mkfifo(tmp_path / "a.trans.txt")
    with pytest.raises(InputError, match="no known layout"):
        find_data(tmp_path)
    with pytest.raises(InputError, match=r"a\.trans\.txt: cannot be read as audio \(it is a pipe"):
        samples_in(tmp_path / "a.trans.txt")


# ------------------------------------------------------------------------------------- bombs


@cache
def _crc_table(polynomial: int, bits: int) -> list[int]:
    top, mask = 1 << (bits - 1), (1 << bits) - 1
    table = []
    for byte in range(256):
        value = byte << (bits - 8)
        for _ in range(8):
            value = ((value << 1) ^ polynomial if value & top else value << 1) & mask
        table.append(value)
    return table


def crc(content: bytes, polynomial: int, bits: int) -> bytes:
    table, mask, value = _crc_table(polynomial, bits), (1 << bits) - 1, 0
    for byte in content:
        value = ((value << 8) & mask) ^ table[(value >> (bits - 8)) ^ byte]
    return value.to_bytes(bits // 8, "big")


def flac_silence(frames: int, rate: int, claimed: int | None = None) -> bytes:
    """A FLAC file of `frames` frames of silence in 8 channels of 16 bits, each 65535 samples.

    A frame takes some 40 bytes and decodes to a megabyte. `claimed` is the length in the header.
    """
    block, channels = 65_535, 8
    samples = frames * block if claimed is None else claimed
    fields = (rate << 44) | ((channels - 1) << 41) | (15 << 36) | samples
    info = block.to_bytes(2, "big") * 2 + bytes(6) + fields.to_bytes(8, "big") + bytes(16)
    parts = [b"fLaC\x80\x00\x00\x22", info]
    for number in range(frames):
        coded = chr(number).encode("utf-8", "surrogatepass")  # FLAC numbers frames like that
        head = b"\xff\xf8\x70\x78" + coded + (block - 1).to_bytes(2, "big")
        frame = head + crc(head, 0x07, 8) + bytes(3 * channels)
        parts += [frame, crc(frame, 0x8005, 16)]
    return b"".join(parts)


def assert_bounded(found: Outcome, megabytes: int) -> None:
    assert not found.raw, found.raw
    assert found.peak - found.base < megabytes * MEGABYTE


@pytest.mark.parametrize("rate", [16_000, 655_350])
def test_a_flac_of_ten_gigabytes(tmp_path: Path, rate: int) -> None:
    """In half a megabyte, valid from the first to the last byte."""
    path = tmp_path / "bomb.flac"
    path.write_bytes(flac_silence(10_240, rate))
    assert path.stat().st_size < 500_000
    assert 2 * 8 * read_header(path).frames > 10e9
    child = DecodingChild()
    found = child.decode(path)
    part = child.decode(path, 500.0, 20.0)
    child.stop()
    assert found.training == "too long"
    assert "in 8 channels" in found.whole
    assert found.whole.endswith("can be read at once; cut the recording")
    assert_bounded(found, 100)
    # A part of it is decoded block by block. At once, 13 million frames of 8 channels would take
    # 420 MB more; resampling them takes most of what is left.
    assert part.training == "kept"
    assert_bounded(part, 100 if rate == 16_000 else 600)


def test_decoding_in_blocks_changes_nothing(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, (40_000, 2))
    for suffix in ("wav", "flac", "ogg", "mp3"):
        path = tmp_path / f"a.{suffix}"
        soundfile.write(path, noise, SAMPLE_RATE)
        whole = soundfile.read(path, dtype="float32")[0].mean(axis=1, dtype=np.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(audio, "BLOCK", 1_001)
            # MP3 is rounded otherwise at the edges of a block.
            np.testing.assert_allclose(read(path), whole, rtol=0, atol=suffix == "mp3" and 1e-6)
        np.testing.assert_array_equal(read(path), whole)  # in one block, as most files are


def ogg_with_length(samples: int) -> bytes:
    """An OGG file whose last page claims a length, with a valid checksum."""
    content = bytearray(intact(7))
    start = content.rindex(b"OggS")
    content[start + 6 : start + 14] = samples.to_bytes(8, "little")
    content[start + 22 : start + 26] = bytes(4)
    checksum = crc(bytes(content[start:]), 0x04C1_1DB7, 32)
    content[start + 22 : start + 26] = checksum[::-1]
    return bytes(content)


def mp3_with_length(frames: int) -> bytes:
    content = bytearray(intact(6))
    start = max(content.find(b"Info"), content.find(b"Xing"))
    content[start + 8 : start + 12] = frames.to_bytes(4, "big")
    return bytes(content)


def wav_with_length(size: int) -> bytes:
    content = bytearray(intact(0))
    for place in (4, content.index(b"data") + 4):
        content[place : place + 4] = size.to_bytes(4, "little")
    return bytes(content)


CLAIMS = {
    "hours.flac": flac_silence(1, 16_000, 2**36 - 1),
    "minute.flac": flac_silence(1, 48_000, 29 * 48_000),
    "hours.mp3": mp3_with_length(2**32 - 1),
    "minute.mp3": mp3_with_length(400),
    "hours.ogg": ogg_with_length(2**62),
    "minute.ogg": ogg_with_length(29 * 16_000),
    "hours.wav": wav_with_length(2**32 - 1),
    "minute.wav": wav_with_length(2**24 - 1),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_header_that_claims_too_much(child: DecodingChild, tmp_path: Path, name: str) -> None:
    """Neither hours that nobody has, nor half a minute in a file of a third of a second."""
    path = tmp_path / name
    path.write_bytes(CLAIMS[name])
    found = child.decode(path)
    assert_bounded(found, 400)
    if name == "hours.wav" or name.endswith("ogg"):  # libsndfile does not believe them
        assert found[:4] == ("kept", "", "read", "")
    else:
        assert found.training in ("too long", "damaged"), found


@pytest.mark.parametrize("rate", [0, 1, 999, 768_001, 2**31 - 1])
def test_a_rate_that_nobody_records_at(child: DecodingChild, tmp_path: Path, rate: int) -> None:
    """At 1 Hz a third of a second would be an hour and a half, in 900 MB."""
    path = tmp_path / "a.wav"
    path.write_bytes(changed(intact(0), [overwrite(24, rate.to_bytes(4, "little"))]))
    found = child.decode(path)
    assert found.training == "damaged"
    assert "sampling rate" in found.detail or rate == 0
    assert found.detail == found.whole
    assert_bounded(found, 400)


def test_far_too_loud(tmp_path: Path) -> None:
    path = tmp_path / "loud.wav"
    for value in (np.nan, np.inf, 3e38):
        soundfile.write(path, np.full((500, 2), value, np.float32), 44_100, subtype="FLOAT")
        with pytest.raises(InputError, match=r"loud\.wav: contains samples that are not finite"):
            read(path)


def test_formats_that_nobody_records_in(tmp_path: Path) -> None:
    """Libsndfile would open them, with readers that are old and little tested."""
    for form, name in (("VOC", "a.wav"), ("IRCAM", "b.wav"), ("MAT5", "c.mat"), ("XI", "d.wav")):
        kind = "DPCM_16" if form == "XI" else "PCM_16"
        soundfile.write(tmp_path / name, np.zeros(99), 44_100, format=form, subtype=kind)
        with pytest.raises(InputError, match="format not recognised"):
            read_header(tmp_path / name)


BIG = 1_000_000
BIG_TABLES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "a long line": ("a.tsv", lambda: b"a.wav\t" + b"x " * BIG, "too long"),
    "a long name": ("a.tsv", lambda: b"x" * BIG + b".wav\tx", "missing"),
    "no line end": ("a.csv", lambda: b"path,text\na.wav," + b"x" * BIG, "field larger than"),
    "columns": ("a.tsv", lambda: b"path\ttext" + b"\tx" * BIG, "lists no recordings"),
    "columns without names": ("a.tsv", lambda: b"a.wav\tx" + b"\tx" * BIG, "write their names"),
    "columns of CSV": ("a.csv", lambda: b"path,text\na.wav" + b",x" * BIG, "has 1000001 columns"),
    "delimiters": ("a.csv", lambda: b";" * BIG, "lists no recordings"),
    "quotation marks": ("a.csv", lambda: b'path,text\na.wav,"' + b'""' * BIG, "field larger"),
    "empty lines": ("a.jsonl", lambda: b"\n" * BIG, "lists no recordings"),
    "nested lists": ("a.jsonl", lambda: b"[" * BIG, "must be a JSON object"),
    "nested objects": ("a.jsonl", lambda: b'{"a":' * BIG, "must be a JSON object"),
    "a nested path": (
        "a.jsonl",
        lambda: b'{"text": "x", "path": ' + b"[" * 900 + b"]" * 900 + b"}",
        "path must be a text",
    ),
    "digits": ("a.jsonl", lambda: b'{"path": "a", "offset": ' + b"9" * BIG, "must be a JSON"),
    "an exponent": (
        "a.json",
        lambda: b'{"audio_filepath": "a", "text": "x", "offset": 1e' + b"9" * BIG + b"}",
        "must be seconds",
    ),
    "digits of a table": (
        "a.csv",
        lambda: b"path,text,offset\na.wav,x," + b"9" * 100_000,
        "must be seconds",
    ),
    "accents": ("a.tsv", lambda: b"a.wav\ta" + "\u0301\u0316".encode() * BIG, "too long"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BIG_TABLES)
def test_a_table_that_is_a_bomb(tmp_path: Path, name: str) -> None:
    """It ends within seconds; accents took hours, as their order is found in quadratic time."""
    table, make, expected = BIG_TABLES[name]
    (tmp_path / "a.wav").write_bytes(intact(0))
    content = make()
    (tmp_path / table).write_bytes(content)
    tracemalloc.start()
    try:
        said = " ".join(one.reason for one in screen(find_data(tmp_path / table).train).left_out)
    except InputError as error:
        said = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert expected in said
    assert len(said) < 1_000
    assert peak < 20 * MEGABYTE + 100 * len(content)


def test_a_table_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    with path.open("wb") as file:
        file.truncate(tables.LARGEST + 1)  # takes no space on the disk
    with pytest.raises(InputError, match=r"a\.tsv: has 2\.0 GiB, but .* at most 2; split it"):
        find_data(path)


def test_a_transcript_beyond_reason_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(intact(0))
    kept, left_out = screen([Recording(path, "x" * n) for n in (LONGEST_TEXT, LONGEST_TEXT + 1)])
    assert len(kept) == len(left_out) == 1
    assert left_out[0].detail == f"{path}: its transcript has 5001 characters, more than 5000"
