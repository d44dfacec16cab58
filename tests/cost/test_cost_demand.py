"""What methods ask for on a batch that stands in, and the passes that it takes, against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.cost import ModelShape, Workload
from apportion.cost.demand import Demand, demand, planned, schedule
from apportion.cost.standin import lengths_of, standin, stated_answer
from apportion.cost.trees import grown
from apportion.credit.registry import make_method
from apportion.measure.plan import BeliefJob, ConfidenceJob, DivergenceJob, Job, SensitivityJob

SHAPE = ModelShape.llama(3, 64, 4, 1, 32, 192, 20, tied=True)
# 4 prompts of 8 responses of 61 tokens: six steps of 10 and EOS, one token a character.
WORK = Workload(32, 8, 20, 20, 61, 61, 100, step=10, characters=1, spread=False, pass_rate=0.5)
ANSWER = "#42"
PATTERN = r"#(\d+)"


def asked(name: str, work: Workload = WORK, worst: bool = True, **settings) -> tuple[list, Demand]:
    method = make_method(name, settings)
    rollouts = standin(work, ANSWER, worst=worst)
    jobs = planned(method, rollouts)
    return jobs, demand(jobs, rollouts, work, SHAPE, len)


def naive_schedule(runs, slots):
    """One turn at a time."""
    waiting, running, rows, now = list(runs), [], [], 0
    while waiting or running:
        while waiting and len(running) < slots:
            if waiting[0][1] > 0:
                running.append(waiting[0][1])
            waiting.pop(0)
        if running:
            rows.append(len(running))
        running = [left - 1 for left in running if left > 1]
        now += 1
    return rows


def test_slots_are_taken_in_turn():
    # Two slots, steps 4, 2 and 3: two turns of both, two of the first and third, one of the third.
    calls = list(schedule([(10, 4), (10, 2), (10, 3)], 2))
    assert [(call.times, call.tokens) for call in calls] == [(2, 2), (2, 2), (1, 1)]
    # Widths at the middle of each: 10 + 1, 10 + 3, 10 + 2.5, and the token itself counts by half of it.
    assert [call.cached / call.tokens for call in calls] == [11.5, 13.5, 13.0]


@given(steps=st.lists(st.integers(0, 9), max_size=12), slots=st.integers(1, 4))
def test_schedule_equals_turn_by_turn(steps, slots):
    found = [int(call.tokens) for call in schedule([(5, n) for n in steps], slots) for _ in range(int(call.times))]
    assert found == naive_schedule([(5, n) for n in steps], slots)
    assert sum(found) == sum(steps)


@given(
    rows=st.integers(1, 64), mean=st.floats(2, 200), more=st.floats(0, 100), spread=st.booleans(),
)  # fmt: skip
def test_lengths_keep_mean_and_longest(rows, mean, more, spread):
    longest = math.ceil(mean + more)
    lengths = lengths_of(replace(WORK, rows=rows, response=mean, longest=longest, limit=400, spread=spread))
    assert len(lengths) == rows and min(lengths) >= 1 and max(lengths) <= max(longest, round(mean))
    if rows >= 32 and (mean * rows - longest) / (rows - 1) > 1:
        assert sum(lengths) / rows == pytest.approx(mean, rel=0.15, abs=1.0)
    if rows > 1 and longest > mean:
        assert max(lengths) == longest


def test_a_shared_opening_is_the_same_ids():
    rollouts = standin(replace(WORK, agreement=1.0), ANSWER)
    first = [row[0].item() for row in rollouts.token_ids.split(rollouts.length.tolist())]
    # Of a group one token, of all groups four.
    assert len(set(first)) == 4 and bool((rollouts.reward == 1).all())
    assert len(set(standin(WORK, ANSWER).token_ids.tolist())) == 32 * 61


def test_share_of_mixed_groups():
    # p = .5, G = 8: 1 − 2/256. p = .1, G = 2: 1 − .01 − .81.
    assert WORK.live == 1 - 2 / 256 and replace(WORK, pass_rate=0.1, size=2).live == pytest.approx(0.18)


def test_probepo_is_bounded_by_its_budget():
    jobs, found = asked("probepo", budget=16, samples=4, min_gap=1, window=8)
    # ⌊16/4⌋ pivots in each of 4 groups, 4 continuations each.
    assert len(jobs) == 16 and found.continuations == 64 and {job.samples for job in jobs} == {4}
    assert all(job.position in (10, 20, 30, 40, 50) for job in jobs)
    # Each goes on to its response's end.
    assert found.generated == sum(4 * (61 - job.position) for job in jobs)


def test_probepo_spends_all_of_a_neyman_budget():
    _, found = asked("probepo", budget=16, samples=4, min_gap=1, allocation="neyman", pilot=2)
    assert found.continuations == 64


def test_vineppo_measures_every_boundary_and_the_prompt_once():
    _, found = asked("vineppo", samples=2)
    # 5 boundaries of 32 responses and 4 prompts (EOS ends the sixth step): 164 states.
    assert found.continuations == 2 * (4 + 5 * 32)
    assert found.generated == 2 * (4 * 61 + 32 * (51 + 41 + 31 + 21 + 11))
    _, shared = asked("vineppo", replace(WORK, agreement=1.0), worst=False, samples=2)
    assert shared.continuations == 2 * 4 * 6


def test_probing_prefills_each_response_once():
    _, found = asked("vineppo", samples=1)
    prefills = [call for call in found.probing if call.loop == ""]
    # Trunks of 20 + 50 tokens, 29 of them in 2,048: two forwards of 32; those of prompts are openings of others.
    assert [(call.times, call.tokens) for call in prefills] == [(1, 29 * 70), (1, 3 * 70)]
    decoded = sum(call.times * call.tokens for call in found.probing if call.loop == "slots")
    # The first token of each comes from the prefill.
    assert decoded == found.generated - found.continuations


def test_oar_p_runs_what_follows_each_replaced_token():
    jobs, found = asked("oar_p", answer_pattern=PATTERN)
    assert all(isinstance(job, SensitivityJob) for job in jobs) and len(jobs) == 32
    # Three characters state the answer before EOS: 57 reasoning tokens, the answer from 58; rows of 20 + 58 tokens.
    assert {(job.reasoning, job.answer) for job in jobs} == {(57, (58, 60))}
    expected, at = 78, 20
    while at < 77:
        rows = min(max((78 - at) // 8, 16), 77 - at)
        expected, at = expected + rows * (78 - at), at + rows
    assert sum(call.times * call.tokens for call in found.reading) == 32 * expected and not found.probing


def test_oar_g_takes_two_forwards_and_a_backward():
    _, found = asked("oar_g", answer_pattern=PATTERN)
    assert sum(call.forward_tokens for call in found.reading) == 2 * sum(call.backward_tokens for call in found.reading)
    # answer_mean reads to the column before the answer's last token: 20 + 59 tokens of each response.
    assert sum(call.backward_tokens for call in found.reading) == 32 * 79


def test_grpo_vps_reads_a_trunk_and_its_branches():
    jobs, found = asked("grpo_vps", answer_pattern=PATTERN, cue="ab", quantile=0.5, per_segment=1, segments=3)
    assert all(isinstance(job, BeliefJob) and len(job.positions) == 4 for job in jobs)
    # 20 + 57 tokens to the answer's cue; a branch is a cue of 2 and 3 − 1 answer tokens, at 4 positions: 93 tokens a
    # row, and as a branch reads the cue's last token too, 3 rows of logits a branch. 32 rows are 2,976 tokens.
    (call,) = found.reading
    assert (call.tokens, call.logits) == (32 * 93, 32 * 4 * 3)
    # Half of 77² pairs in the trunk; 16 columns of branches look at all 93.
    assert call.pairs == 32 * (77 * 77 / 2 + 16 * 93)


def test_spae_samples_answers_after_every_step():
    jobs, found = asked("spae", answer_pattern=PATTERN, cue="abc", samples=5, tokens=10)
    assert all(isinstance(job, ConfidenceJob) for job in jobs)
    # The prompt, five boundaries and the end; answers of 3 tokens and a stop.
    assert {len(job.positions) for job in jobs} == {7} and found.generated == 32 * 7 * 5 * 4


def test_prpo_reads_three_prompts():
    jobs, found = asked("prpo")
    assert all(isinstance(job, DivergenceJob) for job in jobs)
    assert sum(call.forward_tokens for call in found.reading) == 3 * 32 * 81


def test_a_pipeline_asks_for_what_its_stages_ask():
    _, alone = asked("probepo", budget=16, samples=4, min_gap=1)
    _, piped = asked("probepo,cw_grpo", **{"probepo.budget": 16, "probepo.samples": 4, "probepo.min_gap": 1})
    assert piped == alone


def test_groups_that_agree_are_not_probed():
    _, found = asked("probepo", replace(WORK, pass_rate=1.0, agreement=1.0), worst=False)
    assert found == Demand()


def test_methods_without_measurements_ask_for_nothing():
    for name in ("grpo", "cw_grpo", "ep_grpo", "step_verified"):
        assert asked(name)[1] == Demand()


def test_patterns_find_an_answer_or_none_is_stated():
    assert stated_answer(WORK, r"\\boxed\{(.*)\}") == "\\boxed{42}" and stated_answer(WORK, PATTERN) == "#42"
    assert stated_answer(WORK, "ANSWER=(x)") == "" and stated_answer(WORK, None) == "\\boxed{42}"
    assert stated_answer(replace(WORK, answer="#7"), PATTERN) == "#7"
    assert asked("oar_p", answer_pattern="ANSWER=(x)")[1] == Demand()


def test_continuations_keep_to_the_limit():
    jobs, found = asked("vineppo", replace(WORK, response=99.0, longest=100), samples=1)
    assert all(isinstance(job, Job) for job in jobs)
    assert found.generated <= sum(100 - job.position for job in jobs)


def test_spo_tree_grows_level_by_level():
    # 2·3·2 branches of 20 tokens, and of 61 − 40 on the last level.
    method = make_method("spo_tree", {"branching": [2, 3, 2], "level_tokens": 20, "edges": 7})
    tree = grown(method, replace(WORK, size=12, rows=24), 256)
    assert tree.generated == 2 * (2 * 20 + 6 * 20 + 12 * 21) and tree.trained == 2 * 7
    assert [call.times for call in tree.calls[1:]] == [20, 20, 21]
    # More branches than slots take turns.
    assert [call.times for call in grown(method, replace(WORK, size=12, rows=24), 12).calls[1:]] == [20, 20, 42]


def test_treepo_never_exceeds_its_width():
    tree = grown(make_method("treepo", {"width": 8, "depth": 8, "segment_tokens": 16}), WORK, 256)
    # Paths double until there are 8: 2, 4, 8, 8 branches of 16, 16, 16 and 61 − 48 tokens.
    assert tree.generated == 4 * (2 * 16 + 4 * 16 + 8 * 16 + 8 * 13) and tree.trained == 0
    assert grown(make_method("grpo"), WORK, 256) is None


def test_the_worst_case_mixes_every_group():
    _, found = asked("probepo", replace(WORK, pass_rate=1.0), budget=16, samples=4, min_gap=1, window=8)
    assert found.continuations == 64


def test_a_fresh_budget_ends_continuations():
    method = make_method("vineppo", {"samples": 1, "fresh_budget": 5})
    rollouts = standin(WORK, ANSWER, worst=True)
    found = demand(planned(method, rollouts), rollouts, WORK, SHAPE, len, fresh_budget=5)
    assert found.generated == 5 * (4 + 5 * 32)
