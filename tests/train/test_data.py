"""The problems of a run: rows, prompts and rewards, and one error for each thing that can be wrong in a file.

Planted faults seen caught: rows counted from 0, an abstention scored 0, other columns left out of the rows, the
system message sent after the problem, test problems drawn from the training split.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model_folders import save_problems, sums

from apportion.errors import InputError
from apportion.tasks import parse_problem, split_of
from apportion.train.data import load_data
from apportion.train.settings import RunConfig, load_config

SHARED = Path(os.environ.get("APPORTION_SHARED", Path(__file__).parents[3] / "shared"))
GSM8K = SHARED / "data" / "gsm8k_test.jsonl.gz"


def config(**settings: object) -> RunConfig:
    return load_config(None, {key.replace("__", "."): value for key, value in settings.items()})


def test_generated_problems_are_split_and_scored() -> None:
    data = load_data(config(data__count=20, run__evaluate_samples=10, data__operations=2), chat=False)
    assert len(data.train) == 20 and len(data.test) == 10
    assert {split_of(row["prompt"]) for row in data.train} == {"train"}
    assert {split_of(row["prompt"]) for row in data.test} == {"test"}
    prompt = data.train[0]["prompt"]
    right = parse_problem(prompt).solution
    assert data.reward(prompts=[prompt] * 2, completions=[right, right + "0"]) == [1.0, 0.0]
    assert load_data(config(run__evaluate_samples=0), chat=False).test == []


def test_a_file_for_a_plain_model(tmp_path: Path) -> None:
    path = save_problems(tmp_path / "p.jsonl", [{**row, "level": 2} for row in sums()])
    data = load_data(config(data__path=str(path)), chat=False)
    assert data.train[0] == {"prompt": "1+1=?\n", "answer": "3", "level": 2}
    assert len(data.train) == 9 and data.test == []


def test_a_file_for_a_chat_model_with_other_columns(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "solution": "1+1=<<1+1=2>>2\n#### 2"}]
    path = save_problems(tmp_path / "p.jsonl", rows)
    chosen = config(data__path=str(path), data__problem="question", data__answer="solution", data__system="Be brief.")
    [row] = load_data(chosen, chat=True).train
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}
    ]  # fmt: skip
    assert row["answer"] == "2"
    with pytest.raises(InputError, match=r"data\.system: got 'Be brief\.'; expected a model with a chat template"):
        load_data(chosen, chat=False)


def test_rewards_of_text_and_of_messages(tmp_path: Path) -> None:
    path = save_problems(tmp_path / "p.jsonl", [{"problem": "1+1?", "answer": "2"}])
    reward = load_data(config(data__path=str(path)), chat=False).reward
    assert reward(completions=[r"so \boxed{2}", r"so \boxed{3}"], answer=["2", "2"]) == [1.0, 0.0]
    said = [[{"role": "assistant", "content": r"\boxed{2}"}]]
    assert reward(completions=said, answer=["2"]) == [1.0]
    # No verdict is no reward, and not a wrong answer.
    assert reward(completions=[r"\boxed{2}"], answer=[""]) == [None]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, r"p\.jsonl: got an empty file; expected at least one problem"),
        (sums(), {"data__problem": "question"}, r"got no column 'question'; .*: problem, answer\. Fix.*data\.problem"),
        (sums(), {"data__answer": "answr"}, r"got no column 'answr'; .*did you mean 'answer'\?\. Fix.*data\.answer"),
        (
            [*sums(), {"problem": "?", "answer": r"\boxed{}"}], {},
            r"p\.jsonl, row 10, column 'answer': got '.*boxed\{\}'; expected an answer that the math verifier",
        ),
        (
            [{"problem": "?", "answer": "seven"}], {"reward__kind": "choice"},
            r"row 1, column 'answer': got 'seven'; .*the choice verifier",
        ),
        (sums(), {"reward__kind": "task"}, r"reward\.kind: got 'task'; expected math, exact or choice"),
    ],
)  # fmt: skip
def test_refused_files(tmp_path: Path, rows: list, settings: dict, message: str) -> None:
    path = save_problems(tmp_path / "p.jsonl", rows)
    with pytest.raises(InputError, match=message):
        load_data(config(data__path=str(path), **settings), chat=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data__task": "chian"}, r"data\.task: got 'chian'; expected one of chain, did you mean 'chain'\?"),
        ({"data__modulus": 210}, r"data: got modulus: 210 shares a factor"),
        ({"reward__kind": "math"}, r"reward\.kind: got 'math'; expected auto or task"),
        ({"data__path": "nowhere.jsonl"}, r"nowhere\.jsonl: got no such file"),
    ],
)
def test_refused_settings(settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_data(config(**settings), chat=False)


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"no {GSM8K}; APPORTION_SHARED names its folder")
def test_gsm8k() -> None:
    data = load_data(config(data__path=str(GSM8K), data__limit=40), chat=True)
    assert len(data.train) == 40
    assert data.train[0]["answer"] == "18" and data.train[0]["prompt"][0]["content"].startswith("Janet")
    assert data.reward(completions=["She makes 18 dollars: \\boxed{18}."], answer=["18"]) == [1.0]
