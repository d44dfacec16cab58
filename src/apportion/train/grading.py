"""Probes graded by the trainer's own reward functions, without leaving a trace in the trainer.

Shapes: _R responses, _F reward functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trl.trainer.grpo_trainer as grpo_trainer
from torch import Tensor
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from apportion.train.host import weighted

if TYPE_CHECKING:
    from apportion.train.trainer import CreditTrainer


@dataclass
class Logs:
    """What reward functions hand to TRL beside rewards: columns of the completions table, and scalars, by name."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    scalars: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def replay(self, trainer: CreditTrainer) -> None:
        """Hands it to TRL after all."""
        for own, theirs in ((self.columns, trainer._pending_extra_logs), (self.scalars, trainer._pending_metrics)):
            for name, values in own.items():
                theirs[name].extend(values)


def rewards_of(
    trainer: CreditTrainer,
    rows: Sequence[dict[str, Any]],
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
) -> tuple[Tensor, Logs]:
    """(R, F) rewards of R ≥ 1 whole responses, and what the functions logged, which TRL does not see.

    Runs `_calculate_rewards` itself, so plain, asynchronous and model rewards and their columns are those of the
    rollouts. Arguments as for `grade`.
    """
    prompts = [row["prompt"] for row in rows]
    ids = [list(response) for response in token_ids]
    completions = completions_of(trainer, prompts, prompt_ids, ids)
    with _apart(trainer) as logs, _alone():
        return trainer._calculate_rewards(list(rows), prompts, completions, ids), logs


def grade(
    trainer: CreditTrainer,
    rows: Sequence[dict[str, Any]],
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
) -> list[float | None]:
    """The weighted reward of each whole response, None where every function abstained.

    Args:
        rows: the data set row of each response.
        prompt_ids: its prompt.
        token_ids: the whole response: what the probe kept of a rollout, and the continuation.
    """
    if not rows:
        return []
    rewards_RF, _ = rewards_of(trainer, rows, prompt_ids, token_ids)
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
def _apart(trainer: CreditTrainer) -> Iterator[Logs]:
    """`log_extra` and `log_metric` go here; TRL's profiling of the reward functions goes nowhere."""
    kept = trainer._pending_extra_logs, trainer._pending_metrics, trainer.args.report_to
    logs = Logs()
    trainer._pending_extra_logs, trainer._pending_metrics = logs.columns, logs.scalars
    trainer.args.report_to = []
    try:
        yield logs
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
