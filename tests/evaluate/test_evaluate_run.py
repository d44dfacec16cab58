"""A whole evaluation: numbers from samples, the cache, going on after a stop, graders, abstentions, comparisons.

Planted faults seen caught: a cache key without id, seed, weights, prompt, max tokens or sampling; a fingerprint by
file size; new samples that start at m = 0; batches asked again; a stream that depends on what is missing; rows in the
engine's order; text graded without the prompt's <think> or with a base model's next problem; an unreadable gold
always dropped; a changed gold unseen, or an old verdict kept beside it; abstentions final, uncounted or taken for
wrong; disagreements by answer; Avg-6 of fewer than six sets; votes by raw text; n < k accepted; a part file left;
comparisons that miss another gold, another grader, or problems of one side only; R1 templates taken for plain chat;
16 samples on AIME24.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluate_tools import CUT, Engine, policy, samples, silent, write_set
from safetensors.torch import load_file, save_file

from apportion.engines.base import Continuation, Request, Sampling
from apportion.errors import InputError
from apportion.evaluate import AVG6, Policy, Settings, compare, evaluate, grading, load_sets, open_policy
from apportion.evaluate.policy import fingerprint
from apportion.evaluate.records import Store
from apportion.evaluate.table import comparison, leaderboard, table
from apportion.tasks import policy_path
from apportion.verify import Verdict

ROWS = [{"id": f"p{i}", "problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(4)]


def boxed(value: object) -> str:
    return f"so \\boxed{{{value}}}"


def second_right(key: str, m: int) -> str:
    """The even samples are wrong, the odd ones right."""
    return boxed(2 * int(key[-1]) if m % 2 else -1)


def run(
    output: Path, data: Path, engine: Engine, names: str = "gsm8k", model: Policy | None = None,
    limit: int | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    sets = load_sets(names.split(","), [str(data)], limit=limit)
    return evaluate(model or policy(engine), sets, Settings(**{"n": 2, "batch": 4, **settings}), output, silent)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_set(tmp_path / "data", "gsm8k", ROWS)
    return tmp_path / "data"


def test_row_25_the_average_is_over_all_samples(tmp_path: Path, data: Path) -> None:
    found = run(tmp_path / "out", data, Engine(second_right), limit=2)["sets"][0]
    # Two problems, wrong and right each: [[0, 1], [0, 1]].
    assert {name: mean["value"] for name, mean in found["metrics"].items()} == {
        "avg@2": 50.0, "pass@2": 100.0, "maj@2": 50.0
    }  # fmt: skip


def test_what_lies_on_disk(tmp_path: Path, data: Path) -> None:
    def answer(key: str, m: int) -> str:
        return {("p0", 0): "no idea " * 60, ("p1", 1): boxed("2") + CUT}.get((key[-2:], m), second_right(key, m))

    evaluation = run(tmp_path / "out", data, Engine(answer), seed=5)
    rows = samples(tmp_path / "out", "gsm8k")
    files = sorted((tmp_path / "out" / "samples" / "gsm8k").iterdir())
    # Batches of 4 are two problems each; rows stand by problem, then m, however the engine gave them back.
    assert [[(row["id"], row["m"]) for row in Store(tmp_path / "out").rows(path)] for path in files] == [
        [("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1)], [("p2", 0), ("p2", 1), ("p3", 0), ("p3", 1)]
    ]  # fmt: skip
    row = rows["p1", 1]
    assert row["set"] == "gsm8k" and row["gold"] == ["2"] and row["finish"] == "length"
    assert row["text"] == boxed("2") + CUT and row["tokens"] == len(row["token_ids"]) == len(row["text"])
    assert row["prompt"].startswith("Problem: What is 1+1?") and json.loads(row["setting"])["seed"] == 5
    assert row["grades"] == [{"grader": "math", "verdict": "correct", "reason": "same spelling", "answer": "2"}]
    items = {item["id"]: item for item in Store(tmp_path / "out").items("gsm8k")}
    assert items["p0"]["no_answer"] == 1 and items["p1"]["cut_off"] == 1
    assert (items["p2"]["correct"], items["p2"]["graded"], items["p2"]["average"]) == (1, 2, 0.5)
    told = evaluation["sets"][0]
    assert (told["no_answer"], told["cut_off"], told["samples"], told["lost"]) == (1, 1, 8, 0)
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == json.loads(json.dumps(evaluation))
    assert (tmp_path / "out" / "table.md").read_text() == table(evaluation)
    assert "| GSM8K | 4 | 2 | 50.0 |" in table(evaluation) and "12 %" in table(evaluation)
    assert "GSM8K: 4 problems here, 1,319 published" in table(evaluation)


def test_nothing_is_sampled_twice(tmp_path: Path, data: Path) -> None:
    first = Engine(second_right)
    evaluation = run(tmp_path / "out", data, first, limit=2)
    assert sorted(first.asked) == [("gsm8k/p0", 0), ("gsm8k/p0", 1), ("gsm8k/p1", 0), ("gsm8k/p1", 1)]
    # The same again, another grader: no model is opened at all.
    closed = replace(policy(first), engine=lambda batch: pytest.fail("the weights are loaded"))
    assert run(tmp_path / "out", data, first, model=closed, limit=2) == evaluation
    run(tmp_path / "out", data, first, model=closed, limit=2, grader="exact", second_grader="math")
    assert {grade["grader"] for grade in samples(tmp_path / "out", "gsm8k")["p0", 0]["grades"]} == {"math", "exact"}
    # More samples, more problems: what is new alone.
    more = Engine(second_right)
    run(tmp_path / "out", data, more, limit=3, n=3)
    assert sorted(more.asked) == [
        ("gsm8k/p0", 2), ("gsm8k/p1", 2), ("gsm8k/p2", 0), ("gsm8k/p2", 1), ("gsm8k/p2", 2)
    ]  # fmt: skip
    run(tmp_path / "out", data, more, limit=4, n=3)
    assert len(more.asked) == 8  # p3 alone is new
    assert all(Store(tmp_path / "out").rows(path) for path in (tmp_path / "out").rglob("samples/*/*.parquet"))
    # Fewer: those first drawn.
    assert run(tmp_path / "out", data, first, model=closed, limit=2) == evaluation


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1}, {"max_tokens": 99}, {"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5}, "weights", "problem",
        "prompt",
    ],
)  # fmt: skip
def test_what_misses_the_cache(tmp_path: Path, data: Path, change: Any) -> None:
    run(tmp_path / "out", data, Engine(second_right), limit=1)
    again = Engine(second_right)
    model, settings = policy(again, "{{ messages }}"), {}
    if change == "weights":
        model = replace(policy(again), fingerprint="others")
    elif change == "problem":
        write_set(data, "gsm8k", [ROWS[0] | {"problem": "What is 0 + 0?"}])
        model = policy(again)
    elif change != "prompt":
        model, settings = policy(again), change
    run(tmp_path / "out", data, again, model=model, limit=1, **settings)
    assert len(again.asked) == 2
    assert len({row["key"] for row in samples_of_all(tmp_path / "out")}) == 2


def samples_of_all(output: Path) -> list[dict[str, Any]]:
    store = Store(output)
    return [row for path in (output / "samples").glob("*/*.parquet") for row in store.rows(path)]


def test_two_problems_of_one_text_are_sampled_apart(tmp_path: Path, data: Path) -> None:
    write_set(data, "gsm8k", [ROWS[1], ROWS[1] | {"id": "again1"}])
    run(tmp_path / "out", data, Engine(second_right))
    assert len({row["key"] for row in samples_of_all(tmp_path / "out")}) == 2


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(policy_path(), folder)
    before = fingerprint(folder, "float32")
    (folder / "README.md").write_text("another card")
    assert fingerprint(folder, "float32") == before == fingerprint(policy_path(), "float32")
    assert fingerprint(folder, "bfloat16") != before
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[0]
    weights[name][0] += 1  # neither the size nor the header of the file changes
    size = (folder / "model.safetensors").stat().st_size
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert (folder / "model.safetensors").stat().st_size == size
    assert fingerprint(folder, "float32") != before


class Stopping:
    """The real engine until it has given back so many samples."""

    def __init__(self, engine: Any, after: int) -> None:
        self.engine, self.left = engine, after

    def continuations(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        for each in self.engine.continuations(requests, sampling):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield each


def test_a_stopped_run_goes_on_to_the_same_samples(tmp_path: Path) -> None:
    model = open_policy("embedded")
    sets, settings = load_sets(["chain"], [], limit=6), Settings(n=3, batch=6, max_tokens=40)
    whole = evaluate(model, sets, settings, tmp_path / "whole", silent)
    stopping = replace(model, engine=lambda batch: Stopping(model.engine(batch), after=9))
    with pytest.raises(KeyboardInterrupt):
        evaluate(stopping, sets, settings, tmp_path / "stopped", silent)
    # Batches of 2 problems × 3: the first is kept, the second was in hand.
    assert len(samples(tmp_path / "stopped", "chain")) == 6
    assert not (tmp_path / "stopped" / "evaluation.json").exists()
    assert evaluate(model, sets, settings, tmp_path / "stopped", silent) == whole
    assert samples(tmp_path / "stopped", "chain") == samples(tmp_path / "whole", "chain")
    assert not list(tmp_path.rglob("*.part"))


def test_samples_do_not_depend_on_how_they_were_reached(tmp_path: Path) -> None:
    model = open_policy("embedded")

    def reach(output: Path, limit: int, n: int) -> None:
        evaluate(model, load_sets(["chain"], [], limit=limit), Settings(n=n, batch=6, max_tokens=24), output, silent)

    reach(tmp_path / "at once", 6, 3)
    for limit, n in ((1, 1), (3, 2), (4, 3), (6, 3)):
        reach(tmp_path / "by and by", limit, n)
    found, expected = (
        {key: row["token_ids"] for key, row in samples(tmp_path / name, "chain").items()}
        for name in ("by and by", "at once")
    )
    assert found == expected and len({tuple(ids) for ids in found.values()}) > 6


def test_the_response_is_graded_as_the_prompt_left_it(tmp_path: Path, data: Path) -> None:
    # A box in thinking that never closes is no answer; nor is one in the next problem that a base model writes.
    engine = Engine(lambda key, m: boxed(0) if m else f"</think>{boxed(0)}")
    model = policy(engine, "<｜Assistant｜>")
    found = run(tmp_path / "r1", data, engine, model=model, limit=1)["sets"][0]
    assert found["style"] == "r1" and found["metrics"]["avg@2"]["value"] == 50
    ran_on = Engine(lambda key, m: f"{boxed(0)}\n\nProblem: 3?\n{boxed(3)}")
    found = run(tmp_path / "plain", data, ran_on, limit=1)["sets"][0]
    assert found["style"] == "plain" and found["metrics"]["avg@2"]["value"] == 100
    # The same where only the grader is new.
    assert run(tmp_path / "plain", data, ran_on, limit=1, grader="exact")["sets"][0]["metrics"]["avg@2"]["value"] == 100


def test_a_gold_that_cannot_be_read(tmp_path: Path, data: Path) -> None:
    gold = r"5 apples \text{ if } n > 2"
    path = write_set(data, "gsm8k", [*ROWS[:2], ROWS[2] | {"answer": gold}])
    engine = Engine(lambda key, m: boxed(gold if m else 5) if key.endswith("p2") else second_right(key, m))
    with pytest.raises(InputError) as caught:
        run(tmp_path / "out", data, engine)
    for part in (f"gsm8k: {path}, row 3, gold", repr(gold), "words", "--unreadable"):
        assert part in str(caught.value)
    assert not engine.asked
    # A problem beyond the limit is not looked at; nor is the gold read where nothing needs it read.
    run(tmp_path / "out", data, engine, limit=2)
    run(tmp_path / "exact", data, engine, grader="exact")
    dropped = run(tmp_path / "out", data, engine, unreadable="drop")
    told = dropped["sets"][0]
    assert (told["problems"], told["dropped"], told["abstained"]) == (2, 1, 0)
    assert any("1 problems left out" in note for note in dropped["notes"])
    spelled = run(tmp_path / "out", data, engine, unreadable="spelling")["sets"][0]
    # Word for word or wrong: 1 of 2, and none abstained.
    assert (spelled["problems"], spelled["by_spelling"], spelled["abstained"]) == (3, 1, 0)
    assert spelled["metrics"]["avg@2"]["value"] == 50.0
    assert samples(tmp_path / "out", "gsm8k")["p2", 0]["grades"][0]["grader"] == "math by spelling"
    with pytest.raises(InputError, match="row 3, gold"):
        run(tmp_path / "out", data, engine)


def test_a_gold_that_changes_is_judged_again(tmp_path: Path, data: Path) -> None:
    engine = Engine(lambda key, m: boxed(7))
    assert run(tmp_path / "out", data, engine, limit=1)["sets"][0]["metrics"]["avg@2"]["value"] == 0
    write_set(data, "gsm8k", [ROWS[0] | {"answer": "7"}])
    assert run(tmp_path / "out", data, engine)["sets"][0]["metrics"]["avg@2"]["value"] == 100
    # Verdicts of a grader that was not asked this time do not outlive the gold either.
    write_set(data, "gsm8k", [ROWS[0] | {"answer": "8"}])
    run(tmp_path / "out", data, engine, second_grader="exact")
    write_set(data, "gsm8k", [ROWS[0] | {"answer": "7"}])
    run(tmp_path / "out", data, engine)
    assert run(tmp_path / "out", data, engine, grader="exact")["sets"][0]["metrics"]["avg@2"]["value"] == 100
    assert len(engine.asked) == 2


def test_abstentions_leave_the_average_and_are_counted(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = grading.grade_many

    def abstaining(items: Any) -> list[Verdict]:
        items = list(items)
        verdicts = real(items)
        lost = [item["gold"] == ["4"] or (item["gold"] == ["0"] and "-1" in item["prediction"]) for item in items]
        return [Verdict("abstain", "engine") if gone else v for gone, v in zip(lost, verdicts, strict=True)]

    monkeypatch.setattr(grading, "grade_many", abstaining)
    told = run(tmp_path / "out", data, Engine(second_right))["sets"][0]
    # p0 is right in the one sample judged, p1 and p3 in half, p2 has no verdict: (1 + ½ + ½)/3.
    mean = told["metrics"]["avg@2"]
    assert mean["value"] == pytest.approx(100 * 2 / 3) and (mean["problems"], mean["left_out"]) == (3, 1)
    assert told["abstained"] == 3 and told["metrics"]["pass@2"]["left_out"] == 2
    assert "3 (1 problems without a verdict)" in (tmp_path / "out" / "table.md").read_text()
    assert {item["id"]: item["average"] for item in Store(tmp_path / "out").items("gsm8k")}["p2"] is None
    # Whatever failed is tried again, and nothing is sampled for it.
    monkeypatch.setattr(grading, "grade_many", real)
    closed = replace(policy(Engine(second_right)), engine=lambda batch: pytest.fail("the weights are loaded"))
    again = run(tmp_path / "out", data, Engine(second_right), model=closed)["sets"][0]
    assert again["abstained"] == 0 and again["metrics"]["avg@2"]["value"] == 50.0


def test_an_engine_that_loses_samples(tmp_path: Path, data: Path) -> None:
    class Losing(Engine):
        def continuations(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
            yield from (each for each in super().continuations(requests, sampling) if each.m)

    told = run(tmp_path / "out", data, Losing(second_right))["sets"][0]
    assert told["lost"] == 4 and told["metrics"]["avg@2"]["value"] == 100


def test_equal_answers_are_one_candidate(tmp_path: Path, data: Path) -> None:
    # \dfrac12 and \frac{1}{2} are one spelling, so three of five agree; the two others agree as well.
    said = [boxed(r"\dfrac12"), boxed(r"\frac{1}{2}"), boxed(" \\frac{1}{2}."), boxed("3"), boxed("3")]
    write_set(data, "gsm8k", [ROWS[0] | {"answer": "1/2"}])
    metrics = run(tmp_path / "out", data, Engine(lambda key, m: said[m]), n=5, k=(5,))["sets"][0]["metrics"]
    assert metrics["maj@5"]["value"] == 100 and metrics["avg@5"]["value"] == 60


def test_two_graders_and_where_they_differ(tmp_path: Path, data: Path) -> None:
    write_set(data, "gsm8k", [ROWS[0] | {"answer": "1/2"}, ROWS[1]])
    engine = Engine(lambda key, m: boxed(("0.5", "1/2")[m] if key.endswith("p0") else 2))
    evaluation = run(tmp_path / "out", data, engine, second_grader="exact")
    assert evaluation["sets"][0]["disagreements"] == 1 and evaluation["sets"][0]["metrics"]["avg@2"]["value"] == 100
    (listed,) = map(json.loads, (tmp_path / "out" / "disagreements.jsonl").read_text().splitlines())
    assert (listed["set"], listed["id"], listed["m"], listed["gold"]) == ("gsm8k", "p0", 0, ["1/2"])
    assert [(g["grader"], g["verdict"], g["answer"]) for g in listed["grades"]] == [
        ("math", "correct", "0.5"), ("exact", "wrong", "0.5")
    ]  # fmt: skip
    assert "graders differ" in table(evaluation)
    turned = run(tmp_path / "out", data, engine, grader="exact", second_grader="math")
    assert turned["sets"][0]["metrics"]["avg@2"]["value"] == 75


@pytest.mark.parametrize(
    "settings, parts",
    [
        ({"n": 2, "k": (1, 3)}, ("--k: got 3", "n = 2", "gsm8k")),
        ({"n": 0}, ("--n",)), ({"k": (0,)}, ("--k",)), ({"max_tokens": 0}, ("--max-tokens",)),
        ({"batch": 0}, ("--batch",)),
        ({"seed": -1}, ("--seed",)),
        ({"temperature": 0}, ("--temperature", "--top-k 1")), ({"top_p": 0}, ("--top-p",)),
        ({"top_k": -1}, ("--top-k",)),
        ({"grader": "maths"}, ("--grader", "did you mean 'math'")), ({"second_grader": "code"}, ("--second-grader",)),
        ({"second_grader": "math"}, ("another grader",)), ({"unreadable": "keep"}, ("--unreadable",)),
        ({"prompt": "chat"}, ("--prompt: got chat", "no chat template")),
        ({"max_tokens": 4000}, ("gsm8k: ", "row 1", "4096")),
        ({"names": "chain", "grader": "math"}, ("--grader: got math", "chain")),
        ({"names": "chain", "prompt": "plain"}, ("--prompt: got plain", "chain")),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_used(tmp_path: Path, data: Path, settings: Any, parts: tuple[str, ...]) -> None:
    engine = Engine(second_right)
    with pytest.raises(InputError) as caught:
        run(tmp_path / "out", data, engine, **settings)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert not engine.asked


def test_a_prompt_that_the_tokenizer_refuses(tmp_path: Path, data: Path) -> None:
    with pytest.raises(InputError, match=r"gsm8k: .*row 1.*What is 0"):
        run(tmp_path / "out", data, Engine(second_right), model=open_policy("embedded"))


def test_weights_that_give_no_numbers(tmp_path: Path, data: Path) -> None:
    def broken(key: str, m: int) -> str:
        raise FloatingPointError("the model's logits hold NaN")

    with pytest.raises(InputError, match="--model: got the model's logits hold NaN"):
        run(tmp_path / "out", data, Engine(broken))


def test_a_record_that_is_none(tmp_path: Path, data: Path) -> None:
    run(tmp_path / "out", data, Engine(second_right))
    path = next((tmp_path / "out" / "samples" / "gsm8k").glob("*.parquet"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=f"{path.name}.*delete it"):
        run(tmp_path / "out", data, Engine(second_right))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--output"):
        run(tmp_path / "file", data, Engine(second_right))


def test_stops_and_sampling_reach_the_engine(tmp_path: Path, data: Path) -> None:
    engine = Engine(second_right)
    model = policy(engine, "<|im_end|>", model_type="qwen2")
    run(tmp_path / "out", data, engine, model=model, temperature=0.6, top_p=0.95)
    assert engine.sampling == Sampling((0, 7), 0.6, 0, 0.95)


def test_avg_6_is_the_plain_mean_of_the_six(tmp_path: Path) -> None:
    data = tmp_path / "six"
    for name in AVG6:
        write_set(data, name, ROWS[: 3 if name == "amc" else 4])

    def answer(key: str, m: int) -> str:
        return boxed(2 * int(key[-1]) if key.startswith(("math500", "amc")) else -1)

    found = run(tmp_path / "out", data, Engine(answer), names=",".join(AVG6), n=1)
    # 100 on two sets, 0 on four; by problems it would be 7 of 23.
    assert found["avg6"]["value"] == pytest.approx(200 / 6)
    assert "| Avg-6 |" in table(found) and any("[ours" in note for note in found["notes"])
    five = run(tmp_path / "out", data, Engine(answer), names=",".join(AVG6[:5]), n=1)
    assert five["avg6"] is None and "Avg-6" not in table(five)


def test_defaults_of_samples_and_k(tmp_path: Path) -> None:
    for name in ("aime24", "amc"):
        write_set(tmp_path / "data", name, ROWS[:1])
    engine = Engine(second_right)
    sets = load_sets(["aime24", "amc"], [str(tmp_path / "data")])
    found = evaluate(policy(engine), sets, Settings(), tmp_path / "out", silent)
    assert [(each["n"], list(each["metrics"])) for each in found["sets"]] == [
        (32, ["avg@32", "pass@8", "maj@8"]), (16, ["avg@16", "pass@8", "maj@8"])
    ]  # fmt: skip
    assert "| set | problems | n | avg@n | pass@8 | maj@8 |" in table(found)


def test_two_models_on_the_same_problems(tmp_path: Path, data: Path) -> None:
    run(tmp_path / "a", data, Engine(lambda key, m: boxed(2 * int(key[-1]))), limit=3)
    run(tmp_path / "b", data, Engine(second_right), max_tokens=99)
    found = compare(tmp_path / "a", tmp_path / "b")
    (row,) = found["sets"]
    # 100 against 50 on the three problems that both have: 2·(1/8).
    assert row["difference"]["value"] == 50.0 and row["difference"]["problems"] == 3
    assert (row["wins"], row["losses"], row["ties"], row["p"]) == (3, 0, 0, 0.25)
    assert "GSM8K: max_tokens differs: 1024 and 99" in found["notes"]
    assert any("1 problems are in one evaluation only" in note for note in found["notes"])
    told = comparison([found])
    assert f"| {tmp_path / 'a'} | {tmp_path / 'b'} | GSM8K | 3 | +50.0 |" in told and "3/0/0 | 0.25 |" in told
    board = leaderboard({name: Store(tmp_path / name).evaluation() for name in "ab"})
    assert (
        "| folder | model | GSM8K |" in board
        and "| a | scripted | 100.0 |" in board
        and "| b | scripted | 50.0 |" in board
    )


def test_comparisons_over_six_sets_have_avg_6(tmp_path: Path) -> None:
    data = tmp_path / "six"
    for name in AVG6:
        write_set(data, name, ROWS)
    names = ",".join(AVG6)
    run(tmp_path / "a", data, Engine(lambda key, m: boxed(2 * int(key[-1]))), names=names, n=1)
    run(tmp_path / "b", data, Engine(lambda key, m: boxed(2 * int(key[-1]) if "amc" in key else -1)), names=names, n=1)
    rows = {row["name"]: row for row in compare(tmp_path / "a", tmp_path / "b")["sets"]}
    assert rows["avg6"]["difference"]["value"] == pytest.approx(500 / 6)
    assert (rows["avg6"]["wins"], rows["avg6"]["ties"]) == (20, 4)
    assert math.isclose(rows["avg6"]["p"], 2 / 2**20)


def test_evaluations_that_cannot_be_compared(tmp_path: Path, data: Path) -> None:
    write_set(data, "amc", ROWS)
    engine = Engine(second_right)
    run(tmp_path / "a", data, engine)
    for folder, message, settings in (
        ("sets", "a set that both have", {"names": "amc"}), ("grader", "one grader", {"grader": "exact"}),
    ):  # fmt: skip
        run(tmp_path / folder, data, engine, **settings)
        with pytest.raises(InputError, match=message):
            compare(tmp_path / "a", tmp_path / folder)
    write_set(data, "gsm8k", [ROWS[0] | {"answer": "5"}])
    run(tmp_path / "gold", data, engine)
    with pytest.raises(InputError, match="gsm8k, id 'p0', gold"):
        compare(tmp_path / "a", tmp_path / "gold")
    write_set(data, "gsm8k", [ROWS[0] | {"id": "other0"}])
    run(tmp_path / "ids", data, engine)
    with pytest.raises(InputError, match="no problem of gsm8k in both"):
        compare(tmp_path / "a", tmp_path / "ids")
    with pytest.raises(InputError, match=r"evaluation\.json"):
        compare(tmp_path / "a", tmp_path / "nowhere")
