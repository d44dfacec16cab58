"""The user's problem files: what is read, and one clear error for each thing that can be wrong.

Planted faults seen caught, each in a copy: the part before the first `####` taken; lines counted from 0; blank
lines not counted; `limit` off by one; other columns dropped; duplicate ids let through, or null ones refused;
NaN taken for an answer, and true for a number.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from apportion.errors import InputError
from apportion.tasks import load_problems

ROWS = [
    {"id": "a", "problem": "1+1?", "answer": "2", "level": 3},
    {"id": "b", "problem": "2+2?", "answer": "4", "level": None},
]
SHARED = Path(os.environ.get("APPORTION_SHARED", Path(__file__).parents[3] / "shared"))
GSM8K = SHARED / "data" / "gsm8k_test.jsonl.gz"


def write(folder: Path, name: str, rows: list) -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    lines = json.dumps(rows) if ".json" in name and ".jsonl" not in name else "\n".join(map(json.dumps, rows))
    path.write_bytes(gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode())
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json", "p.json.gz", "p.parquet", "P.JSONL"])
def test_every_kind_of_file(tmp_path, name):
    path = write(tmp_path, name, ROWS)
    assert load_problems(path) == ROWS
    assert load_problems(str(path), limit=1) == ROWS[:1]
    assert load_problems(path, limit=2) == load_problems(path, limit=99) == ROWS


def test_chosen_columns_take_the_names(tmp_path):
    rows = [{"question": "1+1?", "gold": 2, "problem": "old", "note": "kept"}]
    path = write(tmp_path, "p.jsonl", rows)
    assert load_problems(path, "question", "gold") == [{"problem": "1+1?", "answer": "2", "note": "kept"}]


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        ("so 40 + 2 = <<40+2=42>>42\n#### 42", "42"),
        ("#### 1\n#### -1,234 ", "-1,234"),
        ("  7 ", "7"),
        (18, "18"),
        (0, "0"),
        (2.5, "2.5"),
    ],
)
def test_answers(tmp_path, raw, answer):
    path = write(tmp_path, "p.jsonl", [{"problem": "q", "answer": raw}])
    assert load_problems(path)[0]["answer"] == answer


def test_blank_lines_and_byte_order_mark_are_skipped(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\n{"problem": "q", "answer": "1"}\n\n')
    assert load_problems(path) == [{"problem": "q", "answer": "1"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty file; expected at least one problem"),
        (" \n\n", "got an empty file"),
        ('{"problem": "q", "answer": "1"}\n\n{"problem": }', "line 3: got .* column 13 .*; expected valid JSON"),
        ('{"problem": "q", "answer": "1"}\n[1]', "line 2: got a JSON list; expected an object"),
        ("[" * 100_000, "line 1: got .*; expected valid JSON"),
        (
            '{"problem": "q", "answer": "1"}\n{"problem": null, "answer": "1"}',
            "line 2, column 'problem': got nothing; expected text. Fix: .*drop",
        ),
        ('{"problem": "q", "answer": "1"}\n{"problem": "q"}', "line 2, column 'answer': got nothing"),
        ('{"problem": "q", "answer": NaN}', "line 1, column 'answer': got nothing"),
        ('{"problem": " ", "answer": "1"}', "line 1, column 'problem': got empty text"),
        ('{"problem": "q", "answer": "so ####  "}', "line 1, column 'answer': got empty text"),
        ('{"problem": 5, "answer": "1"}', "line 1, column 'problem': got a int; expected text"),
        ('{"problem": "q", "answer": ["1"]}', "line 1, column 'answer': got a list; expected text"),
        ('{"problem": "q", "answer": true}', "line 1, column 'answer': got a bool; expected text"),
        (
            '{"question": "q", "answer": "1"}',
            "got no column 'problem'; expected one of its columns: question, answer. Fix: .* data.problem",
        ),
        (
            '{"problem": "q", "answers": "1"}',
            "got no column 'answer'; .*problem, answers, did you mean 'answers'.*data.answer",
        ),
        ("{}", "got no column 'problem'; expected one of its columns: none"),
        (
            '{"id": 7, "problem": "q", "answer": "1"}\n{"problem": "q", "answer": "1"}\n'
            '{"id": 7, "problem": "r", "answer": "1"}',
            "line 3, column 'id': got 7, as in line 1; expected each id once",
        ),
    ],
)
def test_bad_lines(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_problems(path)
    assert caught.value.field.startswith(str(path))


def test_rows_without_an_id_are_no_duplicates(tmp_path):
    rows = [{"id": None, "problem": "q", "answer": "1"}] * 2 + [{"id": "7", "problem": "q", "answer": "1"}]
    assert len(load_problems(write(tmp_path, "p.jsonl", [*rows, {**rows[2], "id": 7}]))) == 4


def test_parquet_nothing_is_null(tmp_path):
    rows = [{"problem": "q", "answer": 1.0}, {"problem": "q", "answer": math.nan}]
    with pytest.raises(InputError, match="row 2, column 'answer': got nothing"):
        load_problems(write(tmp_path, "p.parquet", rows))


@pytest.mark.parametrize("name", ["p.parquet", "p.jsonl.gz", "p.jsonl", "p.json"])
def test_damaged_files(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\x1f\x8b\x08\xff nothing of the kind")
    with pytest.raises(InputError, match=re.escape(str(path))):
        load_problems(path)


def test_cut_gzip(tmp_path):
    path = write(tmp_path, "p.jsonl.gz", ROWS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"expected a \.jsonl\.gz file that can be read"):
        load_problems(path)


def test_wrong_paths_and_settings(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.jsonl: got no such file"):
        load_problems(tmp_path / "nowhere.jsonl")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(InputError, match=r"folder\.json: got no such file"):
        load_problems(tmp_path / "folder.json")
    with pytest.raises(InputError, match=r"p.csv: got an unknown kind of file; expected one of \.jsonl"):
        load_problems(tmp_path / "p.csv")
    with pytest.raises(InputError, match="limit: got 0; expected 1 or more"):
        load_problems(write(tmp_path, "p.jsonl", ROWS), limit=0)
    path = tmp_path / "p.json"
    path.write_text('{"data": []}')
    with pytest.raises(InputError, match="got a JSON dict; expected one array of objects"):
        load_problems(path)
    path.write_text('[{"problem": "q", "answer": "1"}, 3]')
    with pytest.raises(InputError, match="row 2: got a JSON int; expected an object"):
        load_problems(path)


def test_rows_after_the_limit_are_not_read(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"problem": "q", "answer": "1"}\nnot JSON')
    assert load_problems(path, limit=1) == [{"problem": "q", "answer": "1"}]


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"no {GSM8K}; APPORTION_SHARED names its folder")
def test_gsm8k():
    rows = load_problems(GSM8K)
    assert len(rows) == 1319
    assert rows[0]["answer"] == "18"
    assert set(rows[0]) == {"id", "problem", "answer", "solution", "source"}
