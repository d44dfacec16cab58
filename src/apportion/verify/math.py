"""Mathematical answers: math-verify behind rules that say what counts as the same answer.

Bare letters ("cat", "ab") are words, whose case does not matter; between maths marks, after "=" and beside a formula on
the other side they are products of unknowns, whose case does.

Words that name a number, infinity, the real line or a date are read as what they name.

`decide` is the whole judgement and runs in a child process (`pool`): a formula may take for ever. `quick` settles
what needs no computer algebra (same spelling, plain numerals) in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args, get_type_hints

from apportion.errors import InputError, nearest
from apportion.verify.extract import MAX_BARE_CHARS, final_answer, gold_forms, side_by_side
from apportion.verify.gold import accepted, unusable
from apportion.verify.normalise import canonical, normalise
from apportion.verify.numerals import read_numeral, same_numeral
from apportion.verify.pool import shared_pool
from apportion.verify.structure import size
from apportion.verify.verdict import Verdict


@dataclass(frozen=True)
class MathSettings:
    """What counts as the same answer. [ours]

    Attributes:
        rel_tol: relative tolerance where a decimal is in play; exact values are compared exactly, and zero is
            close to nothing but zero. Two decimals with the same number of places are compared exactly.
        percent: 28% equals 28 and 0.28 ("either"), only 28 ("sign"), only 0.28 ("fraction"), only 28% ("strict").
        units: a unit may be left out on one side, but two units must be the same ("optional"); both sides must
            carry the same one ("required"); units are not looked at ("ignored"). Degrees, currencies, number bases
            and am/pm are units, and a percent sign is another unit than all of them. "Million" is a factor, not a
            unit, and a modulus is never left out.
        intervals: x ≥ 2 equals [2, ∞) ("either"), or an inequality answers only an inequality ("strict"). Unions
            of numbers are compared as sets: [0, 1] ∪ [1, 2] is [0, 2].
        order: order in a bare comma list does not matter ("any") or does ("given"). In (a, b) and in a column it
            always does, in {a, b} never. Boxes side by side, \\boxed{1} and \\boxed{2}, are such a list where the
            gold is one of as many items; elsewhere the last box counts.
        names: x = 5 equals 5 ("optional") or not ("required"). x = 5 never equals y = 5. What a name stands in for
            is free: the argument of f(x) = x², the k of k ∈ ℤ, and the constant of integration (C, c, K, k).
        max_chars: longer answers are wrong unread.
        wall_s: seconds for one answer in the child process.
        memory_mb: address space of the child process, MiB.
    """

    rel_tol: float = 1e-6
    percent: Literal["either", "sign", "fraction", "strict"] = "either"
    units: Literal["optional", "required", "ignored"] = "optional"
    intervals: Literal["either", "strict"] = "either"
    order: Literal["any", "given"] = "any"
    names: Literal["optional", "required"] = "optional"
    max_chars: int = 4000
    wall_s: float = 5.0
    memory_mb: int = 1024

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            choices = get_args(hint)
            value = getattr(self, name)
            if choices and value not in choices:
                close = nearest(str(value), choices)
                raise InputError(name, repr(value), f"one of {', '.join(choices)}{close}")
        if not 0 <= self.rel_tol < 1:
            raise InputError("rel_tol", self.rel_tol, "a number from 0 up to 1")


def gold_answers(gold: object) -> list[str]:
    """Accepted answers of a gold: one string or number, or a list of them (any one will do); see `gold_forms`."""
    return [form for text in accepted(gold) for form in gold_forms(text)]


def graded_answer(golds: Sequence[str], prediction: str) -> str | None:
    """The final answer; boxes side by side are read together where the gold is a list of as many items."""
    answer = final_answer(prediction)
    if answer is None or prediction.count("boxed") < 2:
        return answer
    boxes = side_by_side(prediction)
    return ", ".join(boxes) if len(boxes) > 1 and len(boxes) in map(size, golds) else answer


def quick(golds: Sequence[str], answer: str, settings: MathSettings) -> Verdict | None:
    """The verdict where spelling or plain arithmetic settles it, else None."""
    key, numeral = canonical(answer), read_numeral(normalise(answer))
    for gold in golds:
        if canonical(gold) == key:
            return Verdict("correct", "same spelling", gold, answer)
        gold_numeral = read_numeral(normalise(gold))
        if numeral and gold_numeral and same_numeral(gold_numeral, numeral, settings.rel_tol):
            return Verdict("correct", "same number", gold, answer)
    if numeral and all(read_numeral(normalise(gold)) for gold in golds):
        return Verdict("wrong", "another number", " | ".join(golds), answer)
    return None


def decide(golds: Sequence[str], answer: str, settings: MathSettings, stage: Callable[[str], None]) -> Verdict:
    """The full judgement; slow and unbounded, for the child process. `stage` hears "gold", "prediction",
    "compare" before each part, so that whoever kills this process knows which part it hung in."""
    from apportion.verify.equality import Comparison, unreadable
    from apportion.verify.structure import read

    shown = " | ".join(golds)
    stage("gold")
    trees = {gold: read(normalise(gold)) for gold in golds}
    readable = {gold: tree for gold, tree in trees.items() if unreadable(tree) is None}
    if not readable:
        reason = unreadable(trees[golds[0]])
        return Verdict("abstain", f"the gold cannot be read: {reason}", shown, answer)
    stage("prediction")
    prediction = read(normalise(answer))
    if (reason := unreadable(prediction)) is not None:
        return Verdict("wrong", f"the prediction cannot be read: {reason}", shown, answer)
    stage("compare")
    comparison = Comparison(settings)
    for gold, tree in readable.items():
        if comparison.same(tree, prediction):
            return Verdict("correct", "equal", gold, answer)
    return Verdict("wrong", "not equal", shown, answer)


def unreadable_gold(golds: Sequence[str]) -> str | None:
    """Why no accepted answer can be compared except word for word; for the child process."""
    from apportion.verify.equality import unreadable
    from apportion.verify.structure import read

    reasons = [unreadable(read(normalise(gold))) for gold in golds]
    return None if None in reasons else reasons[0]


def grade(gold: object, prediction: str, settings: MathSettings) -> Verdict:
    """Grade one prediction; formulas go to the shared pool of child processes.

    A child that hangs, runs out of memory or dies makes the verdict "wrong" when it had finished with the gold (the
    prediction is then what broke it: abstaining would reward answers that hang), and "abstain" before that, or
    when the machine starved it.
    """
    if reason := unusable(gold):
        return Verdict("abstain", reason)
    golds = gold_answers(gold)
    shown = " | ".join(golds)
    # Of prose the last sentence would be taken; the gold's own words are right as a whole.
    if len(prediction) <= MAX_BARE_CHARS and canonical(prediction.strip()) in map(canonical, golds):
        return Verdict("correct", "same spelling", shown, prediction.strip())
    answer = graded_answer(golds, prediction)
    if answer is None:
        return Verdict("wrong", "no answer found", shown, None)
    if len(answer) > settings.max_chars:
        return Verdict("wrong", f"an answer of {len(answer)} characters", shown, answer[:100])
    if (verdict := quick(golds, answer, settings)) is not None:
        return verdict
    job = {"task": "math", "golds": golds, "answer": answer, "settings": asdict(settings)}
    outcome = shared_pool(settings.memory_mb).run(job, settings.wall_s)
    if outcome.state == "done":
        return Verdict(**outcome.value)
    why = f"{outcome.reason} while reading the {outcome.stage or 'job'}" + (
        f" ({outcome.detail})" if outcome.detail else ""
    )
    if outcome.stage in ("prediction", "compare") and outcome.reason != "starved":
        return Verdict("wrong", why, shown, answer)
    return Verdict("abstain", why, shown, answer)


def check_gold(gold: object, settings: MathSettings) -> str | None:
    """Why a gold cannot be compared except word for word; None when it can."""
    if reason := unusable(gold):
        return reason
    golds = gold_answers(gold)
    if any(read_numeral(normalise(one)) for one in golds):
        return None
    outcome = shared_pool(settings.memory_mb).run({"task": "check_math", "golds": golds}, settings.wall_s)
    return outcome.value if outcome.state == "done" else f"{outcome.reason} while reading the gold"
