"""Verifiers: is this prediction right? Every answer is a `Verdict`: correct, wrong, or abstain.

`grade` judges one prediction, `grade_many` many at once, `check_gold` says before long work starts whether a gold can
be judged against at all. The computer algebra is loaded in child processes only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

from apportion.errors import InputError, nearest
from apportion.verify import choice, code, exact, math
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
}


def _prepare(kind: str, settings: Mapping[str, Any]) -> tuple[Verifier, Any]:
    verifier = VERIFIERS.get(kind)
    if verifier is None:
        raise InputError("kind", repr(kind), f"one of {', '.join(VERIFIERS)}{nearest(str(kind), VERIFIERS)}")
    known = [field.name for field in fields(verifier.settings)]
    for name in settings:
        if name not in known:
            raise InputError(f"{kind} settings", repr(name), f"one of {', '.join(known)}{nearest(name, known)}")
    return verifier, verifier.settings(**settings)


def _text(prediction: object) -> str:
    if isinstance(prediction, bool) or not isinstance(prediction, str | int | float):
        raise InputError("prediction", f"{type(prediction).__name__}", "a string", "pass the model's text")
    return str(prediction)


def grade(kind: str, gold: Any, prediction: str, **settings: Any) -> Verdict:
    """Judge one prediction.

    Args:
        kind: "math", "choice", "exact" or "code".
        gold: the right answer, or for most kinds a list of accepted ones; for "code" the tests (see `code`).
        prediction: the model's whole response, or its bare answer.
        settings: fields of the kind's settings class (`VERIFIERS[kind].settings`).

    Raises:
        InputError: an unknown kind or setting, or a prediction that is no string. What is wrong with a *gold* is a
            verdict ("abstain"), not an error.
    """
    verifier, prepared = _prepare(kind, settings)
    return verifier.grade(gold, _text(prediction), prepared)


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
    tasks = []
    for row, item in enumerate(items):
        try:
            missing = [name for name in ("kind", "gold", "prediction") if name not in item]
            if missing:
                raise InputError(missing[0], "nothing", "a value", "each item needs kind, gold and prediction")
            verifier, prepared = _prepare(item["kind"], (settings or {}).get(item["kind"], {}))
            tasks.append((verifier, item["gold"], _text(item["prediction"]), prepared))
        except InputError as error:
            raise InputError(f"row {row}: {error.field}", error.got, error.expected, error.fix) from None
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "verify") as threads:
        return list(threads.map(lambda task: task[0].grade(*task[1:]), tasks))


def check_gold(kind: str, gold: Any, **settings: Any) -> str | None:
    """Why `gold` cannot be judged against (empty, unreadable formula, no tests), or None if it can.

    A formula that is merely unreadable still accepts a prediction with the same spelling; all else abstains.
    """
    verifier, prepared = _prepare(kind, settings)
    return verifier.check_gold(gold, prepared)
