"""A recorded step comes back as it was; its steps are labelled by whoever can; its lines say what is missing.

Planted faults seen caught: the stop token's text checked as a step; a step right where only its second half is; a
step verifier's verdicts passed over; one prompt taken for two in two steps; half-empty columns kept; the first steps
for the last; truncation lost; the method's credit beside itself in place of the base's; shrinkage ignored; readings
counted as probes; earlier steps forgotten.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.credit.registry import make_method
from apportion.diagnose.lines import ABOUT, SAMPLED
from apportion.diagnose.reading import (
    belief_of,
    checker_of,
    choose_steps,
    read_step,
    rollouts_of,
    run_config,
    step_labels,
)
from apportion.diagnose.report import RECENT, diagnose
from apportion.errors import InputError
from apportion.measure.evidence import Continuations, Evidence
from apportion.records import RunFolder, credit_rows, rollout_rows
from apportion.rollouts import Rollouts
from apportion.train.settings import load_config, save_config

PROMPT = "47+8*7=?\n"
RIGHT, WRONG = "47+8=55\n\n55*7=85\n\n#85", "47+8=55\n\n55*7=25\n\n#25"
ALPHABET = "0123456789+-*=?#!\n"


def encoded(text: str) -> list[int]:
    return [ALPHABET.index(c) + 2 for c in text]


def chain_batch(
    texts: list[str], rewards: list[float | None], prompts: list[str] | None = None, **rest: Any
) -> Rollouts:
    """Character tokens, ended by a token whose text is `<eos>`, as records have it."""
    names = [PROMPT] * len(texts) if prompts is None else prompts
    order = list(dict.fromkeys(names))
    return Rollouts.from_lists(
        [[*encoded(text), 1] for text in texts], names, rewards,
        text=tuple(text + "<eos>" for text in texts), char_start=[list(range(len(text) + 1)) for text in texts],
        old_logprob=[[-0.1 - 0.01 * t for t in range(len(text) + 1)] for text in texts],
        entropy=[[0.2] * (len(text) + 1) for text in texts],
        prompt_ids=tuple(torch.tensor(encoded(prompt)) for prompt in order), **rest,
    )  # fmt: skip


def write(
    folder: Path, batch: Rollouts, step: int = 1, evidence: list[dict[str, Any]] | None = None,
    method: str = "grpo", measured: list[Any] | None = None, **settings: Any,
) -> RunFolder:  # fmt: skip
    run = RunFolder(folder)
    maker = make_method(method, ({"min_gap": 1, "window": 2} if method == "probepo" else {}) | settings)
    base = maker.base(batch)
    credit = maker.assign(batch, Evidence(Continuations.from_rewards(batch, measured or [])), base)
    names = [batch.name(i) for i in range(len(batch))]
    run.write("rollouts", step, rollout_rows(batch, names, ["85"] * len(batch)))
    run.write("evidence", step, evidence or [])
    run.write("credit", step, credit_rows(batch, credit, base.mean.tolist(), base.scale.tolist()))
    return run


def configured(folder: Path, **settings: Any) -> None:
    save_config(load_config(None, {"run.folder": str(folder), **settings}))


def lines(run: Path, **rest: Any) -> dict[str, Any]:
    return {line.name: line for line in diagnose(run, **rest).lines}


def test_a_step_comes_back_as_it_was(tmp_path: Path) -> None:
    batch = chain_batch(
        [RIGHT, WRONG, RIGHT], [1.0, 0.0, None], mask=[[1] * 22, [1] * 21 + [0], [1] * 22],
        truncated=[False, True, False], boundary=[[t == 9 for t in range(22)]] * 3,
    )  # fmt: skip
    run = write(tmp_path, batch, method="probepo", measured=[(0, 9, [1, 0]), (1, 9, [0, 0])])
    found = read_step(run, 1)
    for name in (
        "token_ids",
        "offsets",
        "group",
        "mask",
        "truncated",
        "boundary",
        "char_start",
        "entropy",
        "old_logprob",
    ):
        assert torch.equal(getattr(found.rollouts, name), getattr(batch, name)), name
    assert torch.equal(found.rollouts.reward.isnan(), batch.reward.isnan())
    assert found.rollouts.reward[:2].tolist() == [1, 0] and found.rollouts.text == batch.text
    assert found.rollouts.prompt_ids is not None and found.rollouts.prompt_ids[0].tolist() == encoded(PROMPT)
    assert found.rollouts.ref_logprob is None and found.sample == (0, 1, 2)
    assert found.method == "probepo" and found.settings["min_gap"] == 1 and found.golds == ("85",) * 3
    assert found.advantage.dtype == torch.float64 and len(found.advantage) == 66
    s = found.segments
    # μ = .5, n₀ = 4, two continuations: (2·.5 + 4·.5)/6 = .5 and (0 + 2)/6 = 1/3.
    assert s.row.tolist() == [0, 0, 1, 1, 2] and s.start.tolist() == [0, 9, 0, 9, 0]
    assert s.end.tolist() == [9, 22, 9, 22, 22] and s.samples.tolist() == [0, 2, 0, 2, 0]
    assert s.increment.tolist() == pytest.approx([0, 0.5, -1 / 6, -1 / 3, 0])


def test_columns_that_some_rows_lack_are_left_out(tmp_path: Path) -> None:
    rows = write(tmp_path, chain_batch([RIGHT, WRONG], [1, 0])).read("rollouts", 1)
    rows[1]["entropy"] = rows[0]["text"] = None
    found = rollouts_of(rows)
    assert found.entropy is None and found.text is None and found.char_start is None
    assert found.old_logprob is not None


def test_a_prompt_is_the_same_in_every_step(tmp_path: Path) -> None:
    one, other = PROMPT, "11+1*3=?\n"
    write(tmp_path, chain_batch([RIGHT, WRONG], [1, 0], [one, other]), 1)
    run = write(tmp_path, chain_batch([WRONG, WRONG, RIGHT], [0, 0, 1], [other, one, other]), 2)
    first, second = (read_step(run, step).prompt.tolist() for step in (1, 2))
    assert second == [first[1], first[0], first[1]] and first[0] != first[1]


def test_steps_are_chosen_by_number_range_and_last(tmp_path: Path) -> None:
    batch = chain_batch([RIGHT, WRONG], [1, 0])
    for step in (2, 4, 6, 11):
        run = write(tmp_path, batch, step)
    cases = {None: [2, 4, 6, 11], "4": [4], "3-6": [4, 6], "11,2-3": [2, 11], " 4 , 4-4": [4], "last 2": [6, 11],
             "last 9": [2, 4, 6, 11]}  # fmt: skip
    for text, expected in cases.items():
        assert choose_steps(run, text) == expected, text
    for text in ("5", "7-10", "", "a", "4-", "-4", "last", "last 0", "last -1", "6-3", "4,5"):
        with pytest.raises(InputError, match=r"--steps.*recorded are 2 to 11, 4 in all"):
            choose_steps(run, text)
    with pytest.raises(InputError, match="RUN"):
        choose_steps(RunFolder(tmp_path / "none"), None)


def test_records_that_do_not_fit_together(tmp_path: Path) -> None:
    batch = chain_batch([RIGHT, WRONG], [1, 0])
    run = write(tmp_path, batch)
    credit = run.read("credit", 1)
    run.write("credit", 1, credit[:1])
    with pytest.raises(InputError, match="2 rollouts and 1 rows of credit"):
        read_step(run, 1)
    credit[1]["advantage"] = credit[1]["advantage"][:-1]
    run.write("credit", 1, credit)
    with pytest.raises(InputError, match="43 advantages"):
        read_step(run, 1)


def test_the_stop_tokens_text_is_no_part_of_the_answer() -> None:
    batch = chain_batch([RIGHT, RIGHT], [1, 1], truncated=[False, True])
    assert batch.unstopped_text() == [RIGHT, RIGHT + "<eos>"]


def test_labels_of_the_embedded_task(tmp_path: Path) -> None:
    configured(tmp_path)
    step = read_step(write(tmp_path, chain_batch([RIGHT, WRONG], [1, 0])), 1)
    labels = step_labels(step, checker_of(run_config(tmp_path)))
    assert not isinstance(labels, str)
    assert labels.row.tolist() == [0, 0, 0, 1, 1, 1] and labels.start.tolist() == [0, 9, 18] * 2
    assert labels.ok.tolist() == [True, True, True, True, False, False]
    assert labels.given.tolist() == [True, True]


def test_steps_that_start_in_one_token_hold_where_both_do(tmp_path: Path) -> None:
    batch = Rollouts.from_lists(
        [[5, 6, 7]] * 2, ["g", "g"], [1, 0], text=("abcdefgh", "abcdefgh"), char_start=[[0, 2, 6]] * 2
    )
    step = read_step(write(tmp_path, batch), 1)
    for ok in ((True, False), (False, True), (True, True)):
        # Characters 3 and 5 both lie inside the second token, so the third is the first that starts there or later.
        verdicts = [[(0, True), (3, ok[0]), (5, ok[1]), (8, False)], None]
        labels = step_labels(step, lambda prompts, texts, verdicts=verdicts: verdicts)
        assert not isinstance(labels, str)
        assert list(zip(labels.start.tolist(), labels.ok.tolist(), strict=True)) == [(0, True), (2, all(ok))]
        assert labels.given.tolist() == [True, False]


def test_a_recorded_verifiers_verdicts_come_first(tmp_path: Path) -> None:
    configured(tmp_path)
    evidence = [{"kind": "steps", "row": 1, "position": 9, "values": [1.0]},
                {"kind": "steps", "row": 1, "position": 18, "values": [0.0]}]  # fmt: skip
    step = read_step(write(tmp_path, chain_batch([RIGHT, WRONG], [1, 0]), evidence=evidence), 1)
    labels = step_labels(step, checker_of(run_config(tmp_path)))
    assert not isinstance(labels, str)
    assert (labels.row.tolist(), labels.start.tolist(), labels.ok.tolist()) == ([1, 1], [9, 18], [True, False])
    assert labels.given.tolist() == [False, True]


def test_why_there_are_no_labels(tmp_path: Path) -> None:
    step = read_step(write(tmp_path / "run", chain_batch([RIGHT, WRONG], [1, 0])), 1)
    bare = checker_of(run_config(tmp_path / "run"))
    assert step_labels(step, bare) == "no step verifier's verdicts are recorded, and the run folder has no config.toml"
    (tmp_path / "run" / "config.toml").write_text('method = "probepo"\n')
    assert "config.toml cannot be used" in str(step_labels(step, checker_of(run_config(tmp_path / "run"))))
    configured(tmp_path / "file", **{"data.path": "x.jsonl"})
    assert "from a file" in str(step_labels(step, checker_of(run_config(tmp_path / "file"))))
    configured(tmp_path / "thousand", **{"data.modulus": 1000, "data.task": "chain"})
    assert "does not know a recorded prompt" in str(step_labels(step, checker_of(run_config(tmp_path / "thousand"))))


def test_belief_is_read_from_its_rows(tmp_path: Path) -> None:
    evidence = [{"kind": "belief", "row": 0, "position": p, "values": [v]} for p, v in ((9, -1.0), (0, -2.0))]
    run = write(tmp_path, chain_batch([RIGHT, WRONG], [1, 0]), evidence=evidence)
    belief = belief_of(read_step(run, 1))
    assert belief is not None and belief.position.tolist() == [0, 9] and belief.logprob.tolist() == [-2.0, -1.0]
    assert belief_of(read_step(write(tmp_path / "other", chain_batch([RIGHT], [1])), 1)) is None


def test_lines_of_a_run_by_hand(tmp_path: Path) -> None:
    configured(tmp_path)
    a, b, c = PROMPT, "11+1*3=?\n", "12+1*3=?\n"
    right_b, right_c = "11+1=12\n\n12*3=36\n\n#36", "12+1=13\n\n13*3=39\n\n#39"
    texts = [RIGHT, WRONG, right_b, right_b, "12+1=14\n\n14*3=42\n\n#42", right_c, WRONG]
    batch = chain_batch(texts, [1, 0, 1, 1, 0, 1, 0], [a, a, b, b, c, c, a])
    belief = [(0, 0, -2.0), (0, 9, -1.0), (0, 18, -3.0), (1, 0, -2.0), (1, 9, -1.5), (1, 18, -1.0)]
    evidence = [{"kind": "belief", "row": r, "position": p, "values": [v]} for r, p, v in belief]
    evidence += [{"kind": "continuations", "row": 0, "position": 9, "token_ids": [4, 5, 6]}] * 2
    write(tmp_path, batch, evidence=evidence)
    found = lines(tmp_path)
    assert list(found) == list(ABOUT)
    assert found["acr"].estimate.value == pytest.approx(1 / 3) and found["acr"].estimate.prompts == 3
    assert found["acr_all_right"].estimate.value == pytest.approx(1 / 3)
    assert found["acr_all_wrong"].estimate.value == 0
    assert found["steps_in_collapsed_groups"].estimate.value == pytest.approx(6 / 21)
    # Both failed responses of a have one right step, that of c none; GRPO punishes them all.
    punished = found["right_steps_punished"]
    assert (punished.estimate.value, punished.estimate.n, punished.beside) == (1.0, 2, {"with the base alone": 1.0})
    assert found["wrong_steps_rewarded"].estimate.missing == "no right response has a wrong step"
    # Rises: (0, 0–9) right, (1, 0–9) right, (1, 9–18) wrong; (0, 9–18) falls and is right: 4/(4 + 1 + 1).
    f1 = found["belief_sign_f1"]
    assert f1.estimate.value == pytest.approx(4 / 6) and f1.estimate.n == 4
    assert f1.beside == {"calling all right": pytest.approx(6 / 7)}
    assert found["auxiliary_tokens"].estimate.value == 6 and found["auxiliary_tokens"].beside["continuations"] == 2
    # Group a: r = 1, 0, 0: (1 − 1/3)/(.57735 + 1e-4) = 1.1545 is the largest of three, but c's .7070; p99 is it.
    assert found["p99_abs_advantage"].estimate.value == pytest.approx((2 / 3) / (3**-0.5 + 1e-4), rel=1e-6)
    for name in ("right_steps_punished_probes", "wrong_steps_rewarded_probes", "increments_below_one_se"):
        assert found[name].estimate.missing == "needs continuations: the run's method (grpo) records none"
    for name in SAMPLED:
        assert found[name].estimate.missing == "needs a model: none was asked for"
    tails = [found[f"covariance_{which}"].estimate for which in ("beyond_3_sigma", "kurtosis", "p99_over_p50")]
    assert all(each.value is not None and each.n == 5 * 22 for each in tails)


def test_lines_of_probes_by_hand(tmp_path: Path) -> None:
    configured(tmp_path)
    batch = chain_batch([RIGHT, WRONG], [1, 0])
    # M = n₀ = 4: raw .75 shrinks to .625 around μ = .5, so the increments are .125 and −.625; the error √(.1875/4) =
    # .2165 halves to .1083. σ = .7072: D = .1767 and −.8837, token mean (9 · .1767 − 13 · .8837)/22 = −.4499, and with
    # α = 2 the first segment gets −.7070 + 2 · .6266 = .546 where the base has −.707.
    write(tmp_path, batch, method="probepo", measured=[(1, 9, [1, 1, 1, 0])], alpha=2.0)
    found = lines(tmp_path)
    for name in ("right_steps_punished", "right_steps_punished_probes"):
        assert (found[name].estimate.value, found[name].estimate.n) == (0, 1), name
        assert found[name].beside == {"with the base alone": 1.0}, name
    below = found["increments_below_one_se"].estimate
    assert (below.value, below.n) == (0, 2)
    # Without shrinkage the same rewards give .25 ± .2165: beyond; one more right of three, 2/3 − .5 ± .272: within.
    write(tmp_path / "raw", batch, method="probepo", measured=[(1, 9, [1, 1, 0])], n0=0)
    below = lines(tmp_path / "raw")["increments_below_one_se"].estimate
    assert (below.value, below.n) == (0.5, 2)


def test_steps_are_pooled_and_absences_named(tmp_path: Path) -> None:
    batch = chain_batch([RIGHT, WRONG, WRONG, WRONG], [1, 0, 0, 0], [PROMPT, PROMPT, "11+1=?\n", "11+1=?\n"])
    lean = Rollouts.from_lists([[2, 3], [2, 3]], ["g", "g"], [1, 1])
    for step in range(1, RECENT + 3):
        write(tmp_path, batch, step)
    run = write(tmp_path, lean, RECENT + 3)
    found = lines(tmp_path)
    assert found["acr"].estimate.value == pytest.approx((RECENT + 3) / (2 * RECENT + 5))
    assert found["acr"].estimate.prompts == 3
    assert found["covariance_kurtosis"].estimate.value is not None
    only = lines(tmp_path, steps="last 1")
    assert only["acr_all_right"].estimate.value == 1 and only["acr"].estimate.n == 1
    assert only["covariance_kurtosis"].estimate.missing == "needs log-probabilities: the record has no old_logprob"
    assert "needs belief evidence: the run's method (grpo)" in only["belief_sign_f1"].estimate.missing
    assert "needs step labels: no step verifier's" in only["right_steps_punished"].estimate.missing
    assert all(line.estimate.value is not None or line.estimate.missing for line in only.values())
    # Without its configuration nothing can be graded, whatever the model.
    refused = lines(run.path, bench=lambda config: pytest.fail("opened"))
    assert "needs a model: the run folder has no config.toml" in refused["fork_variance"].estimate.missing
