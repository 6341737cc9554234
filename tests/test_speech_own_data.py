"""The user's own data: layouts, tables, recordings that are left out, `maxfactor data`."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from maxfactor_speech import data_command
from maxfactor_speech.cli import app
from maxfactor_speech.data import overview
from maxfactor_speech.data import recordings as recordings_module
from maxfactor_speech.data.audio import SAMPLE_RATE, read, read_header
from maxfactor_speech.data.batches import Batch, BatchSlice, Order, training_batches
from maxfactor_speech.data.layouts import find_data
from maxfactor_speech.data.overview import letters, look_over
from maxfactor_speech.data.own_data import load_own_data, select
from maxfactor_speech.data.recordings import RecordedUtterances, Recording
from maxfactor_speech.data.screening import (
    LEFT_OUT,
    Screened,
    left_out_table,
    screen,
    screen_decoded,
    screen_shortest,
)
from maxfactor_speech.data.tokens import Codec
from maxfactor_speech.errors import InputError

TEXTS = ("one two", "three four", "five six")


def sound(path: Path, seconds: float = 0.3, rate: int = 16_000, pitch: float = 300.0) -> Path:
    """Write a tone, in the format that the name of the file says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    times = np.arange(round(seconds * rate)) / rate
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * pitch * times), rate)
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# -------------------------------------------------------------------------------------- layouts


def librispeech(folder: Path) -> Path:
    for part, number in (("train-clean-100", 0), ("dev-clean", 1), ("test-clean", 2)):
        chapter = folder / part / "12" / "7"
        sound(chapter / "12-7-0000.flac", pitch=300 + 50 * number)
        write(chapter / "12-7.trans.txt", f"12-7-0000 {TEXTS[number].upper()}\n")
    return folder


def common_voice(folder: Path) -> Path:
    for number, part in enumerate(("train", "dev", "test")):
        sound(folder / "clips" / f"{part}.mp3", rate=48_000)
        line = f"id\t{part}.mp3\t{TEXTS[number]}\t2\ten"
        write(folder / f"{part}.tsv", f"client_id\tpath\tsentence\tup_votes\tlocale\n{line}\n")
    return folder


def common_voice_validated(folder: Path) -> Path:
    """Without train.tsv: what was validated, but for dev.tsv and test.tsv."""
    parts = ("train", "dev", "test")
    lines = [(common_voice(folder) / f"{part}.tsv").read_text().splitlines() for part in parts]
    write(folder / "validated.tsv", "\n".join([lines[0][0], *(line for _, line in lines)]))
    (folder / "train.tsv").unlink()
    return folder


def audiofolder_parts(folder: Path) -> Path:
    """A table in each part; one of them in JSON."""
    for number, part in enumerate(("train", "validation", "test")):
        sound(folder / part / "a" / "0.wav")
        entry = {"file_name": "a/0.wav", "transcription": TEXTS[number]}
        write(folder / part / "metadata.jsonl", json.dumps(entry) + "\n")
    (folder / "train" / "metadata.jsonl").unlink()
    write(folder / "train" / "metadata.csv", f"file_name,transcription\na/0.wav,{TEXTS[0]}\n")
    return folder


def audiofolder_whole(folder: Path) -> Path:
    """One table for all parts."""
    lines = ["transcription,file_name"]
    for number, part in enumerate(("train", "validation", "test")):
        sound(folder / part / "0.ogg")
        lines.append(f'"{TEXTS[number]}",{part}/0.ogg')
    write(folder / "metadata.csv", "\r\n".join(lines) + "\r\n")
    return folder


WITH_PARTS: dict[Callable[[Path], Path], str] = {
    librispeech: "LibriSpeech",
    common_voice: "Common Voice",
    common_voice_validated: "Common Voice",
    audiofolder_parts: "audiofolder",
    audiofolder_whole: "audiofolder",
}


@pytest.mark.parametrize("build", WITH_PARTS, ids=lambda build: build.__name__)
def test_a_layout_with_its_own_parts(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    """Its part for validation validates, and its part for tests is not used."""
    folder = build(tmp_path / "data")
    assert find_data(folder).layout == WITH_PARTS[build]
    found = load_own_data(folder, strict=True)
    for part, text in ((found.train, TEXTS[0]), (found.validation, TEXTS[1])):
        assert [one.text for one in part.recordings] == [text]
        assert part.lengths.tolist() == [pytest.approx(0.3 * SAMPLE_RATE, abs=1)]
        assert len(part[0].samples) == part.lengths[0]
        assert np.abs(part[0].samples).max() > 5_000
    # Given for validation, a data set gives its own part for validation.
    assert find_data(folder).held_out == found.validation.recordings


def plain_tsv(folder: Path) -> Path:
    return write(folder / "list.tsv", f"a.wav\t{TEXTS[0]}\nb.flac\t{TEXTS[1]}\n")


def old_mac_tsv(folder: Path) -> Path:
    return write(folder / "list.tsv", f"a.wav\t{TEXTS[0]}\t\rb.flac\t{TEXTS[1]}\r")


def named_tsv(folder: Path) -> Path:
    return write(
        folder / "list.tsv", f"Sentence\tage\tFile\n{TEXTS[0]}\t\ta.wav\r\n{TEXTS[1]}\t9\tb.flac\n"
    )


def clip_tsv(folder: Path) -> Path:
    """A table of Common Voice by itself."""
    for name in ("a.wav", "b.flac"):
        (folder / "clips").mkdir(exist_ok=True)
        shutil.move(folder / name, folder / "clips" / name)
    lines = f"path\tsentence\na.wav\t{TEXTS[0]}\nb.flac\t{TEXTS[1]}\n"
    return write(folder / "other.tsv", lines)


def comma_csv(folder: Path) -> Path:
    return write(
        folder / "list.csv", f'id,audio,transcript\n1,a.wav,"{TEXTS[0]}"\n2,b.flac,{TEXTS[1]}\n'
    )


def semicolon_csv(folder: Path) -> Path:
    return write(
        folder / "list.csv", f'"wav";"normalized_text"\n\na.wav;"{TEXTS[0]}"\nb.flac;{TEXTS[1]}\n'
    )


def tab_csv_in_utf_16(folder: Path) -> Path:
    """As a spreadsheet writes it."""
    path = folder / "list.csv"
    path.write_bytes(
        f"filename\ttext\r\na.wav\t{TEXTS[0]}\r\nb.flac\t{TEXTS[1]}\r\n".encode("utf-16")
    )
    return path


def json_lines(folder: Path) -> Path:
    entries = [{"path": "a.wav", "text": TEXTS[0], "duration": 99}]
    entries += [{"Path": str(folder / "b.flac"), "TEXT": TEXTS[1]}]
    return write(folder / "list.jsonl", "\n".join(map(json.dumps, entries)))


def nemo(folder: Path) -> Path:
    entries = [{"audio_filepath": "a.wav", "text": TEXTS[0], "duration": 0.3001}]
    entries += [{"audio_filepath": str(folder / "b.flac"), "text": TEXTS[1], "duration": 0.3}]
    return write(folder / "manifest.json", "\n".join(map(json.dumps, entries)) + "\n")


def kaldi(folder: Path) -> Path:
    write(folder / "wav.scp", f"u1 {folder / 'a.wav'}\nu2  b.flac\n")
    write(folder / "text", f"u1 {TEXTS[0]}\nu2 {TEXTS[1]}\n")
    return folder


def ljspeech(folder: Path) -> Path:
    for name in ("a.wav", "b.flac"):
        (folder / "wavs").mkdir(exist_ok=True)
        shutil.move(folder / name, folder / "wavs" / name)
    write(folder / "metadata.csv", f'a|"1 2|{TEXTS[0]}\nb|{TEXTS[1]}|\n')
    return folder


def audiofolder_plain(folder: Path) -> Path:
    lines = f"file_name,text\n./a.wav,{TEXTS[0]}\nb.flac,{TEXTS[1]}\n"
    return write(folder / "metadata.csv", lines).parent


TABLES: dict[Callable[[Path], Path], str] = {
    plain_tsv: "TSV",
    old_mac_tsv: "TSV",
    named_tsv: "TSV",
    clip_tsv: "Common Voice",
    comma_csv: "CSV",
    semicolon_csv: "CSV",
    tab_csv_in_utf_16: "CSV",
    json_lines: "JSON lines",
    nemo: "NeMo manifest",
    kaldi: "Kaldi",
    ljspeech: "LJSpeech",
    audiofolder_plain: "audiofolder",
}


@pytest.mark.parametrize("build", TABLES, ids=lambda build: build.__name__)
def test_a_table_of_recordings(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    for name in ("a.wav", "b.flac"):
        sound(tmp_path / name)
    found = find_data(build(tmp_path))
    assert found.layout == TABLES[build]
    assert found.validation is None
    kept, left_out = screen(found.train)
    assert not left_out
    assert [(one.path.name, one.text) for one in kept] == [
        ("a.wav", TEXTS[0]),
        ("b.flac", TEXTS[1]),
    ]
    assert [one.samples for one in kept] == [4_800, 4_800]


def test_a_set_with_only_a_test_part_is_one_set(tmp_path: Path) -> None:
    librispeech(tmp_path)
    for part in ("train-clean-100", "dev-clean"):
        shutil.rmtree(tmp_path / part)
    assert [one.text for one in find_data(tmp_path).train] == [TEXTS[2]]


@pytest.mark.parametrize(
    ("given_as", "suffix"), [("nemo", "wav"), ("kaldi", "flac"), ("csv", "mp3"), ("nemo", "ogg")]
)
def test_parts_of_a_file_are_cut_out(tmp_path: Path, given_as: str, suffix: str) -> None:
    """A low tone for one second, then a high one."""
    times = np.arange(16_000) / 16_000
    wave = np.concatenate([np.sin(2 * np.pi * pitch * times) for pitch in (200, 2_000)])
    name = f"long.{suffix}"
    soundfile.write(tmp_path / name, 0.3 * wave, 16_000)
    rows = [(0.25, 0.5), (1.25, 0.5), (1.5, 0.8), (1.5, 9.0), (0.0, 0.0)]
    if given_as == "nemo":
        lines = [
            json.dumps({"audio_filepath": name, "text": "x", "offset": at, "duration": length})
            for at, length in rows
        ]
        path = write(tmp_path / "list.json", "\n".join(lines))
    elif given_as == "csv":
        lines = [f"{name},x,{at},{length}" for at, length in rows]
        path = write(tmp_path / "list.csv", "\n".join(["file,text,offset,duration", *lines]))
    else:
        write(tmp_path / "wav.scp", f"long {name}\n")
        lines = [f"u{n} long {at} {at + length}" for n, (at, length) in enumerate(rows[:4])]
        write(tmp_path / "segments", "\n".join([*lines, "u4 long 1.75 -1"]))
        path = write(tmp_path / "text", "".join(f"u{n} x\n" for n in range(5))).parent
    kept, left_out = screen(find_data(path).train)
    assert [one.samples for one in kept[:3]] == [8_000, 8_000, 8_000]  # the third ends too late
    assert left_out[0].reason == "outside the file"
    assert "ends at 2.0 s, but the table goes on to 10.5 s" in left_out[0].detail
    if given_as == "kaldi":
        assert kept[3].samples == 4_000
    else:
        assert left_out[1].reason == "no audio"
    low, high = (RecordedUtterances(kept)[number].samples for number in (0, 1))
    assert [np.abs(np.fft.rfft(part)).argmax() for part in (low, high)] == [100, 1_000]


def test_a_nemo_duration_cuts_and_others_describe(tmp_path: Path) -> None:
    sound(tmp_path / "a.wav", 1.0)
    for key, samples in (("audio_filepath", 4_000), ("path", 16_000)):
        line = json.dumps({key: "a.wav", "text": "x", "duration": 0.25})
        [kept] = screen(find_data(write(tmp_path / f"{key}.jsonl", line)).train).kept
        assert kept.samples == samples


# ---------------------------------------------------------------------------------------- paths


def test_a_closed_data_set_does_not_name_files_outside_it(tmp_path: Path) -> None:
    sound(tmp_path / "secret.wav")
    data = tmp_path / "data"
    (data / "x").mkdir(parents=True)
    outside = ["../secret.wav", str(tmp_path / "secret.wav"), "x/../../secret.wav"]
    for audio in outside:
        write(data / "metadata.csv", f"file_name,text\n{audio},hello\n")
        with pytest.raises(InputError, match=r"metadata\.csv:2: .*is outside the data set"):
            find_data(data)
        # In a table that somebody gives by itself, it is what they mean.
        assert screen(find_data(data / "metadata.csv").train).kept
    cv = tmp_path / "cv"
    sound(cv / "clips" / "a.wav")
    write(cv / "train.tsv", "path\tsentence\n../../secret.wav\thello\n")
    for path in (cv, cv / "train.tsv"):
        with pytest.raises(InputError, match=r"train\.tsv:2: .* is outside the data set"):
            find_data(path)
    speech = tmp_path / "libri"
    write(speech / "a.trans.txt", "../secret HELLO\n")
    with pytest.raises(InputError, match=r"a\.trans\.txt:1: .* is outside the data set"):
        find_data(speech)


def test_the_current_folder_is_closed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound(tmp_path / "secret.wav")
    write(tmp_path / "data" / "metadata.csv", "file_name,text\n../secret.wav,hello\n")
    monkeypatch.chdir(tmp_path / "data")
    with pytest.raises(InputError, match="is outside the data set"):
        find_data(Path())


def test_links_are_followed(tmp_path: Path) -> None:
    sound(tmp_path / "disk" / "a.wav")
    write(tmp_path / "data" / "metadata.csv", "file_name,text\nwav/a.wav,hello\n")
    (tmp_path / "data" / "wav").symlink_to(tmp_path / "disk")
    assert len(screen(find_data(tmp_path / "data").train).kept) == 1


# -------------------------------------------------------------------------------------- bad input

COLUMNS = "one must be named path, file, .* or wav, and one text, sentence"
BAD_TABLES: list[tuple[str, str | bytes, str]] = [
    ("list.tsv", "", r"list\.tsv: lists no recordings"),
    ("list.csv", "\n \n", r"list\.csv: lists no recordings"),
    ("list.jsonl", "", r"list\.jsonl: lists no recordings"),
    ("list.tsv", "path\ttext\n", r"list\.tsv: lists no recordings"),
    ("list.tsv", "a.wav\n", r"list\.tsv:1: must be a path, a tab and a text"),
    ("list.tsv", "a.wav\tone\ttwo\n", r"list\.tsv:1: has 3 columns; write their names"),
    ("list.tsv", "clip\tlabel\n", rf"list\.tsv:1: the columns are \['clip', 'label'\]; {COLUMNS}"),
    ("list.tsv", "path\ttext\na.wav", r":2: has 1 columns, but .* 2; was the file written compl"),
    ("list.tsv", "path\ttext\na.wav\tx\ty\n", r"list\.tsv:2: has 3 .* must not contain tabs"),
    ("list.csv", "a.wav,hello\n", rf"list\.csv:1: the columns are \['a.wav', 'hello'\]; {COLUMNS}"),
    ("list.csv", "path;note\n", rf"list\.csv:1: the columns are \['path', 'note'\]; {COLUMNS}"),
    ("list.csv", "path,text\na.wav,one, two\n", r"list\.csv:2: has 3 columns, .*quotation marks"),
    ("list.csv", 'path,text\na,b\nc,"on', r"list\.csv:3: cannot be read as CSV, unexpected end"),
    ("list.csv", '"on', r"list\.csv:1: cannot be read as CSV, unexpected end"),
    ("list.csv", "path,text,start\na.wav,b,1\n", r"list\.csv:2: start is not supported; give"),
    ("list.csv", "path,text,offset\na.wav,b,-1\n", r"offset must be seconds, .* got '-1'"),
    ("list.jsonl", "{}\n", rf"list\.jsonl:1: the columns are \[\]; {COLUMNS}"),
    ("list.jsonl", "[1]\n", r'list\.jsonl:1: must be \{"path": …, "text": …\}, one for each line'),
    ("list.jsonl", '{"path": "a.wav", "text": 5}\n', r"list\.jsonl:1: text must be a text, got 5"),
    ("list.jsonl", '{"path": null, "text": "five"}\n', r":1: path must be a text, got None"),
    ("list.jsonl", '{"path": "a", "text": "b"}\n{"path": "c', r":2: must .* written completely"),
    ("list.jsonl", "[" * 100_000, r"list\.jsonl:1: must be a JSON object"),
    ("list.jsonl", r'{"path": "a.wav", "text": "\ud800"}', r":1: the text is no valid Unicode"),
    ("list.jsonl", r'{"path": "a\u0000", "text": "x"}', r":1: must name an audio file, got"),
    ("list.json", '{"audio_filepath": "a", "text": "b", "offset": NaN}', "offset must be seconds"),
    ("list.csv", "path,text\n,hello\n", r"list\.csv:2: must name an audio file, got ''"),
    ("list.tsv", "~nobody-here/a.wav\thello\n", r"list\.tsv:1: '~nobody-here/a.wav': Could not"),
    ("list.tsv", b"a.wav\tok\nb.wav\tcaf\xe9\n", r"list\.tsv:2: cannot be read as text in UTF-8 "),
    ("list.tsv", b"\xff\xfe\x00", r"list\.tsv:1: cannot be read as text in UTF-16"),
    ("list.tsv", "a.wav\tx\n".encode("utf-16-le"), r"list\.tsv:1: contains zero bytes, as UTF-16"),
    ("list.txt", "a.wav\thello\n", r"list\.txt: no known layout; it must be a folder in the layo"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), BAD_TABLES)
def test_a_bad_table_is_named(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message) as caught:
        find_data(path)
    assert len(str(caught.value)) < 500 + len(str(path))


BAD_FOLDERS: list[tuple[dict[str, str], str]] = [
    ({}, r"no known layout; it must be .*LibriSpeech .*Common Voice .*audiofolder .*LJSpeech "),
    ({"wav.scp": "u sox a.wav - |\n", "text": "u x\n"}, r"wav\.scp:1: .* is a command, and comman"),
    ({"wav.scp": "u raw.ark:23\n", "text": "u x\n"}, r"wav\.scp:1: .* in an archive of Kaldi"),
    ({"wav.scp": "u a.wav\nu b.wav", "text": "u x\n"}, r"wav\.scp:2: 'u' is listed twice"),
    ({"wav.scp": "u a.wav\n", "text": "v x\n"}, r"text:1: 'v' has no line in wav\.scp; repair"),
    ({"wav.scp": "u a\n", "text": "v x\n", "segments": "v w 0 1"}, r"text:1: 'w' has no line "),
    ({"wav.scp": "u a\n", "text": "v x\n", "segments": "v u 0"}, r"segments:1: must be utter"),
    ({"wav.scp": "u a\n", "text": "v x\n", "segments": "v u 2 1"}, r"segments:1: the segment must"),
    ({"wav.scp": "u a\n", "text": "v x\n", "segments": "v u a 1"}, r"segments:1: start must be"),
    ({"metadata.csv": "", "metadata.jsonl": ""}, r"has metadata\.csv and metadata\.jsonl; give"),
    ({f"{name}.csv": "" for name in "abcdef"}, r"several tables, a\.csv, .*, e\.csv, …; give"),
    ({"metadata.csv": "a,b\n"}, r"metadata\.csv:1: the columns are"),
    ({"metadata.csv": "a|b\nc\n", "wavs/a.wav": ""}, r"metadata\.csv:2: must be name\|text, got"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "layout"),
    [
        ("x.csv", "path,text\na.wav,hello\n", "CSV"),
        ("x.tsv", "a.wav\thello\n", "TSV"),
        ("manifest.json", '{"audio_filepath": "a.wav", "text": "hello"}\n', "NeMo manifest"),
        ("x.JSONL", '{"path": "a.wav", "text": "hello"}\n', "JSON lines"),
    ],
)
def test_a_folder_with_one_table_is_that_table(
    tmp_path: Path, name: str, content: str, layout: str
) -> None:
    write(tmp_path / name, content)
    write(tmp_path / "README.txt", "about")
    found = find_data(tmp_path)
    assert found.layout == layout
    assert [(one.path, one.text) for one in found.train] == [(tmp_path / "a.wav", "hello")]
    write(tmp_path / name, content.replace("a.wav", "../a.wav"))
    with pytest.raises(InputError, match="is outside the data set"):
        find_data(tmp_path)
    write(tmp_path / "other.tsv", "a.wav\thello\n")
    with pytest.raises(InputError, match=r"has several tables, .*other\.tsv.*; give one of them"):
        find_data(tmp_path)


@pytest.mark.parametrize(("files", "message"), BAD_FOLDERS)
def test_a_bad_folder_is_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    with pytest.raises(InputError, match=message):
        find_data(tmp_path)


def test_commands_of_kaldi_are_not_run(tmp_path: Path) -> None:
    write(tmp_path / "wav.scp", f"u touch {tmp_path / 'ran'} |\n")
    write(tmp_path / "text", "u x\n")
    with pytest.raises(InputError, match="commands are not run"):
        find_data(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing: no such file or folder"):
        find_data(tmp_path / "missing")
    with pytest.raises(InputError, match="cannot be read, File name too long"):
        find_data(tmp_path / ("x" * 300))


WORDS = st.sampled_from(
    ["path", "text", "Path", '"Text": "x"',
     "audio_filepath", "offset", "duration", "a.wav", "b.wav", "~x", "..", "/", "1",
     '"', "\t", ",", ";", "|", "\n", "\r", "\0", "{", "}", ":", "[", "\ufeff", "\u2028", "é", " ",
     '{"path": "a.wav", "text": "', '"}', "\\ud800", "\\u0000", "1e999", "x" * 300]
)  # fmt: skip
CONTENT = st.one_of(
    st.binary(max_size=200),
    st.lists(WORDS, max_size=25).map(lambda words: "".join(words).encode()),
    st.text(max_size=60).map(lambda text: text.encode("utf-16", "surrogatepass")),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    sound(folder / "a.wav")
    (folder / "b.wav").write_bytes(b"RIFF no audio")
    return folder


def screened_or_error(path: Path) -> Screened | InputError:
    try:
        return screen(find_data(path).train)
    except InputError as error:
        return error


@given(content=CONTENT, name=st.sampled_from(["l.tsv", "l.csv", "l.jsonl", "metadata.csv"]))
@settings(max_examples=250, deadline=None, database=None)
def test_random_tables_raise_nothing_but_input_errors(
    scratch: Path, content: bytes, name: str
) -> None:
    path = scratch / name
    path.write_bytes(content)
    result = screened_or_error(path)
    if isinstance(result, InputError):
        assert str(path) in str(result)
    else:
        assert result.kept or result.left_out
        left_out_table(result.left_out)


@given(content=CONTENT, name=st.sampled_from(["wav.scp", "text", "segments", "x.trans.txt"]))
@settings(max_examples=100, deadline=None, database=None)
def test_random_folders_raise_nothing_but_input_errors(
    scratch: Path, content: bytes, name: str
) -> None:
    folder = scratch / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    write(folder / "wav.scp", "u ../a.wav\n")
    write(folder / "text", "u hello\n")
    (folder / name).write_bytes(content)
    if name == "x.trans.txt":
        (folder / "wav.scp").unlink()
    result = screened_or_error(folder)
    assert not isinstance(result, InputError) or str(folder) in str(result)


# ------------------------------------------------------------------------- recordings left out


def mixture(folder: Path, good: int = 6) -> Path:
    """A table with good recordings of growing length, and one of each kind that is left out."""
    lines = []
    for number in range(good):
        sound(folder / f"{number}.flac", 0.3 + 0.1 * number, pitch=200 + 50 * number)
        lines.append(f"{number}.flac\tword {'abcdefghijklmnopqrstuvwxyz'[number]}")
    sound(folder / "long.flac", 30.1, 8_000)
    sound(folder / "empty.wav", 0.0)
    (folder / "noise.mp3").write_bytes(b"no audio at all")
    cut = sound(folder / "cut.wav", 2.0)
    cut.write_bytes(cut.read_bytes()[:20_000])
    lines += [f"{name}\thello" for name in ("long.flac", "empty.wav", "noise.mp3", "cut.wav")]
    lines += ["gone.wav\thello", "0.flac\t ", f"{folder}\thello", "x.raw\thello"]
    (folder / "x.raw").write_bytes(bytes(100))
    return write(folder / "list.tsv", "\n".join(lines) + "\n")


EXPECTED = {
    "long.flac": ("too long", "30.1 s long, but the model takes at most 30 s"),
    "empty.wav": ("no audio", "contains no audio"),
    "noise.mp3": ("damaged", "cannot be read as audio"),
    "cut.wav": ("damaged", "is shorter than its header says; it is incomplete"),
    "gone.wav": ("missing", "no such file"),
    "0.flac": ("no transcript", "its transcript is empty"),
    "x.raw": ("damaged", "cannot be read as audio"),
}


def test_unusable_recordings_are_left_out(tmp_path: Path) -> None:
    path = mixture(tmp_path)
    kept, left_out = screen(find_data(path).train)
    assert [one.path.name for one in kept] == [f"{number}.flac" for number in range(6)]
    found = {one.recording.path.name: one for one in left_out}
    assert found.pop(tmp_path.name).reason == "missing"  # a folder is no file
    assert found.keys() == EXPECTED.keys()
    for name, (reason, detail) in EXPECTED.items():
        assert found[name].reason == reason
        assert detail in found[name].detail
        assert str(tmp_path / name) in found[name].detail
    short = screen(find_data(path).train, longest=0.55).kept
    assert [one.path.name for one in short] == ["0.flac", "1.flac", "2.flac"]
    table = left_out_table(left_out).decode().splitlines()
    assert table[0].split("\t") == ["path", "reason", "detail", "listed in"]
    assert table[1].split("\t")[:2] == [str(tmp_path / "long.flac"), "too long"]
    assert table[1].endswith(f"{path}:7")
    assert len(table) == 1 + len(left_out) == 9


def test_devices_and_pipes_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.wav")
    listed = [Recording(path, "x") for path in (tmp_path / "pipe.wav", Path("/dev/zero"))]
    assert [one.reason for one in screen(listed).left_out] == ["missing", "missing"]


def test_a_header_cannot_claim_memory(tmp_path: Path) -> None:
    """Ten minutes of silence are a small FLAC file; only what is asked for is decoded."""
    path = tmp_path / "silence.flac"
    soundfile.write(path, np.zeros(600 * 8_000, np.int16), 8_000)
    assert path.stat().st_size < 60_000
    assert [one.reason for one in screen([Recording(path, "x")]).left_out] == ["too long"]
    tracemalloc.start()
    assert len(read(path, 1.0, SAMPLE_RATE)) == SAMPLE_RATE
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    fast = sound(tmp_path / "fast.wav")
    header = bytearray(fast.read_bytes())
    header[24:28] = (2_000_000_011).to_bytes(4, "little")
    fast.write_bytes(header)
    with pytest.raises(InputError, match=r"fast\.wav: has a sampling rate of 2000000011 Hz"):
        read_header(fast)


def truncated(path: Path, share: float = 0.5) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: round(share * len(content))])
    return path


@pytest.mark.parametrize("suffix", ["flac", "mp3"])
def test_damage_behind_an_intact_header(tmp_path: Path, suffix: str) -> None:
    """The header of a truncated file is whole, so that only decoding finds it."""
    path = truncated(sound(tmp_path / f"a.{suffix}", 3.0))
    kept, left_out = screen([Recording(path, "x")])
    assert kept[0].samples == 48_000
    assert not left_out
    [found] = screen_decoded(kept).left_out
    assert found.reason == "damaged"
    assert str(path) in found.detail


def damaged_set(folder: Path, damaged: tuple[int, ...] = (3,)) -> list[Recording]:
    table = mixture(folder)
    for number in damaged:
        truncated(folder / f"{number}.flac", 0.6)
    return screen(find_data(table).train).kept


def test_a_damaged_recording_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next shorter one, in every process and after resuming; one warning for each file."""
    kept = damaged_set(tmp_path)
    data, told = RecordedUtterances(kept), BufferingHandler(9)
    monkeypatch.setattr(recordings_module.logger, "handlers", [told])
    assert data[3].text == data[2].text == "word c"
    np.testing.assert_array_equal(data[3].samples, data[2].samples)
    assert data[4].text == "word e"
    assert len(told.buffer) == 1
    message = told.buffer[0].getMessage()
    assert message.startswith(f"{tmp_path / '3.flac'}: cannot be read as audio")
    assert message.endswith("another recording takes its place (1 damaged so far)")

    codec, order = Codec.build("word abcdef"), Order(data.lengths, 2, seed=1)

    def batches(first: int, count: int, part: BatchSlice | None = None) -> list[Batch]:
        source = RecordedUtterances(kept)
        made = training_batches(source, codec, order, first, part=part)
        taken = [next(made) for _ in range(count)]
        made.close()
        return taken

    whole = batches(0, 6)
    for number, batch in enumerate(batches(2, 4), 2):  # resumed
        assert torch.equal(batch.samples, whole[number].samples)
        assert torch.equal(batch.labels, whole[number].labels)
    ranks = [batches(0, 6, BatchSlice(rank, 2)) for rank in range(2)]
    for one, *others in zip(whole, *ranks, strict=True):
        assert torch.equal(torch.cat([other.samples for other in others]), one.samples)


def test_the_shortest_recording_is_intact(tmp_path: Path) -> None:
    """Otherwise nothing could replace it."""
    kept = damaged_set(tmp_path, (0, 1, 4))
    shortened = screen_shortest(kept)
    assert [one.path.name for one in shortened.kept] == ["2.flac", "3.flac", "4.flac", "5.flac"]
    assert [one.recording.path.name for one in shortened.left_out] == ["0.flac", "1.flac"]
    data = RecordedUtterances(shortened.kept)
    assert [data[number].text for number in range(4)] == ["word c", "word d", "word d", "word f"]


def test_too_much_damage_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = damaged_set(tmp_path, (1, 3))
    monkeypatch.setattr(recordings_module, "DAMAGED_COUNT", 1)
    data = RecordedUtterances(kept)
    assert data[1].text == "word a"
    with pytest.raises(InputError, match=r"3\.flac: .*2 of 6 recordings are damaged, too many"):
        data[3]
    (tmp_path / "5.flac").unlink()  # gone, not damaged: perhaps the whole disk is gone
    with pytest.raises(InputError, match=r"5\.flac: no such file"):
        data[5]


def test_damage_that_nothing_can_replace(tmp_path: Path) -> None:
    """All recordings that are not longer are damaged, too."""
    data = RecordedUtterances(damaged_set(tmp_path, (0, 1)))
    with pytest.raises(InputError, match=r"1\.flac: damaged, and so are all .* data --decode"):
        data[1]


def test_what_is_used_for_validation_is_decoded_first(tmp_path: Path) -> None:
    table = mixture(tmp_path)
    truncated(tmp_path / "5.flac", 0.6)
    other = write(tmp_path / "validation.tsv", "4.flac\tword\n5.flac\tword\n")
    found = load_own_data(table, other)
    assert len(found.train) == 6  # 5.flac is replaced if it is read
    assert [one.path.name for one in found.validation.recordings] == ["4.flac"]
    assert (len(found.train.left_out), found.total) == (9, 16)
    with pytest.raises(InputError, match=r"list\.tsv:7: .*long\.flac: .*leave out --strict to"):
        load_own_data(table, other, strict=True)
    write(other, "5.flac\tword\n")
    with pytest.raises(InputError, match=r"no recordings are left of .*validation\.tsv; 9 of 15"):
        load_own_data(table, other)
    write(table, "gone.wav\thello\n")
    with pytest.raises(
        InputError, match=r"list\.tsv: no recordings are left; 1 of 1 .*: 1 missing"
    ):
        load_own_data(table)


def test_decoding_everything_finds_all_damage(tmp_path: Path) -> None:
    table = mixture(tmp_path)
    truncated(tmp_path / "5.flac", 0.6)
    usual = {one.recording.path.name for one in select(table, table).left_out}
    assert "5.flac" in usual  # in validation
    other = write(tmp_path / "other.tsv", "4.flac\tword\n")
    assert len(select(table, other).left_out) == 8
    assert len(select(table, other, decode=True).left_out) == 9


# --------------------------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Common Voice as mp3, with recordings that are left out."""
    folder = tmp_path_factory.mktemp("voices")
    header = "client_id\tpath\tsentence\n"
    for part, count in (("train", 6), ("dev", 2)):
        for number in range(count):
            sound(folder / "clips" / f"{part}{number}.mp3", 0.4 + 0.4 * number, 48_000)
        rows = [f"id\t{part}{number}.mp3\tword {'abcdefg'[number]}\n" for number in range(count)]
        write(folder / f"{part}.tsv", header + "".join(rows))
    sound(folder / "clips" / "long.mp3", 31.0, 16_000)
    with (folder / "train.tsv").open("a") as file:
        file.write("id\tlong.mp3\ttoo long\nid\tgone.mp3\tis gone\n")
    truncated(folder / "clips" / "train5.mp3", 0.5)
    return folder


def test_training_on_common_voice(voices: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    base = ["train", "--data", voices, "--optimizer", "adamw", "--batch-size", "2", "--out", out]
    result = run(*base, "--steps", "4", "--strict")
    assert result.exit_code == 2
    assert "train.tsv:8:" in result.stderr
    assert "long.mp3: 31.0 s long, but the model takes at most 30 s; leave out" in result.stderr
    assert not out.exists()
    result = run(*base, "--steps", "4")
    assert result.exit_code == 0, result.output
    line = (
        "2 of 10 recordings are left out: 1 missing (gone.mp3), 1 too long (long.mp3); all are "
        f"named in {LEFT_OUT}"
    )
    assert line in result.stdout
    rows = (out / LEFT_OUT).read_text().splitlines()
    assert [row.split("\t")[1] for row in rows] == ["reason", "too long", "missing"]
    assert json.loads((out / "settings.json").read_text())["strict"] is False
    assert "WER" in result.stdout


def test_a_model_with_a_shorter_window(voices: Path, tmp_path: Path) -> None:
    """It leaves out what is too long for it, although 30 seconds would take it."""
    data = write(tmp_path / "short.tsv", f"{voices / 'clips' / 'dev0.mp3'}\tword abcdefg is\n")
    first, second = tmp_path / "first", tmp_path / "second"
    tiny = ["--optimizer", "adamw", "--steps", "1", "--batch-size", "2"]
    assert run("train", "--data", data, "--validation", data, *tiny, "--out", first).exit_code == 0
    longer = sound(tmp_path / "longer.wav", 1.5)
    write(data, data.read_text() + f"{longer}\tword\n")
    result = run("train", "--data", data, "--model", first, "--validation", data, *tiny,
                 "--out", second)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "1.5 s long, but the model takes at most 1 s" in (second / LEFT_OUT).read_text()


def test_data_command(voices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = run("data", voices, "--decode")
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert max(map(len, lines)) <= columns
    text = " ".join(result.stdout.split())
    assert "layout: Common Voice" in text
    assert "recordings 5 2" in text
    assert "sampling rates 48 kHz 48 kHz" in text
    assert "2 texts are in training and in validation: 'word a', 'word b'" in text
    assert "2 audio files are in training and in validation" in text
    assert "left out: 3 of 10 recordings" in text
    assert "too long 1" in text
    assert "█" in text


def test_data_command_for_machines(voices: Path) -> None:
    result = run("data", voices, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["layout"] == "Common Voice"
    assert found["train"]["recordings"] == 6
    assert found["train"]["hours"] == pytest.approx(6 * 1.4 / 3600, rel=1e-3)
    assert sum(found["train"]["lengths"].values()) == 6
    assert found["train"]["sampling_rates"] == {"48000": 6}
    assert found["train"]["words"] == 12
    assert found["train"]["characters"]["o"] == 6
    assert found["left_out"] == {"count": 2, "reasons": {"missing": 1, "too long": 1}}
    assert found["left_out_recordings"][0]["listed_in"] == f"{voices / 'train.tsv'}:8"
    assert found["same_texts"] == {"count": 2, "first": ["word a", "word b"]}


def test_data_command_says_if_nothing_is_usable(tmp_path: Path) -> None:
    table = write(tmp_path / "list.csv", "path,text\n[bold]gone.wav,hello\n")
    result = run("data", table)
    assert result.exit_code == 1
    assert result.stderr == f"maxfactor: {table}: no recording can be used\n"
    assert "[bold]gone.wav" in "".join(result.stdout.split())
    result = run("data", tmp_path / "nothing")
    assert result.exit_code == 2
    assert result.stderr == f"maxfactor: {tmp_path / 'nothing'}: no such file or folder\n"


def test_data_command_with_too_few_to_split(tmp_path: Path) -> None:
    sound(tmp_path / "a.wav")
    result = run("data", write(tmp_path / "list.tsv", "a.wav\thello\n"))
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "validation: only 1 recordings of 1 texts, too few to split off" in text
    assert "nothing is left out of 1 recordings" in text


def test_copies_are_found_by_their_content(tmp_path: Path) -> None:
    sound(tmp_path / "a.wav")
    shutil.copy(tmp_path / "a.wav", tmp_path / "copy.wav")
    sound(tmp_path / "other.wav", pitch=400.0)  # of the same size
    train = write(tmp_path / "train.tsv", "a.wav\tone\n")
    other = write(tmp_path / "other.tsv", "copy.wav\ttwo\nother.wav\tthree\n")
    found = look_over(train, other)
    assert found.same_texts == []
    assert found.same_audio == [(str(tmp_path / "a.wav"), str(tmp_path / "copy.wav"))]


def test_unusual_characters() -> None:
    found = {
        one.character: one.unusual for one in letters(["naïve «text» 3 " * 99 + "p\u0430 \u200b €"])
    }
    assert [found[one] for one in "ï«3x "] == [""] * 5
    assert found["\u0430"].endswith("CYRILLIC")
    assert found["\u200b"].startswith("a control character")
    assert found["€"] == "a symbol"


def test_files_that_vanish_while_they_are_compared(tmp_path: Path) -> None:
    paths = [sound(tmp_path / name) for name in ("a.wav", "b.wav")]
    train = write(tmp_path / "train.tsv", "a.wav\tone\n")
    other = write(tmp_path / "other.tsv", "b.wav\ttwo\n")
    assert overview._size(paths[0]) == paths[0].stat().st_size
    found = look_over(train, other)
    assert len(found.same_audio) == 1  # the same tone
    paths[1].unlink()
    assert overview._size(paths[1]) == -1  # like that of no other file
    with pytest.raises(InputError, match=r"b\.wav: cannot be read, No such file"):
        overview._digest(paths[1])


def test_unusual_characters_are_listed_up_to_a_number(tmp_path: Path) -> None:
    sound(tmp_path / "a.wav")
    strange = "".join(map(chr, range(0x2600, 0x2600 + data_command.NAMED + 3)))
    result = run("data", write(tmp_path / "list.tsv", f"a.wav\thello {strange}\n"))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "unusual: ☀ (U+2600), 1 times, a symbol" in text
    assert text.count("(U+26") == data_command.NAMED
    assert "unusual: 3 more; --json lists all" in text
