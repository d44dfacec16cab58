"""A vLLM server behind TRL's client: a call a request, matched by name.

Planted faults seen caught: answers matched by the order in which they finish, or held back until all are there; one
seed for all calls; too few outputs accepted; a cache that was not dropped; decoding not counted.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import FakeClient, FakeLLM
from policies import requests
from vllm_worlds import LLAMA, LONGEST, MODEL, REAL, STOP, ask, engine_of, run, weights

from apportion.engines.base import Sampling
from apportion.engines.vllm import StaleWeights, seed_of
from apportion.engines.vllm_hosts import Colocated
from apportion.engines.vllm_server import Server


def test_a_server_is_asked_once_a_request(fake_server) -> None:
    """It takes one seed and one budget a call."""
    asked = requests()
    engine = engine_of(fake_server)
    run(engine, asked, Sampling((3, 7), temperature=0.7, top_k=9, repetition_penalty=1.1))
    calls = {tuple(call["prompts"][0]): call for call in fake_server.client.calls}
    # Two of the requests open alike, and their prefixes differ all the same.
    assert len(calls) == len(asked)
    for r in asked:
        call = calls[r.prefix_ids]
        assert call == {
            "prompts": [list(r.prefix_ids)], "n": r.samples, "max_tokens": r.budget, "seed": seed_of(r.key, r.first),
            "temperature": 0.7, "top_k": 9, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.1,
            "stop_token_ids": [3, 7], "ignore_eos": True,
        }  # fmt: skip


def test_both_ways_to_the_fake_draw_alike(fake_server) -> None:
    assert run(engine_of(Colocated(FakeLLM(MODEL, LONGEST))), requests()) == run(engine_of(fake_server), requests())


@REAL
def test_both_ways_to_the_real_one_draw_alike(real_llm, real_client) -> None:
    colocated = Colocated(real_llm)
    colocated.load(weights(LLAMA))
    assert run(engine_of(colocated), requests()) == run(engine_of(Server(real_client)), requests())


@pytest.mark.parametrize("change", ["prompt", "count"])
def test_a_server_that_answers_something_else(change: str, fake_server) -> None:
    generate = fake_server.client.generate

    def other(*args: Any, **kwargs: Any) -> dict[str, Any]:
        answer = generate(*args, **kwargs)
        if change == "prompt":
            return answer | {"prompt_ids": [[1, *answer["prompt_ids"][0]]]}
        return answer | {"completion_ids": answer["completion_ids"][1:]}

    fake_server.client.generate = other
    with pytest.raises(RuntimeError, match="asked"):
        run(engine_of(fake_server), [ask(3)])


def test_a_server_answers_as_requests_finish(fake_server) -> None:
    generate, slow = fake_server.client.generate, threading.Event()

    def waits(prompts: Any, **rest: Any) -> Any:
        if len(prompts[0]) == 40:
            assert slow.wait(30)
        return generate(prompts, **rest)

    fake_server.client.generate = waits
    answers = engine_of(fake_server).continuations([ask(2, length=40), ask(2)], Sampling(()))
    assert [next(answers).m for _ in range(2)] == [0, 1]
    slow.set()
    assert len(list(answers)) == 2


def test_a_change_between_two_answers_is_noticed(fake_server) -> None:
    version = [0]
    answers = engine_of(fake_server, lambda: version[0]).continuations([ask(2)], STOP)
    next(answers)
    version[0] = 1
    with pytest.raises(StaleWeights, match="changed"):
        list(answers)


def test_a_servers_error_comes_through(fake_server) -> None:

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("gone")

    fake_server.client.generate = fails
    with pytest.raises(ConnectionError, match="gone"):
        run(engine_of(fake_server), requests())


@pytest.mark.parametrize(
    ("status", "content", "dropped"),
    [(200, b"", True), (200, b'{"success":true}', True), (200, b'{"success":false}', False), (404, b"", False)],
)
def test_what_a_server_says_about_its_cache(status: int, content: bytes, dropped: bool) -> None:
    client = FakeClient(FakeLLM(MODEL))
    answer = SimpleNamespace(status_code=status, content=content, json=lambda: {"success": b"true" in content})
    client.session.post = lambda url: answer
    assert Server(client).drop_cache() is dropped
