"""Weights that change, what a call leaves behind, servers, and what of vLLM and TRL all of it relies on.

Planted faults seen caught: versions unchecked before or after a call; the cache dropped never, at every call, or
without looking whether it was; a failed update that keeps its version; a tied head left out of an update; requests
left in flight, or another caller's taken; random streams or the environment not put back; an answer about other ids;
a vLLM that sleeps, is split, returns logits or chunks prefills on the CPU. With the real one: PyTorch's number of
threads unasked in a new thread; a tied head left out.
"""

from __future__ import annotations

import importlib
import inspect
import os
import random
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
import pytest
import torch
from fake_vllm import FakeClient, FakeLLM
from policies import ids, llama, requests
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from vllm_worlds import (
    LLAMA,
    LONGEST,
    MODEL,
    OTHER,
    REAL,
    STOP,
    ask,
    engine_of,
    logprobs_of,
    models,
    run,
    states,
    weights,
)

from apportion.engines.base import Sampling, Scoring
from apportion.engines.vllm import StaleWeights, VLLMEngine, settings_of, through_trl
from apportion.engines.vllm_hosts import Colocated, Host, own_llm
from apportion.engines.vllm_server import Server
from apportion.errors import InputError

# Weights and the prefix cache.


def test_new_weights_are_used_and_the_cache_is_dropped(colocated: Colocated) -> None:
    (model, other), version = models(colocated), [0]
    engine = VLLMEngine(colocated, lambda: version[0])
    engine.update(model)
    asked = [ask(), ask(prompt="qq")]
    first = run(engine, asked)
    version[0] = 1
    engine.update(other)
    second = run(engine, asked)
    assert second != first
    (read,) = engine.logprobs([Scoring(ask().key, ask().prefix_ids, 1)])
    wanted = logprobs_of(other, ask().prefix_ids, 1)
    torch.testing.assert_close(read.values, wanted, atol=5e-5, rtol=0)
    version[0] = 2
    engine.update(model)
    assert run(engine, asked) == first, "nothing of the other weights is left"


def test_the_trap_is_real(colocated: Colocated) -> None:
    """vLLM goes on from keys and values of the old weights where nobody drops its cache."""
    engine = engine_of(colocated)
    first = run(engine, [ask()])
    colocated.load(weights(models(colocated)[1]))
    stale = run(engine, [ask()])
    colocated.drop_cache()
    fresh = run(engine, [ask()])
    assert stale != fresh != first


def test_stale_weights_are_refused(host: Host) -> None:
    trained, held = [3], [3]
    engine = VLLMEngine(host, lambda: trained[0], lambda: held[0])
    run(engine, [ask(1)])
    trained[0] = 4
    for measure in (lambda: run(engine, [ask(1)]), lambda: list(engine.logprobs([Scoring(ask().key, ids(9), 2)]))):
        with pytest.raises(StaleWeights, match=r"version 4, and vLLM holds version 3"):
            measure()
    held[0] = 4
    run(engine, [ask(1)])
    held[0] = 5
    with pytest.raises(StaleWeights, match="version 5"):
        run(engine, [ask(1)])


def test_our_own_vllm_has_no_weights_before_the_first_update() -> None:
    engine = VLLMEngine(Colocated(FakeLLM(MODEL)), lambda: 0)
    with pytest.raises(StaleWeights, match="call `update`"):
        run(engine, [ask(1)])


def test_a_failed_update_leaves_no_weights_to_measure_with(monkeypatch) -> None:
    llm = FakeLLM(MODEL)
    engine = VLLMEngine(Colocated(llm), lambda: 0)
    engine.update(MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(llm, "collective_rpc", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.update(OTHER)
    with pytest.raises(StaleWeights):
        run(engine, [ask(1)])


def test_a_tied_head_is_updated_by_its_own_name(monkeypatch) -> None:
    llm, sent = FakeLLM(MODEL), dict[str, torch.Tensor]()
    monkeypatch.setattr(llm, "collective_rpc", lambda method, kwargs: sent.update(kwargs["weights_iterator"]))
    VLLMEngine(Colocated(llm), lambda: 0).update(LLAMA)
    assert LLAMA.lm_head.weight is LLAMA.get_input_embeddings().weight
    assert sent.keys() == set(LLAMA.state_dict())
    assert torch.equal(sent["lm_head.weight"], LLAMA.lm_head.weight)
    assert not any(value.requires_grad for value in sent.values())


def test_weights_that_change_while_vllm_generates_are_noticed() -> None:
    llm = FakeLLM(MODEL)
    engine = engine_of(Colocated(llm), lambda: llm.steps > 3)
    with pytest.raises(StaleWeights, match="changed"):
        run(engine, [ask(2, 9)], Sampling(()))


def test_the_cache_is_dropped_once_a_version() -> None:
    llm, version = FakeLLM(MODEL), [0]
    engine = engine_of(Colocated(llm), lambda: version[0])
    for want in (1, 1):
        run(engine, [ask(2)])
        list(engine.logprobs([Scoring(ask().key, ids(9), 2)]))
        assert llm.resets == want
    version[0] = "resumed"
    run(engine, [ask(2)])
    assert llm.resets == 2
    version[0] = 0
    run(engine, [ask(2)])
    assert llm.resets == 3, "going back is a change too"


@pytest.mark.parametrize("make", [lambda llm: Colocated(llm), lambda llm: Server(FakeClient(llm))])
def test_a_cache_that_is_not_dropped_is_an_error(make: Callable[[FakeLLM], Host]) -> None:
    llm = FakeLLM(MODEL)
    host = make(llm)
    llm.reset_prefix_cache = lambda: False  # type: ignore[method-assign]
    with pytest.raises(StaleWeights, match="did not drop"):
        run(engine_of(host), [ask(1)])
    assert not llm.added


def test_only_our_own_vllm_is_updated() -> None:
    for engine in (
        engine_of(Colocated(FakeLLM(MODEL))),
        VLLMEngine(Server(FakeClient(FakeLLM(MODEL))), lambda: 0),
    ):
        with pytest.raises(InputError, match="TRL updates"):
            engine.update(MODEL)


# No trace.


def test_global_random_streams_are_left_alone(host: Host) -> None:
    before = states()
    engine = engine_of(host)
    for _ in engine.continuations(requests(), STOP):
        assert states() == before
    list(engine.logprobs([Scoring(ask().key, ids(30), 4)]))
    if isinstance(host, Colocated):
        host.load(weights(models(host)[0]))
    assert states() == before


def test_another_thread_may_ask(host: Host) -> None:
    """As where continuations are graded while others are decoded."""
    engine = engine_of(host)
    here = run(engine, requests())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, engine, requests()).result() == here


def test_seeds_do_not_come_from_the_global_streams(host: Host) -> None:
    first = run(engine_of(host), requests())
    torch.manual_seed(99)
    random.seed(99)
    assert run(engine_of(host), requests()) == first


def test_an_interrupted_call_leaves_nothing_in_flight() -> None:
    llm = FakeLLM(MODEL)
    engine = engine_of(Colocated(llm))
    whole = run(engine, requests())
    llm.break_at = llm.steps + 3
    before = states()
    with pytest.raises(KeyboardInterrupt):
        run(engine, requests())
    assert not llm.has_unfinished_requests() and states() == before
    assert run(engine, requests()) == whole


@REAL
def test_an_interrupted_call_leaves_nothing_in_flight_in_the_real_one(real_llm, monkeypatch) -> None:
    host = Colocated(real_llm)
    host.load(weights(LLAMA))
    engine = engine_of(host)
    whole = run(engine, requests())
    step, count = real_llm.llm_engine.step, [0]

    def breaks() -> Any:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(real_llm.llm_engine, "step", breaks)
        with pytest.raises(KeyboardInterrupt):
            run(engine, requests())
    assert not real_llm.llm_engine.has_unfinished_requests()
    assert host.drop_cache()
    assert run(engine, requests()) == whole


def test_a_refused_request_takes_those_before_it_along(monkeypatch) -> None:
    llm = FakeLLM(MODEL)
    add = llm.add_request

    def refuses(name: str, prompt: Any, params: Any) -> Any:
        if len(prompt["prompt_token_ids"]) == 40:
            raise ValueError("refused")
        return add(name, prompt, params)

    monkeypatch.setattr(llm, "add_request", refuses)
    with pytest.raises(ValueError, match="refused"):
        run(engine_of(Colocated(llm)), [ask(), ask(length=40)])
    assert not llm.running


def test_anothers_requests_are_not_taken() -> None:
    llm = FakeLLM(MODEL)
    engine = engine_of(Colocated(llm))
    run(engine, [ask(1)])
    llm.add_request("theirs", {"type": "token", "prompt_token_ids": [1, 2]}, fake_vllm.SamplingParams(seed=1))
    with pytest.raises(RuntimeError, match="another caller"):
        run(engine, [ask(1)])
    assert [child.name for child in llm.running] == ["theirs"]


def test_what_vllm_breaks_off_is_missing_and_counted() -> None:
    llm = FakeLLM(MODEL)
    engine = engine_of(Colocated(llm))
    whole = run(engine, [ask(4, 9)], Sampling(()))
    llm.abort_at = llm.steps + 3
    left = run(engine, [ask(4, 9)], Sampling(()))
    assert left == {c for c in whole if c.m != 0}
    assert engine.lost == 1


def test_an_answer_about_another_prefix_is_an_error(monkeypatch) -> None:
    llm = FakeLLM(MODEL)
    step = llm.step

    def cut() -> list[Any]:
        out = step()
        for output in out:
            output.prompt_token_ids = output.prompt_token_ids[1:]
        return out

    monkeypatch.setattr(llm, "step", cut)
    with pytest.raises(RuntimeError, match="69 token ids"):
        run(engine_of(Colocated(llm)), [ask(1)])
    assert not llm.running


# What cannot be used.


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"enable_sleep_mode": True}, "sleep_mode"),
        ({"tensor_parallel_size": 2}, "tensor_parallel"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({"enable_chunked_prefill": True}, "chunked_prefill"),
    ],
)
def test_a_vllm_that_cannot_be_used(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        Colocated(FakeLLM(MODEL, **settings))


def test_a_server_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match="logprobs_mode"):
        Server(FakeClient(FakeLLM(MODEL, logprobs_mode="processed_logits")))
    with pytest.raises(InputError, match="chunked_prefill"):
        Server(FakeClient(FakeLLM(MODEL, enable_chunked_prefill=True)))
    for usable in ({"enable_chunked_prefill": True, "device": "cuda"}, {"logprobs_mode": "raw_logprobs"}):
        Server(FakeClient(FakeLLM(MODEL, **usable)))
        Colocated(FakeLLM(MODEL, **usable))


def test_workers_elsewhere_cannot_read_our_weights() -> None:
    llm = FakeLLM(MODEL)
    del llm.model_executor
    with pytest.raises(InputError, match="MULTIPROCESSING"):
        VLLMEngine(Colocated(llm), lambda: 0).update(MODEL)


def test_without_vllm_the_message_says_how_to_get_it(monkeypatch) -> None:
    host = Colocated(FakeLLM(MODEL))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"apportion\[vllm\]"):
        run(engine_of(host), [ask(1)])
    with pytest.raises(InputError, match=r"apportion\[vllm\]"):
        own_llm(LLAMA, LONGEST)


def test_our_own_vllm_is_made_in_this_process(monkeypatch) -> None:
    made: list[Any] = []

    def llm(folder: str, **arguments: Any) -> None:
        config = (Path(folder) / "config.json").read_text()
        made.append((arguments, os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"], "LlamaForCausalLM" in config))
        random.random(), torch.rand(1), np.random.random()

    monkeypatch.setattr(sys.modules["vllm"], "LLM", llm)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    before = states()
    own_llm(LLAMA, 99, block_size=32)
    assert states() == before and "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    arguments = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 99,
        "enable_prefix_caching": True, "enable_chunked_prefill": False, "block_size": 32,
    }  # fmt: skip
    assert made == [(arguments, "0", True)]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    own_llm(LLAMA, 99)
    assert made[1][1] == "0" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_peft_needs_trls_vllm() -> None:
    peft = pytest.importorskip("peft", reason="needs apportion[peft]")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(InputError, match="PEFT"):
        own_llm(model, 99)


# The host's side: through TRL, and what probing makes of it.


def test_through_trl() -> None:
    llm = FakeLLM(MODEL, LONGEST)
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=0), _last_loaded_step=-1)
    versions = (lambda: trainer.state.global_step, lambda: trainer._last_loaded_step)
    engine = through_trl(SimpleNamespace(mode="colocate", llm=llm), *versions)
    with pytest.raises(StaleWeights):
        run(engine, requests())
    trainer._last_loaded_step = 0
    done = run(engine, requests())
    server = through_trl(SimpleNamespace(mode="server", vllm_client=FakeClient(llm)), *versions)
    assert run(server, requests()) == done
    trainer.state.global_step = 1
    with pytest.raises(StaleWeights):
        run(server, requests())


def test_trl_is_as_expected() -> None:
    """What the engine relies on in TRL; the fake client takes and gives the same."""
    for name in ("generate", "get_sequence_logprobs", "get_server_info"):
        real = inspect.signature(getattr(VLLMClient, name)).parameters
        fake = inspect.signature(getattr(FakeClient, name)).parameters
        assert {k: p.default for k, p in real.items()} == {k: p.default for k, p in fake.items()}, name
    source = inspect.getsource(VLLMClient)
    assert all(text in source for text in ("self.session = ", "self.base_url = ", "/reset_prefix_cache"))
    generation = inspect.getsource(VLLMGeneration)
    assert all(text in generation for text in ("self.mode = mode", "self.llm = LLM(", "self.vllm_client = VLLMClient("))
    trainer = inspect.getsource(GRPOTrainer)
    assert "self.vllm_generation = VLLMGeneration(" in trainer
    synced = r"self\.vllm_generation\.sync_weights\(\)\s+self\._last_loaded_step = self\.state\.global_step"
    assert re.search(synced, trainer)


@REAL
def test_the_fake_is_like_vllm_the_real_one(real_llm) -> None:
    vllm = importlib.import_module("vllm")
    fields = {f.name: f.default for f in fake_vllm.SamplingParams.__dataclass_fields__.values()}
    real = vllm.SamplingParams()
    for name in fields:
        assert hasattr(real, name)
    for name in ("n", "temperature", "top_p", "min_p", "repetition_penalty", "seed", "ignore_eos", "max_tokens"):
        assert getattr(real, name) == fields[name], name
    for name, first in (
        ("add_request", ["request_id", "prompt", "params"]),
        ("abort_request", ["request_ids"]),
        ("step", []),
    ):
        real_names = list(inspect.signature(getattr(real_llm.llm_engine, name)).parameters)
        assert real_names[: len(first)] == first
    assert set(settings_of(STOP)) <= set(inspect.signature(vllm.SamplingParams).parameters)
    llm = FakeLLM(MODEL, LONGEST)
    for one in (real_llm, llm):
        Colocated(one).load(weights(models(Colocated(one))[0]))
        assert one.reset_prefix_cache() is True
        params = vllm.SamplingParams if one is real_llm else fake_vllm.SamplingParams
        engine, steps = one.llm_engine, []
        before = states()
        for name, extra in (("a", {"n": 2}), ("b", {"prompt_logprobs": 0, "max_tokens": 1})):
            common = {"seed": 5, "max_tokens": 3, "stop_token_ids": [3], "ignore_eos": True, "detokenize": False}
            engine.add_request(
                name, {"type": "token", "prompt_token_ids": list(ids(40))}, params(**{**common, **extra})
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                (completion,) = output.outputs
                steps.append((output.request_id, completion.index, len(completion.token_ids), output.finished))
                assert list(output.prompt_token_ids) == list(ids(40))
                assert (completion.finish_reason is not None) == (
                    len(completion.token_ids) == 3 or output.request_id == "b"
                )
                if output.request_id == "b":
                    assert output.num_cached_tokens == 0 and output.prompt_logprobs[0] is None
                    assert len(output.prompt_logprobs) == 40
                    logp = [
                        at[token].logprob for at, token in zip(output.prompt_logprobs[1:], ids(40)[1:], strict=True)
                    ]
            if len(steps) < 6:
                assert one.reset_prefix_cache() is False
        assert sorted(steps) == [
            ("a", 0, 1, False), ("a", 0, 2, False), ("a", 0, 3, False), ("a", 1, 1, False), ("a", 1, 2, False),
            ("a", 1, 3, True), ("b", 0, 1, True),
        ]  # fmt: skip
        assert states() != before, "it draws from the global streams"
        assert max(logp) < 0
