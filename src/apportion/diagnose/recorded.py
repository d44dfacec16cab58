"""The lines that records alone answer, over as many steps as there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from apportion.diagnose.belief import belief_changes, segment_truth, sign_f1
from apportion.diagnose.collapse import collapsed_groups, steps_in_collapsed_groups
from apportion.diagnose.lines import ABOUT, Line
from apportion.diagnose.noise import below_one_error, increments
from apportion.diagnose.polarity import Spans, misaligned, probed_spans, step_spans
from apportion.diagnose.reading import Checker, Recorded, belief_of, step_labels
from apportion.diagnose.stats import Counts, Estimate, ratio
from apportion.diagnose.tails import covariance, p99_abs_advantage, quantile_ratio, tail_counts
from apportion.measure.evidence import StepLabels

_COLLAPSE = ("acr", "acr_all_right", "acr_all_wrong")
_POLARITY = ("right_steps_punished", "wrong_steps_rewarded")
_PROBED = ("right_steps_punished_probes", "wrong_steps_rewarded_probes")
_TAILS = ("covariance_beyond_3_sigma", "covariance_kurtosis")
_RATIOS = (
    *_COLLAPSE, "steps_in_collapsed_groups", *_POLARITY, *_PROBED, "increments_below_one_se", "belief_sign_f1", *_TAILS,
)  # fmt: skip


class Tally:
    """What the steps so far add up to. Only sums and one number a token are kept of a step."""

    def __init__(self, checker: Checker | str) -> None:
        self.checker = checker
        self.counts: dict[str, list[Counts]] = defaultdict(list)
        # Counts of a second number, which a line should be read with: line → its name → counts.
        self.beside: dict[str, dict[str, list[Counts]]] = defaultdict(lambda: defaultdict(list))
        self.missing: dict[str, str] = {}
        self.updates: dict[str, list[float]] = defaultdict(list)
        self.sizes: list[np.ndarray] = []

    def add(self, step: Recorded) -> None:
        """Counts in another step."""
        labels = step_labels(step, self.checker)
        self._count(_COLLAPSE, collapsed_groups(step.rollouts, step.prompt))
        self._labelled(step, labels)
        self._probed(step)
        self._belief(step, labels)
        self._tails(step)
        self._spent(step)

    def lines(self) -> list[Line]:
        """The lines, in the order of `ABOUT`."""
        return [*map(self._ratio, _RATIOS), self._quantiles(), self._mean("p99_abs_advantage"), self._auxiliary()]

    def _count(self, names: Sequence[str], found: Sequence[Counts]) -> None:
        for name, counts in zip(names, found, strict=True):
            self.counts[name].append(counts)

    def _misaligned(self, names: Sequence[str], step: Recorded, spans: Spans) -> None:
        self._count(names, misaligned(step.rollouts, spans, step.advantage, step.prompt))
        by_base = misaligned(step.rollouts, spans, step.base[step.rollouts.row], step.prompt)
        for name, counts in zip(names, by_base, strict=True):
            self.beside[name]["with the base alone"].append(counts)

    def _labelled(self, step: Recorded, labels: StepLabels | str) -> None:
        names = ("steps_in_collapsed_groups", *_POLARITY)
        if isinstance(labels, str):
            self.missing |= dict.fromkeys(names, f"needs step labels: {labels}")
            return
        self._count(names[:1], [steps_in_collapsed_groups(step.rollouts, labels, step.prompt)])
        self._misaligned(_POLARITY, step, step_spans(step.rollouts, labels))

    def _probed(self, step: Recorded) -> None:
        names = (*_PROBED, "increments_below_one_se")
        if not (step.segments.samples > 0).any():
            why = f"needs continuations: the run's method ({step.method}) records none"
            self.missing |= dict.fromkeys(names, why)
            return
        n0 = float(step.settings.get("n0", 0.0))
        self._misaligned(_PROBED, step, probed_spans(step.rollouts, step.segments, n0))
        found = increments(step.rollouts, step.segments, n0)
        self._count(names[2:], [below_one_error(found, step.segments.row, step.prompt)])

    def _belief(self, step: Recorded, labels: StepLabels | str) -> None:
        name, belief = "belief_sign_f1", belief_of(step)
        if belief is None:
            self.missing[name] = f"needs belief evidence: the run's method ({step.method}) measures none"
        elif isinstance(labels, str):
            self.missing[name] = f"needs step labels: {labels}"
        else:
            spans, _ = belief_changes(belief)
            truth = segment_truth(step.rollouts, spans, step_spans(step.rollouts, labels))
            by_sign, all_right = sign_f1(spans.ok, truth, spans.row, step.prompt)
            self._count([name], [by_sign])
            self.beside[name]["calling all right"].append(all_right)

    def _tails(self, step: Recorded) -> None:
        found = covariance(step.rollouts, step.advantage)
        if found is None:
            why = "needs log-probabilities: the record has no old_logprob"
            self.missing |= dict.fromkeys((*_TAILS, "covariance_p99_over_p50"), why)
            return
        self._count(_TAILS, tail_counts(found, step.rollouts, step.prompt))
        self.sizes.append(found.score.abs().float().numpy())

    def _spent(self, step: Recorded) -> None:
        largest = p99_abs_advantage(step.rollouts, step.advantage)
        if largest is not None:
            self.updates["p99_abs_advantage"].append(largest)
        probes = [row for row in step.evidence if row["kind"] == "continuations"]
        self.updates["auxiliary_tokens"].append(float(sum(len(row["token_ids"]) for row in probes)))
        self.updates["continuations"].append(float(len(probes)))
        self.updates["rollout tokens"].append(float(len(step.rollouts.token_ids)))

    def _ratio(self, name: str) -> Line:
        if name not in self.counts:
            return Line.without(name, self.missing[name])
        beside = {other: ratio(Counts.pooled(parts), "").value for other, parts in self.beside[name].items()}
        return Line(name, ratio(Counts.pooled(self.counts[name]), ABOUT[name].nothing), beside)

    def _quantiles(self) -> Line:
        name = "covariance_p99_over_p50"
        if not self.sizes:
            return Line.without(name, self.missing[name])
        sizes = np.concatenate(self.sizes)
        value = quantile_ratio(sizes)
        why = ABOUT[name].nothing if value is None else "no interval: quantiles of pooled tokens"
        return Line(name, Estimate(value, None, len(sizes), missing=why))

    def _mean(self, name: str, beside: Mapping[str, float | None] | None = None) -> Line:
        values = self.updates.get(name)
        if not values:
            return Line.without(name, ABOUT[name].nothing)
        why = "no interval: one number an update"
        return Line(name, Estimate(float(np.mean(values)), None, len(values), missing=why), beside or {})

    def _auxiliary(self) -> Line:
        others = {name: float(np.mean(self.updates[name])) for name in ("continuations", "rollout tokens")}
        return self._mean("auxiliary_tokens", others)


def recorded_lines(steps: Iterable[Recorded], checker: Checker | str) -> list[Line]:
    """The lines of some steps that need nothing but their records."""
    tally = Tally(checker)
    for step in steps:
        tally.add(step)
    return tally.lines()
