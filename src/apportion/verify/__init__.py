"""Verifiers: is this prediction right? Every answer is a `Verdict`: correct, wrong, or abstain.

`grade` judges one prediction, `grade_many` many at once, `check_gold` says before long work starts whether a gold can
be judged against at all. The computer algebra is loaded in child processes only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from apportion.errors import InputError, nearest
from apportion.verify import choice, code, exact, math, proofs
from apportion.verify.verdict import Verdict

__all__ = ["VERIFIERS", "Verdict", "Verifier", "check_gold", "grade", "grade_many"]


@dataclass(frozen=True)
class Verifier:
    """One kind of verifier: its settings, its judgement, and its test of a gold."""

    settings: type[Any]
    grade: Callable[[Any, str, Any], Verdict]
    check_gold: Callable[[Any, Any], str | None]


VERIFIERS: dict[str, Verifier] = {
    "math": Verifier(math.MathSettings, math.grade, math.check_gold),
    "choice": Verifier(choice.ChoiceSettings, choice.grade, choice.unreadable_gold),
    "exact": Verifier(exact.ExactSettings, exact.grade, exact.unreadable_gold),
    "code": Verifier(code.CodeSettings, code.grade, code.unreadable_gold),
    "lean": Verifier(proofs.LeanSettings, proofs.grade, proofs.unreadable_gold),
}
Task: TypeAlias = tuple[Verifier, Any, str, Any]
"""A verifier, a gold, a prediction and the settings."""


def prepare(kind: str, settings: Mapping[str, Any]) -> tuple[Verifier, Any]:
    """The verifier of a kind, and its settings checked.

    Raises:
        InputError: an unknown kind or setting, or a value that the setting does not take.
    """
    verifier = VERIFIERS.get(kind)
    if verifier is None:
        raise InputError("kind", repr(kind), f"one of {', '.join(VERIFIERS)}{nearest(str(kind), VERIFIERS)}")
    known = {field.name: field.default for field in fields(verifier.settings)}
    for name, value in settings.items():
        if name not in known:
            raise InputError(f"{kind} settings", repr(name), f"one of {', '.join(known)}{nearest(name, known)}")
        default = known[name]
        whole = isinstance(default, float) and type(value) is int
        if default is not None and type(value) is not type(default) and not whole:
            raise InputError(f"{kind} settings: {name}", repr(value), f"a value such as {default!r}")
    return verifier, verifier.settings(**settings)


def _text(prediction: object) -> str:
    if isinstance(prediction, bool) or not isinstance(prediction, str | int | float):
        raise InputError("prediction", f"{type(prediction).__name__}", "a string", "pass the model's text")
    return str(prediction)


def grade(kind: str, gold: Any, prediction: str, **settings: Any) -> Verdict:
    """Judge one prediction.

    Args:
        kind: "math", "choice", "exact", "code" or "lean".
        gold: the right answer, or for most kinds a list of accepted ones; for "code" the tests (see `code`), for
            "lean" the theorem to prove (see `proofs`).
        prediction: the model's whole response, or its bare answer.
        settings: fields of the kind's settings class (`VERIFIERS[kind].settings`).

    Raises:
        InputError: an unknown kind or setting, or a prediction that is no string. What is wrong with a *gold* is a
            verdict ("abstain"), not an error.
    """
    verifier, prepared = prepare(kind, settings)
    return _judge((verifier, gold, _text(prediction), prepared))


def grade_many(
    items: Iterable[Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    workers: int | None = None,
) -> list[Verdict]:
    """Judge many predictions at once, in the order given.

    Args:
        items: mappings with `kind`, `gold` and `prediction`; other keys are ignored.
        settings: for each kind, its settings: `{"math": {"order": "given"}}`.
        workers: judged at a time; the number of processors by default.

    Raises:
        InputError: as `grade`, naming the row, before anything is judged.
    """
    tasks: list[Task] = []
    prepared: dict[str, tuple[Verifier, Any]] = {}
    for row, item in enumerate(items):
        try:
            missing = [name for name in ("kind", "gold", "prediction") if name not in item]
            if missing:
                raise InputError(missing[0], "nothing", "a value", "each item needs kind, gold and prediction")
            kind = str(item["kind"])
            if kind not in prepared:
                prepared[kind] = prepare(kind, (settings or {}).get(kind, {}))
            verifier, own = prepared[kind]
            tasks.append((verifier, item["gold"], _text(item["prediction"]), own))
        except InputError as error:
            raise InputError(f"row {row}: {error.field}", error.got, error.expected, error.fix) from None
    return judge_all(tasks, workers)


def judge_all(tasks: Sequence[Task], workers: int | None = None) -> list[Verdict]:
    """The verdicts of prepared tasks, in order; `workers` as in `grade_many`."""
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "verify") as threads:
        return list(threads.map(_judge, tasks))


def _judge(task: Task) -> Verdict:
    verifier, gold, text, settings = task
    try:
        return verifier.grade(gold, text, settings)
    except InputError:
        raise
    except Exception as error:
        # A sandbox of the user's, say. That we failed says nothing about the prediction.
        return Verdict("abstain", f"the verifier failed: {type(error).__name__}: {str(error)[:200]}")


def check_gold(kind: str, gold: Any, **settings: Any) -> str | None:
    """Why `gold` cannot be judged against (empty, unreadable formula, no tests), or None if it can.

    A formula that is merely unreadable still accepts a prediction with the same spelling; all else abstains.
    """
    verifier, prepared = prepare(kind, settings)
    try:
        return verifier.check_gold(gold, prepared)
    except (ValueError, RecursionError) as error:
        return f"the gold cannot be read: {str(error)[:200]}"
