"""Collapse, polarity, noise, belief and tails by hand.

Planted faults seen caught: sample deviation in ACR; groups of one counted; wrong groups that are not collapsed;
prompts of other groups; steps of unscored responses counted; an advantage of 0 taken as a punishment; signs swapped;
rewards not looked at; masked tokens in a step's mean or in its length; probe labels within their error, or upside
down; last step cut off; shrinkage left out of an error; one end's error only; no spread taken for noise; unmeasured
and unknown increments counted; ΔC of logs; a segment right where any step is; misses left out of F1; unlabelled
segments in it; segments over two responses; ΔC = 0 as a rise; c without its means; kurtosis not centred; masked
tokens, collapsed groups and foreign groups in c; a median of 0.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepmaker import batch, laid, prompts

from apportion.credit.avspo import collapse_rate
from apportion.diagnose.belief import belief_changes, segment_truth, sign_f1
from apportion.diagnose.collapse import collapsed_groups, steps_in_collapsed_groups
from apportion.diagnose.noise import below_one_error, increments
from apportion.diagnose.polarity import Spans, misaligned, probed_spans, span_means, step_spans
from apportion.diagnose.stats import Counts, ratio
from apportion.diagnose.tails import covariance, p99_abs_advantage, quantile_ratio, tail_counts
from apportion.measure.evidence import Belief, StepLabels
from apportion.rollouts import Rollouts

NAN = float("nan")


def share(counts: Counts) -> tuple[float, float]:
    return float(counts.numerator.sum()), float(counts.denominator.sum())


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_acr_and_its_split() -> None:
    # a: all right; b: all wrong; c: mixed; d: alone; e: one scored, one abstained; f: fifteen float32 .9.
    group = list("abcabcb") + ["d", "e", "e"] + ["f"] * 15
    reward = [1, 0, 1, 1, 0, 0, 0, 1, 0.5, None, *[float(np.float32(0.9))] * 15]
    rollouts = batch(group, reward)
    acr, right, wrong = collapsed_groups(rollouts, prompts(rollouts))
    assert share(acr) == (3, 4)
    assert share(right) == (2, 4)  # a and f
    assert share(wrong) == (1, 4)  # b
    assert acr.prompt.tolist() == [0, 1, 2, 5]
    assert collapse_rate(rollouts) == 3 / 4  # the method that acts on it sees the same


def test_population_deviation_decides() -> None:
    # Two rewards `gap` apart: gap/2 in the population, gap/√2 in a sample (1.06e-6 for 1.5e-6).
    for gap, collapsed in ((4e-6, 0), (2.5e-6, 0), (1.5e-6, 1), (0.0, 1)):
        rollouts = batch("aa", [0.5, 0.5 + gap])
        assert share(collapsed_groups(rollouts, prompts(rollouts))[0]) == (collapsed, 1), gap


def test_prompts_of_groups_come_from_the_caller() -> None:
    rollouts = batch("ab" * 2, [1, 0, 1, 1])
    found = collapsed_groups(rollouts, np.array([50, 60, 50, 60]))[0]
    assert dict(zip(found.prompt.tolist(), found.numerator.tolist(), strict=True)) == {50: 1, 60: 0}


def test_steps_in_collapsed_groups() -> None:
    # a is collapsed: 2 + 1 steps; b is not: 3; the response without a reward has 1 that does not count.
    rollouts = batch("aabbb", [1, 1, 1, 0, None])
    entries = [(0, 0, True), (0, 2, True), (1, 0, False), (2, 0, True), (2, 1, True), (3, 1, True), (4, 0, True)]
    labels = StepLabels.from_entries(rollouts, entries, range(5))
    found = steps_in_collapsed_groups(rollouts, labels, prompts(rollouts))
    assert share(found) == (3, 6) and found.n == 6


LABELLED = [
    # (row, start, ok); rows of 6 tokens, rewards 0, 1, 0, None
    (0, 0, True), (0, 2, True), (0, 4, False),
    (1, 1, True), (1, 3, False),
    (2, 0, True), (2, 3, True),
    (3, 0, True),
]  # fmt: skip


def labelled() -> tuple[Rollouts, Spans]:
    rollouts = batch("aabb", [0, 1, 0, None], 6, mask=[[1] * 6, [1] * 6, [0] * 3 + [1] * 3, [1] * 6])
    return rollouts, step_spans(rollouts, StepLabels.from_entries(rollouts, LABELLED, range(4)))


def test_steps_end_where_the_next_starts() -> None:
    _, spans = labelled()
    found = list(zip(spans.row.tolist(), spans.start.tolist(), spans.end.tolist(), strict=True))
    assert found == [(0, 0, 2), (0, 2, 4), (0, 4, 6), (1, 1, 3), (1, 3, 6), (2, 0, 3), (2, 3, 6), (3, 0, 6)]


def test_polarity_by_hand() -> None:
    rollouts, spans = labelled()
    a = tensor(
        -1, 0.5,  2, -1,  -3, -3,     # right: mean −.25, punished; right: .5, not; wrong in a failed one: no part in it
        9, 1, 1, 2, -1, -0.5,         # right in a right one: no part in it; wrong: mean 1/6, rewarded
        -1, -1, -1, -1, 0, 0,         # right but masked: no part; right: −1/3, punished
        -1, -1, -1, -1, -1, -1,       # no reward: no part
    )  # fmt: skip
    punished, rewarded = misaligned(rollouts, spans, a, prompts(rollouts))
    assert share(punished) == (2, 3) and punished.prompt.tolist() == [0, 0, 1]
    assert share(rewarded) == (1, 1) and rewarded.prompt.tolist() == [0]
    # An advantage of 0 is no punishment and no reward.
    assert [share(each) for each in misaligned(rollouts, spans, 0 * a, prompts(rollouts))] == [(0, 3), (0, 1)]
    mirrored = misaligned(rollouts, spans, -a, prompts(rollouts))
    assert [share(each) for each in mirrored] == [(1, 3), (0, 1)]


def test_the_base_punishes_every_right_step_of_a_failed_response() -> None:
    rollouts, spans = labelled()
    base = tensor(-0.7, 0.7, -0.7, 0)[rollouts.row]
    assert [share(each) for each in misaligned(rollouts, spans, base, prompts(rollouts))] == [(3, 3), (1, 1)]


def test_means_leave_masked_tokens_out() -> None:
    rollouts = batch("a", [1], 4, mask=[[1, 0, 1, 1]])
    spans = Spans(*(torch.tensor(v) for v in ([0, 0, 0], [0, 1, 2], [2, 2, 2])), torch.tensor([True] * 3))
    mean, trained = span_means(rollouts, spans, tensor(2, 100, 3, 5))
    assert mean.tolist() == [2, 0, 0] and trained.tolist() == [True, False, False]


def probed(reward: float = 1.0):
    """The example of methods.md with M = n₀ = 4: raw .75 and .25 shrink to .625 and .375 around μ = .5."""
    rollouts = batch("ab", [reward, 0], 10)
    error = math.sqrt(0.75 * 0.25 / 4)
    return rollouts, laid(
        [
            (0, 0, 4, 0.5, 0.5, 0.0, 0.125, 0),
            (0, 4, 7, 0.75, 0.625, error, -0.25, 4),
            (0, 7, 10, 0.25, 0.375, error, reward - 0.375, 4),
            (1, 0, 10, 0.5, 0.5, 0.0, -0.5, 0),
        ]
    )


def test_increments_and_their_errors_by_hand() -> None:
    rollouts, segments = probed()
    found = increments(rollouts, segments, n0=4.0)
    # √(.75 · .25/4) = .21651, halved by shrinkage .10825; two such ends .15309. The reward at the end has none.
    assert found.stderr.tolist() == pytest.approx([0.108253, 0.153093, 0.108253, 0.0], abs=1e-6)
    assert found.known.tolist() == [True, True, True, False]  # the last response was not measured
    assert increments(rollouts, segments, n0=0.0).stderr.tolist() == pytest.approx(
        [0.216506, 0.306186, 0.216506, 0], abs=1e-6
    )
    owner = prompts(rollouts)
    # Shrunk: .125, .25 and .625 all lie beyond. Unshrunk errors: .125 and .25 are within .2165 and .3062.
    assert share(below_one_error(found, segments.row, owner)) == (0, 3)
    assert share(below_one_error(increments(rollouts, segments, 0.0), segments.row, owner)) == (2, 3)


def test_no_spread_is_no_noise_and_unknown_values_do_not_count() -> None:
    rollouts = batch("aa", [1, None], 6)
    segments = laid(
        [
            # VinePPO whose first state was lost: its value is NaN, and no increment can be told.
            (0, 0, 2, NAN, NAN, 0.0, 0.0, 0),
            (0, 2, 4, 1.0, 1.0, 0.0, 0.0, 9),  # all continuations agreed, and nothing changed
            (0, 4, 6, 1.0, 1.0, 0.0, 0.0, 9),
            (1, 0, 3, 0.5, 0.5, 0.1, 0.1, 9),
            (1, 3, 6, 0.6, 0.6, 0.1, 0.0, 9),  # ends at a reward that is not there
        ]
    )
    found = increments(rollouts, segments, 0.0)
    assert found.known.tolist() == [False, True, True, True, False]
    # |.1| against √(.01 + .01) = .1414.
    assert share(below_one_error(found, segments.row, prompts(rollouts))) == (1, 3)


def test_labels_from_probes() -> None:
    rollouts, segments = probed()
    spans = probed_spans(rollouts, segments, n0=4.0)
    assert spans.start.tolist() == [0, 4, 7] and spans.ok.tolist() == [True, False, True]
    # Without shrinkage .125 and .25 are within their errors and say nothing.
    assert probed_spans(rollouts, segments, n0=0.0).start.tolist() == [7]
    # A = .925 ×4, .175 ×3, 1.925 ×3, of a right response: the fall in the middle is still rewarded.
    a = torch.cat([tensor(*[0.925] * 4, *[0.175] * 3, *[1.925] * 3), torch.zeros(10, dtype=torch.float64)])
    punished, rewarded = misaligned(rollouts, spans, a, prompts(rollouts))
    assert share(punished) == (0, 0) and share(rewarded) == (1, 1)


def test_belief_changes_are_of_probabilities() -> None:
    rollouts = batch("ab", [1, 0], 10)
    logs = {(0, 0): 0.2, (0, 4): 0.5, (0, 10): 0.4, (1, 0): 0.3, (1, 6): 0.3}
    belief = Belief.from_entries(rollouts, [(*state, math.log(p)) for state, p in logs.items()], [0, 1])
    spans, change = belief_changes(belief)
    assert list(zip(spans.row.tolist(), spans.start.tolist(), spans.end.tolist(), strict=True)) == [
        (0, 0, 4), (0, 4, 10), (1, 0, 6),
    ]  # fmt: skip
    assert change.tolist() == pytest.approx([0.3, -0.1, 0.0])
    assert spans.ok.tolist() == [True, False, False]


def test_truth_of_segments() -> None:
    rollouts = batch("ab", [1, 0], 10)
    steps = step_spans(
        rollouts, StepLabels.from_entries(rollouts, [(0, 1, True), (0, 4, False), (0, 8, True), (1, 0, True)], [0, 1])
    )
    cases = {
        (0, 1, 4): 1, (0, 2, 3): 1, (0, 3, 5): 0, (0, 4, 8): 0, (0, 8, 10): 1, (0, 0, 4): -1, (0, 5, 5): -1,
        (0, 1, 10): 0, (1, 0, 10): 1, (1, 9, 10): 1,
    }  # fmt: skip
    row, start, end = (torch.tensor(column) for column in zip(*cases, strict=True))
    found = segment_truth(rollouts, Spans(row, start, end, torch.ones(len(row), dtype=torch.bool)), steps)
    assert dict(zip(cases, found.tolist(), strict=True)) == cases


def test_f1_by_hand() -> None:
    # 3 hits, 1 false alarm, 2 misses, 1 rightly not called, 1 without a label: 6/(6 + 1 + 2).
    rises = torch.tensor([True, True, True, True, False, False, False, True])
    truth = torch.tensor([1, 1, 1, 0, 1, 1, 0, -1])
    row = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0])
    by_sign, all_right = sign_f1(rises, truth, row, np.array([5, 6]))
    assert ratio(by_sign, "").value == pytest.approx(6 / 9) and by_sign.n == 7
    # Calling all 7 right: 5 hits, 2 false alarms: 10/12.
    assert ratio(all_right, "").value == pytest.approx(10 / 12)
    none = sign_f1(torch.tensor([False, False]), torch.tensor([0, 0]), torch.tensor([0, 1]), np.array([5, 6]))[0]
    assert ratio(none, "no segment is right").missing == "no segment is right"


LOGP = (-0.1, -2, -0.05, -0.3, -1.5, -0.2)


def test_covariance_by_hand() -> None:
    # methods.md, section 9: c = (.5917, −1.3083, .6417, −.3917, .8083, −.4917), σ_c = .7658.
    rollouts = batch("aa", [1, 0], 3, old_logprob=[LOGP[:3], LOGP[3:]])
    found = covariance(rollouts, tensor(1, 1, 1, -1, -1, -1))
    assert found is not None
    c = np.array([0.591667, -1.308333, 0.641667, -0.391667, 0.808333, -0.491667])
    assert found.score.tolist() == pytest.approx((c / 0.765764).tolist(), abs=1e-5)
    owner = prompts(rollouts)
    beyond, kurtosis = tail_counts(found, rollouts, owner, sigmas=1.5)
    assert share(beyond) == (1, 6)  # 1.3083/.7658 = 1.708; the next is 1.056
    assert share(tail_counts(found, rollouts, owner)[0]) == (0, 6)
    # Mean c is −.025; fourth powers of c + .025 sum to 3.60237, over 6 · .765764⁴.
    # The group's means are taken off: an advantage that is 5 higher everywhere has the same covariance.
    higher = covariance(rollouts, tensor(6, 6, 6, 4, 4, 4))
    assert higher is not None and higher.score.tolist() == pytest.approx(found.score.tolist(), abs=1e-12)
    assert ratio(kurtosis, "").value == pytest.approx(3.60237 / (6 * 0.765764**4), rel=1e-5)
    assert kurtosis.n == 6
    # |c| rising: .3917 .4917 .5917 .6417 .8083 1.3083: p50 .61667, p99 .8083 + .95 · .5.
    assert quantile_ratio(found.score.abs().numpy()) == pytest.approx(1.283333 / 0.616667, rel=1e-5)


def test_covariance_is_taken_group_by_group_over_trained_tokens() -> None:
    whole = batch("aa", [1, 0], 3, old_logprob=[LOGP[:3], LOGP[3:]])
    alone = covariance(whole, tensor(1, 1, 1, -1, -1, -1))
    # The same group scattered between another of other scale, a collapsed one, and masked tokens.
    rollouts = batch(
        "bacab", [1, 1, 1, 0, 0], [2, 4, 2, 4, 2],
        old_logprob=[[-9, -3], [*LOGP[:3], NAN], [-1, -2], [NAN, *LOGP[3:]], [-7, -1]],
        mask=[[1, 1], [1, 1, 1, 0], [1, 1], [0, 1, 1, 1], [1, 1]],
    )  # fmt: skip
    a = tensor(50, 50, 1, 1, 1, 0, 0, 0, 0, -1, -1, -1, -50, -50)
    found = covariance(rollouts, a)
    assert alone is not None and found is not None
    mine = found.score[found.group == 1]
    assert mine.tolist() == pytest.approx(alone.score.tolist(), abs=1e-6)
    assert sorted(set(found.group.tolist())) == [0, 1]  # c, collapsed, has no covariance
    beyond, _ = tail_counts(found, rollouts, np.array([7, 8, 9, 8, 7]))
    assert beyond.prompt.tolist() == [7, 8] and beyond.denominator.tolist() == [4, 6] and beyond.n == 10


def test_what_has_no_tail() -> None:
    assert covariance(batch("aa", [1, 0]), torch.zeros(8, dtype=torch.float64)) is None
    flat = batch("aa", [1, 0], 2, old_logprob=[[-1.0, -1.0]] * 2)
    found = covariance(flat, tensor(1, 1, -1, -1))
    assert found is not None and len(found.score) == 0
    assert ratio(tail_counts(found, flat, prompts(flat))[0], "c is constant").missing == "c is constant"
    assert quantile_ratio(found.score.numpy()) is None
    assert quantile_ratio(np.array([0.0, 0.0, 0.0, 5.0])) is None


def test_p99_by_hand() -> None:
    # |A| 0 … 100 in steps of 1, and a masked 1000: the 99th percentile is 99.
    rollouts = batch("a", [1], 102, mask=[[1] * 101 + [0]])
    a = torch.arange(102, dtype=torch.float64) * torch.tensor([1.0, -1.0]).repeat(51)
    a[101] = 1000
    assert p99_abs_advantage(rollouts, a) == pytest.approx(99)
    assert p99_abs_advantage(batch("a", [1], 2, mask=[[0, 0]]), tensor(1, 1)) is None


@given(st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_order_of_rows_does_not_matter(fill) -> None:
    count = fill.randint(2, 8)
    group = [fill.choice("ab") for _ in range(count)]
    reward = [fill.choice([0.0, 1.0, None]) for _ in range(count)]
    logp = [[-fill.random() for _ in range(4)] for _ in range(count)]
    a = [[fill.choice([-1.0, 0.0, 0.5]) for _ in range(4)] for _ in range(count)]
    ok = [(fill.random() < 0.5, fill.random() < 0.5) for _ in range(count)]
    owner = {"a": 1, "b": 2}
    found = []
    for order in (list(range(count)), fill.sample(range(count), count)):
        rollouts = batch([group[i] for i in order], [reward[i] for i in order], old_logprob=[logp[i] for i in order])
        entries = [(k, at, ok[i][at // 2]) for k, i in enumerate(order) for at in (0, 2)]
        labels = StepLabels.from_entries(rollouts, entries, range(count))
        keys = np.array([owner[group[i]] for i in order])
        values = torch.tensor([v for i in order for v in a[i]], dtype=torch.float64)
        c = covariance(rollouts, values)
        assert c is not None
        found.append(
            [
                ratio(each, "none")
                for each in (
                    *collapsed_groups(rollouts, keys), steps_in_collapsed_groups(rollouts, labels, keys),
                    *misaligned(rollouts, step_spans(rollouts, labels), values, keys),
                    *tail_counts(c, rollouts, keys, sigmas=1.0),
                )
            ]
        )  # fmt: skip
    for one, other in zip(*found, strict=True):
        assert (one.n, one.prompts, one.missing) == (other.n, other.prompts, other.missing)
        assert one.value == (None if other.value is None else pytest.approx(other.value, abs=1e-9))
