"""Jobs that read the model: their requests, how ranks share them, and what comes back.

Planted faults seen caught: the last request dropped; work shared by number; doubled, missing or foreign readings let
through; readings in the order of the ranks; rows matched by number; kinds with one random stream; the first accepted
answer only; a cue with special tokens; two jobs for a row; an empty gold column taken.
"""

from __future__ import annotations

import math
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from apportion.engines.base import (
    BeliefRequest,
    ConfidenceRequest,
    DivergenceRequest,
    Key,
    Reading,
    Sampling,
    SensitivityRequest,
)
from apportion.engines.scoring import Scorer
from apportion.engines.transformers import TransformersEngine
from apportion.errors import InputError
from apportion.groups import grpo_base
from apportion.measure.batch import Batch, answers_of
from apportion.measure.plan import BeliefJob, ConfidenceJob, DivergenceJob, SensitivityJob
from apportion.measure.readings import Asker, merged, read, share
from apportion.rollouts import Rollouts

PROMPT, STOP = 3, 9
SAMPLING = Sampling((STOP,), temperature=0.7)


def key(kind, row):
    return Key(f"5/{kind}", 2, str(row // 2), row % 2, 0)


def requests(lengths, seed=0):
    """A request of each kind for each response of so many tokens."""
    rng = random.Random(seed)

    def ids(n):
        return tuple(rng.randrange(1, 12) for _ in range(n))

    asked = {}
    for row, n in enumerate(lengths):
        whole = ids(PROMPT + n)
        asked["belief", row] = BeliefRequest(key("belief", row), whole, PROMPT, (0, n), (2, 3), ((5, 6), (7,)))
        asked["confidence", row] = ConfidenceRequest(key("confidence", row), whole, PROMPT, (1,), (2,), (5,), 2, 3)
        asked["divergence", row] = DivergenceRequest(key("divergence", row), whole, PROMPT, ids(PROMPT), ids(PROMPT))
        estimator = "perturb" if row % 2 else "gradient"
        asked["sensitivity", row] = SensitivityRequest(
            key("sensitivity", row), whole, PROMPT, n - 2, (n - 2, n), estimator, "answer_mean", 1e-2
        )
    return asked


@given(st.lists(st.integers(3, 40), max_size=6), st.integers(1, 9), st.integers(0, 99))
def test_every_request_has_one_rank_and_order_does_not_matter_to_which_there_are(lengths, world, seed):
    asked = requests(lengths, seed)
    shares = [share(pickle.loads(pickle.dumps(asked)), rank, world) for rank in range(world)]
    assert sorted(at for each in shares for at in each) == sorted(asked)
    assert all(each[at] == asked[at] for each in shares for at in each)


def test_work_is_shared_by_what_it_costs():
    """One perturbation of 40 tokens reads about 40²/2 = 800; six beliefs of about 20 tokens each fit beside it."""
    asked = {("belief", row): requests([8] * 6)["belief", row] for row in range(6)}
    asked["sensitivity", 7] = SensitivityRequest(
        key("sensitivity", 7), (1,) * 43, PROMPT, 38, (38, 40), "perturb", "last"
    )
    assert sorted(map(len, (share(asked, rank, 2) for rank in range(2)))) == [1, 6]
    assert sorted(map(len, (share({("belief", 0): asked["belief", 0]}, rank, 3) for rank in range(3)))) == [0, 0, 1]
    with pytest.raises(InputError, match="rank"):
        share(asked, 2, 2)


def test_a_doubled_a_foreign_and_a_missing_reading_are_named():
    asked = requests([5, 6])
    answers = {at: Reading(request.key, torch.zeros(1)) for at, request in asked.items()}
    whole = list(answers.items())
    random.Random(1).shuffle(whole)
    found = merged(asked, [dict(whole[:3]), {}, dict(whole[3:])])
    assert list(found) == list(asked) and all(found[at] is answers[at] for at in asked)
    with pytest.raises(RuntimeError, match=r"belief of Key\(run='5/belief'.*read by two ranks"):
        merged(asked, [answers, {("belief", 1): answers["belief", 1]}])
    with pytest.raises(RuntimeError, match=r"divergence of Key\(.*sample=1.*read by no rank"):
        merged(asked, [{at: answer for at, answer in answers.items() if at != ("divergence", 1)}])
    with pytest.raises(RuntimeError, match="not asked for"):
        merged({at: asked[at] for at in list(asked)[:-1]}, [answers])
    # Of another step: the row is there, and it is not what was asked.
    stale = Reading(Key("5/belief", 1, "0", 0, 0), torch.zeros(1))
    with pytest.raises(RuntimeError, match="not asked for"):
        merged(asked, [{**answers, ("belief", 0): stale}])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=12, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_readings_are_those_of_each_row_by_itself(model):
    """Whoever reads what beside it, a row's values are its own."""
    asked = requests([6, 11, 4])
    ats = list(asked)
    random.Random(3).shuffle(ats)

    def run(part):
        return read(part, Scorer(model, 0, temperature=0.7), TransformersEngine(model, 0), SAMPLING)

    together = run({at: asked[at] for at in ats})
    assert together.keys() == asked.keys()
    for at, request in asked.items():
        (alone,) = run({at: request}).values()
        assert together[at].key == alone.key == request.key
        assert torch.allclose(together[at].values, alone.values, atol=1e-5, rtol=1e-5)
    # ln p of the best of two answers after the cue, from the model's own logits.
    request = asked["belief", 1]
    best = -math.inf
    for answer in request.answers:
        whole = (*request.ids, *request.cue_ids, *answer)
        with torch.no_grad():
            logp = (model.eval()(torch.tensor([whole])).logits[0].double() / 0.7).log_softmax(-1)
        first = len(whole) - len(answer)
        best = max(best, sum(float(logp[first + j - 1, token]) for j, token in enumerate(answer)))
    assert float(together["belief", 1].values[-1]) == pytest.approx(best, abs=1e-5)


class Letters:
    """Token n is the letter n of the alphabet."""

    pad_token_id = 0

    def __call__(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return {"input_ids": [ord(c) - 97 for c in text]}

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


def asker():
    return Asker(Letters(), Letters().decode, "5")


def batch(rows):
    rollouts = Rollouts.from_lists([[1, 2, 3], [4, 5]], ["11", "11"], [1.0, 0.0], prompt_ids=(torch.tensor([6, 7, 8]),))
    return Batch(rollouts, grpo_base(rollouts), rows, ["ghi"] * 2)


def test_jobs_become_requests_of_ids():
    rows = [{"gold": ["ab", "c"], "span": "hi"}, {"answer": ""}]
    jobs = [
        BeliefJob(0, (0, 3), "yz"), BeliefJob(1, (0,), "yz"), ConfidenceJob(0, (1,), "z", 2, 4),
        SensitivityJob(1, 1, (1, 2), "perturb", "last"), DivergenceJob(0, 1.0),
    ]  # fmt: skip
    found = asker().requests(batch(rows), jobs, 3)
    # The second row has no gold answer.
    assert list(found) == [("belief", 0), ("confidence", 0), ("sensitivity", 1), ("divergence", 0)]
    assert found["belief", 0] == BeliefRequest(
        Key("5/belief", 3, "11", 0, 0), (6, 7, 8, 1, 2, 3), 3, (0, 3), (24, 25), ((0, 1), (2,))
    )
    assert found["confidence", 0].gold_ids == (0, 1) and found["confidence", 0].key.run == "5/confidence"
    assert found["sensitivity", 1].ids == (6, 7, 8, 4, 5)
    altered = found["divergence", 0]
    assert altered.blank_ids == (6, 0, 0) and altered.disturbed_ids[0] == 6 and {*altered.disturbed_ids[1:]} <= {7, 8}


def test_two_jobs_for_one_row_are_refused():
    with pytest.raises(InputError, match="belief of row 0: got two jobs"):
        asker().requests(batch([{"gold": "a"}] * 2), [BeliefJob(0, (0,), "z"), BeliefJob(0, (1,), "z")], 1)
    with pytest.raises(InputError, match="span of prompt 11"):
        asker().requests(batch([{"span": "zz"}] * 2), [DivergenceJob(0, 1.0)], 1)


def test_accepted_answers_come_from_the_first_column_that_has_one():
    assert answers_of({"answer": "", "gold": None, "solution": 7, "ground_truth": "8"}) == ["7"]
    assert answers_of({"ground_truth": ("a", "b")}) == ["a", "b"] and answers_of({}) == []
    both = Batch(batch([]).rollouts, batch([]).base, [{"gold": "x"}, {}], ["", ""])
    assert both.golds == ["x", ""] and both.rows[both.local] == both.rows


def test_nothing_asked_is_nothing_read():
    assert read({}, SimpleNamespace()) == {} and merged({}, [{}, {}]) == {}
