"""Probes are graded exactly as rollouts are: text and chat, plain, async and model rewards, weights and columns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_host import inside

from apportion.records import RunFolder
from apportion.train import CreditTrainer
from apportion.train.grading import completions_of, grade


class Handed(CreditTrainer):
    """Keeps what TRL hands to the reward functions for its rollouts."""

    handed: tuple[Any, ...] = ()

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        if self._capture is not None:
            self.handed = (inputs, prompts, completions, completion_ids_list)
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)


async def slow(completions: list[Any], **kwargs: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [None if len(str(c)) % 3 == 0 else 0.25 for c in completions]


def by_ids(completion_ids: list[list[int]], prompts: list[Any], **kwargs: Any) -> list[float | None]:
    assert len(prompts) == len(completion_ids)
    return [None if ids[0] == 2 else float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("chat", [False, True])
def test_rollouts_graded_as_probes_get_the_rollouts_rewards(policy: Path, tmp_path: Path, chat: bool) -> None:
    trainer = tiny.trainer(
        policy, tmp_path, cls=Handed, train_dataset=tiny.dataset(chat=chat),
        reward_funcs=[tiny.last_digit, slow, by_ids], reward_weights=[1.0, 2.0, 0.125],
    )  # fmt: skip
    capture, output = inside(trainer)
    rows, prompts, completions, ids = trainer.handed
    prompt_ids = [p[m.bool()].tolist() for p, m in zip(output["prompt_ids"], output["prompt_mask"], strict=True)]
    assert completions_of(trainer, prompts, prompt_ids, ids) == completions
    # Shuffled, so that a row graded with another row's columns would show.
    order = [5, 0, 7, 2, 6, 1, 4, 3]
    found = grade(trainer, [rows[i] for i in order], [prompt_ids[i] for i in order], [ids[i] for i in order])
    assert capture.rewards is not None
    weighted = (capture.rewards * torch.tensor([1.0, 2.0, 0.125])).nansum(1)[order]
    assert found == weighted.tolist()
    assert len(set(found)) > 2


def test_abstentions_are_none(policy: Path, tmp_path: Path) -> None:
    trainer = tiny.trainer(policy, tmp_path, reward_funcs=by_ids)
    row = {"prompt": "ab", "answer": "1"}
    assert grade(trainer, [row, row], [[2, 3]] * 2, [[2, 5], [3, 5, 1]]) == [None, 3.0]
    assert grade(trainer, [], [], []) == []


def test_probes_keep_their_prefix_and_are_graded_whole(policy: Path, tmp_path: Path) -> None:
    """The reward function sees, for each probe, the response up to the pivot and then the continuation."""
    calls: list[tuple[list[str], list[list[int]], list[str]]] = []

    def spy(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **kwargs: Any) -> list[float]:
        calls.append((list(prompts), [list(c) for c in completion_ids], list(answer)))
        return tiny.last_digit(completions, answer)

    trainer = tiny.trainer(policy, tmp_path, reward_funcs=spy, max_steps=2)
    trainer.train()
    batch, credit = trainer.last_credit
    prompts, ids, answers = calls[-1]
    rollouts, rows = batch.rollouts, batch.rows
    pivots = {(int(r), int(s)) for r, s in zip(credit.segments.row, credit.segments.start, strict=True) if s > 0}
    assert pivots and len(ids) == 4 * len(pivots)
    for prompt, response, answer in zip(prompts, ids, answers, strict=True):
        fits = [
            (row, at) for row, at in pivots
            if rows[row]["prompt"] == prompt and rows[row]["answer"] == answer
            and rollouts.token_ids[rollouts.offsets[row] : rollouts.offsets[row] + at].tolist() == response[:at]
        ]  # fmt: skip
        assert fits and len(response) <= 24


def test_a_cut_off_probe_is_rescued(policy: Path, tmp_path: Path) -> None:
    """Where no text ever holds an answer, exactly the probes that would have been cut off get the cue `=1`."""
    trainer = tiny.trainer(
        policy, tmp_path, max_completion_length=20, rescue_cue="=1", rescue_tokens=4, rescue_answer="never",
        run_folder=str(tmp_path / "run"), max_steps=4,
    )  # fmt: skip
    trainer.train()
    run = RunFolder(tmp_path / "run")
    evidence = [row for step in run.steps() for row in run.read("evidence", step)]
    rescued = [row for row in evidence if row["rescued"]]
    cue = tiny.make_tokenizer()("=1")["input_ids"]
    for row in rescued:
        kept = 20 - row["position"] - 4
        assert row["token_ids"][kept : kept + 2] == cue and len(row["token_ids"]) <= kept + 4
    # Closer to the limit than the reserve a rescue has no room.
    cut = [r for r in evidence if r["position"] < 16 and len(r["token_ids"]) > 20 - r["position"] - 4]
    assert rescued and len(rescued) == len(cut)
