"""The replica of verl on plain transformers: what a server does, without Ray; and what verl finds, where it is there.

The slow reference below is written from the definitions alone: whole forwards, one token of one request at a time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion.integrations.verl.asks import Ask, Limits, ask_of
from apportion.integrations.verl.mailbox import Mailbox
from apportion.integrations.verl.serving import ReplicaAsleepError, Served, Serving
from apportion.tasks import ArithmeticTask, generate, load_policy

sys.path.insert(0, str(Path(__file__).parent))

LIMITS = Limits(prompt=24, response=40, length=96)
EOS = 1
PROMPTS = [problem.prompt for problem in generate(ArithmeticTask(operations=3), "test", 4)]


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_policy()


@pytest.fixture
def serving(policy):
    model, tokenizer = policy
    return Serving("replica 0", model, tokenizer.pad_token_id, max_batch=8, length=96)


def ask(policy, prompt: str, request: str = "r", **params) -> Ask:
    return ask_of(request, policy[1](prompt).input_ids, params, (EOS,), LIMITS)


def finish(work):
    """Runs it; what waits forever fails."""
    return asyncio.run(asyncio.wait_for(work, 60))


def answers(serving: Serving, *asks: Ask) -> list[Served]:
    async def all_of_them():
        return await asyncio.gather(*(serving.generate(each) for each in asks))

    return finish(all_of_them())


def reference(policy, asked: Ask, temperature=1.0, top_k=0, top_p=1.0, penalty=1.0) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities at the temperature, before any filter, in float64."""
    model = policy[0]
    draws = np.random.Generator(np.random.Philox(key=asked.key.stream(0))).random(asked.budget)
    tokens, logprobs = [], []
    for u in draws:
        ids = [*asked.prefix_ids, *tokens]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        plain = logits / temperature
        scores = logits.copy()
        for token in set(ids):
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        scores = scores / temperature
        if top_k:
            scores[scores < np.sort(scores)[-top_k]] = -np.inf
        p = np.exp(scores - scores.max())
        p /= p.sum()
        if top_p < 1:
            kept, mass = [], 0.0
            for token in np.argsort(-p):
                kept.append(token)
                mass += p[token]
                if mass >= top_p:
                    break
            p[[token for token in range(len(p)) if token not in kept]] = 0
            p /= p.sum()
        token = int(np.searchsorted(np.cumsum(p), u, side="right"))
        tokens.append(token)
        logprobs.append(float(plain[token] - plain.max() - np.log(np.exp(plain - plain.max()).sum())))
        if token == EOS:
            break
    return tokens, logprobs


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.2, "top_k": 6, "top_p": 0.9, "penalty": 1.3},
    ],
)
def test_tokens_and_logprobs_are_those_of_the_slow_reference(policy, serving, how):
    params = {{"penalty": "repetition_penalty"}.get(name, name): value for name, value in how.items()}
    for seed, prompt in enumerate(PROMPTS[:2]):
        asked = ask(policy, prompt, seed=seed, logprobs=True, **params)
        tokens, logprobs = reference(policy, asked, **how)
        [served] = answers(serving, asked)
        assert list(served.token_ids) == tokens
        assert served.log_probs == pytest.approx(logprobs, abs=5e-5)
        assert served.stop == "completed"


def test_a_temperature_of_zero_is_greedy(policy, serving):
    for prompt in PROMPTS:
        [served] = answers(serving, ask(policy, prompt, temperature=0, top_k=-1, top_p=1.0))
        tokens, _ = reference(policy, ask(policy, prompt), top_k=1)
        assert list(served.token_ids) == tokens


@pytest.fixture(scope="module")
def alone(policy):
    """Six requests, and what the reference answers to each."""
    budgets = [5, 12, 40, 7, 30, 12]
    asks = [ask(policy, PROMPTS[i % 4], f"call {i}", seed=i, max_tokens=budgets[i]) for i in range(6)]
    return [(asked, tuple(reference(policy, asked)[0])) for asked in asks]


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(6)), st.sampled_from([1, 2, 8]), st.integers(1, 6))
def test_a_seeded_request_does_not_depend_on_its_company(policy, alone, order, max_batch, count):
    serving = Serving("replica 0", policy[0], 0, max_batch=max_batch, length=96)
    chosen = [alone[i] for i in order[:count]]
    served = answers(serving, *(asked for asked, _ in chosen))
    assert [each.token_ids for each in served] == [tokens for _, tokens in chosen]


def test_equal_seeds_on_two_prompts_are_two_continuations(policy, serving):
    asks = [ask(policy, prompt, seed=3) for prompt in PROMPTS[:2]]
    assert len(asks[0].prefix_ids) == len(asks[1].prefix_ids)
    assert [list(each.token_ids) for each in answers(serving, *asks)] == [reference(policy, each)[0] for each in asks]


def test_two_samplings_at_once_are_both_right(policy, serving):
    hot = ask(policy, PROMPTS[0], seed=3, temperature=2.0)
    cold = ask(policy, PROMPTS[1], seed=3, temperature=0.5)
    served = answers(serving, hot, cold)
    assert list(served[0].token_ids) == reference(policy, hot, temperature=2.0)[0]
    assert list(served[1].token_ids) == reference(policy, cold, temperature=0.5)[0]


def test_equal_seeds_on_one_prompt_are_one_continuation_at_every_budget(policy, serving):
    asks = [ask(policy, PROMPTS[0], f"call {n}", seed=9, max_tokens=n) for n in (3, 11, 7, 11)]
    served = answers(serving, *asks)
    longest = served[1].token_ids
    assert len(longest) == 11
    assert [each.token_ids for each in served] == [longest[:3], longest, longest[:7], longest]
    assert {each.stop for each in served} == {"completed"}


def test_without_a_seed_the_name_of_the_request_decides(policy, serving):
    one, again, other = (ask(policy, PROMPTS[0], name, temperature=3.0) for name in ("a", "a", "b"))
    served = answers(serving, one, again, other)
    assert served[0].token_ids == served[1].token_ids != served[2].token_ids
    assert list(served[2].token_ids) == reference(policy, other, temperature=3.0)[0]


def test_a_stop_token_ends_a_continuation_and_is_part_of_it(policy, serving):
    plain = ask(policy, PROMPTS[0], seed=0, temperature=0)
    [served] = answers(serving, plain)
    assert served.token_ids[-1] == EOS and EOS not in served.token_ids[:-1]
    other = served.token_ids[4]
    [cut] = answers(serving, ask(policy, PROMPTS[0], temperature=0, stop_token_ids=[other]))
    assert cut.token_ids == served.token_ids[: served.token_ids.index(other) + 1]
    [on] = answers(serving, ask(policy, PROMPTS[0], temperature=0, ignore_eos=True))
    assert len(on.token_ids) == LIMITS.response and on.token_ids[: len(served.token_ids)] == served.token_ids


def test_logprobs_come_to_those_who_ask(policy, serving):
    asks = [ask(policy, PROMPTS[0], f"call {n}", seed=4, max_tokens=6, logprobs=n > 0) for n in range(2)]
    without, with_them = answers(serving, *asks)
    assert without.log_probs is None and len(with_them.log_probs) == len(with_them.token_ids)


# What verl asks for in a configuration of 24 prompt and 40 response tokens, in 64 or 96 positions.
@pytest.mark.parametrize(
    ("length", "prompt", "params", "budget"),
    [
        (96, 10, {}, 40),
        (96, 24, {}, 40),
        (96, 30, {}, 34),
        (96, 70, {}, 1),
        (96, 10, {"max_tokens": 60}, 60),
        (96, 10, {"max_new_tokens": 7}, 7),
        (96, 10, {"max_tokens": None, "max_new_tokens": 7}, 7),
        (64, 60, {"max_tokens": 9}, 4),
    ],
)
def test_budgets(length, prompt, params, budget):
    limits = Limits(prompt=24, response=40, length=length)
    assert ask_of("r", [5] * prompt, params, (EOS,), limits).budget == budget


@pytest.mark.parametrize(
    ("prefix", "params", "words"),
    [
        ([5], {"top_pp": 0.9}, "did you mean 'top_p'"),
        ([5], {"n": 4}, "a request for each continuation"),
        ([5], {"max_tokens": 0}, "sampling_params.max_tokens: got 0"),
        ([5], {"temperature": -1.0}, "sampling.temperature"),
        ([], {}, "0 tokens"),
        ([5] * 96, {}, "96 tokens; expected 1 to 95"),
    ],
)
def test_requests_that_cannot_be_served(prefix, params, words):
    with pytest.raises(InputError, match=words):
        ask_of("r", prefix, params, (EOS,), LIMITS)


def test_foreign_token_ids_are_refused_and_harm_nobody(policy, serving):
    async def both():
        good = ask(policy, PROMPTS[0], seed=1)
        bad = [ask_of("r", ids, {}, (EOS,), LIMITS) for ids in ([5, 20], [-1, 5])]
        return good, await asyncio.gather(
            *(serving.generate(each) for each in (bad[0], good, bad[1])), return_exceptions=True
        )

    good, (first, served, last) = finish(both())
    assert isinstance(first, InputError) and "got 20; expected ids from 0 to 19" in str(first)
    assert isinstance(last, InputError) and "got -1" in str(last)
    assert list(served.token_ids) == reference(policy, good)[0]


def test_an_error_of_the_model_comes_to_those_who_asked_and_the_next_are_served(policy, serving, monkeypatch):
    asked = ask(policy, PROMPTS[0], seed=1)
    with monkeypatch.context() as broken, pytest.raises(FloatingPointError, match="no more"):
        broken.setattr(serving.engine, "continuations", lambda *_: (_ for _ in ()).throw(FloatingPointError("no more")))
        answers(serving, asked)
    assert list(answers(serving, asked)[0].token_ids) == reference(policy, asked)[0]


def weights_of(model) -> dict:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def test_a_replica_that_sleeps_refuses_until_it_has_weights_again(policy, serving):
    asked = ask(policy, PROMPTS[0], seed=1)

    async def life():
        await serving.release(["weights", "kv_cache"], forget=True)
        with pytest.raises(ReplicaAsleepError, match="replica 0 is asleep"):
            await serving.generate(asked)
        serving.wake(["weights"])
        with pytest.raises(ReplicaAsleepError, match="asleep"):
            await serving.generate(asked)
        serving.wake(["kv_cache"])
        with pytest.raises(ReplicaAsleepError, match="no weights"):
            await serving.generate(asked)
        await serving.update(weights_of(policy[0]), 7, first=True, last=True)
        return await serving.generate(asked)

    served = finish(life())
    assert served.version == 7
    assert list(served.token_ids) == reference(policy, asked)[0]


def test_a_cache_that_was_released_comes_back_without_new_weights(policy, serving):
    async def life():
        await serving.release(["kv_cache"])
        with pytest.raises(ReplicaAsleepError):
            await serving.generate(ask(policy, PROMPTS[0]))
        serving.wake(["kv_cache"])
        return await serving.generate(ask(policy, PROMPTS[0], seed=1))

    assert finish(life()).version is None


def test_sleep_lets_what_was_accepted_end_and_takes_no_more(policy, serving):
    async def life():
        running = asyncio.create_task(serving.generate(ask(policy, PROMPTS[0], seed=1)))
        await asyncio.sleep(0)
        asleep = asyncio.create_task(serving.release(["kv_cache"]))
        await asyncio.sleep(0)
        with pytest.raises(ReplicaAsleepError):
            await serving.generate(ask(policy, PROMPTS[1], seed=1))
        await asleep
        assert running.done()
        return await running

    assert list(finish(life()).token_ids) == reference(policy, ask(policy, PROMPTS[0], seed=1))[0]


def copy_of(policy):
    return load_policy()[0], policy[1]


def test_new_weights_are_the_policy_from_their_last_part_on(policy):
    own = copy_of(policy)
    serving = Serving("replica 0", own[0], 0, max_batch=8, length=96, ready=False)
    new = {
        name: tensor + 0.05 * torch.sin(torch.arange(tensor.numel()).view_as(tensor))
        for name, tensor in weights_of(policy[0]).items()
    }
    names = sorted(new)
    asked = ask(policy, PROMPTS[0], seed=2, temperature=1.4)

    async def life():
        with pytest.raises(ReplicaAsleepError, match="no weights"):
            await serving.generate(asked)
        await serving.update(weights_of(policy[0]), 1, first=True, last=True)
        old = await serving.generate(asked)
        await serving.update({name: new[name] for name in names[:5]}, 2, first=True, last=False)
        with pytest.raises(ReplicaAsleepError, match="no weights"):
            await serving.generate(asked)
        assert serving.version == 1
        await serving.update({name: new[name] for name in names[5:]}, 2, first=False, last=True)
        return old, await serving.generate(asked)

    old, served = finish(life())
    changed = copy_of(policy)
    changed[0].load_state_dict(new, strict=False)
    assert list(old.token_ids) == reference(policy, asked, temperature=1.4)[0]
    assert list(served.token_ids) == reference(changed, asked, temperature=1.4)[0] != list(old.token_ids)
    assert (old.version, served.version) == (1, 2)


def test_weights_wait_for_a_continuation_under_way(policy):
    own = copy_of(policy)
    serving = Serving("replica 0", own[0], 0, max_batch=8, length=96)
    asked = ask(policy, PROMPTS[0], seed=2, ignore_eos=True)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights_of(policy[0]).items()}

    async def life():
        running = asyncio.create_task(serving.generate(asked))
        await asyncio.sleep(0.02)
        await serving.update(zeros, 1, first=True, last=True)
        assert running.done()
        return await running

    served = finish(life())
    assert served.version is None
    assert len(served.token_ids) == 40
    own[0].load_state_dict(weights_of(policy[0]), strict=False)
    assert served.token_ids == answers(Serving("other", own[0], 0, max_batch=8, length=96), asked)[0].token_ids


@pytest.mark.parametrize("change", ["missing", "misnamed", "misshaped", "of an update that was broken off"])
def test_weights_that_are_not_whole_are_refused(policy, change):
    own = copy_of(policy)
    serving = Serving("replica 0", own[0], 0, max_batch=8, length=96)
    new = weights_of(policy[0])
    name = "model.norm.weight"
    taken = new.pop(name)
    if change == "misnamed":
        new["model.norm.wait"] = taken
    if change == "misshaped":
        new[name] = taken[:-1]

    async def life():
        if change.startswith("of an"):
            await serving.update({name: taken}, 1, first=True, last=False)
        await serving.update(new, 1, first=True, last=True)

    with pytest.raises(InputError, match="norm"):
        finish(life())
    with pytest.raises(ReplicaAsleepError, match="no weights"):
        answers(serving, ask(policy, PROMPTS[0]))


def test_abort_hands_back_what_is_there_and_resume_lets_the_rest_go_on(policy, serving):
    """What verl's asynchronous trainers do around new weights: abort, update, resume; then they ask for the rest."""
    long = ask(policy, PROMPTS[0], seed=1, max_tokens=60, ignore_eos=True)
    whole = answers(serving, long)[0].token_ids
    reached = asyncio.Event()

    async def life():
        loop, step = asyncio.get_running_loop(), serving.engine.step
        made = 0

        def counted(*args):
            nonlocal made
            made += 1
            if made == 10:
                # The thread that decodes waits for the abort, so that it comes in the middle.
                loop.call_soon_threadsafe(reached.set)
                asyncio.run_coroutine_threadsafe(closed.wait(), loop).result(20)
            return step(*args)

        closed = asyncio.Event()
        serving.engine.step = counted
        running = asyncio.create_task(serving.generate(long))
        await reached.wait()
        queued = asyncio.create_task(serving.generate(ask(policy, PROMPTS[1], seed=1)))
        await asyncio.sleep(0)
        ending = asyncio.create_task(serving.abort())
        await asyncio.sleep(0)
        closed.set()
        count = await ending
        serving.engine.step = step
        late = asyncio.create_task(serving.generate(ask(policy, PROMPTS[2], seed=1)))
        await asyncio.sleep(0.02)
        assert not late.done()
        serving.resume()
        return count, await running, await queued, await late

    count, running, queued, late = finish(life())
    assert count == 2
    assert running.stop == "aborted" and 0 < len(running.token_ids) < 60
    assert running.token_ids == whole[: len(running.token_ids)]
    assert queued == Served((), None, "aborted", None)
    assert list(late.token_ids) == reference(policy, ask(policy, PROMPTS[2], seed=1))[0]


def test_a_replica_that_leaves_answers_with_nothing_instead_of_waiting(policy, serving):
    async def life():
        await serving.abort(rejecting=True)
        await serving.release(["weights", "kv_cache"], forget=True)
        return await asyncio.wait_for(serving.generate(ask(policy, PROMPTS[0])), 5)

    assert finish(life()) == Served((), None, "aborted", None)


def test_who_waits_at_the_gate_of_a_sleeping_replica_is_served_after_it_woke(policy, serving):
    """The colocated asynchronous trainer: abort, sleep, train, weights, wake, resume, and requests at any time."""
    asked = ask(policy, PROMPTS[0], seed=1)

    async def life():
        await serving.abort()
        await serving.release(["weights", "kv_cache"], forget=True)
        waiting = asyncio.create_task(serving.generate(asked))
        await asyncio.sleep(0.01)
        serving.wake(["weights"])
        await serving.update(weights_of(policy[0]), 3, first=True, last=True)
        serving.wake(["kv_cache"])
        assert not waiting.done()
        serving.resume()
        return await waiting

    assert finish(life()).version == 3


# What verl finds. These run in its environment.
needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed here: make cluster runs this"
)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    from apportion.integrations.verl import replica

    replica.register()
    return replica


@needs_verl
def test_verl_finds_the_engine_by_its_name(on_cpu):
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.plugin.platform import PlatformRegistry
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    from apportion.integrations.verl import cpu, transfer

    assert get_rollout_class("apportion_transformers", "async") is on_cpu.ServerAdapter
    assert get_rollout_replica_class("apportion_transformers") is on_cpu.Replica
    assert CheckpointEngineRegistry.get("apportion_ray") is transfer.RayCheckpointEngine
    platform = PlatformRegistry.get("cpu")()
    assert isinstance(platform, cpu.PlatformCPU) and platform.device_name == "cpu"
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"
    free, total = platform.device_module.mem_get_info()
    assert 0 < free <= total
    assert platform.device_module.memory_allocated() == 0 and platform.device_module.is_available()


@needs_verl
@pytest.mark.parametrize("free_cache_engine", [True, False])
def test_the_server_answers_as_verl_expects(on_cpu, policy, tmp_path, free_cache_engine):
    import verl_run
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.replica import RolloutMode

    from apportion.integrations.verl.server import Server

    path = verl_run.tiny_model(tmp_path)
    described = HFModelConfig(path=str(path), override_config={"attn_implementation": "sdpa"})
    assert len(described.tokenizer) == described.hf_config.vocab_size
    config = RolloutConfig(
        name=on_cpu.NAME, dtype="float32", prompt_length=24, response_length=40, max_model_len=96,
        free_cache_engine=free_cache_engine, load_format="dummy",
    )  # fmt: skip
    server = Server(config, described, RolloutMode.HYBRID, 3)
    text = described.tokenizer.apply_chat_template([{"role": "user", "content": PROMPTS[0]}], tokenize=False)
    ids = described.tokenizer(text).input_ids
    params = {"temperature": 1.2, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 5}

    async def life():
        with pytest.raises(ReplicaAsleepError, match="replica 3"):
            await server.generate(ids, params, "r")
        await server.sleep()
        await server.wake_up(tags=["weights"])
        await server.update_weights(weights_of(policy[0]), 4, True, True)
        await server.wake_up(tags=["kv_cache"])
        served = await server.generate(
            prompt_ids=ids, sampling_params=params, request_id="r", image_data=None, video_data=None
        )
        with pytest.raises(InputError, match="image_data"):
            await server.generate(ids, params, "r", image_data=["picture"])
        await server.sleep()
        if free_cache_engine:
            with pytest.raises(ReplicaAsleepError, match="asleep"):
                await server.generate(ids, params, "r")
        else:
            assert (await server.generate(ids, params, "r")).token_ids == served.token_ids
        return served

    served = finish(life())
    tokens, logprobs = reference(policy, ask(policy, PROMPTS[0], seed=5), temperature=1.2)
    assert served.token_ids == tokens
    assert served.log_probs == pytest.approx(logprobs, abs=5e-5)
    assert served.extra_fields == {"global_steps": 4} and served.stop_reason == "completed"


@needs_verl
@pytest.mark.parametrize(("size", "sizes"), [(1, [1, 1, 1, 1]), (8, [2, 1, 1]), (12, [2, 2]), (100, [4])])
def test_weights_travel_in_buckets_of_a_size(size, sizes):
    """Tensors of 4, 4, 8 and 4 bytes: each bucket holds at least one, and more while they fit."""
    from apportion.integrations.verl.transfer import buckets

    weights = [("a", torch.zeros(1)), ("b", torch.ones(1)), ("c", torch.ones(2)), ("d", torch.ones(1))]

    async def all_of_them():
        return [each async for each in buckets(iter(weights), size)]

    out = finish(all_of_them())
    assert [len(bucket) for bucket, _ in out] == sizes
    assert [last for _, last in out] == [False] * (len(sizes) - 1) + [True]
    assert [name for bucket, _ in out for name in bucket] == ["a", "b", "c", "d"]


def test_every_reader_gets_every_part_in_order_at_its_own_pace_and_the_next_model_after_that():
    async def reader(box, number, pause):
        out = []
        for _ in range(2):
            last = False
            while not last:
                part, last = await box.take(number, len(out) % 4)
                out.append(part)
                await asyncio.sleep(pause)
        return out

    async def sender(box):
        for model in ("a", "b"):
            for part in range(4):
                await box.put(f"{model}{part}", part == 3)

    async def life():
        box = Mailbox(readers=3)
        readers = (reader(box, number, pause) for number, pause in enumerate((0, 0.004, 0.001)))
        return await asyncio.wait_for(asyncio.gather(sender(box), *readers), 20)

    _, *read = finish(life())
    assert read == [["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]] * 3


def test_the_sender_is_at_most_a_part_ahead_of_the_slowest_reader():
    async def life():
        box = Mailbox(readers=2)
        await box.put("first", False)
        second = asyncio.create_task(box.put("second", True))
        assert await box.take(0, 0) == ("first", False)
        await asyncio.sleep(0.01)
        assert not second.done()
        assert await box.take(1, 0) == ("first", False)
        await asyncio.wait_for(second, 5)

    finish(life())


@needs_verl
def test_weights_arrive_through_ray_as_they_were_sent(monkeypatch):
    """With the calls of Ray replaced by their results: the real ones are in a run of separate_async."""
    from apportion.integrations.verl import transfer

    async def stored(value):
        return value

    class Handle:
        def __init__(self, box):
            self.put, self.take = (SimpleNamespace(remote=call) for call in (box.put, box.take))

    monkeypatch.setattr(transfer.ray, "put", lambda bucket: asyncio.ensure_future(stored(bucket)))
    weights = [(f"w{i}", torch.full((3,), float(i))) for i in range(7)]

    async def received(handle, reader):
        engine = transfer.RayCheckpointEngine(bucket_size=24)
        engine.init_process_group(handle, reader)
        return [(name, tensor.tolist()) async for name, tensor in engine.receive_weights(global_steps=1)]

    async def sent(handle, master):
        engine, walked = transfer.RayCheckpointEngine(bucket_size=24, is_master=master), []
        engine.init_process_group(handle, 0)
        await engine.send_weights((walked.append(each[0]) or each for each in weights), global_steps=1)
        return walked

    async def life():
        handle = Handle(Mailbox(readers=2))
        calls = received(handle, 0), received(handle, 1), sent(handle, True), sent(handle, False)
        return await asyncio.wait_for(asyncio.gather(*calls), 20)

    one, other, *senders = finish(life())
    assert one == other == [(f"w{i}", [float(i)] * 3) for i in range(7)]
    # Gathering a tensor is a collective: ranks that send nothing walk through all the same.
    assert senders == [[f"w{i}" for i in range(7)]] * 2
