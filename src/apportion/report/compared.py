"""The same responses under several methods as the page shows them: `compare-N` and `compare-N-row-R`.

All text in it is `visible` already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from apportion.compare.agreement import Disagreement, Pair, agreement, disagreements
from apportion.compare.store import about, method_folder, record_digest, shown
from apportion.diagnose.stats import Estimate
from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report.detail import column, segments, snippet
from apportion.report.escape import visible
from apportion.report.numbers import number

_KEY = re.compile(r"compare-(\d{1,9})(?:-row-(\d{1,9}))?")
_WORDS = 200  # characters

Row = Mapping[str, Any]


class Compared:
    """One recorded step under the methods that were compared on it.

    Attributes:
        step: its number. told: name → what is kept about the method's result (see `compare.run`).
    """

    def __init__(self, run: Path, step: int, told: Mapping[str, Mapping[str, Any]]) -> None:
        self.step, self.told, self._run = step, told, run

    @classmethod
    def open(cls, run: str | Path, step: int | None = None) -> Compared | None:
        """What was compared last, or on `step`; None where fewer than two results belong to the step as recorded."""
        run = Path(run)
        if (found := shown(run, step)) is None:
            return None
        number_, names = found
        record = record_digest(run, number_)
        told = {name: entry for name in names if (entry := about(run, name, number_)) is not None}
        told = {name: entry for name, entry in told.items() if entry.get("record") == record}
        return cls(run, number_, told) if len(told) > 1 else None

    def index(self) -> dict[str, Any]:
        """What the page's index says of it."""
        return {"step": self.step, "methods": list(self.told)}

    def keys(self, rows: Collection[int] | None = None) -> list[str]:
        """Of every chunk; with `rows`, those of these responses alone."""
        kept = [row["row"] for row in self._rollouts if rows is None or row["row"] in rows]
        return [f"compare-{self.step}", *(f"compare-{self.step}-row-{row}" for row in kept)]

    def chunk(self, key: str) -> dict[str, Any]:
        """The JSON of a key.

        Raises:
            InputError: a key of another step, of no such row, or of no such form.
        """
        asked = _KEY.fullmatch(key)
        if asked is None or int(asked[1]) != self.step:
            raise InputError("key", key, f"compare-{self.step}, or compare-{self.step}-row-R")
        return self.summary() if asked[2] is None else self._row(int(asked[2]))

    def summary(self) -> dict[str, Any]:
        """Every method with what it took, every pair with how far it agrees, and where they differ most."""
        rows = self._rollouts
        pairs = self.pairs
        return {
            "step": self.step,
            "methods": [self._method(name) for name in self.told],
            "pairs": [_pair(pair, len(rows)) for pair in pairs],
            "disagreements": [self._entry(each) for each in self.disagreements],
            "responses": [
                {"row": row["row"], "rho": [_share(pair.rho[i]) for pair in pairs]} for i, row in enumerate(rows)
            ],
        }  # fmt: skip

    @cached_property
    def pairs(self) -> list[Pair]:
        """How far each two methods agree."""
        return agreement(self._flat, self._offsets, self._mask, self._prompt)

    @cached_property
    def disagreements(self) -> list[Disagreement]:
        """Where two methods differ most."""
        ids = np.concatenate([row["token_ids"] for row in self._rollouts])
        return disagreements(self._flat, self._offsets, self._mask, ids, self._prompt)

    def text(self, where: Disagreement) -> str:
        """The tokens of a disagreement, on one line."""
        return snippet(self._rollouts[where.row], where.start, where.end)

    def _row(self, row: int) -> dict[str, Any]:
        place = {r["row"]: i for i, r in enumerate(self._rollouts)}
        if row not in place:
            raise InputError("key", f"row {row}", f"a row of step {self.step}: {min(place)} to {max(place)}")
        at = place[row]
        return {
            name: {"advantage": column(rows[at]["advantage"]), "segments": segments(self._rollouts[at], rows[at])}
            for name, rows in self._credit.items()
        }

    def _method(self, name: str) -> dict[str, Any]:
        told, credit = self.told[name], self._credit[name]
        sizes = np.abs(self._flat[name][self._mask])
        kept = ("provenance", "settings", "model", "gap", "statistics", "states", "cost", "reproduced")
        return {
            "name": name, **{key: _plain(told.get(key)) for key in kept},
            "counts": _plain(json.loads(credit[0]["counts"])) if credit else {},
            # Where the colours saturate, as everywhere on the page.
            "scale": number(float(np.quantile(sizes, 0.99, method="higher"))) if len(sizes) else 0.0,
        }  # fmt: skip

    def _entry(self, each: Disagreement) -> dict[str, Any]:
        return {
            "step": self.step, "row": self._rollouts[each.row]["row"], "token": each.start, "end": each.end,
            "snippet": self.text(each), "alike": each.alike,
            "gap": number(each.gap), "high": each.high, "low": each.low,
            "rank": {name: number(rank) for name, rank in each.rank.items()},
            "advantage": {name: number(value) for name, value in each.advantage.items()},
        }  # fmt: skip

    @cached_property
    def _rollouts(self) -> Sequence[Row]:
        return RunFolder(self._run).read("rollouts", self.step)

    @cached_property
    def _credit(self) -> Mapping[str, Sequence[Row]]:
        found = {name: method_folder(self._run, name).read("credit", self.step) for name in self.told}
        for name, rows in found.items():
            if [len(c["advantage"]) for c in rows] != [len(r["token_ids"]) for r in self._rollouts]:
                raise InputError(
                    f"RUN/compare/{name}, step {self.step}", "other responses than the run's", "one row a response",
                    f"delete RUN/compare/{name} and compare again",
                )  # fmt: skip
        return found

    @cached_property
    def _prompt(self) -> list[int]:
        """A number a response; a prompt may come twice in a step, and what is known of it decides."""
        names = [tuple(row["prompt_ids"] or ()) or row["prompt"] or row["group"] for row in self._rollouts]
        number_of = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return [number_of[name] for name in names]

    @cached_property
    def _flat(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate([c["advantage"] for c in rows]) for name, rows in self._credit.items()}

    @cached_property
    def _offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([len(row["token_ids"]) for row in self._rollouts])]).astype(int)

    @cached_property
    def _mask(self) -> np.ndarray:
        return np.concatenate([row["mask"] for row in self._rollouts]).astype(bool)


def _pair(pair: Pair, responses: int) -> dict[str, Any]:
    return {
        "first": pair.first, "second": pair.second, "rho": _estimate(pair.mean), "sign": _estimate(pair.sign),
        "opposite": _share(pair.opposite), "responses": responses - pair.without, "without": pair.without,
    }  # fmt: skip


def _estimate(estimate: Estimate) -> dict[str, Any]:
    interval = estimate.interval and [_share(each) for each in estimate.interval]
    return {"value": _share(estimate.value), "interval": interval, "missing": estimate.missing}


def _share(value: float | None) -> float | None:
    """Four decimals of what lies in −1 … 1."""
    return None if value is None or not np.isfinite(value) else round(float(value), 4) + 0.0


def _plain(value: Any) -> Any:
    """Kept JSON with its texts made visible."""
    if isinstance(value, Mapping):
        return {visible(str(name), _WORDS): _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return number(value)
    return visible(value, _WORDS) if isinstance(value, str) else value
