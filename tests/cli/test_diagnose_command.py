"""`apportion diagnose`: its table and JSON, bad input, and the lines that sample from the embedded policy.

Planted faults seen caught: the original token drawn again, a stop token drawn, a uniform of another stream; the seed
not handed on; sampling without being asked; the embedded policy in place of the run's own; a budget spent twice or
ignored; losses at high and low entropies swapped.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from apportion.cli import app
from apportion.credit.registry import make_method
from apportion.diagnose.lines import ABOUT, SAMPLED
from apportion.diagnose.model import open_bench
from apportion.engines.base import Key
from apportion.groups import grpo_base
from apportion.measure.evidence import Evidence
from apportion.records import RunFolder, credit_rows, rollout_rows
from apportion.rollouts import Rollouts
from apportion.tasks import ArithmeticTask, generate, load_policy, policy_path, verify
from apportion.train.settings import load_config, save_config

SAMPLING = ["--forks", "2", "--samples", "2", "--budget", "4000"]


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


def found(*arguments: object) -> dict[str, Any]:
    result = command(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(result.stdout, parse_constant=refuse)


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in report["lines"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of chains solved by hand: of each prompt's four responses two go wrong at the second step."""
    folder = tmp_path_factory.mktemp("runs") / "chain"
    save_config(load_config(None, {"run.folder": str(folder), "run.threads": 1, "data.operations": 4}))
    tokenizer = load_policy()[1]
    method, written = make_method("grpo"), RunFolder(folder)
    for step in (1, 2, 3):
        problems = [p for p in generate(ArithmeticTask(4, seed=step), "train", 4) for _ in range(4)]
        texts = []
        for k, p in enumerate(problems):
            first, second, *rest = p.steps
            wrong, answer = (f"{(int(right[-2:]) + 1) % 100:02d}" for right in (second, p.answer))
            texts.append(p.solution if k % 4 < 2 else "\n\n".join([first, second[:-2] + wrong, *rest, f"#{answer}"]))
        ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        entropy = [[0.01 + 0.8 * (("=" in text[max(0, t - 2) : t]) + t / 99) for t in range(len(row))]
                   for text, row in zip(texts, ids, strict=True)]  # fmt: skip
        rewards = [float(verify(text, p)) for text, p in zip(texts, problems, strict=True)]
        batch = Rollouts.from_lists(
            ids, [p.prompt for p in problems], rewards, entropy=entropy,
            old_logprob=[[-h for h in row] for row in entropy],
            text=tuple(f"{text}<eos>" for text in texts), char_start=[list(range(len(row))) for row in ids],
            prompt_ids=tuple(torch.tensor(tokenizer(p.prompt)["input_ids"]) for p in problems[::4]),
        )  # fmt: skip
        base = grpo_base(batch)
        credit = method.assign(batch, Evidence(), base)
        written.write("rollouts", step, rollout_rows(batch, [p.prompt for p in problems], [p.answer for p in problems]))
        written.write("evidence", step, [])
        written.write("credit", step, credit_rows(batch, credit, base.mean.tolist(), base.scale.tolist()))
    return folder


@pytest.fixture(scope="module")
def sampled(run: Path) -> dict[str, Any]:
    return found(run, "--model", "embedded", *SAMPLING)


def test_json_has_every_line_in_order(run: Path) -> None:
    report = found(run)
    assert report["run"] == str(run) and report["steps"] == [1, 2, 3] and report["spent"] == {}
    assert [line["name"] for line in report["lines"]] == list(ABOUT)
    for line in report["lines"]:
        assert set(line) == {
            "name", "value", "interval", "n", "of", "prompts", "says", "mark", "missing", "beside"
        }  # fmt: skip
        assert (line["value"] is None) <= (line["missing"] is not None), line
        if line["interval"]:
            low, high = line["interval"]
            assert low < high
        assert line["mark"].startswith(("[paper]", "[note]", "[ours]"))
    lines = by_name(report)
    assert (lines["acr"]["value"], lines["acr"]["n"], lines["acr"]["prompts"]) == (0, 12, 12)
    # GRPO punishes the one right step of every failed response, and no right response has a wrong one.
    assert (lines["right_steps_punished"]["value"], lines["right_steps_punished"]["n"]) == (1, 24)
    assert lines["wrong_steps_rewarded"]["missing"] == "no right response has a wrong step"
    assert "grpo" in lines["increments_below_one_se"]["missing"]
    assert by_name(found(run, "--steps", "1,3"))["acr"]["n"] == 8
    assert found(run, "--steps", "last 1")["steps"] == [3]


def test_table_says_the_same_within_80_columns(run: Path) -> None:
    result = command(run)
    assert result.exit_code == 0 and result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 80
    shown = " ".join(result.stdout.split())
    for line in found(run)["lines"]:
        assert f"\n{line['name']} " in result.stdout
        assert f"{line['says']}" in shown and line["mark"] in shown
        if line["missing"]:
            assert line["missing"] in shown, line
    assert "steps: 3, from 1 to 3" in shown
    assert "needs a model: give --model, or --forks for the run's own" in shown
    assert "nan" not in shown.lower().replace("covariance", "")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["missing"], ["RUN: got", "missing", "credit/step-*.parquet"]),
        (["{run}", "--steps", "9"], ["--steps: got '9'", "recorded are 1 to 3"]),
        (["{run}", "--forks", "1"], ["forks: got 1", "at least 2"]),
        (["{run}", "--forks", "-3"], ["forks: got -3"]),
        (["{run}", "--forks", "4", "--samples", "1"], ["samples: got 1"]),
        (["{run}", "--model", "nowhere"], ["--model: got 'nowhere'", "embedded, smollm2"]),
    ],
)
def test_bad_input_is_one_line(run: Path, arguments: list[str], parts: list[str]) -> None:
    result = command(*(each.format(run=run) for each in arguments))
    assert result.exit_code == 2 and result.stdout == "", (result.output, result.exception)
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


def test_why_nothing_is_sampled(run: Path) -> None:
    for arguments, why in (
        ([], "give --model, or --forks for the run's own"),
        (["--forks", 3], "the run folder holds no whole model: give --model"),
        (["--forks", 0, "--model", "embedded"], "--forks 0"),
    ):
        lines = by_name(found(run, *arguments))
        assert {lines[name]["missing"] for name in SAMPLED} == {f"needs a model: {why}"}


def test_sampling_stays_within_the_budget_and_says_what_it_spent(sampled: dict[str, Any]) -> None:
    spent, lines = sampled["spent"], by_name(sampled)
    assert spent["model"] == "embedded" and spent["budget"] == 4000
    assert 2000 < spent["generated_tokens"] <= 4000 and spent["continuations"] > 100
    assert spent["tokens_read_to_redraw"] > 0
    for name in SAMPLED:
        assert lines[name]["n"] > 0, lines[name]
    # A spoilt right response is worth less, wherever it is spoilt.
    beside = lines["token_informativeness"]["beside"]
    assert 0 < beside["at high entropies"] <= 1 and 0 < beside["at low entropies"] <= 1
    difference = beside["at high entropies"] - beside["at low entropies"]
    assert lines["token_informativeness"]["value"] == pytest.approx(difference)
    assert 0 <= lines["fork_variance"]["value"] <= 0.5


def test_the_runs_own_model_and_the_same_seed_give_the_same(run: Path) -> None:
    shutil.copytree(policy_path(), run / "model")
    try:
        few = [*SAMPLING, "--budget", 1500]
        own, same = found(run, *few), found(run, *few, "--model", "embedded")
        assert own["lines"] == same["lines"]
        assert own["spent"] == {**same["spent"], "model": str(run / "model")}
        other = command(run, *few, "--seed", 1).stdout
        assert "generated tokens of at most 1,500, in" in other and f"model: {run / 'model'}" in other
        assert f"spent: {own['spent']['generated_tokens']:,} generated" not in other
    finally:
        shutil.rmtree(run / "model")


def test_another_token_is_drawn_from_what_the_policy_leaves(run: Path) -> None:
    bench = open_bench(load_config(run / "config.toml"), "embedded", 0, lambda tokens: None)
    model, tokenizer = load_policy()
    ids = tokenizer("47+8*7-9+5=?\n47+8=")["input_ids"]
    with torch.no_grad():
        p = torch.softmax(model(torch.tensor([ids])).logits[0, -1].double(), 0).numpy()
    original = int(p.argmax())
    p[[original, tokenizer.eos_token_id]] = 0
    drawn = []
    for k in range(60):
        key = Key("r", k, "p", 0, 3)
        u = np.random.Generator(np.random.Philox(key=key.stream(0))).random() * p.sum()
        expected = next(token for token in range(len(p)) if p[: token + 1].sum() > u)
        drawn.append(bench.redraw(ids, original, key))
        assert drawn[-1] == expected
    assert len(set(drawn)) > 3
    # Where the response would end, it goes on all the same.
    whole = tokenizer("47+8=?\n47+8=55\n\n#55")["input_ids"]
    with torch.no_grad():
        assert int(model(torch.tensor([whole])).logits[0, -1].argmax()) == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in {bench.redraw(whole, 2, Key("r", k, "p", 0, 3)) for k in range(10)}
    assert bench.cost.forward_tokens == 60 * len(ids) + 10 * len(whole)
    assert bench.limit == ArithmeticTask(4).max_response and bench.sampling.stop_ids == (tokenizer.eos_token_id,)
    assert bench.grade(["47+8*7-9+5=?\n"] * 2, [tokenizer(f"#{a}")["input_ids"] for a in ("81", "80")], ["", ""]) == [
        1,
        0,
    ]
