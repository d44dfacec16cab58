"""One worker of verl's probes, in process: a client, reward workers and a tokenizer that are scripted.

What needs verl, the layout that responses are graded in, is compared with what verl's own agent loop hands over.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import importlib.util
import math
import pickle
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.engines.base import Key, Request
from apportion.integrations.verl import probe_worker
from apportion.integrations.verl.probe_worker import Answer, ProbeWorker, why
from apportion.integrations.verl.reward import Abstained
from apportion.integrations.verl.scheduler import Piece
from apportion.measure.probe import Rescue

needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed here: run by `make cluster`"
)

STOP = 9
KEY = Key("7", 3, "12", 1, 2)
# A prompt of three tokens, two kept ones of the response.
REQUEST = Request(KEY, (4, 5, 6, 1, 2), 8, 6)
ROW = {"data_source": "sums", "reward_model": {"ground_truth": "3"}}


class Tokenizer:
    """Token n is the letter n of the alphabet; the stop token is special."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(97 + i) for i in ids if not (skip_special_tokens and i == STOP))


class Rollout(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


def config(**changes):
    rollout = {"name": "vllm", "temperature": 0.7, "top_p": 0.9, "top_k": -1, "ignore_eos": False} | changes
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=Rollout(**rollout)))


def output(tokens, stop_reason="completed", log_probs=None, **fields):
    return SimpleNamespace(
        token_ids=list(tokens), stop_reason=stop_reason, log_probs=log_probs, extra_fields=fields
    )  # fmt: skip


class Client:
    """Answers each call with what `script` makes of its arguments, an exception is raised; notes the calls."""

    def __init__(self, script):
        self.script, self.calls, self.cancelled, self.out = script, [], 0, 0

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.calls.append((request_id, list(prompt_ids), dict(sampling_params)))
        found = self.script(request_id, prompt_ids, sampling_params)
        # What verl's engines do with the dictionary.
        sampling_params.clear()
        self.out += 1
        try:
            found = await found if asyncio.iscoroutine(found) else found
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.out -= 1
        if isinstance(found, Exception):
            raise found
        return found


class Handle:
    """A reward worker: `verdict` of the data that it is handed."""

    def __init__(self, verdict):
        self.verdict, self.asked = verdict, []
        self.compute_score = SimpleNamespace(remote=self._remote)

    async def _remote(self, data):
        # Ray passes a copy.
        self.asked.append(copy.deepcopy(data))
        found = self.verdict(data)
        if isinstance(found, Exception):
            raise found
        return {"reward_score": found, "reward_extra_info": {}}


@pytest.fixture(autouse=True)
def layout(monkeypatch):
    """Grading is handed its parts as they are: what verl makes of them is tested below."""
    own = probe_worker.graded_as
    monkeypatch.setattr(probe_worker, "graded_as", lambda *parts: parts)
    return own


def made(
    script, verdict=lambda data: 1.0, *, handles=None, rescue=None, timeout=None, balancer=None, stop=(STOP,), **changes
):
    client = Client(script)
    worker = ProbeWorker(
        config(**changes), client, handles or [Handle(verdict)], stop, rescue, timeout, balancer, Tokenizer()
    )
    return worker, client


def probe(worker, numbers=(0,), request=REQUEST, row=ROW, route="r"):
    found, reason = asyncio.run(worker.probe(Piece(request, tuple(numbers), 0, route), row))
    return {answer.m: answer for answer in found}, reason


def seed(m, text="7\x1f3\x1f12\x1f1\x1f2\x1f"):
    """Of continuation m of KEY: the low 31 bits of the first 8 bytes of a hash, little end first."""
    digest = hashlib.blake2b(f"{text}{m}".encode(), digest_size=8).digest()
    return (digest[0] + digest[1] * 256 + digest[2] * 256**2 + digest[3] * 256**3) % 2**31


def test_the_first_of_a_state_brings_its_log_probabilities():
    worker, client = made(lambda *_: output([3, STOP], log_probs=[-0.5, -0.25]))
    answers, _ = probe(worker, (0, 1))
    assert [call[2]["logprobs"] for call in client.calls] == [True, False]
    assert answers[0].logprobs == (-0.5, -0.25) and answers[1].logprobs is None


def test_each_number_is_one_request_with_its_own_seed_on_one_route():
    worker, client = made(lambda *_: output([3, STOP]))
    answers, reason = probe(worker, (2, 5))
    assert sorted(answers) == [2, 5] and reason == ""
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": False}
    assert client.calls == [
        ("r", [4, 5, 6, 1, 2], sampling | {"seed": seed(2), "max_tokens": 6}),
        ("r", [4, 5, 6, 1, 2], sampling | {"seed": seed(5), "max_tokens": 6}),
    ]
    assert answers[2] == Answer(2, (3, STOP), "stop", False, "bcd", 1.0, None)
    assert pickle.loads(pickle.dumps(answers[2])) == answers[2]


@pytest.mark.parametrize(("engine", "takes"), [("vllm", True), ("apportion_transformers", True), ("sglang", False),
                                              ("trtllm", False)])  # fmt: skip
def test_a_seed_goes_to_engines_that_take_one(engine, takes):
    worker, client = made(lambda *_: output([STOP]), name=engine)
    probe(worker)
    assert ("seed" in client.calls[0][2]) == takes


def test_names_of_requests_differ_where_the_engine_gets_them():
    worker, client = made(lambda *_: output([STOP]), full_determinism=True)
    probe(worker, range(8))
    assert len({name for name, *_ in client.calls}) == 8


@pytest.mark.parametrize(
    ("tokens", "reported", "finish"),
    [
        ([1, STOP], "completed", "stop"),
        ([1, 2, 3, 4, 5, STOP], "completed", "stop"),
        # verl's client of asynchronous training calls any answer of the budget's length that.
        ([1, 2, 3, 4, 5, STOP], "length", "stop"),
        ([1, 2, 3, 4, 5, 6], "completed", "length"),
        ([1, 2, 3, 4, 5, 6], None, "length"),
        ([1, 2, 3, 4, 5, 6], "length", "length"),
        # SGLang keeps a token of the longest sequence to itself.
        ([1, 2, 3, 4, 5], "length", "length"),
        # A stop string of the user's own.
        ([1, 2], "stop", "stop"),
        ([1, 2], None, "stop"),
    ],
)  # fmt: skip
def test_finish(tokens, reported, finish):
    answers, _ = probe(made(lambda *_: output(tokens, reported))[0])
    assert (answers[0].finish, answers[0].token_ids) == (finish, tuple(tokens))


def test_no_stop_token_ends_an_answer_where_they_are_ignored():
    worker, _ = made(lambda *_: output([1, 2, 3, 4, 5, STOP]), ignore_eos=True)
    assert probe(worker)[0][0].finish == "length"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (output([1, 2], "aborted"), "NoAnswer: broken off by the engine"),
        (output([1, 2], "abort"), "NoAnswer: broken off by the engine"),
        (output([]), "NoAnswer: an empty answer"),
        (output([1] * 7), "NoAnswer: 7 tokens for a budget of 6"),
        pytest.param(RuntimeError("no server\nand more"), "RuntimeError: no server", marks=needs_verl),
        pytest.param(ValueError(), "ValueError", marks=needs_verl),
    ],
)  # fmt: skip
def test_one_that_fails_takes_no_other_with_it(bad, reason):
    def script(_, __, sampling):
        return bad if sampling["seed"] == seed(4) else output([sampling["seed"] % 5, STOP])

    answers, said = probe(made(script)[0], range(8))
    assert said == reason
    assert {m: a.token_ids for m, a in answers.items()} == {m: (seed(m) % 5, STOP) for m in range(8) if m != 4}


@needs_verl
def test_several_reasons_are_each_said_once():
    errors = [ValueError("a"), ValueError("b"), ValueError("a")]
    answers, said = probe(made(lambda *_: errors.pop())[0], range(3))
    assert (answers, sorted(said.split("; "))) == ({}, ["ValueError: a", "ValueError: b"])


def test_what_came_in_time_is_answered_and_the_rest_runs_on():
    """verl's client counts a request off its replica as soon as the call ends; one that is stuck still burdens it."""

    async def in_time():
        hangs = asyncio.Event()

        async def late():
            await hangs.wait()
            return output([STOP])

        worker, client = made(lambda _, __, s: late() if s["seed"] == seed(1) else output([STOP]), timeout=0.2)
        found, reason = await worker.probe(Piece(REQUEST, (0, 1, 2), 0, "r"), ROW)
        assert sorted(answer.m for answer in found) == [0, 2] and reason == "no answer in 0.2 s"
        assert (client.out, client.cancelled) == (1, 0)
        hangs.set()
        await asyncio.sleep(0.01)
        return client.out, len(client.calls), len(worker._reward_handles[0].asked)

    # The late answer is not graded.
    assert asyncio.run(in_time()) == (0, 3, 2)


def test_a_verifier_that_hangs_is_out_of_time_like_an_engine():
    class Hangs:
        compute_score = SimpleNamespace(remote=lambda data: asyncio.sleep(60))

    answers, reason = probe(made(lambda *_: output([STOP]), handles=[Hangs()], timeout=0.1)[0])
    assert (answers, reason) == ({}, "no answer in 0.1 s")


def test_a_cancelled_piece_asks_for_nothing_more():
    async def cancelled():
        hangs = asyncio.Event()

        async def late():
            await hangs.wait()
            return output([1, 1])

        worker, client = rescuing(late, timeout=60)
        task = asyncio.create_task(worker.probe(Piece(REQUEST, (0, 1), 0, "r"), ROW))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        hangs.set()
        await asyncio.sleep(0.05)
        return len(client.calls), len(worker._reward_handles[0].asked)

    assert asyncio.run(cancelled()) == (2, 0)


def test_responses_are_graded_whole_and_the_prompt_is_no_part_of_them():
    handle = Handle(lambda data: 0.5)
    worker, _ = made(lambda *_: output([3, STOP], global_steps=2), handles=[handle])
    assert probe(worker)[0][0].text == "bcd"
    [(prompt, response, row, fields)] = handle.asked
    assert (prompt, response, row, fields) == ([4, 5, 6], [1, 2, 3, STOP], ROW, {"global_steps": 2})


def test_at_position_0_all_of_the_prefix_is_the_prompt():
    handle = Handle(lambda data: 0.5)
    worker, _ = made(lambda *_: output([3, STOP]), handles=[handle])
    answers, _ = probe(worker, request=Request(replace(KEY, position=0), (4, 5, 6), 1, 6))
    assert handle.asked[0][:2] == ([4, 5, 6], [3, STOP]) and answers[0].text == "d"


@pytest.mark.parametrize(
    ("verdict", "reward", "fault"),
    [
        (0.25, 0.25, ""),
        (True, 1.0, ""),
        (math.nan, None, ""),
        (None, None, ""),
        pytest.param("none", None, "ValueError: could not convert string to float: 'none'", marks=needs_verl),
        pytest.param(KeyError("gold"), None, "KeyError: 'gold'", marks=needs_verl),
        (Abstained("no number in it"), None, ""),
    ],
)  # fmt: skip
def test_a_verifier_that_fails_or_knows_nothing_abstains(verdict, reward, fault):
    answers, reason = probe(made(lambda *_: output([STOP]), lambda data: verdict)[0])
    assert (answers[0].reward, answers[0].fault, reason) == (reward, fault, "")


@needs_verl
@pytest.mark.parametrize("gone", [1, 2, 3])
def test_another_reward_worker_is_asked_where_one_is_gone(gone):
    from ray.exceptions import ActorDiedError

    handles = [Handle(lambda data, dead=i < gone: ActorDiedError() if dead else 1.0) for i in range(3)]
    answers, _ = probe(made(lambda *_: output([STOP]), handles=handles)[0])
    assert (answers[0].reward == 1.0) == (gone < 2) and (answers[0].fault == "") == (gone < 2)
    assert sum(len(handle.asked) for handle in handles) == 2


class Balancer:
    """One server, which answers `states` one after the other when it is asked whether it is there."""

    def __init__(self, *states):
        self.states, self.calls = list(states), []
        self.server = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=self._ready))

    async def _ready(self):
        state = self.states.pop(0)
        if isinstance(state, Exception):
            raise state

    def __getattr__(self, name):
        async def done(**said):
            return "s", self.server

        def remote(*given, **said):
            self.calls.append((name, *given, *said.values()))
            return done()

        return SimpleNamespace(remote=remote)


@needs_verl
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("kind", ["dead", "back", "dead later", "its own error"])
def test_a_replica_that_is_dead_is_taken_off_the_balancer(kind):
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

    away = ActorUnavailableError("away", None)
    states = {"dead": [ActorDiedError()], "back": [away, None], "dead later": [away, ActorDiedError()]}.get(kind, [])
    balancer = Balancer(*states)
    error = ActorDiedError()
    if kind == "its own error":
        # The replica is there; something that it asked is not.
        error = RayTaskError("f", "tb", ActorDiedError(), "p", 1, "ip").as_instanceof_cause()
    errors = [error]
    answers, reason = probe(made(lambda *_: errors.pop() if errors else output([STOP]), balancer=balancer)[0])
    # It is asked again, and by the same name: the balancer then has it elsewhere.
    assert (len(answers), reason == "") == ((1, True) if states else (0, False)) and balancer.states == []
    asked = [("acquire_server", "r"), ("release_server", "s")] if states else []
    assert balancer.calls == asked + ([("remove_servers", ["s"])] if kind.startswith("dead") else [])


@needs_verl
def test_a_request_is_asked_of_three_replicas_at_most():
    from ray.exceptions import ActorDiedError

    worker, client = made(lambda *_: ActorDiedError(), balancer=Balancer(*[ActorDiedError() for _ in range(2)]))
    answers, reason = probe(worker)
    assert (answers, len(client.calls)) == ({}, 3) and reason.startswith("ActorDiedError")


@needs_verl
def test_what_ray_passes_on_is_told_as_it_was():
    from ray.exceptions import RayTaskError

    error = RayTaskError("f", "Traceback\n  many lines", ValueError("the gold is empty"), "p", 1, "ip")
    assert why(error) == why(error.as_instanceof_cause()) == "ValueError: the gold is empty"


def test_reward_workers_take_turns():
    handles = [Handle(lambda data: 1.0) for _ in range(3)]
    probe(made(lambda *_: output([STOP]), handles=handles)[0], range(6))
    assert [len(handle.asked) for handle in handles] == [2, 2, 2]


@pytest.mark.parametrize(("fields", "version", "oldest"), [({"min_global_steps": 4, "max_global_steps": 5}, 5, 4),
                                                          ({}, None, None)])  # fmt: skip
def test_the_policy_that_sampled_it_is_told(fields, version, oldest):
    answers, _ = probe(made(lambda *_: output([STOP], **fields))[0])
    assert (answers[0].version, answers[0].oldest) == (version, oldest)


def test_the_longest_sequence_bounds_the_budget():
    worker, client = made(lambda *_: output([1, 2, 3]), max_model_len=8)
    assert probe(worker)[0][0].finish == "length"
    assert client.calls[0][2]["max_tokens"] == 3
    answers, reason = probe(made(lambda *_: output([1]), max_model_len=5)[0])
    assert (answers, reason) == ({}, "NoAnswer: max_model_len = 5 leaves no room after 5 tokens")


# Cutoff rescue: 4 of the tokens are kept for it, the cue takes 2 of those. A text with a "d" (token 3) has an answer.
RESCUE = Rescue((7, 8), lambda text: "d" in text, 4)


def rescuing(first, second=None, **changes):
    second = second or output([3, STOP])

    def script(_, prefix, __):
        return second if list(prefix[-2:]) == [7, 8] else first() if callable(first) else first

    return made(script, rescue=RESCUE, **changes)


def test_a_rescue_asks_for_an_answer_within_the_budget():
    second = output([3, STOP], min_global_steps=6, max_global_steps=6)
    worker, client = rescuing(output([1, 1], min_global_steps=5, max_global_steps=5), second)
    answers, reason = probe(worker)
    assert [call[1:] for call in client.calls] == [
        ([4, 5, 6, 1, 2], {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0,
                           "logprobs": True, "seed": seed(0), "max_tokens": 2}),
        ([4, 5, 6, 1, 2, 1, 1, 7, 8], {"temperature": 0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0,
                                       "logprobs": False, "max_tokens": 2}),
    ]  # fmt: skip
    assert [name for name, *_ in client.calls] == ["r", "r"] and reason == ""
    assert answers[0] == Answer(0, (1, 1, 7, 8, 3, STOP), "stop", True, "bcbbhid", 1.0, 6, 5)


@pytest.mark.parametrize(
    ("first", "budget"),
    [
        (output([1, 3]), 6),  # an answer
        (output([1, STOP]), 6),  # a stop token
        (output([1], "stop"), 6),
        (output([1, 1, 1, 1]), 4),  # a budget of no more than the reserve
    ],
)  # fmt: skip
def test_no_rescue(first, budget):
    worker, client = rescuing(first)
    answers, _ = probe(worker, request=replace(REQUEST, budget=budget))
    assert len(client.calls) == 1 and not answers[0].rescued
    assert answers[0].token_ids == tuple(first.token_ids)


def test_the_kept_tokens_may_hold_the_answer():
    request = replace(REQUEST, prefix_ids=(4, 5, 6, 1, 3))
    assert not probe(rescuing(output([1, 1]))[0], request=request)[0][0].rescued
    # The prompt's do not count.
    worker, _ = rescuing(output([1, 1]))
    assert probe(worker, request=replace(REQUEST, prefix_ids=(4, 3, 6, 1, 2)))[0][0].rescued


def test_a_rescue_may_run_out_too():
    worker, _ = rescuing(output([1, 1]), output([1, 1]))
    answers, _ = probe(worker)
    assert (answers[0].finish, answers[0].rescued, len(answers[0].token_ids)) == ("length", True, 6)


def test_a_rescue_that_fails_leaves_the_continuation_to_be_asked_again():
    worker, _ = rescuing(output([1, 1]), output([], "aborted"))
    assert probe(worker) == ({}, "NoAnswer: broken off by the engine")


def test_a_longest_sequence_leaves_the_rescue_its_tokens():
    worker, client = rescuing(output([1]), max_model_len=10)
    answers, _ = probe(worker)
    assert client.calls[0][2]["max_tokens"] == 1
    assert answers[0].token_ids == (1, 7, 8, 3, STOP) and len(REQUEST.prefix_ids) + 5 == 10


@given(st.permutations(range(8)), st.lists(st.integers(1, 3), min_size=8, max_size=8), st.integers(0, 99))
def test_answers_depend_on_key_and_number_alone(numbers, sizes, salt):
    """However the numbers are cut into pieces, on whatever routes, and in whatever order the engine answers."""
    rng = random.Random(salt)

    async def drawn(sampling):
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        tokens = random.Random(sampling["seed"])
        return output([tokens.randrange(8) for _ in range(tokens.randint(1, 5))] + [STOP])

    worker, _ = made(lambda _, __, sampling: drawn(dict(sampling)), lambda data: float(sum(data[1])))
    whole, _ = probe(worker, range(8))
    found: dict[int, Any] = {}
    rest = list(numbers)
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        if piece:
            found |= probe(worker, piece, route=f"r{salt}{size}")[0]
    assert found == whole


@needs_verl
def test_layout_is_that_of_verls_own_agent_loop(layout):
    """The rollout [4, 5, 6] → [1, 2, 3, 9] as verl's agent loop hands it to a reward worker, and a probe of it."""
    import numpy as np
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker

    row = {
        "raw_prompt": [{"role": "user", "content": "?"}], "data_source": "sums", "index": 4, "uid": "u",
        "reward_model": {"style": "rule", "ground_truth": "3"}, "extra_info": {"split": "train", "span": [1, 2]},
        "priority": np.int64(3), "nothing": None,
    }  # fmt: skip
    said = {"global_steps": 2, "min_global_steps": 2, "max_global_steps": 2}
    rollout = AgentLoopOutput(
        prompt_ids=[4, 5, 6], response_ids=[1, 2, 3, STOP], response_mask=[1] * 4, num_turns=2,
        metrics=AgentLoopMetrics(), extra_fields={**said, "turn_scores": [], "tool_rewards": []},
    )  # fmt: skip
    handle = Handle(lambda data: 1.0)
    loop = SimpleNamespace(
        reward_loop_worker_handles=[handle], processor=None, _compute_multi_modal_inputs=lambda *_: {},
        _get_mm_processor_kwargs=lambda *_: {},
    )  # fmt: skip
    loop._compute_position_ids = AgentLoopWorker._compute_position_ids.__get__(loop)
    asyncio.run(AgentLoopWorker._compute_score(loop, [rollout], kwargs=row))
    theirs, ours = handle.asked[0], layout([4, 5, 6], [1, 2, 3, STOP], row, said)
    assert set(theirs.batch.keys()) == set(ours.batch.keys())
    for name, value in theirs.batch.items():
        assert value.tolist() == ours.batch[name].tolist() and value.dtype == ours.batch[name].dtype, name
    assert set(theirs.non_tensor_batch) == set(ours.non_tensor_batch)
    for name, value in theirs.non_tensor_batch.items():
        mine = ours.non_tensor_batch[name]
        assert (value.tolist(), value.dtype, value.shape) == (mine.tolist(), mine.dtype, mine.shape), name
    assert theirs.meta_info == ours.meta_info


@needs_verl
def test_verls_own_reward_manager_reads_the_text_that_is_recorded(layout):
    from omegaconf import OmegaConf
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    seen = {}

    def score(data_source, solution_str, ground_truth, extra_info):
        seen.update(locals())
        return {"score": 0.5, "why": "half"}

    async def graded(data):
        return await NaiveRewardManager(OmegaConf.create({}), Tokenizer(), score).run_single(data)

    class Own:
        compute_score = SimpleNamespace(remote=lambda data: graded(layout(*data)))

    worker, _ = made(lambda *_: output([3, STOP]), handles=[Own()])
    answers, _ = probe(worker, row=ROW | {"extra_info": {"a": 1}, "__num_turns__": 4})
    assert answers[0].reward == 0.5
    assert (seen["solution_str"], seen["data_source"], seen["ground_truth"]) == (answers[0].text, "sums", "3")
    assert seen["extra_info"]["a"] == 1 and seen["extra_info"]["num_turns"] == 4
