"""The interchange file (docs/interchange.md): what `apportion assign` wrote, or what it reads.

A row of its output holds its credit; without credit the base is GRPO's, worked out from the rewards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from apportion.errors import InputError
from apportion.groups import group_stats, grpo_base
from apportion.interchange import Batch, objects, read
from apportion.records import rollout_rows, verdict_of
from apportion.report.escape import one_line
from apportion.report.foreign.files import Entry, File, number_in, whole_lines
from apportion.report.foreign.records import Records
from apportion.report.foreign.responses import FROM_REWARDS, GRPO, Row, Step, Tables
from apportion.report.foreign.text import clean, conversation, gold, messages
from apportion.rollouts import Rollouts

FIELDS = frozenset({"group", "reward", "token_ids"})
_DEEP = 4


def file_source(path: Path) -> Records:
    """One file is one batch: a step, numbered by what the file's name ends in."""
    return Records(path, lambda: [_file(path)], load)


def folder_source(folder: Path) -> Records:
    """The files of a folder, a step each."""
    return Records(folder, lambda: sorted(map(_file, folder.glob("*.jsonl")), key=lambda file: file.step or 0), load)


def _file(path: Path) -> File:
    return File(number_in(path.stem) or 0, (path,))


def load(file: File) -> Mapping[int, Step]:
    """The batch of a file.

    Raises:
        InputError: a line that is not as the contract has it; names the field, the line and the file.
    """
    (path,) = file.paths
    try:
        batch = read(objects(whole_lines(path)))
    except InputError as error:
        raise InputError(one_line(f"{error.field} of {path.name}", 200), error.got, error.expected, error.fix) from None
    found = [Entry(f"line {line} of {path.name}", row) for line, row in zip(batch.lines, batch.rows, strict=True)]
    assigned = [entry for entry in found if "advantage" in entry.fields]
    if assigned and len(assigned) < len(found):
        first = next(entry for entry in found if "advantage" not in entry.fields)
        raise InputError(f"advantage of {first.where}", "nothing", f"credit, as {assigned[0].where} has it")
    return {file.step or 0: _Batch(batch, found, bool(assigned))}


@dataclass(frozen=True)
class _Batch:
    batch: Batch
    entries: Sequence[Entry]
    assigned: bool

    def tables(self) -> Tables:
        rollouts = self._rollouts()
        credit = [_credit(i, entry) for i, entry in enumerate(self.entries)] if self.assigned else self._grpo()
        stats, group = group_stats(self.batch.rollouts), self.batch.rollouts.group.tolist()
        for row, g in zip(credit, group, strict=True):
            row["mean"] = float(stats.mean[g]) if stats.count[g] else None
        evidence = [row for i, entry in enumerate(self.entries) for row in _evidence(i, entry)]
        return Tables(rollouts, credit, evidence)

    def outcome(self) -> tuple[Rollouts, float]:
        return self.batch.rollouts, float(self.batch.rollouts.trainable.mean())

    def _rollouts(self) -> list[Row]:
        count = len(self.entries)
        rows = rollout_rows(self.batch.rollouts, [""] * count, [""] * count)
        for row, entry in zip(rows, self.entries, strict=True):
            entry.counts("token_ids")
            given = entry.fields
            row |= {
                "group": clean(row["group"]), "prompt": clean(conversation(messages(entry, "prompt"))) or None,
                "gold": clean(text) if (text := gold(given.get("gold"))) is not None else None,
                "text": None if row["text"] is None else clean(row["text"]),
                "char_start": None if row["text"] is None else row["char_start"],
                "reward": entry.number("reward"), "finish": given.get("finish"), "boundaries": given.get("boundaries"),
                "path": row["path"] and [clean(node) for node in row["path"]],
            }  # fmt: skip
        return rows

    def _grpo(self) -> list[Row]:
        rollouts = self.batch.rollouts
        base = grpo_base(rollouts)
        spread = (rollouts.spread(base.advantage) * rollouts.mask).tolist()
        common: Row = {
            "method": FROM_REWARDS, "settings": json.dumps({"base": GRPO}), "invariants": "{}", "counts": "{}",
            "weight": None, "residual": None, "segments": [],
        }  # fmt: skip
        return [
            {
                "row": i,
                "advantage": spread[a:b],
                "base": float(base.advantage[i]),
                "scale": float(base.scale[i]),
                **common,
            }
            for i, (a, b) in enumerate(pairwise(rollouts.offsets.tolist()))
        ]


def _credit(i: int, entry: Entry) -> Row:
    """A row of `assign`'s output. What divided the base is not in it.

    Raises:
        InputError: a field that is not what `assign` writes.
    """
    length = len(entry.fields["token_ids"])
    lists = {name: entry.numbers(name) for name in ("advantage", "weight")}
    for name, values in lists.items():
        if values is not None and len(values) != length:
            raise InputError(f"{name} of {entry.where}", f"{len(values)} values", f"{length}, one a token")
    mask = entry.fields.get("mask") or [1] * length
    advantage = lists["advantage"]
    if advantage is None or any(m and math.isnan(a) for a, m in zip(advantage, mask, strict=True)):
        raise InputError(f"advantage of {entry.where}", "null", "a number for each token that is trained on")
    if (base := entry.number("base")) is None:
        raise entry.wrong("base", "a number")
    settings, method = entry.entry("settings"), entry.word("method")
    for table in (settings, *(settings.entry(name) for name, v in settings.fields.items() if type(v) is dict)):
        if "n0" in table.fields and table.number("n0") is None:
            raise table.wrong("n0", "a number")
    if not _is_plain(settings.fields, _DEEP):
        raise entry.wrong("settings", "settings, or a table of them for each method of a pipeline")
    invariants = entry.entry("invariants")
    return {
        "row": i, "advantage": [a if m else 0.0 for a, m in zip(advantage, mask, strict=True)], "base": base,
        "scale": None, "weight": lists["weight"], "residual": None,
        "segments": [_segment(each, length) for each in entry.entries("segments")],
        "method": clean(method or "not recorded"), "settings": json.dumps(dict(settings.fields)),
        "invariants": json.dumps({name: invariants.number(name) for name in invariants.fields}), "counts": "{}",
    }  # fmt: skip


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(each, depth - 1) for each in inner)
    return True


def _segment(entry: Entry, length: int) -> dict[str, float]:
    """A segment; NaN where nothing was measured.

    Raises:
        InputError: no stretch of the response, or a number that is none.
    """
    names = ("start", "end", "raw", "shrunk", "stderr", "increment", "samples")
    found = {name: entry.number(name) for name in names}
    start, end, samples = (entry.fields.get(name) for name in ("start", "end", "samples"))
    if not (type(start) is int and type(end) is int and 0 <= start < end <= length):
        raise entry.wrong("start", f"a stretch of the response: 0 <= start < end <= {length}")
    if not (type(samples) is int and samples >= 0):
        raise entry.wrong("samples", "a whole number from 0")
    return {name: math.nan if value is None else value for name, value in found.items()}


def _evidence(i: int, entry: Entry) -> Iterator[Row]:
    """What was measured on a row. Of continuations the file has rewards, no texts."""
    measured = entry.entry("evidence")
    common = {
        "key": None, "group": clean(entry.fields["group"]), "row": i, "m": None, "token_ids": None, "text": None,
        "reward": None, "verdict": None, "finish": None, "rescued": None, "values": None,
    }  # fmt: skip
    seen: dict[int, int] = {}
    for each in measured.entries("continuations"):
        position = each.fields["position"]
        for reward in each.numbers("rewards") or []:
            known = None if math.isnan(reward) else reward
            yield common | {
                "kind": "continuations", "position": position, "m": seen.setdefault(position, 0), "token_ids": [],
                "text": "", "reward": known, "verdict": verdict_of(known), "rescued": False,
            }  # fmt: skip
            seen[position] += 1
    for kind, at, names in (
        ("belief", "position", ("logprob",)), ("confidence", "position", ("conf", "acc")), ("steps", "start", ("ok",)),
    ):  # fmt: skip
        for each in measured.entries(kind):
            values = [float(each.fields[name]) for name in names]
            yield common | {"kind": kind, "position": each.fields[at], "values": values}
    if (importance := measured.numbers("importance")) is not None:
        answer = measured.fields.get("answer_start")
        yield common | {"kind": "sensitivity", "position": -1 if answer is None else answer, "values": importance}
