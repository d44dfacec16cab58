"""The one answer every verifier gives: correct, wrong, or abstain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["correct", "wrong", "abstain"]

_REWARDS: dict[Outcome, float] = {"correct": 1.0, "wrong": 0.0, "abstain": float("nan")}


@dataclass(frozen=True)
class Verdict:
    """What a verifier found, and the two extracted forms that it compared. [ours]

    `abstain` means that *we* failed (unreadable gold, zero tests, sandbox or engine failure): it says
    nothing about the prediction, so its reward is NaN and group statistics leave the row out.
    """

    outcome: Outcome
    reason: str
    gold: str | None = None
    prediction: str | None = None

    @property
    def reward(self) -> float:
        """1.0 correct, 0.0 wrong, NaN abstain."""
        return _REWARDS[self.outcome]
