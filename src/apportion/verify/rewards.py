"""Reward functions of the form TRL's trainers take: `f(completions, **columns) -> list[float | None]`.

A verifier made into one drops into TRL, and any reward function written for TRL composes with these. None means
that there is no reward (the verifier abstained, or the function does not apply): never 0.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from apportion.errors import InputError
from apportion.verify import grade_many
from apportion.verify.extract import boxes

RewardFunction: TypeAlias = Callable[..., Any]
Rewards: TypeAlias = list[float | None]


def completion_text(completion: Any) -> str:
    """The model's text: a plain string, or the contents of the assistant's messages in a conversational one."""
    if isinstance(completion, str):
        return completion
    try:
        return "\n".join(m["content"] or "" for m in completion if m.get("role", "assistant") == "assistant")
    except (TypeError, KeyError, AttributeError):
        raise InputError("completions", type(completion).__name__, "strings, or lists of messages") from None


def _named(function: RewardFunction, name: str) -> RewardFunction:
    # TRL logs each reward under its function's name.
    function.__name__ = function.__qualname__ = name
    return function


def verifier_reward(kind: str, answer_column: str = "answer", **settings: Any) -> RewardFunction:
    """1.0 correct, 0.0 wrong, None abstain, by the verifier `kind` ("math", "choice", "exact", "code").

    Args:
        kind: as in `grade`.
        answer_column: the data set's column with the gold.
        settings: of that verifier.

    Raises (when called): InputError if the column is missing or its length is not that of `completions`.
    """

    def reward(completions: Sequence[Any], **columns: Any) -> Rewards:
        golds = columns.get(answer_column)
        if golds is None or len(golds) != len(completions):
            got = "nothing" if golds is None else f"{len(golds)} values"
            raise InputError(
                answer_column,
                got,
                f"a column of {len(completions)} golds",
                "name the data set's column with answer_column=",
            )
        items = [
            {"kind": kind, "gold": gold, "prediction": completion_text(completion)}
            for gold, completion in zip(golds, completions, strict=True)
        ]
        verdicts = grade_many(items, {kind: settings})
        return [None if verdict.outcome == "abstain" else verdict.reward for verdict in verdicts]

    return _named(reward, f"{kind}_reward")


def format_reward(think: bool = True, box: bool = True) -> RewardFunction:
    """1.0 for a response in the form asked for, else 0.0. [ours]

    Args:
        think: exactly one `</think>`, and at most one `<think>`, which comes first. (A chat template may have
            opened the block in the prompt.)
        box: exactly one balanced box after the thinking.
    """

    def well_formed(text: str) -> bool:
        before, closed, after = text.rpartition("</think>")
        if think:
            opened = before.count("<think>")
            starts = opened == 0 or (opened == 1 and before.lstrip().startswith("<think>"))
            if not closed or "</think>" in before or "<think>" in after or not starts:
                return False
        return not box or len(boxes(after)) == 1

    def reward(completions: Sequence[Any], **_: Any) -> Rewards:
        return [float(well_formed(completion_text(completion))) for completion in completions]

    return _named(reward, "format_reward")


def overlong_penalty(max_length: int, buffer: int) -> RewardFunction:
    """Soft penalty on length: 0 up to `max_length - buffer` tokens, then linear, −1 from `max_length` on.
    [paper] (DAPO, arXiv 2503.14476, eq. 13)

    Args:
        max_length: tokens of a completion, L_max.
        buffer: tokens over which the penalty grows, L_cache.
    """
    if not 0 < buffer <= max_length:
        raise InputError("buffer", buffer, f"a length from 1 to max_length = {max_length}")

    def reward(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> Rewards:
        free = max_length - buffer
        return [-min(max(len(ids) - free, 0) / buffer, 1.0) for ids in completion_ids]

    return _named(reward, "overlong_penalty")


def _call(function: RewardFunction, completions: Sequence[Any], columns: dict[str, Any]) -> Rewards:
    values = function(completions=completions, **columns)
    if inspect.isawaitable(values):

        async def wait() -> Any:
            return await values

        values = asyncio.run(wait())
    if len(values) != len(completions):
        name = getattr(function, "__name__", repr(function))
        raise InputError(name, f"{len(values)} rewards", f"one for each of {len(completions)} completions")
    return list(values)


def combine(
    functions: Sequence[RewardFunction],
    weights: Sequence[float] | None = None,
    missing: Literal["abstain", "skip"] = "abstain",
) -> RewardFunction:
    """The weighted sum of reward functions, as one.

    Args:
        functions: any TRL reward functions, async ones included.
        weights: one each; all 1 by default.
        missing: a None from any function makes the sum None ("abstain": a reward we do not know), or counts as
            left out ("skip", as TRL sums: for functions that apply to some rows only). All None is None either way.
    """
    factors = [1.0] * len(functions) if weights is None else list(weights)
    if not functions or len(factors) != len(functions):
        raise InputError("weights", f"{len(factors)} for {len(functions)} functions", "one weight for each function")

    def total(row: Sequence[float | None]) -> float | None:
        known = [(factor, value) for factor, value in zip(factors, row, strict=True) if value is not None]
        if not known or (missing == "abstain" and len(known) < len(row)):
            return None
        return sum(factor * float(value) for factor, value in known)

    def reward(completions: Sequence[Any], **columns: Any) -> Rewards:
        parts = [_call(function, completions, columns) for function in functions]
        return [total(row) for row in zip(*parts, strict=True)]

    return _named(reward, "+".join(getattr(function, "__name__", "reward") for function in functions))
