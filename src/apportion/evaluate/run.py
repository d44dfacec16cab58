"""An evaluation from start to end: what is on disk is not sampled again, what is missing is sampled and graded.

Samples come from keyed random streams in batches that depend on nothing but the problems' order, so a run that was
stopped goes on to the same samples bit for bit.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from apportion.engines.base import Continuation, ContinuationEngine, Key, Request
from apportion.errors import InputError
from apportion.evaluate import grading
from apportion.evaluate.benches import ProblemSet
from apportion.evaluate.grading import Grade
from apportion.evaluate.plan import Item, Settings, Work, plan
from apportion.evaluate.policy import Policy
from apportion.evaluate.records import Store
from apportion.evaluate.summary import summarise

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def evaluate(
    policy: Policy, sets: Sequence[ProblemSet], settings: Settings, output: Path, progress: Progress
) -> dict[str, Any]:
    """Evaluates a model and leaves records and numbers in `output` (see `records`).

    Returns:
        What `summary.summarise` returns, as in evaluation.json.

    Raises:
        InputError: as `plan`; a gold that a grader cannot read, with its set, row and text, unless such problems are
            to be left out; records that cannot be read or written; a model whose logits are not finite.
    """
    store = Store(output)
    works = [plan(policy, each, settings) for each in sets]
    with store.held():
        works = [_readable(work, store, settings, progress) for work in works]
        _sample(policy, works, store, settings, progress)
        for work in works:
            _grade_stored(work, store, progress)
        return summarise(policy, works, settings, store)


def _more(count: int) -> str:
    return f" and {count:,} more golds of the set" if count else ""


def _missing(work: Work, store: Store) -> dict[str, list[int]]:
    """Each key's m that are not on disk; only keys that lack one of their n samples."""
    found = store.read(work.name, [item.key for item in work.items])
    missing = {item.key: [m for m in range(work.n) if (item.key, m) not in found] for item in work.items}
    return {key: ms for key, ms in missing.items() if ms}


def _readable(work: Work, store: Store, settings: Settings, progress: Progress) -> Work:
    """The work with golds that cannot be judged against dealt with; those judged before are not asked about again."""
    found = store.read(work.name, [item.key for item in work.items])
    golds = {item.key: item.problem.gold for item in work.items}
    known = {key for (key, _), sample in found.items() if sample.judged(work.graders, golds[key])}
    asked = [item for item in work.items if item.key not in known]
    unread: dict[str, set[str]] = defaultdict(set)
    for grader in work.graders:
        refused = []
        for done, reason in enumerate(grading.unreadable(grader, [item.problem for item in asked])):
            progress(f"{work.name}: checking answers", done, len(asked))
            if reason is not None:
                refused.append((asked[done], reason))
        if refused and settings.unreadable == "error":
            item, reason = refused[0]
            raise InputError(
                f"{work.name}: {work.problems.source}, row {item.problem.row}, gold",
                repr(" | ".join(item.problem.gold))[:120] + _more(len(refused) - 1),
                f"an answer that the {grader} verifier can judge against ({reason})",
                "correct the row, choose another --grader, or --unreadable drop or spelling for all such rows",
            )  # fmt: skip
        for item, _ in refused:
            unread[item.key].add(grader)
    if settings.unreadable == "drop":
        items = tuple(item for item in work.items if item.key not in unread)
        if not items:
            raise InputError("--unreadable", f"drop, which leaves no problem of {work.name}", "a problem that is left",
                             "correct the set, choose another --grader, or --unreadable spelling")  # fmt: skip
        return replace(work, items=items, dropped=len(unread))
    return replace(work, items=tuple(replace(item, unread=frozenset(unread.get(item.key, ()))) for item in work.items))


def _sample(policy: Policy, works: Sequence[Work], store: Store, settings: Settings, progress: Progress) -> None:
    """Samples what is missing. A batch is written when all of it is there; a stop loses the batch in hand."""
    missing = {work.name: _missing(work, store) for work in works}
    total = sum(len(ms) for work in works for ms in missing[work.name].values())
    if not total:
        return
    progress("loading the model", 0, total)
    engine = policy.engine(settings.batch)
    done = 0
    for work in works:
        for chunk, items in _chunks(work, settings.batch):
            asked = {item: missing[work.name][item.key] for item in items if item.key in missing[work.name]}
            if not asked:
                continue
            drawn = []
            for each in _drawn(engine, work, asked, settings.seed):
                drawn.append(each)
                done += 1
                progress(f"{work.name}: sampling", done, total)
            progress(f"{work.name}: grading", done, total)
            store.write(work.name, chunk, _rows(policy, work, drawn, settings.seed))


def _chunks(work: Work, batch: int) -> Iterator[tuple[int, Sequence[Item]]]:
    """Problems in order, as many as make a batch; the same ones whatever is on disk."""
    size = max(1, batch // work.n)
    for chunk, start in enumerate(range(0, len(work.items), size)):
        yield chunk, work.items[start : start + size]


def _drawn(
    engine: ContinuationEngine, work: Work, asked: Mapping[Item, Sequence[int]], seed: int
) -> Iterator[tuple[Item, Continuation]]:
    """These samples m of each problem."""
    items = {Key(f"evaluate/{seed}", 0, f"{work.name}/{item.problem.id}", 0, 0): item for item in asked}
    requests = [
        Request(key, item.prompt.ids, count, work.max_tokens, first)
        for key, item in items.items() for first, count in _spans(asked[item])
    ]  # fmt: skip
    try:
        for sampled in engine.continuations(requests, work.sampling):
            yield items[sampled.key], sampled
    except FloatingPointError as error:
        raise InputError("--model", error, "weights whose logits are finite") from None


def _spans(ms: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and length of each unbroken run of rising numbers: 0, 1, 3 are (0, 2) and (3, 1)."""
    first = 0
    for at in range(1, len(ms) + 1):
        if at == len(ms) or ms[at] != ms[at - 1] + 1:
            yield ms[first], at - first
            first = at


def _rows(policy: Policy, work: Work, drawn: Sequence[tuple[Item, Continuation]], seed: int) -> list[dict[str, Any]]:
    """Graded rows of `records.SAMPLES`, in the order of problems and m."""
    place = {item.key: at for at, item in enumerate(work.items)}
    drawn = sorted(drawn, key=lambda each: (place[each[0].key], each[1].m))
    texts = [policy.tokenizer.decode(list(sampled.token_ids), skip_special_tokens=True) for _, sampled in drawn]
    items = [item for item, _ in drawn]
    grades = _graded(work.graders, items, texts)
    setting = json.dumps({"model": policy.name, "weights": policy.fingerprint, "style": work.style,
                          "max_tokens": work.max_tokens, "seed": seed, **asdict(work.sampling)})  # fmt: skip
    return [
        {
            "set": work.name, "id": item.problem.id, "m": sampled.m, "key": item.key, "setting": setting,
            "prompt": item.prompt.text, "gold": list(item.problem.gold), "text": text,
            "token_ids": list(sampled.token_ids), "tokens": len(sampled.token_ids), "finish": sampled.finish,
            "grades": [asdict(each) for each in of_sample],
        }
        for (item, sampled), text, of_sample in zip(drawn, texts, grades, strict=True)
    ]  # fmt: skip


def _graded(graders: Sequence[str], items: Sequence[Item], texts: Sequence[str]) -> list[list[Grade]]:
    """Every grader's verdict on one text of each item."""
    out: list[list[Grade]] = [[] for _ in items]
    for grader in graders:
        rows: dict[str, list[int]] = defaultdict(list)
        for row, item in enumerate(items):
            rows[item.judge(grader)].append(row)
        for judge, of_judge in rows.items():
            shown = [items[row].prompt.graded(texts[row]) for row in of_judge]
            for row, each in zip(of_judge, grading.grade(judge, [items[row].problem for row in of_judge], shown),
                                 strict=True):  # fmt: skip
                out[row].append(each)
    return out


def _grade_stored(work: Work, store: Store, progress: Progress) -> None:
    """Grades samples on disk that lack a grader's verdict, or were judged against another gold."""
    items = {item.key: item for item in work.items}
    due = {
        (key, m): sample.path for (key, m), sample in store.read(work.name, items).items()
        if m < work.n and not sample.judged(map(items[key].judge, work.graders), items[key].problem.gold)
    }  # fmt: skip
    paths = dict.fromkeys(due.values())
    for done, path in enumerate(paths):
        progress(f"{work.name}: grading what is on disk", done, len(paths))
        rows = store.rows(path)
        again = [row for row in rows if (row["key"], row["m"]) in due]
        grades = _graded(work.graders, [items[row["key"]] for row in again], [row["text"] for row in again])
        for row, new in zip(again, grades, strict=True):
            gold = list(items[row["key"]].problem.gold)
            # Verdicts of other graders stand as long as the gold does.
            old = {each["grader"]: each for each in row["grades"]} if row["gold"] == gold else {}
            row["gold"] = gold
            row["grades"] = list((old | {each.grader: asdict(each) for each in new}).values())
        store.rewrite(path, rows)
