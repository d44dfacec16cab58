"""Problem sets from folders, files and the datasets library, and prompts by model family.

Planted faults seen caught: capitals or a dash in a name that make it a set of one's own; a name that leaves the folder
of records; one set's column asked of all; a folder after hf: not looked for; the library's bars left off; half a
surrogate pair let through; an id that stands twice unseen, `answers` ignored, no aliases, chains from the training
split, two BOS tokens, an end of turn that does not stop.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluate_tools import Tokenizer, write_set

from apportion.errors import InputError
from apportion.evaluate import AVG6, BENCHES, Columns, columns_by_set, load_sets
from apportion.evaluate.prompts import INSTRUCTION, render, style_of, turn_ends
from apportion.evaluate.sources import Problem
from apportion.tasks import parse_problem, split_of

ROWS = [{"id": f"p{i}", "problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(4)]
CHAT, QWEN, R1 = "{{ messages }}", "<|im_start|>{{ messages }}<|im_end|>", "{{ messages }}<｜Assistant｜>"


def refused(*parts: str, **arguments: Any) -> None:
    with pytest.raises(InputError) as caught:
        load_sets(**arguments)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_the_six_sets_and_their_samples() -> None:
    assert {name: BENCHES[name].n for name in AVG6} == {
        "math500": 16, "olympiadbench": 16, "collegemath": 16, "amc": 16, "minerva": 16, "aime24": 32
    }  # fmt: skip
    assert BENCHES["amc"].sizes == (83,)


def test_a_folder_under_either_name(tmp_path: Path) -> None:
    write_set(tmp_path, "amc_83", ROWS)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "math500.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_set(tmp_path, "mine", ROWS)
    for names in (["amc", "math500", "mine"], ["amc_83", "math500", "mine"]):
        sets = load_sets(names, [str(tmp_path)], limit=2)
        assert [each.name for each in sets] == ["amc", "math500", "mine"]
        assert all([p.id for p in each.problems] == ["p0", "p1"] for each in sets)
    assert sets[2].bench.n == 16 and sets[2].bench.title == "mine"


def test_answers_are_accepted_beside_the_answer(tmp_path: Path) -> None:
    row = {"id": 7, "problem": "x?", "answer": "3.83e35", "answers": [r"3.83 \times 10^{35}", "3.83e35"]}
    write_set(tmp_path, "minerva_math", [row])
    problems = load_sets(["minerva"], [str(tmp_path)])[0].problems
    assert problems == (Problem("7", "x?", ("3.83e35", r"3.83 \times 10^{35}"), 1),)
    for wrong in ("3", [3], [""], [None]):
        path = write_set(tmp_path, "minerva_math", [row | {"answers": wrong}])
        refused("minerva: ", str(path), "row 1", "'answers'", names=["minerva"], sources=[str(tmp_path)])


@pytest.mark.parametrize("column", ["final_answer", "answer", "answers"])
def test_a_list_in_the_column_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    rows: list[dict[str, Any]] = [{"problem": "x?", column: ["2", "3"]}, {"problem": "y?", column: ["1.5"]}]
    path = write_set(tmp_path, "mine", rows)
    columns = Columns(answer=column)
    refused("mine: ", "line 1", "a list", "column answers", names=["mine"], sources=[str(path)], columns=columns)
    # A data set of the library cannot be rewritten by who reads it, and OlympiadBench's answers are lists there.
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_list(rows))
    (found,) = load_sets(["mine"], ["hf:a/b"], columns)
    assert [p.gold for p in found.problems] == [("2", "3"), ("1.5",)]
    for wrong in ([], [""], [None]):
        rows[1] = {"problem": "y?", column: wrong}
        refused("mine: hf:a/b, row 2", "'answer", names=["mine"], sources=["hf:a/b"], columns=columns)
    rows[:] = [{"problem": "x?", column: [2, 3]}]
    assert load_sets(["mine"], ["hf:a/b"], columns)[0].problems[0].gold == ("2", "3")


def test_other_columns_and_no_ids(tmp_path: Path) -> None:
    path = write_set(tmp_path, "mine", [{"question": "a?", "final": 1.5, "uid": "u"}, {"question": "b?", "final": "2"}])
    refused("mine: ", "no column 'problem'", "--problem-column", names=["mine"], sources=[str(path)])
    columns = Columns("question", "final")
    assert [(p.id, p.text, p.gold) for p in load_sets(["mine"], [str(path)], columns)[0].problems] == [
        ("1", "a?", ("1.5",)), ("2", "b?", ("2",))
    ]  # fmt: skip
    named = Columns("question", "final", "uid")
    refused("mine: ", "row 2", "'uid'", "nothing", names=["mine"], sources=[str(path)], columns=named)
    refused("'id2'", names=["mine"], sources=[str(path)], columns=Columns("question", "final", "id2"))


@pytest.mark.parametrize("column", ["problem", "answer", "id"])
def test_a_missing_field_is_named(tmp_path: Path, column: str) -> None:
    last = {"id": "p9", "problem": "?", "answer": "1"}
    write_set(tmp_path, "gsm8k", [*ROWS, {key: value for key, value in last.items() if key != column}])
    refused("gsm8k: ", f"'{column}'", "nothing", "5", names=["gsm8k"], sources=[str(tmp_path)])


def test_columns_of_each_set(tmp_path: Path) -> None:
    write_set(tmp_path, "math500", [{"id": 1, "problem": "a?", "answer": "1"}])
    write_set(tmp_path, "gsm8k", [{"id": 2, "question": "b?", "final": "2", "uid": "u"}])
    write_set(tmp_path, "mine", [{"question": "c?", "answer": "3"}])
    names = ["math500", "GSM8K", "mine"]
    columns = columns_by_set(names, ["gsm8k_test=question", "mine=question"], ["GSM8K=final"], ["gsm8k=uid"])
    sets = load_sets(names, [str(tmp_path)], columns)
    assert [each.problems[0] for each in sets] == [
        Problem("1", "a?", ("1",), 1), Problem("u", "b?", ("2",), 1), Problem("1", "c?", ("3",), 1)
    ]  # fmt: skip
    # One for all beside one for a single set; "=" in a column's name is no set's.
    columns = columns_by_set(["math500", "mine"], ["question", "math500=a=b"])
    assert (columns["math500"].problem, columns["mine"].problem) == ("a=b", "question")
    for wrong in (["question", "text"], ["amc=question"], ["mine=a", "mine=b"], [" "]):
        with pytest.raises(InputError, match="--problem-column"):
            columns_by_set(["math500", "mine"], wrong)


@pytest.mark.parametrize("name", ["MATH500", "MATH-500", "math_500"])
def test_a_name_in_other_letters(tmp_path: Path, name: str) -> None:
    # As a set of one's own it would be asked with other samples, and Avg-6 would lack it.
    for file in ("math500", "MATH-500"):
        write_set(tmp_path / file, file, ROWS)
        (found,) = load_sets([name], [str(tmp_path / file)])
        assert (found.name, found.bench) == ("math500", BENCHES["math500"])
    assert load_sets(["AIME24"], [str(write_set(tmp_path, "x", ROWS))])[0].bench.n == 32
    # The 40 problems of 2023 are not the 83.
    assert load_sets(["amc23"], [str(write_set(tmp_path, "amc23", ROWS))])[0].name == "amc23"


@pytest.mark.parametrize("name", ["..", "../x", "/x", "a/b", ".x", "a=b", "a b"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    refused("--bench", "letters", "--data NAME=FILE", names=[name], sources=[str(write_set(tmp_path, "x", ROWS))])


@pytest.mark.parametrize("column", ["id", "problem", "answer", "answers"])
def test_half_a_surrogate_pair(tmp_path: Path, column: str) -> None:
    bad = "a\ud800" if column != "answers" else ["a\ud800"]
    path = write_set(tmp_path, "mine", [ROWS[0], ROWS[1] | {column: bad}])
    refused("mine: ", "row 2", column.removesuffix("s"), "UTF-8", names=["mine"], sources=[str(path)])


def test_encodings_and_kinds_of_file(tmp_path: Path) -> None:
    rows = [{"id": "日本|x", "problem": "π²を求めよ 😀 \u2028 z", "answer": "π^2"}, *ROWS[:1]]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    expected = [(row["id"], row["problem"], (row["answer"],)) for row in rows]
    for name, content in {
        "crlf.jsonl": lines.replace("\n", "\r\n").encode(), "mark.jsonl": b"\xef\xbb\xbf" + lines.encode(),
        "blank.jsonl": lines.replace("\n", "\n\n").encode(), "array.json": json.dumps(rows, indent=1).encode(),
        "array.json.gz": gzip.compress(json.dumps(rows).encode()), "lines.jsonl.gz": gzip.compress(lines.encode()),
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table.parquet")
    for path in tmp_path.iterdir():
        (found,) = load_sets(["mine"], [str(path)])
        assert [(p.id, p.text, p.gold) for p in found.problems] == expected, path
    whole = (tmp_path / "lines.jsonl.gz").read_bytes(), (tmp_path / "table.parquet").read_bytes()
    for name, content in {
        "no.jsonl": b"", "no.json": b"[]", "cut.jsonl.gz": whole[0][:-9], "plain.jsonl.gz": lines.encode(),
        "latin.jsonl": '{"problem": "é"}'.encode("latin-1"), "cut.parquet": whole[1][:-9],
        "object.json": b'{"data": []}', "set.csv": b"id,problem,answer",
    }.items():  # fmt: skip
        path = tmp_path / name
        path.write_bytes(content)
        refused(f"mine: {path}", names=["mine"], sources=[str(path)])


@pytest.mark.parametrize("given", [[1], {"a": 1}, True, "", " ", None, float("nan")])
def test_an_id_that_is_none(tmp_path: Path, given: Any) -> None:
    path = write_set(tmp_path, "mine", [ROWS[0], ROWS[1] | {"id": given}])
    refused("mine: ", "row 2", "'id'", names=["mine"], sources=[str(path)])


def test_an_id_that_stands_twice_is_named(tmp_path: Path) -> None:
    write_set(tmp_path, "gsm8k", [*ROWS, ROWS[1]])
    refused("gsm8k: ", "line 5", "'p1'", "line 2", names=["gsm8k"], sources=[str(tmp_path)])
    write_set(tmp_path, "gsm8k", [{**row, "key": f" {i // 3} "} for i, row in enumerate(ROWS)])
    refused("row 2", "'0', as in row 1", names=["gsm8k"], sources=[str(tmp_path)], columns=Columns(id="key"))


def test_names_and_sources_that_cannot_be_used(tmp_path: Path) -> None:
    folder = str(tmp_path)
    path = write_set(tmp_path, "amc", ROWS)
    refused("did you mean 'math500'", names=["math50"], sources=[folder])
    refused("math500, which has no file", "math500.jsonl", names=["math500"], sources=[folder])
    refused("amc twice", names=["amc", "amc_83"], sources=[folder])
    refused("nothing for amc", names=["amc"], sources=[])
    refused("one folder for all", names=["amc"], sources=[folder, folder])
    refused("amc and mine share it", f"amc={path}", names=["amc", "mine"], sources=[str(path)])
    refused("hf:a/b", "share it", names=["amc", "mine"], sources=["hf:a/b"])
    refused("NAME=SOURCE once", names=["amc"], sources=[folder, f"amd={path}"])
    refused("NAME=SOURCE once", names=["chain"], sources=[f"chain={path}"])
    refused("hf:ORG/NAME", names=["amc"], sources=["hf:alone"])
    refused("no such file", names=["amc"], sources=[str(tmp_path / "none.jsonl")])
    refused("--limit", names=["amc"], sources=[folder], limit=0)
    refused("--bench", names=[], sources=[folder])
    refused("--data", names=["amc"], sources=[""])
    refused(f"amc: {tmp_path / 'none'}", "no such", names=["amc"], sources=[str(tmp_path / "none")])
    write_set(tmp_path, "amc_83", ROWS)
    refused("amc.jsonl and amc_83.jsonl", f"amc={path}", names=["amc"], sources=[folder])
    own = load_sets(["amc", "chain"], [folder, f"amc_83={path}"], limit=1)
    assert own[0].source == str(path) and own[1].source == "generated"


def test_data_from_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((path, config, split))
        if path == "no/where":
            raise ConnectionError("cannot reach the hub")
        return datasets.Dataset.from_list([{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(5)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = load_sets(["gsm8k"], ["hf:openai/gsm8k/main@train"], Columns("question"), limit=2)[0]
    assert [(p.id, p.text, p.gold) for p in found.problems] == [("1", "0?", ("0",)), ("2", "1?", ("1",))]
    load_sets(["gsm8k"], ["gsm8k=hf:openai/gsm8k"], Columns("question"))
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", None, "test")]
    refused("hf:no/where (cannot reach the hub)", "gsm8k=FILE", names=["gsm8k"], sources=["hf:no/where"])
    refused("gsm8k: hf:openai/gsm8k: got no column 'problem'", names=["gsm8k"], sources=["hf:openai/gsm8k"])


def test_data_from_a_folder_of_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "org" / "deep" / "set"
    (folder / "data").mkdir(parents=True)
    for split, rows in (("test", ROWS), ("train", ROWS[:1])):
        table = pa.Table.from_pylist([{"question": row["problem"], "final": row["answer"]} for row in rows])
        pq.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    columns = Columns("question", "final")
    for source in (f"hf:{folder}", "hf:org/deep/set", "hf:./org/deep/set@test", f"gsm8k=hf:{folder}@test"):
        (found,) = load_sets(["gsm8k"], [source], columns, limit=3)
        assert [(p.id, p.text, p.gold) for p in found.problems] == [
            (str(i + 1), f"What is {i}+{i}?", (str(2 * i),)) for i in range(3)
        ]  # fmt: skip
    assert len(load_sets(["gsm8k"], [f"hf:{folder}@train"], columns)[0].problems) == 1
    # The library's bars are as they were.
    assert not datasets.utils.are_progress_bars_disabled()
    refused(f"hf:{folder}@dev", "train", names=["gsm8k"], sources=[f"hf:{folder}@dev"], columns=columns)
    refused(f"gsm8k: hf:{folder}", "no column 'problem'", "--problem-column gsm8k=", names=["gsm8k"],
            sources=[f"hf:{folder}"])  # fmt: skip


def test_the_embedded_task_is_held_out() -> None:
    problems = load_sets(["chain"], [], limit=20)[0].problems
    assert len({p.id for p in problems}) == 20
    for problem in problems:
        assert split_of(problem.text) == "test"
        assert problem.gold == (parse_problem(problem.text).answer,)


@pytest.mark.parametrize(
    "template, model_type, style",
    [
        (None, "llama", "plain"), (CHAT, "llama", "chat"), (QWEN, "qwen2", "qwen"), (QWEN, "qwen3", "qwen"),
        (QWEN, "llama", "chat"), (R1, "qwen2", "r1"), (R1, "llama", "r1"),
    ],
)  # fmt: skip
def test_the_style_of_a_family(template: str | None, model_type: str, style: str) -> None:
    assert style_of(Tokenizer(template), model_type, None) == style


def test_a_forced_style() -> None:
    assert style_of(Tokenizer(CHAT), "llama", "plain") == "plain"
    assert style_of(Tokenizer(CHAT), "llama", "qwen") == "qwen"
    for style in ("chat", "qwen", "r1"):
        with pytest.raises(InputError, match="no chat template"):
            style_of(Tokenizer(None), "llama", style)
    with pytest.raises(InputError, match="did you mean 'plain'"):
        style_of(Tokenizer(CHAT), "llama", "plane")


def test_prompts_by_style() -> None:
    texts = {style: render(style, Tokenizer(CHAT), "1+1?") for style in ("qwen", "chat", "r1", "plain", "task")}
    assert texts["qwen"].text == f"<system>{INSTRUCTION}<user>1+1?<assistant>"
    assert texts["chat"].text == f"<user>1+1?\n{INSTRUCTION}<assistant>"
    assert texts["r1"].text == f"<user>1+1?\n{INSTRUCTION}<assistant><think>\n"
    assert texts["plain"].text == f"Problem: 1+1?\n{INSTRUCTION}\n\nSolution:"
    assert texts["task"].text == "1+1?"
    # A template brings its own special tokens; plain text gets the tokenizer's (1 here).
    assert {style: prompt.ids[0] == 1 for style, prompt in texts.items()} == {
        "qwen": False, "chat": False, "r1": False, "plain": True, "task": True
    }  # fmt: skip


def test_what_is_graded_of_a_response() -> None:
    r1, plain, chat = (render(style, Tokenizer(CHAT), "?") for style in ("r1", "plain", "chat"))
    # Thinking that never closes has no answer, even with a box in it.
    assert r1.graded(r"\boxed{1}") == r"<think>\boxed{1}"
    # A base model goes on with a problem of its own.
    ran_on = "\\boxed{1}\n\nProblem: next\n\\boxed{2}"
    assert plain.graded(ran_on) == "\\boxed{1}\n"
    assert chat.graded(ran_on) == ran_on


def test_a_template_that_opens_the_thinking_is_not_opened_twice() -> None:
    class Opening(Tokenizer):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
            return super().apply_chat_template(*args, **kwargs) + "<think>\n"

    prompt = render("r1", Opening(R1), "?")
    assert prompt.text.count("<think>") == 1 and prompt.graded("x") == "<think>x"


def test_a_base_model_with_a_chat_template_stops_at_the_turn() -> None:
    assert turn_ends("qwen", Tokenizer(QWEN)) == [7]
    assert turn_ends("plain", Tokenizer(QWEN)) == [] and turn_ends("chat", Tokenizer(CHAT)) == []
