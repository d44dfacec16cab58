"""Probes graded by the trainer's own reward functions, without leaving a trace in the trainer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import trl.trainer.grpo_trainer as grpo_trainer
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from apportion.train.host import weighted

if TYPE_CHECKING:
    from apportion.train.trainer import CreditTrainer


def grade(
    trainer: CreditTrainer,
    rows: Sequence[dict[str, Any]],
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
) -> list[float | None]:
    """The weighted reward of each whole response, None where every function abstained.

    Runs `_calculate_rewards` itself, so plain, asynchronous and model rewards, their weights and columns are those
    of the rollouts.

    Args:
        rows: the data set row of each response.
        prompt_ids: its prompt.
        token_ids: the whole response: what the probe kept of a rollout, and the continuation.
    """
    if not rows:
        return []
    prompts = [row["prompt"] for row in rows]
    ids = [list(response) for response in token_ids]
    completions = completions_of(trainer, prompts, prompt_ids, ids)
    with _quiet(trainer), _alone():
        rewards_RF = trainer._calculate_rewards(list(rows), prompts, completions, ids)
    reward = weighted(rewards_RF, trainer.reward_weights)
    return [None if r != r else r for r in reward.tolist()]


def completions_of(
    trainer: CreditTrainer,
    prompts: Sequence[Any],
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
) -> list[Any]:
    """Completions in the form in which TRL hands them to reward functions: text, or a list of messages."""
    if not is_conversational({"prompt": prompts[0]}):
        return trainer.processing_class.batch_decode(token_ids, skip_special_tokens=True)
    tokenizer = trainer._tokenizer
    if getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None):
        return [
            [parse_response(tokenizer, ids, prefix=prefix, tools=trainer.tools)]
            for prefix, ids in zip(prompt_ids, token_ids, strict=True)
        ]
    contents = trainer.processing_class.batch_decode(token_ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": content}] for content in contents]


@contextmanager
def _quiet(trainer: CreditTrainer) -> Iterator[None]:
    """`log_extra`, `log_metric` and TRL's profiling of the reward functions go nowhere."""
    kept = trainer._pending_extra_logs, trainer._pending_metrics, trainer.args.report_to
    trainer._pending_extra_logs, trainer._pending_metrics = defaultdict(list), defaultdict(list)
    trainer.args.report_to = []
    try:
        yield
    finally:
        trainer._pending_extra_logs, trainer._pending_metrics, trainer.args.report_to = kept


@contextmanager
def _alone() -> Iterator[None]:
    """`_calculate_rewards` ends by gathering over ranks, but ranks grade different numbers of probes, some none."""
    kept = grpo_trainer.gather
    grpo_trainer.gather = lambda tensor: tensor
    try:
        yield
    finally:
        grpo_trainer.gather = kept
