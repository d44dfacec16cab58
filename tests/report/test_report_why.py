"""Where the continuations went and why there is no pivot, against steps worked out by hand.

Planted in a copy of the package and seen caught here: shared states counted once a response, or across groups; the
prompt, or a state without a reward, taken for a pivot; abstained continuations not counted as spent; tokens of a
state's first continuation only; readings counted; continuations that are not recorded told as 0; a pipeline's budget
missed; NaN taken for a reward; a pipeline's own word on collapsed groups taken for its stage's; VinePPO's collapsed
groups called σ = 0; each of the checks that a record is of the recomputed plan left out, and lost pivots counted as
states; a response's least score, or a group's highest, told; the last one probed taken over all groups; ties untold;
two different numbers told alike; a weighed score called H_max; a short tail called no step; masked windows, empty
responses, lost and unused measurements told as something else; reasons for a method that is not installed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from synthetic import write_run
from torch import Tensor

from apportion.credit.method import CreditMethod
from apportion.credit.probepo import ProbePO
from apportion.records import ROLLOUTS
from apportion.report import why
from apportion.report.why import Spending, spending

Row = dict[str, Any]
# Window 2 and one continuation a pivot: two pivots a group.
SMALL = {"window": 2, "min_gap": 1, "samples": 1, "budget": 2, "shortlist": 1.0}


def response(
    entropy: Sequence[float], steps: Sequence[int] = (), reward: float | None = 1.0, *,
    pivots: Sequence[int] = (), ids: Sequence[int] | None = None, **rest: Any,
) -> Row:  # fmt: skip
    """A response whose tokens no other has, unless `ids` are given; `pivots` have a recorded value."""
    return {"entropy": list(entropy), "steps": list(steps), "reward": reward, "pivots": pivots, "ids": ids, **rest}


def step(
    responses: Sequence[Row], evidence: Sequence[tuple[Any, ...]] = (), *, method: str = "probepo",
    settings: Mapping[str, Any] = SMALL, **counts: int,
) -> Spending:  # fmt: skip
    """What was spent in a step of these responses and (row, position, rewards, tokens of each continuation)."""
    rollouts, credit = [], []
    for i, given in enumerate(responses):
        n = len(given["entropy"])
        rollouts.append(
            dict.fromkeys(ROLLOUTS.names) | {
                "row": i, "group": given.get("group", "g"),
                "token_ids": given["ids"] or [100 * (i + 1) + t for t in range(n)],
                "mask": given.get("mask", [True] * n), "reward": given["reward"], "finish": "stop",
                "entropy": given["entropy"], "old_logprob": given.get("old_logprob"), "boundaries": given["steps"],
            }
        )  # fmt: skip
        segments = [{"start": float(p), "samples": 1.0} for p in given["pivots"]]
        credit.append(
            {
                "row": i, "segments": [{"start": 0.0, "samples": 0.0}, *segments] if n else [],
                "method": method, "settings": json.dumps(dict(settings)), "counts": json.dumps(counts),
            }
        )  # fmt: skip
    sampled = [
        {
            "kind": "continuations", "group": rollouts[row]["group"], "row": row, "position": position, "m": m,
            "token_ids": [1] * tokens, "reward": reward,
        }
        for row, position, rewards, tokens in evidence for m, reward in enumerate(rewards)
    ]  # fmt: skip
    return spending(rollouts, sampled, credit)


def whys(found: Spending) -> list[str | None]:
    return [each["why"] for each in found.responses]


# A response with the pivots that the others lose to: H_max .62 at 2, .9 at 4.
UNSURE = response([0, 0, 0.62, 0, 0.9, 0], [2, 4], 0.0, pivots=[2, 4])
ITS = [(0, 2, [1.0], 3), (0, 4, [0.0], 5)]


# --- what was spent ---------------------------------------------------------------------------------------------


def test_a_shared_state_counts_once_and_where_it_was_sampled():
    # Rows 0 and 1 open with 1 2 3, and the state behind it is measured on row 1 with three continuations of 4 tokens.
    # Row 0 has one more, of two continuations of 7 tokens, one of them without a reward; both were paid for.
    rows = [
        response([0] * 6, [3, 4], 0.0, ids=[1, 2, 3, 4, 5, 6], pivots=[3, 4]),
        response([0] * 6, [3], 1.0, ids=[1, 2, 3, 9, 8, 7], pivots=[3]),
        response([0] * 6, [], 1.0, group="h"),
    ]
    found = step(rows, [(1, 3, [1.0, 0.0, 1.0], 4), (0, 4, [1.0, None], 7)])
    assert found.groups[0]["spent"] == {"pivots": 2, "continuations": 5, "tokens": 26}
    assert found.groups[1]["spent"] == {"pivots": 0, "continuations": 0, "tokens": 0}
    assert [(r["continuations"], r["probe_tokens"]) for r in found.responses] == [(2, 14), (3, 12), (0, 0)]


def test_the_same_tokens_in_another_group_are_another_state():
    rows = [response([0] * 4, [2], 1.0, ids=[1, 2, 3, 4], pivots=[2], group=name) for name in "gh"]
    found = step(rows, [(0, 2, [1.0], 1), (1, 2, [1.0], 1)])
    assert [group["spent"]["pivots"] for group in found.groups] == [1, 1]


def test_the_prompt_is_no_pivot_and_a_state_without_a_reward_is_none():
    found = step([response([0] * 6, [2], 1.0)] * 2, [(0, 0, [1.0], 2), (1, 2, [None, math.nan], 2)])
    assert found.groups[0]["spent"] == {"pivots": 0, "continuations": 3, "tokens": 6}


def test_values_without_their_continuations_have_no_number():
    found = step([UNSURE, response([0] * 6, [], 1.0)])
    assert found.groups[0]["spent"] == {"pivots": 2, "continuations": None, "tokens": None}
    assert [r["continuations"] for r in found.responses] == [None, 0]
    # A tree's values are of its own leaves: nothing was sampled for them.
    tree = step([UNSURE], method="spo_tree", settings={})
    assert tree.groups[0]["spent"] == {"pivots": 2, "continuations": 0, "tokens": 0}


def test_readings_are_no_continuations():
    row = {"kind": "belief", "group": "g", "row": 0, "position": 2, "token_ids": None, "reward": None, "values": [-1.0]}
    rollout = dict.fromkeys(ROLLOUTS.names) | {
        "row": 0, "group": "g", "token_ids": [1, 2, 3], "mask": [True] * 3, "reward": 1.0,
    }  # fmt: skip
    credit = {"row": 0, "segments": None, "method": "grpo_vps", "settings": "{}", "counts": "{}"}
    assert spending([rollout], [row], [credit]).groups[0]["spent"] == {"pivots": 0, "continuations": 0, "tokens": 0}


@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        ({"budget": 40}, 40), ({}, None), ({"budget": "all"}, None), ({"budget": True}, None),
        ({"avspo": {"rate": 0.1}, "probepo": {"budget": 24}}, 24),
    ],
)  # fmt: skip
def test_budget_is_the_methods_or_its_stages(settings, budget):
    found = step([response([0], [], 1.0)], settings=settings, method="elsewhere")
    assert found.groups[0]["budget"] == budget


def test_a_step_without_responses():
    assert spending([], [], []) == Spending([], [])


# --- why there is no pivot: whatever the method -----------------------------------------------------------------


def test_who_has_a_pivot_needs_no_reason():
    found = step([UNSURE, response([0] * 6, [2], 1.0)], ITS)
    assert found.responses[0]["why"] is None and found.groups[0]["why"] is None


@pytest.mark.parametrize("reward", [None, math.nan])
def test_abstained(reward):
    found = step([UNSURE, response([9.0] * 6, [2], 1.0, mask=[False] * 6), response([9.0] * 6, [2], reward)], ITS[:0])
    assert whys(found)[2] == "no reward: the verifier abstained"


def test_untrained_and_empty():
    rows = [UNSURE, response([9.0] * 6, [2], mask=[False] * 6), response([], []), response([0] * 6, [], 1.0)]
    assert whys(step(rows, ITS))[1:3] == ["none of its tokens is trained", "it is empty"]


def test_equal_rewards():
    text = "σ = 0: all rewards are equal, so there is nothing to tell apart"
    found = step([response([9.0] * 6, [2], 1.0), response([9.0] * 6, [2], 1.0), response([9.0] * 6, [2], None)])
    assert whys(found) == [text, text, "no reward: the verifier abstained"] and found.groups[0]["why"] == text


def test_a_single_reward():
    found = step([response([9.0] * 6, [2], 1.0), response([9.0] * 6, [2], None)])
    assert whys(found)[0] == found.groups[0]["why"] == "only one response has a reward"
    found = step([response([9.0] * 6, [2], 1.0), response([9.0] * 6, [2], 0.0, mask=[False] * 6)])
    assert whys(found)[0] == "only one response has a reward and a token to train"


def test_no_reward_in_the_group():
    assert step([response([9.0] * 6, [2], None)] * 2).groups[0]["why"] == "no response has a reward"
    masked = response([9.0] * 6, [2], 0.0, mask=[False] * 6)
    assert step([masked, masked]).groups[0]["why"] == "no response has a reward and a token to train"


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("grpo", "the method measures nothing"),
        ("avspo+cw_grpo", "the method measures nothing"),
        ("grpo_vps", "the method samples no continuations: it reads the belief in the gold answer"),
        ("spae", "the method samples no continuations: it reads the confidence of forced answers"),
        ("oar_p", "the method samples no continuations: it reads how tokens bear on the answer"),
        ("prpo", "the method samples no continuations: it reads how predictions hang on what was shown"),
        ("step_verified", "the method samples no continuations: it reads a verifier’s verdicts on steps"),
        ("spo_tree", "no node of its tree lies inside it"),
    ],
)  # fmt: skip
def test_methods_that_sample_no_continuations(method, text):
    found = step([response([0] * 6, [2], 1.0), response([0] * 6, [2], 0.0)], method=method, settings={})
    assert whys(found) == [text, text] and found.groups[0]["why"] == text


def test_a_method_that_is_not_installed_has_no_reasons():
    found = step([UNSURE, response([0] * 6, [2], None), response([0] * 6, group="h")], ITS, method="elsewhere")
    assert whys(found) == [None] * 3 and [group["why"] for group in found.groups] == [None, None]
    assert found.groups[0]["spent"]["continuations"] == 2


# --- what the record does not say -------------------------------------------------------------------------------


UNKNOWN = "the record does not say why"


def test_settings_of_another_version():
    rows = [UNSURE, response([0] * 6, [2], 1.0), response([0] * 6, [2], None)]
    assert whys(step(rows, ITS, settings=SMALL | {"heat": 3})) == [None, UNKNOWN, "no reward: the verifier abstained"]
    assert whys(step(rows, ITS, settings=SMALL | {"budget": 0}))[1] == UNKNOWN


def test_a_record_that_lacks_what_the_plan_needs():
    rows = [UNSURE, response([0] * 6, [2], 1.0)]
    assert whys(step([{**row, "steps": None} for row in rows], ITS))[1] == UNKNOWN


def test_a_state_that_was_never_planned():
    # 3 is no step of row 0, so these are the pivots of another rule; group h is as planned.
    other = [{**UNSURE, "group": "h"}, response([0, 0, 0.41, 0, 0, 0], [2], 1.0, group="h")]
    rows = [{**UNSURE, "pivots": [3]}, response([0] * 6, [2], 1.0), *other]
    found = step(rows, [(0, 3, [1.0], 1), (2, 2, [1.0], 1), (2, 4, [1.0], 1)])
    assert whys(found)[1] == UNKNOWN
    assert whys(found)[3].endswith("has H_max 0.41, the last one probed in this group 0.62")


def test_continuations_of_a_state_that_was_never_planned():
    # The values are not recorded at all; the state they were sampled from is of another plan.
    rows = [{**UNSURE, "pivots": []}, response([0, 0, 0.41, 0, 0, 0], [2], 1.0)]
    assert whys(step(rows, [(0, 3, [1.0], 1)]))[1] == UNKNOWN
    assert whys(step(rows, [(0, 2, [1.0], 1), (0, 4, [1.0], 1)]))[1].startswith("its most uncertain boundary")


def test_a_value_at_a_state_that_was_planned_for_another_response():
    # Rows 0 and 1 open with 1 2, but row 1 has no boundary there: a value of it is of another plan.
    rows = [
        response([0, 0, 0.9, 0, 0, 0], [2], 0.0, ids=[1, 2, 3, 4, 5, 6], pivots=[2]),
        response([0, 0, 0, 0.3, 0, 0], [3], 1.0, ids=[1, 2, 9, 8, 7, 6], pivots=[2]),
        response([0, 0, 0.2, 0, 0, 0], [2], 1.0),
    ]
    found = step(rows, [(0, 2, [1.0], 1)], settings=SMALL | {"budget": 1})
    assert whys(found)[2] == UNKNOWN


def test_a_lost_state_is_lost_to_all_that_share_it():
    # One state of two responses: two pivots were dropped.
    ids = [[1, 2, 3, 4, 5, 6], [1, 2, 9, 8, 7, 6]]
    rows = [response([0, 0, 0.9, 0, 0, 0], [2], float(i), ids=row) for i, row in enumerate(ids)]
    assert whys(step(rows, [(0, 2, [None], 1)], dropped_pivots=2)) == [why.LOST, why.LOST]
    assert whys(step(rows, [(0, 2, [None], 1)], dropped_pivots=1)) == [UNKNOWN, UNKNOWN]


def test_more_pivots_lack_than_were_lost():
    rows = [{**UNSURE, "pivots": []}, response([0, 0, 0.1, 0, 0, 0], [2], 1.0)]
    assert whys(step(rows, dropped_pivots=0)) == [UNKNOWN, UNKNOWN]


def test_lost_measurements():
    # Both pivots of row 0 were planned; nothing came back for one, and abstentions for the other.
    rows = [{**UNSURE, "pivots": []}, response([0, 0, 0.1, 0, 0, 0], [2], 1.0)]
    found = step(rows, [(0, 2, [None], 4)], dropped_pivots=2)
    assert whys(found)[0] == "a pivot was planned, but no continuation came back with a reward"
    assert whys(found)[1] == "its most uncertain boundary has H_max 0.10, the last one probed in this group 0.62"
    assert found.groups[0] == {
        "spent": {"pivots": 0, "continuations": 1, "tokens": 4}, "budget": 2,
        "why": "no response has a pivot, each for its own reason",
    }  # fmt: skip
    # Half of what was planned is there: row 0 has a pivot, and one was lost, as the method says.
    half = step([{**UNSURE, "pivots": [4]}, rows[1]], [(0, 4, [1.0], 4)], dropped_pivots=1)
    assert whys(half)[0] is None and whys(half)[1].startswith("its most uncertain boundary has H_max 0.10")


def test_a_value_that_the_method_left_out():
    rows = [{**UNSURE, "pivots": [4]}, response([0, 0, 0.7, 0, 0, 0], [2], 1.0)]
    found = step(rows, [(0, 4, [1.0], 1), (1, 2, [1.0], 1)])
    assert whys(found)[1] == "continuations were sampled inside it, but the method recorded no value of them"


# --- ProbePO ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("high", "low"), [("0.62", "0.41"), ("0.6200", "0.6199")]
)  # fmt: skip
def test_the_budget_went_to_others(high, low):
    found = step([UNSURE, response([5, 0, float(low), 0.1, 0, 0], [2], 1.0)], ITS)
    assert whys(found)[1] == f"its most uncertain boundary has H_max {low}, the last one probed in this group {high}"


def test_the_best_of_several_boundaries_is_told():
    # H_max .3 at 1 (tokens 1 and 2), .41 at 3; the .8 at 5 has too short a tail, the 5 at 0 opens no step.
    found = step([UNSURE, response([5, 0.2, 0.3, 0.41, 0, 0.8], [1, 3, 5], 1.0)], ITS)
    assert whys(found)[1].startswith("its most uncertain boundary has H_max 0.41,")


def test_ties_go_to_the_earlier_response():
    rows = [UNSURE, response([0, 0, 0.62, 0, 0, 0], [2], 1.0)]
    assert whys(step(rows, ITS))[1] == (
        "its most uncertain boundary has H_max 0.62, as the last one probed in this group, "
        "and ties go to the earlier response"
    )


def test_no_step_starts_inside():
    # A host's boundary at 0 is the prompt's state.
    assert whys(step([UNSURE, response([5.0] * 6, [0], 1.0)], ITS))[1] == "no step starts inside it"


def test_steps_too_near_the_end():
    found = step([UNSURE, response([5.0] * 6, [5], 1.0), response([5.0] * 2, [1], 1.0)], ITS)
    assert whys(found)[1:] == ["fewer than 2 tokens follow its only step boundary"] * 2
    wide = SMALL | {"window": 4}
    rows = [response([0, 0.62, 0.9, 0, 0, 0], [1, 2], 0.0, pivots=[1, 2]), response([5.0] * 6, [3, 5], 1.0)]
    found = step(rows, [(0, 1, [1.0], 1), (0, 2, [1.0], 1)], settings=wide)
    assert whys(found)[1] == "fewer than 4 tokens follow each of its 2 step boundaries"


def test_masked_windows():
    found = step([UNSURE, response([5.0] * 6, [2], 1.0, mask=[True, True, False, False, True, True])], ITS)
    assert whys(found)[1] == "no token just behind its step boundaries is trained"


def test_random_placement():
    # One draw for two responses with three interior tokens each, of which one is masked in both, so it fell on one of
    # four states: exactly one of these records is the method's own, and its other response was not drawn.
    settings = SMALL | {"placement": "random", "budget": 1}
    found = []
    for row, position in [(0, 1), (0, 2), (1, 1), (1, 2)]:
        rows = [response([0] * 4, [], float(k), mask=[True, True, True, False]) for k in range(2)]
        rows[row] = {**rows[row], "pivots": [position]}
        found.append(whys(step(rows, [(row, position, [1.0], 1)], settings=settings))[1 - row])
    drawn = "placement is random, and none of the 2 tokens where it could fall was drawn"
    assert sorted(found) == sorted([drawn, UNKNOWN, UNKNOWN, UNKNOWN])


def test_random_placement_needs_a_token_behind_the_first():
    settings = SMALL | {"placement": "random"}
    rows = [response([0] * 3, [], 0.0, pivots=[1, 2]), response([0], [], 1.0)]
    found = step(rows, [(0, 1, [1.0], 1), (0, 2, [1.0], 1)], settings=settings)
    assert whys(found) == [None, "no token behind its first is trained"]


def test_a_state_measured_for_others_only():
    # Both open with 1 2, but only row 0 had that boundary: row 1's only one is at 3, and the budget of one is spent.
    rows = [
        response([0, 0, 0.9, 0, 0, 0], [2], 0.0, ids=[1, 2, 3, 4, 5, 6], pivots=[2]),
        response([0, 0, 0, 0.3, 0, 0], [3], 1.0, ids=[1, 2, 9, 8, 7, 6]),
    ]
    found = step(rows, [(0, 2, [1.0], 1)], settings=SMALL | {"budget": 1})
    assert whys(found)[1] == "its most uncertain boundary has H_max 0.30, the last one probed in this group 0.90"
    # Were 2 a boundary of both, the value would stand in both: a record without it is of another plan.
    rows[1] = {**rows[1], "steps": [2, 3]}
    assert whys(step(rows, [(0, 2, [1.0], 1)], settings=SMALL | {"budget": 1}))[1] == UNKNOWN


def test_a_pipeline_is_asked_by_its_stage():
    settings = {"avspo": {}, "probepo": SMALL, "cw_grpo": {}}
    rows = [UNSURE, response([0, 0, 0.41, 0, 0, 0], [2], 1.0), *[response([9.0] * 6, [2], 1.0, group="h")] * 2]
    found = step(rows, ITS, method="avspo+probepo+cw_grpo", settings=settings)
    assert whys(found)[1].endswith("has H_max 0.41, the last one probed in this group 0.62")
    # The pipeline learns from such a group; the stage that measures spends nothing there.
    assert whys(found)[2].startswith("σ = 0") and found.groups[1]["budget"] == 2


class Late(ProbePO):
    """Scores by place."""

    def position_weight(self, position: Tensor, length: Tensor) -> Tensor:
        return position.double() / length


class Own(ProbePO):
    """Probes the last of what ProbePO would."""

    def plan(self, rollouts: Any, base: Any) -> Any:
        return super().plan(rollouts, base)[-1:]


class Bare(CreditMethod):
    """Plans nothing."""

    name = "bare"
    needs = frozenset({"continuations"})
    paper = marks = ""

    def assign(self, rollouts: Any, evidence: Any, base: Any) -> Any:
        raise NotImplementedError


def told(monkeypatch: pytest.MonkeyPatch, cls: type[CreditMethod], *args: Any, **settings: Any) -> list[str | None]:
    """The reasons where `cls` is what is registered."""
    monkeypatch.setattr(why, "method_class", lambda name: cls)
    monkeypatch.setattr(why, "make_method", lambda name, settings: cls(**settings))
    return whys(step(*args, method="theirs", settings=settings))


def test_scores_that_are_weighed_are_no_entropies(monkeypatch):
    # Row 0: .62·2/6 = .2067 and .9·4/6 = .6; row 1: .41·2/6 = .1367.
    rows = [UNSURE, response([0, 0, 0.41, 0, 0, 0], [2], 1.0)]
    assert told(monkeypatch, Late, rows, ITS, **SMALL)[1] == (
        "its most uncertain boundary has the score 0.14, the last one probed in this group 0.21"
    )


def test_a_plan_by_another_rule_is_not_explained_by_ours(monkeypatch):
    rows = [{**UNSURE, "pivots": [2]}, response([0, 0, 0.41, 0, 0, 0], [2], 1.0)]
    assert told(monkeypatch, Own, rows, ITS[:1], **SMALL)[1] == UNKNOWN


def test_a_method_that_plans_nothing(monkeypatch):
    rows = [{**UNSURE, "pivots": []}, response([0] * 6, [2], 1.0)]
    assert told(monkeypatch, Bare, rows) == ["the method plans no state inside it"] * 2


# --- VinePPO and SPO-chain --------------------------------------------------------------------------------------


def test_vineppo_measures_the_prompt_of_all():
    rows = [response([0] * 6, [2], 1.0, pivots=[0, 2]), response([0] * 6, [], 1.0, pivots=[0])]
    found = step(rows, [(0, 0, [1.0], 1), (0, 2, [1.0], 1)], method="vineppo", settings={"samples": 1})
    # The rewards are equal, and VinePPO does not mind.
    assert whys(found) == [None, "no step starts inside it, so only the prompt was measured"]
    alone = step(rows[1:], [(0, 0, [1.0], 1)], method="vineppo", settings={"samples": 1})
    assert alone.groups[0]["why"] == "no step starts inside it, so only the prompt was measured"


def test_spo_chain_cuts_where_the_policy_was_unsure():
    low, high = math.log(0.5), math.log(0.95)
    rows = [
        response([0] * 4, [], 1.0, pivots=[2], old_logprob=[high, high, low, high]),
        response([0] * 4, [], 0.0, old_logprob=[high] * 4),
        # Cuts at every fifth unsure token from the first: here 0 alone, the prompt that row 2 shares with nobody.
        response([0] * 4, [], 0.0, pivots=[0], old_logprob=[low, high, low, low]),
    ]
    found = step(rows, [(0, 2, [1.0], 1), (2, 0, [1.0], 1)], method="spo_chain", settings={"samples": 1})
    assert whys(found) == [
        None, "every token it is trained on had a probability of 0.9 or more",
        "its only cutpoint is its first token, so only the prompt was measured",
    ]  # fmt: skip


# --- whole runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("probepo", {"min_gap": 8, "window": 4, "samples": 4, "budget": 16}),
        ("probepo", {"min_gap": 8, "window": 4, "samples": 4, "budget": 8, "placement": "random"}),
        ("vineppo", {"samples": 2}), ("spo_chain", {"samples": 2}),
    ],
)  # fmt: skip
def test_a_faithful_record_always_says_why(method, settings, tmp_path):
    run = write_run(tmp_path / "run", steps=2, prompts=5, group=8, method=method, settings=settings, logged=2)
    for number in run.steps():
        rollouts, evidence, credit = (run.read(kind, number) for kind in ("rollouts", "evidence", "credit"))
        found = spending(rollouts, evidence, credit)
        for c, r in zip(credit, found.responses, strict=True):
            inside = any(s["samples"] and s["start"] for s in c["segments"] or ())
            assert (r["why"] is None) == inside and r["why"] != UNKNOWN
        assert sum(r["continuations"] for r in found.responses) == len(evidence)
        assert sum(g["spent"]["continuations"] for g in found.groups) == len(evidence)
        assert sum(g["spent"]["tokens"] for g in found.groups) == sum(len(e["token_ids"]) for e in evidence)
        inner = [e for e in evidence if e["position"]]
        states = {(e["group"], tuple(rollouts[e["row"]]["token_ids"][: e["position"]])) for e in inner}
        assert sum(g["spent"]["pivots"] for g in found.groups) == len(states)


def test_numbers_of_the_budget_reason_against_a_slow_reference(tmp_path):
    settings = {"min_gap": 8, "window": 4, "samples": 4, "budget": 8}
    run = write_run(tmp_path / "run", steps=2, prompts=6, group=8, settings=settings, logged=2)
    told = 0
    for number in run.steps():
        rollouts, evidence, credit = (run.read(kind, number) for kind in ("rollouts", "evidence", "credit"))

        def highest(row: Row) -> dict[int, float]:
            kept: dict[int, float] = {}
            text, entropy = row["text"], row["entropy"]
            for p in range(2, len(text)):
                if text[p - 2 : p] == "\n\n" and p - max(kept, default=-8) >= 8:
                    kept[p] = max(entropy[p : p + 4])
            return {p: h for p, h in kept.items() if len(entropy) - p >= 4}

        for row, reason in zip(rollouts, whys(spending(rollouts, evidence, credit)), strict=True):
            if numbers := re.fullmatch(r"its most .* H_max ([\d.]+), the last .* group ([\d.]+)", reason or ""):
                told += 1
                probed = {(e["row"], e["position"]) for e in evidence if e["group"] == row["group"]}
                last = min(highest(rollouts[i])[p] for i, p in probed)
                digits = len(numbers[1].partition(".")[2])
                assert numbers[1] == f"{max(highest(row).values()):.{digits}f}"
                # A shared state counts with the score of the response that it was sampled from, its highest.
                assert numbers[2] == f"{last:.{digits}f}"
    assert told > 10


def test_a_planted_difference_is_not_explained_away(tmp_path):
    """The same record with one entropy changed after the fact: its plan is no longer what was measured."""
    settings = {"min_gap": 8, "window": 4, "budget": 8}
    run = write_run(tmp_path / "run", steps=1, prompts=3, group=8, settings=settings, logged=1)
    rollouts, evidence, credit = (run.read(kind, run.steps()[0]) for kind in ("rollouts", "evidence", "credit"))
    before = spending(rollouts, evidence, credit)
    i = next(i for i, r in enumerate(before.responses) if (r["why"] or "").startswith("its most uncertain"))
    rollouts[i] = {**rollouts[i], "entropy": [9.0] * len(rollouts[i]["entropy"])}
    after = spending(rollouts, evidence, credit)
    changed = rollouts[i]["group"]
    for row, old, new in zip(rollouts, whys(before), whys(after), strict=True):
        assert new == (UNKNOWN if row["group"] == changed and old is not None else old)
