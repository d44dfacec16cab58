"""Reward functions of the form TRL's trainers take: `f(completions, **columns) -> list[float | None]`.

A verifier made into one drops into TRL, and any reward function written for TRL composes with these. None means
that there is no reward (the verifier abstained, or the function does not apply): never 0. TRL adds up what several
functions give and counts a None as 0 there, as long as another one gave something; `combine` does not.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

from apportion.errors import InputError, nearest
from apportion.verify import Verifier, judge_all, prepare
from apportion.verify.extract import after_thinking, boxes

RewardFunction: TypeAlias = Callable[..., Any]
Rewards: TypeAlias = list[float | None]
Missing: TypeAlias = Literal["abstain", "skip"]


def completion_text(completion: Any) -> str:
    """The model's text: a plain string, or the contents of the assistant's messages in a conversational one.

    A message's content is text, None (a tool call alone), or a list of blocks, of which those of type "text" count.
    """
    if isinstance(completion, str):
        return completion
    try:
        return "\n".join(_content(m["content"]) for m in completion if m.get("role", "assistant") == "assistant")
    except (TypeError, KeyError, AttributeError):
        raise InputError("completions", type(completion).__name__, "strings, or lists of messages") from None


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block["text"] for block in content if block.get("type", "text") == "text")


def completion_texts(completions: Sequence[Any]) -> list[str]:
    """As `completion_text`, of each; what cannot be read is named with its row."""
    texts = []
    for row, completion in enumerate(completions):
        try:
            texts.append(completion_text(completion))
        except InputError as error:
            raise InputError(f"{error.field}, row {row}", error.got, error.expected) from None
    return texts


def golds_of(columns: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """The golds of `count` completions, from the data set's column `name`.

    Raises:
        InputError: the column is missing, is no list, or has another length.
    """
    golds = columns.get(name)
    listed = None if isinstance(golds, str | bytes | Mapping) or not hasattr(golds, "__len__") else golds
    if listed is None or len(listed) != count:
        got = "nothing" if golds is None else type(golds).__name__ if listed is None else f"{len(listed)} values"
        raise InputError(name, got, f"a column of {count} golds", "name the data set's column with answer_column=")
    return list(listed)


class Reward:
    """A function with its first arguments given, under the name that TRL logs it under.

    No closure, since TRL's asynchronous trainer sends reward functions to another process, and no `functools.partial`,
    which TRL would name after the function inside.
    """

    def __init__(self, name: str, function: RewardFunction, *given: Any) -> None:
        self.__name__, self.function, self.given = name, function, given

    def __call__(self, /, completions: Sequence[Any], **columns: Any) -> Rewards:
        rewards: Rewards = self.function(*self.given, completions, **columns)
        return rewards


def verifier_reward(kind: str, answer_column: str = "answer", *, name: str | None = None, **settings: Any) -> Reward:
    """1.0 correct, 0.0 wrong, None abstain, by the verifier `kind` ("math", "choice", "exact", "code", "lean").

    In a trainer the metric `rewards/NAME/abstained` counts the Nones of each call.

    Args:
        kind: as in `grade`.
        answer_column: the data set's column with the gold.
        name: of the function, under which TRL logs; `KIND_reward` by default.
        settings: of that verifier.

    Raises:
        InputError: an unknown kind or setting. When called: the column is missing or its length is not that of
            `completions`; a completion is neither text nor messages.
    """
    verifier, prepared = prepare(kind, settings)
    name = name or f"{kind}_reward"
    return Reward(name, _judged, verifier, prepared, answer_column, name)


def _judged(
    verifier: Verifier, settings: Any, column: str, name: str, /, completions: Sequence[Any], **columns: Any
) -> Rewards:
    golds, texts = golds_of(columns, column, len(completions)), completion_texts(completions)
    verdicts = judge_all([(verifier, gold, text, settings) for gold, text in zip(golds, texts, strict=True)])
    rewards = [None if verdict.outcome == "abstain" else verdict.reward for verdict in verdicts]
    # Trainers of TRL hand this in.
    if log := columns.get("log_metric"):
        log(f"rewards/{name}/abstained", float(rewards.count(None)))
    return rewards


def format_reward(think: bool = True, box: bool = True) -> Reward:
    """1.0 for a response in the form asked for, else 0.0. [ours]

    Args:
        think: exactly one `</think>`, and at most one `<think>`, which comes first. (A chat template may have
            opened the block in the prompt.)
        box: exactly one balanced box after the thinking.
    """
    return Reward("format_reward", _formatted, think, box)


def _formatted(think: bool, box: bool, /, completions: Sequence[Any], **columns: Any) -> Rewards:
    return [float(_well_formed(text, think, box)) for text in completion_texts(completions)]


def _well_formed(text: str, think: bool, box: bool) -> bool:
    before, closed, after = text.rpartition("</think>")
    if think:
        opened = before.count("<think>")
        starts = opened == 0 or (opened == 1 and before.lstrip().startswith("<think>"))
        if not closed or "</think>" in before or "<think>" in after or not starts:
            return False
    # What stands in a block that never closes is no answer.
    return not box or len(boxes(after_thinking(text) or "")) == 1


def overlong_penalty(max_length: int, buffer: int) -> Reward:
    """Soft penalty on length: 0 up to `max_length - buffer` tokens, then linear, −1 from `max_length` on.
    [paper] (DAPO, arXiv 2503.14476, eq. 13)

    Args:
        max_length: tokens of a completion, L_max.
        buffer: tokens over which the penalty grows, L_cache.

    Raises:
        InputError: lengths that are no whole numbers, or a buffer outside of 1 to `max_length`. When called: no
            `completion_ids`, or not one list for each completion.
    """
    for field, value in (("max_length", max_length), ("buffer", buffer)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(field, repr(value), "a number of tokens")
    if not 0 < buffer <= max_length:
        raise InputError("buffer", buffer, f"a length from 1 to max_length = {max_length}")
    return Reward("overlong_penalty", _penalised, max_length - buffer, buffer)


def _penalised(
    free: int, buffer: int, /, completions: Sequence[Any], completion_ids: Any = None, **columns: Any
) -> Rewards:
    if completion_ids is None or len(completion_ids) != len(completions):
        got = "nothing" if completion_ids is None else f"{len(completion_ids)} lists"
        raise InputError("completion_ids", got, f"the token ids of {len(completions)} completions, as TRL gives")
    return [0.0 - min(max(len(ids) - free, 0) / buffer, 1.0) for ids in completion_ids]


def combine(
    functions: Sequence[RewardFunction], weights: Sequence[float] | None = None, missing: Missing = "abstain"
) -> Reward:
    """The weighted sum of reward functions, as one.

    Args:
        functions: any TRL reward functions. Asynchronous ones are waited for one after the other, each call in an
            event loop of its own.
        weights: one each; all 1 by default.
        missing: a None (or NaN, which TRL takes for one) from any function makes the sum None ("abstain": a reward
            we do not know), or counts as left out ("skip", as TRL sums: for functions that apply to some rows only).
            All None is None either way.

    Raises:
        InputError: nothing to combine, something that cannot be called (a reward model), weights that are not one
            finite number for each. When called, naming the function and where it can the row: a column that the
            function takes is missing, the function raises, or what it returns is not a finite number or None for
            each completion.
    """
    factors = [1.0] * len(functions) if weights is None else list(weights)
    if not functions or len(factors) != len(functions):
        raise InputError("weights", f"{len(factors)} for {len(functions)} functions", "one weight for each function")
    for number, (function, factor) in enumerate(zip(functions, factors, strict=True)):
        if not callable(function):
            raise InputError(f"functions[{number}]", repr(function)[:80], "a reward function")
        if not _is_number(factor):
            raise InputError(f"weights[{number}]", repr(factor)[:80], "a finite number")
    if missing not in get_args(Missing):
        raise InputError("missing", repr(missing), f"abstain or skip{nearest(str(missing), get_args(Missing))}")
    return Reward("+".join(map(_name, functions)), _summed, tuple(functions), tuple(factors), missing)


def _summed(
    functions: Sequence[RewardFunction], factors: Sequence[float], missing: Missing, /, completions: Sequence[Any],
    **columns: Any,
) -> Rewards:  # fmt: skip
    def total(row: Sequence[float | None]) -> float | None:
        known = [(factor, value) for factor, value in zip(factors, row, strict=True) if value is not None]
        if not known or (missing == "abstain" and len(known) < len(row)):
            return None
        return sum(factor * value for factor, value in known)

    parts = [_call(function, completions, columns) for function in functions]
    return [total(row) for row in zip(*parts, strict=True)]


def _name(function: RewardFunction) -> str:
    # Partials have none of their own, nor have objects that can be called.
    named = function if hasattr(function, "__name__") else getattr(function, "func", type(function))
    return str(getattr(named, "__name__", type(function).__name__))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _call(function: RewardFunction, completions: Sequence[Any], columns: dict[str, Any]) -> Rewards:
    """What one function gives, checked: a finite number or None for each completion."""
    name = f"reward function {_name(function)}"
    try:
        inspect.signature(function).bind(completions=completions, **columns)
    except TypeError as error:
        raise InputError(name, error, f"a function that takes the columns {', '.join(columns) or '(none)'}",
                         "name the column as the function does, or let it take **kwargs") from None  # fmt: skip
    except ValueError:
        # Nothing is known of the signature.
        pass
    try:
        values = _values(function, completions, columns)
    except InputError as error:
        raise InputError(f"{name}: {error.field}", error.got, error.expected, error.fix) from None
    except Exception as error:
        row = _failing_row(function, completions, columns, type(error))
        got = f"{type(error).__name__}: {error}"
        raise InputError(f"{name}{row}", got, "rewards, or None where it has none to give") from error
    expected = f"one number or None for each of {len(completions)} completions"
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise InputError(name, f"a {type(values).__name__}", expected)
    if len(values) != len(completions):
        raise InputError(name, f"{len(values)} rewards", expected)
    return [_reward(value, f"{name}, row {row}") for row, value in enumerate(values)]


def _values(function: RewardFunction, completions: Sequence[Any], columns: dict[str, Any]) -> Any:
    values = function(completions=completions, **columns)
    if not inspect.isawaitable(values):
        return values

    async def wait() -> Any:
        return await values

    # In a thread of its own: this one may be running an event loop already, as notebooks do.
    with ThreadPoolExecutor(1, "reward") as thread:
        return thread.submit(asyncio.run, wait()).result()


def _failing_row(function: RewardFunction, completions: Sequence[Any], columns: dict[str, Any], kind: type) -> str:
    """The first row on which the function fails by itself as it did on all of them; nothing if there is none."""
    count = len(completions)
    for row in range(count):
        one = {
            name: [column[row]] if isinstance(column, list | tuple) and len(column) == count else column
            for name, column in columns.items()
        }
        try:
            _values(function, [completions[row]], one)
        except Exception as error:
            if type(error) is kind:
                return f", row {row}"
    return ""


def _reward(value: Any, field: str) -> float | None:
    if value is None:
        return None
    # Elements of arrays and tensors.
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, Real) and math.isnan(value):
        return None
    if not _is_number(value):
        raise InputError(field, repr(value)[:80], "a finite number, or None for no reward")
    return float(value)
