"""Any record that the page can be made from: which it is, what is refused, and that hostile ones never crash it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from foreign_records import checked, dump, episode, node, rollout, talk, trace, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report.foreign.text import conversation, is_trained, parts, split
from apportion.report.source import open_source

INTERCHANGE = {"group": "g", "reward": 1, "token_ids": [1, 2, 3]}


# --- which record it is -------------------------------------------------------------------------------------


def test_a_run_folder_is_opened_as_one(run: RunFolder) -> None:
    source = open_source(run.path)
    assert isinstance(source, RunFolder) and source.steps() == run.steps()
    checked(source, source.steps()[-1])


def test_a_folder_of_runs_is_refused_by_name(tmp_path: Path, run: RunFolder) -> None:
    for name in ("b", "a", "d", "c"):
        shutil.copytree(run.path / "credit", tmp_path / name / "credit")
    with pytest.raises(InputError, match=r"4 runs \(a, b, c and 1 more\)"):
        open_source(tmp_path)


def test_a_run_before_its_first_step_is_opened(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    assert open_source(tmp_path).steps() == []


def test_a_path_that_holds_no_record(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        open_source(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is no file"):
        open_source(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"credit/step-\*\.parquet"):
        open_source(tmp_path)
    with pytest.raises(InputError, match="objects with a, b"):
        open_source(write_lines(tmp_path / "other.jsonl", [{"b": 1, "a": 2}]))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match="no whole line"):
        open_source(tmp_path / "empty.jsonl")


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".pkl", ".npz"])
def test_packed_files_are_never_opened(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rollouts{suffix}"
    # Whoever unpickles it leaves a trace.
    path.write_bytes(pickle.dumps(_Trap(str(tmp_path / "sprung"))))
    with pytest.raises(InputError, match="packed file"):
        open_source(path)
    assert not (tmp_path / "sprung").exists()


class _Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (self.path, "w")


def test_a_prime_rl_folder_with_nothing_but_batches_names_the_fix(tmp_path: Path) -> None:
    batch = tmp_path / "rollouts" / "step_3" / "train_rollouts.bin"
    batch.parent.mkdir(parents=True)
    batch.write_bytes(b"\x81\xa8examples\x90")
    with pytest.raises(InputError, match="prime-rl writes in the same folder"):
        open_source(tmp_path)


# --- text as pieces -----------------------------------------------------------------------------------------


def test_pieces_are_words_with_the_space_before_them_and_line_breaks() -> None:
    pieces, mask = split([("So 2+2\n\n =  4 ", True)])
    assert pieces == ["So", " 2+2", "\n\n", " =", "  4", " "]
    assert mask == [True] * 6


def test_a_response_without_text_is_one_empty_piece() -> None:
    assert split([("", True)]) == ([""], [True]) == split([])


def test_of_several_messages_only_the_assistant_is_trained_on() -> None:
    said = [("assistant", "look up"), ("tool", "4 hits"), ("assistant", "done")]
    pieces, mask = split(parts(said))
    assert "".join(pieces) == conversation(said)
    assert [p for p, m in zip(pieces, mask, strict=True) if m] == ["look", " up", "done"]


@given(st.lists(st.tuples(st.text(), st.booleans()), max_size=4))
def test_no_character_is_lost_and_no_piece_mixes_two_authors(given_parts: list[tuple[str, bool]]) -> None:
    pieces, mask = split(given_parts)
    author = [ours for part, ours in given_parts for _ in part]
    assert "".join(pieces) == "".join(part for part, _ in given_parts)
    assert [ours for piece, ours in zip(pieces, mask, strict=True) for _ in piece] == author
    assert any(mask) == is_trained(given_parts)
    if author:
        assert all(pieces)
    # No line break stands beside anything else.
    assert all(len({c == "\n" for c in piece}) <= 1 for piece in pieces)


@pytest.mark.parametrize("text", [" " * 10**6, "x" * 10**6, "\n" * 10**6, " \n" * 10**5, (" " * 50 + "x") * 10**4])
def test_splitting_takes_time_in_proportion_to_the_text(text: str) -> None:
    # A pattern that looks at white space again and again would not come back from a million of them.
    pieces, _ = split([(text, True)])
    assert max(map(len, pieces)) <= 80 and "".join(pieces) == text


# --- files that are being written, or are no files of this kind ----------------------------------------------


@pytest.mark.parametrize("name", ["verl", "prime-rl", "interchange"])
def test_a_half_written_last_line_is_left_out(tmp_path: Path, name: str) -> None:
    rows = {"verl": dump("p", "a", 1.0), "prime-rl": rollout(0, "a", 1.0), "interchange": INTERCHANGE}
    path = write_lines(tmp_path / "7.jsonl", [rows[name]] * 3)
    whole = path.read_bytes()
    source = open_source(path)
    (step,) = source.steps()
    assert len(source.read("rollouts", step)) == 3
    path.write_bytes(whole[:-20])
    assert len(source.read("rollouts", step)) == 2 == len(source.read("credit", step))
    # A last line without its line break is whole where it is JSON.
    path.write_bytes(whole[:-1])
    assert len(source.read("rollouts", step)) == 3


@pytest.mark.parametrize(
    ("content", "field", "got"),
    [
        (b'{"input": "a", "output": "\xff", "score": 1}\n', "line 2 of 7.jsonl", "not UTF-8"),
        (b'{"input": "a", "output": }\n', "line 2 of 7.jsonl", "invalid JSON"),
        (b"[" * 100_000 + b"\n", "line 2 of 7.jsonl", "invalid JSON"),
        (b"[1, 2]\n", "line 2 of 7.jsonl", "a list of 2"),
        (b'{"input": "a", "score": 1}\n', "output of line 2 of 7.jsonl", "nothing"),
        (b'{"input": "a", "output": "b", "score": "1"}\n', "score of line 2 of 7.jsonl", '"1"'),
        (b'{"input": "a", "output": "b", "score": 1e39}\n', "score of line 2 of 7.jsonl", "1e+39"),
        (b'{"input": "a", "output": "b", "score": -Infinity}\n', "score of line 2 of 7.jsonl", "-inf"),
        (b'{"input": "a", "output": "b", "score": true}\n', "score of line 2 of 7.jsonl", "true"),
        (b'{"input": 3, "output": "b", "score": 1}\n', "input of line 2 of 7.jsonl", "3"),
        (b'{"input": "a", "output": [{"content": 3}], "score": 1}\n', "content of output[0] of line 2", "3"),
    ],
)
def test_what_is_wrong_is_named_with_its_file_line_and_field(
    tmp_path: Path, content: bytes, field: str, got: str
) -> None:
    path = tmp_path / "7.jsonl"
    path.write_bytes(json.dumps(dump("p", "a", 1.0)).encode() + b"\n" + content)
    with pytest.raises(InputError) as error:
        open_source(path).read("rollouts", 7)
    assert error.value.field.startswith(field) and got in str(error.value.got)
    assert "\n" not in str(error.value)


def test_a_name_out_of_the_record_cannot_act_in_a_message(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [trace("t", talk("4"), {"\x1b[2J": "high"})])
    with pytest.raises(InputError) as error:
        open_source(path).steps()
    assert str(error.value).startswith('␛[2J of rewards of line 1 of t.jsonl: got "high"')


# --- hostile records ------------------------------------------------------------------------------------------

HOSTILE = st.one_of(
    st.text(st.characters(codec=None), max_size=30),
    st.sampled_from(["\ud800", "a\udfffb", "\x00\x1b[31m", "</script><script>alert(1)</script>", "\u202eevil", "\r\n"]),
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE, inner, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries({"role": HOSTILE | st.just("assistant"), "content": HOSTILE | JUNK})
TALK = HOSTILE | st.lists(MESSAGE, max_size=3)
FIGURE = st.floats(allow_nan=True, allow_infinity=False, width=16) | st.integers(-3, 3)
NUMBER = FIGURE | st.none()


def bad(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what it should be."""
    return st.one_of(good, good, good, JUNK)


VERL = st.fixed_dictionaries(
    {"input": bad(TALK), "output": bad(TALK), "score": bad(NUMBER)},
    optional={"gts": JUNK, "uid": bad(st.sampled_from(["u_0_0", "u_1_0", "v_0_0"])), "step": bad(st.integers(0, 2))},
)
NODE = st.builds(
    lambda base, change: {**base, **change},
    st.builds(
        node, st.sampled_from(["user", "assistant"]), HOSTILE, st.none() | st.integers(0, 1), st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.dictionaries(
        st.sampled_from(["parent", "message", "mask", "logprobs", "advantages", "token_ids"]), JUNK, max_size=1
    ),
)  # fmt: skip
TRACE = st.fixed_dictionaries(
    {"nodes": bad(st.lists(NODE, max_size=3)), "rewards": bad(st.dictionaries(HOSTILE, NUMBER, max_size=2))},
    optional={
        "id": JUNK, "info": bad(st.dictionaries(st.sampled_from(["advantage", "group_id", "ship"]), JUNK)),
        "task": JUNK,
    },
)  # fmt: skip
PRIME = st.one_of(
    TRACE,
    st.fixed_dictionaries({"traces": bad(st.lists(TRACE, max_size=2))}, optional={"run": JUNK, "group": JUNK}),
    st.fixed_dictionaries(
        {"example_id": JUNK, "prompt": bad(TALK), "completion": bad(TALK), "reward": bad(NUMBER)},
        optional={"advantage": bad(NUMBER), "answer": JUNK, "error": JUNK, "is_truncated": JUNK},
    ),
)
SEGMENT = st.fixed_dictionaries(
    {
        "start": bad(st.integers(0, 1)), "end": bad(st.integers(1, 3)), "samples": bad(st.integers(0, 4)),
        **{name: bad(NUMBER) for name in ("raw", "shrunk", "stderr", "increment")},
    }
)  # fmt: skip
THREE = st.lists(FIGURE, min_size=3, max_size=3)
LINE = st.fixed_dictionaries(
    {"group": bad(HOSTILE), "reward": bad(NUMBER), "token_ids": st.just([1, 2, 3])},
    optional={
        "text": st.just("a\ud800bc"), "offsets": st.just([0, 1, 2]), "prompt": JUNK, "gold": JUNK,
        "evidence": bad(st.fixed_dictionaries({"continuations": st.just([{"position": 1, "rewards": [1, None, 0]}])})),
    },
)  # fmt: skip
ASSIGNED = st.builds(
    lambda line, credit: {**line, **credit}, LINE,
    st.fixed_dictionaries(
        {"advantage": bad(THREE), "base": bad(NUMBER)},
        optional={
            "segments": bad(st.lists(SEGMENT, max_size=2)), "method": bad(st.sampled_from(["probepo", "grpo", "a+b"])),
            "settings": bad(st.dictionaries(st.sampled_from(["n0", "budget", "samples"]), NUMBER | JUNK, max_size=2)),
            "invariants": bad(st.dictionaries(st.sampled_from(["telescoping", "conserved"]), NUMBER)),
            "weight": bad(THREE),
        },
    ),
)  # fmt: skip


ROWS = {"verl": VERL, "prime-rl": PRIME, "interchange": LINE, "assigned": ASSIGNED}
# More of them: APPORTION_FUZZ=2000 pytest tests/report/test_report_foreign.py
EXAMPLES = int(os.environ.get("APPORTION_FUZZ", "40"))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", ROWS)
@given(data=st.data())
def test_hostile_records_become_valid_rows_or_one_clear_error(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    path = tmp_path / "7.jsonl"
    write_lines(path, data.draw(st.lists(ROWS[kind], min_size=1, max_size=4)))
    try:
        source = open_source(path)
        for step in source.steps():
            checked(source, step)
        json.dumps(source.metrics(), allow_nan=False)
    except InputError as error:
        assert str(error).isprintable()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), suffix=st.sampled_from([".jsonl", ".parquet", ".jsonl.zst", ".txt"]))
def test_bytes_of_any_kind_are_one_clear_error(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError):
        open_source(path).metrics()


def test_half_a_surrogate_pair_is_shown_as_no_character(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "7.jsonl", [dump("p\ud800", "\udfffx \ud83d\ude00", 1.0)])
    (row,) = open_source(path).read("rollouts", 7)
    assert (row["prompt"], row["text"]) == ("p\ufffd", "\ufffdx \U0001f600")
    assert row["char_start"] == [0, 2]


def test_reading_a_step_again_follows_the_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "1.jsonl", [dump("p", "a", 1.0)])
    source = open_source(tmp_path)
    assert source.metrics()[0]["reward"] == 1.0
    write_lines(path, [dump("p", "a", 1.0), dump("p", "b", 0.0)])
    assert source.metrics()[0]["reward"] == 0.5
    write_lines(tmp_path / "2.jsonl", [dump("p", "a", 1.0)])
    assert source.steps() == [1, 2] and [row["step"] for row in source.metrics()] == [1, 2]


def test_a_sealed_stream_is_unpacked(tmp_path: Path) -> None:
    lines = b"".join(
        json.dumps(episode(f"e{k}", [trace(f"t{k}", talk("4"), {"ok": 1.0})])).encode() + b"\n" for k in (0, 1)
    )
    stream = tmp_path / "traces" / "stream"
    stream.mkdir(parents=True)
    # Sealed chunks are several frames and a table of seeks that a reader skips.
    frames = b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (lines[:100], lines[100:]))
    (stream / "00000.jsonl.zst").write_bytes(frames + b"\x5e\x2a\x4d\x18\x04\x00\x00\x00seek")
    assert len(open_source(tmp_path).read("rollouts", 0)) == 2
