"""What each line of the report is called, counts and says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from apportion.diagnose.stats import Estimate


@dataclass(frozen=True)
class About:
    """What a line counts (`of`), what its number is (`says`), the mark of its rule, and why it may have none."""

    of: str
    says: str
    mark: str
    nothing: str


ABOUT: Mapping[str, About] = {
    "acr": About(
        "groups", "share of groups whose rewards are all equal: nothing to learn from", "[note] AVSPO",
        "no group has two scored responses",
    ),
    "acr_all_right": About(
        "groups", "share of groups in which every response is right", "[note] AVSPO; [ours] split",
        "no group has two scored responses",
    ),
    "acr_all_wrong": About(
        "groups", "share of groups in which every response is wrong", "[note] AVSPO; [ours] split",
        "no group has two scored responses",
    ),
    "steps_in_collapsed_groups": About(
        "steps", "share of steps that stand in groups of zero variance", "[note] EP-GRPO", "no step is labelled"
    ),
    "right_steps_punished": About(
        "steps", "share with A < 0 of the right steps of failed responses", "[note] EP-GRPO",
        "no failed response has a right step",
    ),
    "wrong_steps_rewarded": About(
        "steps", "share with A > 0 of the wrong steps of right responses", "[note] EP-GRPO",
        "no right response has a wrong step",
    ),
    "right_steps_punished_probes": About(
        "segments", "share with A < 0 of the segments of failed responses whose probed value rose",
        "[note] EP-GRPO; [ours] labels", "no probed value rose by more than its error in a failed response",
    ),
    "wrong_steps_rewarded_probes": About(
        "segments", "share with A > 0 of the segments of right responses whose probed value fell",
        "[note] EP-GRPO; [ours] labels", "no probed value fell by more than its error in a right response",
    ),
    "increments_below_one_se": About(
        "increments", "share of measured increments within one standard error: may be noise", "[ours]",
        "no increment was measured",
    ),
    "belief_sign_f1": About(
        "segments", "F1 of a rising belief as a test for right steps", "[paper] GRPO-VPS",
        "no segment is right or was called so",
    ),
    "covariance_beyond_3_sigma": About(
        "tokens", "share with |c| > 3 σ, c = (log π − mean)(A − mean) in the group", "[note] CW-GRPO; [ours] statistic",
        "c is constant in every group",
    ),
    "covariance_kurtosis": About(
        "tokens", "kurtosis of c inside groups; 3 for a normal", "[note] CW-GRPO; [ours] statistic",
        "c is constant in every group",
    ),
    "covariance_p99_over_p50": About(
        "tokens", "99th percentile of |c|/σ over its median", "[note] CW-GRPO; [ours] statistic",
        "c is constant in every group, or its median 0",
    ),
    "p99_abs_advantage": About(
        "updates", "99th percentile of |A|, mean over updates", "[paper] ProbePO", "no token is trained"
    ),
    "auxiliary_tokens": About("updates", "tokens of probes, mean over updates", "[paper] ProbePO", "no step"),
    "token_informativeness": About(
        "responses", "accuracy lost by another token at high entropies, minus that at low ones",
        "[note] EP-GRPO; [ours] procedure", "the budget pays for no right response",
    ),
    "fork_variance": About(
        "states", "mean action-fork variance: how much the next tokens decide", "[ours]",
        "the responses have no boundary, or the budget pays for none",
    ),
    "fork_variance_spearman": About(
        "states", "rank correlation of H_max with action-fork variance", "[paper] ProbePO; [ours] variance",
        "the responses have no boundary, or the budget pays for none",
    ),
    "fork_capture": About(
        "responses", "points of fork variance at the top-ranked boundary above a random one",
        "[paper] ProbePO; [ours] definition", "no response has two measured boundaries and any fork variance",
    ),
}  # fmt: skip
"""Every line, in the order of the report."""

SAMPLED = ("token_informativeness", "fork_variance", "fork_variance_spearman", "fork_capture")
"""The lines that need the model."""


@dataclass(frozen=True)
class Line:
    """One diagnostic; `beside` holds numbers that it should be read with."""

    name: str
    estimate: Estimate
    beside: Mapping[str, float | None] = field(default_factory=dict)

    @classmethod
    def without(cls, name: str, missing: str) -> Line:
        """The line of a diagnostic that lacks something."""
        return cls(name, Estimate(None, missing=missing))

    @property
    def about(self) -> About:
        return ABOUT[self.name]

    def as_json(self) -> dict[str, Any]:
        """As `apportion diagnose --json` prints it; null where there is no number, never NaN."""
        e, about = self.estimate, self.about
        return {
            "name": self.name, "value": e.value, "interval": e.interval and list(e.interval), "n": e.n, "of": about.of,
            "prompts": e.prompts, "says": about.says, "mark": about.mark, "missing": e.missing or None,
            "beside": dict(self.beside),
        }  # fmt: skip
