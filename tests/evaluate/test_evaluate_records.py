"""What lies on disk: kill -9, damage, two runs in one folder, missing samples, comparisons of unlike runs, progress.

Planted faults seen caught: files written in place; a part file left; a batch drawn again after its file was there;
samples drawn again that lie behind a missing one; damage that is read as if it were none; a lock that is not taken;
a folder that cannot be written to found after sampling; disagreements of an earlier command left; a set without
problems taken for one; a gold in dollar signs that its own spelling does not match; a time left told by a batch's
first sample; sets that only one of two has, and problems without a verdict, left out in silence.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluate_tools import Engine, policy, samples, silent, write_set

from apportion.cli.evaluate import LOG_EVERY, _Left, _log
from apportion.engines.base import Continuation, Request, Sampling
from apportion.errors import InputError
from apportion.evaluate import Settings, compare, evaluate, grading, load_sets
from apportion.evaluate.records import ITEMS, Store
from apportion.evaluate.run import _spans
from apportion.evaluate.sources import Problem
from apportion.verify import Verdict

ROWS = [{"id": f"p{i}", "problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(5)]
SETTINGS: dict[str, Any] = {"n": 3, "batch": 6, "grader": "exact"}


def answer(key: str, m: int) -> str:
    return f"\\boxed{{{2 * int(key[-1]) if m else -1}}}"


def run(output: Path, data: Path, engine: Engine, names: str = "gsm8k", **settings: Any) -> dict[str, Any]:
    limit = settings.pop("limit", None)
    sets = load_sets(names.split(","), [str(data)], limit=limit)
    return evaluate(policy(engine), sets, Settings(**{**SETTINGS, **settings}), output, silent)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("gsm8k", "amc"):
        write_set(tmp_path / "data", name, ROWS)
    return tmp_path / "data"


class Dying(Engine):
    """Logs what it gives back, and kills its process in place of the sample after `last`."""

    def __init__(self, log: Path, last: int) -> None:
        super().__init__(answer)
        self.log, self.left = log, last

    def continuations(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        for each in super().continuations(requests, sampling):
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            with self.log.open("a") as file:
                file.write(f"{each.key.prompt} {each.m}\n")
            yield each


def killed(output: Path, data: Path, log: Path, last: int, moves: int) -> bool:
    """A run in a child that kills itself after so many samples, or in place of so many renames; whether it died."""
    child = os.fork()
    if child == 0:
        real, left = os.replace, [moves]

        def replace(source: Path, target: Path) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            real(source, target)

        os.replace = replace
        try:
            run(output, data, Dying(log, last), "gsm8k,amc", second_grader="math")
        finally:
            os._exit(0 if (output / "evaluation.json").exists() else 1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_kill_9_anywhere(tmp_path: Path, data: Path) -> None:
    whole, output = tmp_path / "whole", tmp_path / "killed"
    run(whole, data, Engine(answer), "gsm8k,amc", second_grader="math")
    parts = deaths = 0
    for last, moves in [*((last, 99) for last in (0, 1, 6, 7)), *((99, moves) for moves in (0, 1, 1, 2, 0, 3, 1, 9))]:
        before = {f"{name}/{id_} {m}" for name in ("gsm8k", "amc") for id_, m in samples(output, name)}
        log = tmp_path / f"log {deaths}"
        died = killed(output, data, log, last, moves)
        drawn = log.read_text().splitlines() if log.exists() else []
        # What was there is not drawn again.
        assert not before & set(drawn) and len(set(drawn)) == len(drawn)
        parts += len(list(output.rglob("*.part")))
        deaths += died
        if not died:
            break
    assert not died and deaths >= 8 and parts >= 3
    for name in ("gsm8k", "amc"):
        assert samples(output, name) == samples(whole, name)
        assert Store(output).items(name) == Store(whole).items(name)
    files = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in (whole, output)]
    assert files[0] == files[1]
    for path in ("evaluation.json", "table.md", "disagreements.jsonl"):
        assert (output / path).read_text() == (whole / path).read_text()


def test_two_runs_in_one_folder(tmp_path: Path, data: Path) -> None:
    engine = Engine(answer)
    with Store(tmp_path / "out").held():
        with pytest.raises(InputError, match=r"--output: got .*no other evaluation"):
            run(tmp_path / "out", data, engine)
        assert not engine.asked
    run(tmp_path / "out", data, engine)
    run(tmp_path / "out", data, engine)
    assert len(engine.asked) == 15


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, data: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = Engine(answer)
    for output in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere"), Path("/proc/self")):
        with pytest.raises(InputError, match=r"--output: got .*can be written to"):
            run(output, data, engine)
    # Bad settings leave no folder behind.
    with pytest.raises(InputError, match="--k"):
        run(tmp_path / "out", data, engine, k=(4,))
    assert not engine.asked and not (tmp_path / "out").exists()


def test_damage_is_seen_wherever_it_is(tmp_path: Path, data: Path) -> None:
    run(tmp_path / "out", data, Engine(answer), limit=2)
    (path,) = (tmp_path / "out" / "samples" / "gsm8k").iterdir()
    good, rows = path.read_bytes(), Store(tmp_path / "out").rows(path)
    seen = 0
    for at in range(0, len(good), 61):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x15]) + good[at + 1 :])
        try:
            # Not every byte of the footer means something.
            assert Store(tmp_path / "out").rows(path) == rows, at
        except InputError as error:
            assert path.name in str(error) and "delete it" in str(error)
            seen += 1
    assert seen > len(good) / 61 / 3
    for content in (b"", b"PAR1", good[:-1], b"no table"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="delete it"):
            run(tmp_path / "out", data, Engine(answer), limit=2)
    for other in (pa.table({"key": [1]}), pa.Table.from_pylist([], schema=ITEMS)):
        pq.write_table(other, path)
        with pytest.raises(InputError, match=r"got columns .*delete it"):
            run(tmp_path / "out", data, Engine(answer), limit=2)
    path.unlink()
    run(tmp_path / "out", data, Engine(answer), limit=2)
    assert path.read_bytes() == good


def test_samples_that_are_missing_in_the_middle(tmp_path: Path, data: Path) -> None:
    for n in (1, 2, 4):
        run(tmp_path / "out", data, Engine(answer), limit=1, n=n)
    folder = tmp_path / "out" / "samples" / "gsm8k"
    whole = samples(tmp_path / "out", "gsm8k")
    by_m = {pq.read_table(path)["m"].to_pylist()[0]: path for path in folder.iterdir()}
    assert sorted(by_m) == [0, 1, 2]
    by_m[1].unlink()
    engine = Engine(answer)
    run(tmp_path / "out", data, engine, limit=1, n=4)
    assert engine.asked == [("gsm8k/p0", 1)] and samples(tmp_path / "out", "gsm8k") == whole


def test_spans() -> None:
    assert list(_spans([0, 1, 3, 6, 7, 8])) == [(0, 2), (3, 1), (6, 3)]
    assert list(_spans([5])) == [(5, 1)] and list(_spans([])) == []


def test_disagreements_are_those_of_the_last_command(tmp_path: Path, data: Path) -> None:
    run(tmp_path / "out", data, Engine(answer), second_grader="math")
    assert (tmp_path / "out" / "disagreements.jsonl").exists()
    run(tmp_path / "out", data, Engine(answer))
    assert not (tmp_path / "out" / "disagreements.jsonl").exists()


def test_golds_of_which_none_can_be_read(tmp_path: Path, data: Path) -> None:
    write_set(data, "gsm8k", [row | {"answer": f"\\frac{{{i}}}{{"} for i, row in enumerate(ROWS)])
    engine = Engine(answer)
    with pytest.raises(InputError, match=r"row 1, gold: got .* and 4 more golds of the set;"):
        run(tmp_path / "out", data, engine, grader="math")
    with pytest.raises(InputError, match="--unreadable: got drop, which leaves no problem of gsm8k"):
        run(tmp_path / "out", data, engine, grader="math", unreadable="drop")
    assert not engine.asked


def test_spelling_where_a_gold_cannot_be_read() -> None:
    # As CollegeMath has them: in dollar signs, which no boxed answer repeats.
    problem = Problem("1", "?", (r"$12 \mathrm{~min}$", "1:(-1,1]"), 1)
    grader = grading.by_spelling("math")
    for text, verdict, reason in (
        (r"so \boxed{12 \mathrm{~min}}", "correct", "same spelling"),
        (r"so $\boxed{ 12\mathrm{~min} }$.", "correct", "same spelling"),
        (r"so \boxed{1:(-1, 1]}", "correct", "same spelling"), (r"so \boxed{12}", "wrong", "another spelling"),
        ("no idea " * 60, "wrong", "no answer found"), (rf"\boxed{{{'1+' * 9999}1}}", "wrong", "characters"),
    ):  # fmt: skip
        (grade,) = grading.grade(grader, [problem], [text])
        assert (grade.grader, grade.verdict) == (grader, verdict) and reason in grade.reason, (text, grade)


def test_a_temperature_without_end() -> None:
    for temperature in (float("inf"), float("nan")):
        with pytest.raises(InputError, match="--temperature"):
            Settings(temperature=temperature)


def test_what_is_not_compared_is_said(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "a", data, Engine(answer), "gsm8k,amc")
    real = grading.grade_many

    def abstaining(items: Any) -> list[Verdict]:
        items = list(items)
        lost = [item["gold"] == ["4"] for item in items]
        return [Verdict("abstain", "x") if gone else v for gone, v in zip(lost, real(items), strict=True)]

    monkeypatch.setattr(grading, "grade_many", abstaining)
    run(tmp_path / "b", data, Engine(answer))
    for first, second in (("a", "b"), ("b", "a")):
        found = compare(tmp_path / first, tmp_path / second)
        assert [(row["name"], row["difference"]["problems"]) for row in found["sets"]] == [("gsm8k", 4)]
        assert f"AMC: only {tmp_path / 'a'} has it, so it is not compared" in found["notes"]
        assert "GSM8K: 1 problems lack a verdict in one evaluation and are left out" in found["notes"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sets": []}', "\x00"])
def test_an_evaluation_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(InputError, match=r"OUT: got .*finished evaluation"):
        Store(tmp_path).evaluation()


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    show = _log(_Left(4, lambda: now[0]))

    def at(seconds: float, doing: str, done: int, total: int) -> list[str]:
        now[0] = seconds
        show(doing, done, total)
        return capsys.readouterr().err.splitlines()

    assert at(0, "loading the model", 0, 100) == at(10, "amc: sampling", 1, 100) == []
    # Of the first batch of 4 nothing is said but that it goes on.
    assert at(LOG_EVERY, "amc: sampling", 3, 100) == ["progress: amc: sampling, 3 of 100"]
    assert at(LOG_EVERY + 1, "amc: sampling", 4, 100) == []
    # 20 in 60 s: 80 take 240 s.
    assert at(2 * LOG_EVERY, "amc: sampling", 20, 100) == ["progress: amc: sampling, 20 of 100, about 0:04:00 left"]
    # Other work begins anew.
    assert at(4 * LOG_EVERY, "amc: grading", 0, 24) == ["progress: amc: grading, 0 of 24"]
    assert at(5 * LOG_EVERY, "amc: grading", 6, 24) == ["progress: amc: grading, 6 of 24, about 0:01:30 left"]


def test_the_store_says_what_each_item_was(tmp_path: Path, data: Path) -> None:
    found = run(tmp_path / "out", data, Engine(answer), second_grader="math")
    # m = 0 is wrong and 1, 2 are right: 2/3 of each problem, by enumeration of the verdicts on disk.
    rows = samples(tmp_path / "out", "gsm8k").values()
    right = [row["grades"][0]["verdict"] == "correct" for row in rows]
    assert found["sets"][0]["metrics"]["avg@3"]["value"] == pytest.approx(100 * sum(right) / len(right))
    assert [item["correct"] for item in Store(tmp_path / "out").items("gsm8k")] == [2] * 5
    listed = [json.loads(line) for line in (tmp_path / "out" / "disagreements.jsonl").read_text().splitlines()]
    assert {(each["id"], each["m"]) for each in listed} == {
        (row["id"], row["m"]) for row in rows if len({grade["verdict"] for grade in row["grades"]}) > 1
    }  # fmt: skip
