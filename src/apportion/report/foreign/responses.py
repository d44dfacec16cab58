"""Responses with rewards, and recorded advantages where there are some, as the rows of a run folder."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from apportion.groups import group_stats, grpo_base
from apportion.records import verdict_of
from apportion.report.foreign.text import PIECES, Part, clean, is_trained, split, words
from apportion.rollouts import Rollouts

Row = dict[str, Any]
FROM_REWARDS = "grpo (from recorded rewards)"
GRPO = "(r − μ)/(σ + 0.0001) of each group, σ of the sample; worked out from the rewards, since none is recorded"


@dataclass(frozen=True)
class Tables:
    """The rows of one step, as `RunFolder.read` gives them."""

    rollouts: list[Row]
    credit: list[Row]
    evidence: list[Row] = field(default_factory=list)


class Step(Protocol):
    """One step of a record that was read, before it is rows: those are many, and made when they are shown."""

    def tables(self) -> Tables:
        """The step's rows."""

    def outcome(self) -> tuple[Rollouts, float]:
        """The step's groups and rewards, and its responses' mean length: in tokens, or else in words."""


@dataclass(frozen=True)
class Tokens:
    """A response's tokens; of `logprob` and `advantage` one value each, NaN and 0 where the mask is 0."""

    ids: list[int]
    mask: list[bool]
    logprob: list[float] | None
    advantage: list[float]


@dataclass(frozen=True)
class Response:
    """One response of a record.

    Attributes:
        parts: its text; `tokens` where the record has credit for each token.
        group: name of its group; None groups it with those of the same prompt.
        advantage: the recorded one; None where the record has none.
    """

    prompt: str
    parts: Sequence[Part]
    reward: float | None
    group: str | None = None
    advantage: float | None = None
    gold: str | None = None
    finish: str | None = None
    tokens: Tokens | None = None


@dataclass(frozen=True)
class Responses:
    """The responses of a step.

    Attributes:
        trainer: whose record it is.
        settings: what the page says of the record.
    """

    trainer: str
    responses: Sequence[Response]
    settings: Mapping[str, Any]

    def tables(self) -> Tables:
        return Tables(_rollout_rows(self.responses, self._groups()), self._credit())

    def outcome(self) -> tuple[Rollouts, float]:
        sizes = [sum(r.tokens.mask) if r.tokens else words(r.parts) for r in self.responses]
        return self._batch(), sum(sizes) / len(sizes)

    def _batch(self) -> Rollouts:
        """What group statistics need: one token a response, trained on where any of its tokens is."""
        trained = [any(r.tokens.mask) if r.tokens else is_trained(r.parts) for r in self.responses]
        return Rollouts.from_lists(
            [[0]] * len(trained), self._groups(), [r.reward for r in self.responses], mask=[[each] for each in trained]
        )

    def _groups(self) -> list[str]:
        found: dict[str, str] = {}
        return [
            clean(r.group) if r.group is not None else found.setdefault(r.prompt, f"prompt-{len(found)}")
            for r in self.responses
        ]

    def _credit(self) -> list[Row]:
        batch = self._batch()
        stats, base = group_stats(batch), grpo_base(batch)
        without = sum(r.advantage is None for r in self.responses)
        recorded = without < len(self.responses)
        settings = {**self.settings}
        if any(r.tokens is None for r in self.responses):
            settings["tokens"] = PIECES
        if not recorded:
            settings["base"] = GRPO
        elif without:
            settings["advantage"] = "a response without a recorded one got none: 0"
        common: Row = {
            "method": f"{self.trainer}: {'recorded advantages' if recorded else FROM_REWARDS}",
            "settings": json.dumps(settings), "invariants": "{}",
            "counts": json.dumps({"without_advantage": without} if recorded and without else {}),
            "weight": None, "residual": None, "segments": [],
        }  # fmt: skip
        rows = []
        for i, response in enumerate(self.responses):
            group = int(batch.group[i])
            spread = (response.advantage or 0.0) if recorded else float(base.advantage[i])
            rows.append(
                {
                    "row": i, "base": spread,
                    "advantage": response.tokens.advantage if response.tokens else
                    [spread if ours else 0.0 for ours in split(response.parts)[1]],
                    "mean": float(stats.mean[group]) if stats.count[group] else None,
                    "scale": None if recorded else float(base.scale[i]), **common,
                }
            )  # fmt: skip
        return rows


def _rollout_rows(responses: Sequence[Response], names: Sequence[str]) -> list[Row]:
    # A piece's number is that of its text in the step, so that equal beginnings have equal numbers.
    numbers: dict[str, int] = {}
    samples: dict[str, int] = defaultdict(int)
    rows = []
    for i, (response, name) in enumerate(zip(responses, names, strict=True)):
        pieces, mask = split([(clean(part), ours) for part, ours in response.parts])
        tokens = response.tokens
        rows.append(
            {
                "row": i, "group": name, "sample": samples[name], "prompt": clean(response.prompt),
                "gold": None if response.gold is None else clean(response.gold), "prompt_ids": None,
                "token_ids": tokens.ids if tokens else [numbers.setdefault(piece, len(numbers)) for piece in pieces],
                "mask": tokens.mask if tokens else mask,
                # Where each token stands in the text is not recorded.
                "text": None if tokens else "".join(pieces),
                "char_start": None if tokens else [0, *accumulate(map(len, pieces[:-1]))],
                "reward": response.reward, "verdict": verdict_of(response.reward), "finish": response.finish,
                "old_logprob": tokens.logprob if tokens else None, "ref_logprob": None, "entropy": None,
                "boundaries": None, "path": None,
            }
        )  # fmt: skip
        samples[name] += 1
    return rows
