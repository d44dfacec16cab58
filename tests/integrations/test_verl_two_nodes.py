"""Probes on two Ray nodes, each of which is a set of processes of its own, on the loopback device.

Real actors of ours, behind verl's own client and balancer; engines and reward workers are stand-ins that take their
time. An engine draws a continuation from the seed and the prefix it is given, so what must come back is written down
here without any worker: `expected`. Tests run in their order: what they break is mended by the one that breaks it, and
the second node is taken away at the end.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="verl is not installed; `make cluster` installs it and runs this")

import ray
from omegaconf import OmegaConf
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from verl_run import tiny_model

from apportion.engines.base import Key, Request
from apportion.errors import InputError
from apportion.integrations.verl import workers
from apportion.integrations.verl.settings import ProbeSettings
from apportion.integrations.verl.workers import Answer, Probes

# The classes of this file are no module's on the other side.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

STOP, SAMPLES, STATES, BUDGET, VERSION = 2, 8, 12, 12, 3
SECONDS = 300


def drawn(prefix, sampling):
    """What every engine answers: the prompt's mark first, so that a continuation says whose it is."""
    rng = random.Random(f"{sampling['seed']} {prefix}")
    length = rng.randint(1, sampling["max_tokens"])
    ids = [prefix[0]] + [rng.randrange(3, 19) for _ in range(length - 1)]
    return ids if length == sampling["max_tokens"] else [*ids, STOP]


class Engine:
    """A replica. How long it takes hangs on no seed, so that answers come in another order every time."""

    def __init__(self, least=0.2, most=0.6):
        self.least, self.most, self.hangs = least, most, False
        self.prefixes, self.started, self.cancelled = set(), 0, 0

    async def generate(self, request_id, *, prompt_ids, sampling_params, **media):
        self.started += 1
        self.prefixes.add(tuple(prompt_ids))
        try:
            await asyncio.sleep(3600 if self.hangs else random.uniform(self.least, self.most))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        ids = drawn(prompt_ids, sampling_params)
        return SimpleNamespace(
            token_ids=ids, log_probs=[-0.5] * len(ids) if sampling_params["logprobs"] else None,
            stop_reason="completed", extra_fields={"global_steps": VERSION},
        )  # fmt: skip

    async def seen(self):
        return self.started, self.cancelled, self.prefixes

    async def set(self, **values):
        vars(self).update(values)


class Reward:
    """A reward worker: −1 where prompt, response and row are not of one group."""

    async def compute_score(self, data):
        item = data[0]
        mark = item.non_tensor_batch["reward_model"]["ground_truth"]
        response = item.batch["responses"].tolist()
        whole = item.batch["prompts"][0] == mark and response[0] == mark
        return {"reward_score": float(sum(response)) if whole else -1.0, "reward_extra_info": {}}


def requests():
    """States of three prompts, whose marks are 16, 17 and 18; a response starts with its mark as well."""
    marks = [16 + i % 3 for i in range(STATES)]
    return [
        Request(Key("0", 1, str(mark), i, 2), (mark, 5, 6, mark, 3 + i), SAMPLES, BUDGET)
        for i, mark in enumerate(marks)
    ]


def rows(asked):
    return {r.key: {"data_source": "marks", "reward_model": {"ground_truth": r.prefix_ids[0]}} for r in asked}


def expected(asked, tokenizer):
    """Every answer, one after the other."""
    found = {}
    for r in asked:
        for m in range(r.first, r.first + r.samples):
            text = "\x1f".join(map(str, (r.key.run, r.key.step, r.key.prompt, r.key.sample, r.key.position, m)))
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % 2**31
            ids = drawn(list(r.prefix_ids), {"seed": seed, "max_tokens": r.budget})
            response = [*r.prefix_ids[3:], *ids]
            full = tokenizer.decode(response, skip_special_tokens=True)
            scored = (-0.5,) * len(ids) if m == r.first else None
            found[r.key, m] = Answer(
                m, tuple(ids), "stop" if ids[-1] == STOP else "length", False, full, float(sum(response)), VERSION,
                VERSION, logprobs=scored,
            )  # fmt: skip
    return found


class World:
    """Two nodes, two engines and a reward worker on each, verl's balancer and client, and workers of ours."""

    def __init__(self, folder):
        from verl.utils import hf_tokenizer

        quick = {
            "health_check_initial_delay_ms": 500,
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 4,
        }
        context = ray.init(
            address="local", num_cpus=4, include_dashboard=False, _temp_dir=str(folder), log_to_driver=False,
            object_store_memory=100 * 2**20, _system_config=quick,
        )  # fmt: skip
        ray_command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=4"]
        self.second = subprocess.Popen(
            [*ray_command, f"--address={context.address_info['gcs_address']}", f"--object-store-memory={100 * 2**20}"],
            start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(lambda: len(self.nodes()) == 2)
        here = ray.get_runtime_context().get_node_id()
        self.node = sorted(self.nodes(), key=lambda name: name != here)
        model = str(tiny_model(folder))
        self.tokenizer = hf_tokenizer(model)
        self.config = OmegaConf.create(
            {"actor_rollout_ref": {
                "model": {"path": model, "tokenizer_path": None},
                "rollout": {"name": "vllm", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": False,
                            "full_determinism": False, "max_model_len": None, "agent": {"num_workers": 2}},
            }}
        )  # fmt: skip
        self.engines = {f"engine {i}": self.on(i % 2, Engine) for i in range(4)}
        self.rewards = [self.on(i, Reward) for i in range(2)]
        # With the driver: a run of verl does not outlive its balancer, wherever Ray puts it.
        self.balancer = self.on(0, GlobalRequestLoadBalancer, self.engines)
        # The second node is known everywhere once something runs there.
        self.seen()
        self.patient, self.single = self.probes(workers=2), self.probes(workers=1)
        self.hasty = self.probes(workers=1, timeout_s=3.0)

    def on(self, node, kind, *about):
        there = NodeAffinitySchedulingStrategy(self.node[node], soft=False)
        return ray.remote(kind).options(num_cpus=0, scheduling_strategy=there).remote(*about)

    def probes(self, *, config=None, **settings):
        config = config or self.config
        return Probes(
            config, LLMServerClient(config, self.balancer), self.rewards,
            ProbeSettings(**{"in_flight": 8, "timeout_s": 120.0, **settings}), stop_ids=[STOP], balancer=self.balancer,
        )  # fmt: skip

    def nodes(self):
        return [node["NodeID"] for node in ray.nodes() if node["Alive"]]

    def seen(self, at=0):
        """Over all engines that live: requests (0), cancelled ones (1)."""
        return sum(ray.get(engine.seen.remote())[at] for engine in self.engines.values())

    def set(self, **values):
        ray.get([engine.set.remote(**values) for engine in self.engines.values()])

    def loads(self):
        """Requests that verl's balancer believes each engine to have; those of a killed worker it never forgets."""
        return ray.get(self.balancer.get_status.remote())["servers"]

    def close(self):
        ray.shutdown()
        if self.second.poll() is None:
            os.killpg(self.second.pid, signal.SIGKILL)
        self.second.wait()


def until(holds, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def once(world, asked, deed):
    """Does the deed in another thread, once the engines have had that many more requests."""
    before = world.seen()

    def wait():
        until(lambda: world.seen() >= before + asked)
        deed()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def world():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Sockets have short names.
    folder = Path(tempfile.mkdtemp(prefix="two-nodes-", dir="/tmp"))
    made = World(folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def bounded(world):
    """No test hangs."""

    def ring(*_):
        raise TimeoutError(f"the test took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_two_nodes_answer_what_one_does(world):
    asked = requests()
    right = expected(asked, world.tokenizer)
    one = world.single.run(asked, rows(asked), replicas=4)
    two = world.patient.run(asked, rows(asked), replicas=4)
    assert one.answers == two.answers == right and len(right) == STATES * SAMPLES
    assert one.lost == two.lost == []
    assert {two.counts[name] for name in ("retried", "abstained", "grading_failed", "workers_lost")} == {0}
    homes = {ray.get(world.patient.actor(slot).__ray_call__.remote(where)) for slot in range(2)}
    assert homes == set(world.node)


def where(_):
    return ray.get_runtime_context().get_node_id()


def test_one_replica_prefills_a_state_and_all_of_them_work(world):
    asked = [replace(r, key=replace(r.key, step=2), prefix_ids=(*r.prefix_ids[:4], 3 + i, 9)) for i, r in
             enumerate(requests())]  # fmt: skip
    world.patient.run(asked, rows(asked), replicas=4)
    served = [ray.get(engine.seen.remote())[2] for engine in world.engines.values()]
    assert [sum(r.prefix_ids in prefixes for prefixes in served) for r in asked] == [1] * STATES
    assert all(any(r.prefix_ids in prefixes for r in asked) for prefixes in served)


def test_answers_that_come_twice_in_another_order_are_counted_once(world, monkeypatch):
    """And one of a number that nobody asked for is not counted at all."""
    get = ray.get

    def doubled(refs, **how):
        found = get(refs, **how)
        if isinstance(found, tuple) and found[0] and isinstance(found[0][0], Answer):
            answers, reason = found
            # The second of two has another reward: it is the first that counts.
            again = [replace(answer, reward=-5.0) for answer in answers]
            return [*answers[::-1], *again, replace(answers[0], m=99)], reason
        return found

    monkeypatch.setattr(workers.ray, "get", doubled)
    asked = requests()
    outcome = world.patient.run(asked, rows(asked), replicas=4)
    assert outcome.answers == expected(asked, world.tokenizer)
    assert (outcome.counts["doubled"], outcome.counts["foreign"]) == (STATES * SAMPLES, STATES)


def test_a_worker_that_is_killed_leaves_its_work_to_the_others(world):
    asked = requests()
    victim = world.patient.actor(0)
    deed = once(world, 20, lambda: ray.kill(victim))
    outcome = world.patient.run(asked, rows(asked), replicas=4)
    deed.join()
    assert outcome.answers == expected(asked, world.tokenizer) and outcome.lost == []
    assert outcome.counts["workers_lost"] == 1 and outcome.counts["retried"] >= 1
    # Another one takes its place in a later step.
    until(lambda: world.patient.up() == [0, 1])
    assert world.patient.actor(0) != victim
    again = world.patient.run(asked, rows(asked), replicas=4)
    assert again.answers == outcome.answers and again.counts["workers_lost"] == 0


def test_a_last_worker_that_is_killed_is_replaced_at_once(world):
    asked = requests()
    victim = world.single.actor(0)
    deed = once(world, 20, lambda: ray.kill(victim))
    outcome = world.single.run(asked, rows(asked), replicas=4)
    deed.join()
    assert outcome.answers == expected(asked, world.tokenizer) and outcome.lost == []
    assert outcome.counts["workers_lost"] == 1


def test_workers_that_died_between_steps_cost_no_answer(world):
    for slot in range(2):
        ray.kill(world.patient.actor(slot))
    asked = requests()
    outcome = world.patient.run(asked, rows(asked), replicas=4)
    assert outcome.answers == expected(asked, world.tokenizer) and outcome.counts["workers_lost"] == 2


def test_a_replica_that_is_killed_is_asked_nothing_more(world):
    asked = requests()
    victim = world.engines["engine 1"]
    deed = once(world, 20, lambda: (world.engines.pop("engine 1"), ray.kill(victim)))
    outcome = world.patient.run(asked, rows(asked), replicas=4)
    deed.join()
    assert outcome.answers == expected(asked, world.tokenizer) and outcome.lost == []
    assert sorted(world.loads()) == ["engine 0", "engine 2", "engine 3"]
    world.engines["engine 1"] = world.on(1, Engine)
    ray.get(world.balancer.add_servers.remote({"engine 1": world.engines["engine 1"]}))


def test_a_replica_that_never_answers_is_asked_elsewhere(world):
    ray.get(world.engines["engine 0"].set.remote(hangs=True))
    asked, before = requests(), world.loads()
    begin = time.monotonic()
    outcome = world.hasty.run(asked, rows(asked), replicas=4)
    took = time.monotonic() - begin
    assert outcome.answers == expected(asked, world.tokenizer) and outcome.lost == []
    assert outcome.counts["retried"] >= 1 and took >= 3
    # What hangs there still burdens it: the others were asked for what was missing.
    more = {name: load - before[name] for name, load in world.loads().items()}
    assert more.pop("engine 0") > 0 and set(more.values()) == {0}


def test_what_nobody_answers_is_counted_as_lost(world):
    world.set(hangs=True)
    asked = requests()[:4]
    begin = time.monotonic()
    outcome = world.hasty.run(asked, rows(asked), replicas=4)
    took = time.monotonic() - begin
    assert outcome.answers == {} and {(lost.key, lost.m) for lost in outcome.lost} == set(
        expected(asked, world.tokenizer)
    )
    assert {lost.reason for lost in outcome.lost} == {"no answer in 3 s"}
    # Three times 3 s, all four pieces side by side.
    assert 9 <= took < 60


def test_a_worker_that_freezes_is_not_waited_for(world):
    world.set(hangs=False)
    frozen = world.hasty.actor(0)
    pid = ray.get(frozen.__ray_call__.remote(lambda _: os.getpid()))
    asked = requests()[:2]
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        outcome = world.hasty.run(asked, rows(asked), replicas=4)
        assert len(outcome.lost) == 2 * SAMPLES and time.monotonic() - begin < 60
    finally:
        os.kill(pid, signal.SIGCONT)


def test_an_interrupt_cancels_what_is_out(world):
    world.set(hangs=True, started=0, cancelled=0)
    asked = requests()[:4]
    deed = once(world, 32, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        world.patient.run(asked, rows(asked), replicas=4)
    signal.signal(signal.SIGINT, before)
    deed.join()
    until(lambda: world.seen(1) == 32, 60)
    world.set(hangs=False)


def test_progress_is_logged(world, monkeypatch, caplog):
    monkeypatch.setattr(workers, "REPORT_S", 0.3)
    asked = requests()
    with caplog.at_level(logging.INFO, logger=workers.log.name):
        world.patient.run(asked, rows(asked), replicas=4)
    said = [record.getMessage() for record in caplog.records]
    assert any(f"of {STATES * SAMPLES} came" in line for line in said)


def test_a_row_that_cannot_be_graded_abstains_and_says_why(world, caplog):
    asked = requests()[:2]
    about = rows(asked)
    about[asked[1].key] = {"data_source": "marks"}
    outcome = world.patient.run(asked, about, replicas=4)
    assert {key.sample for (key, _), answer in outcome.answers.items() if answer.reward is None} == {1}
    assert (outcome.counts["abstained"], outcome.counts["grading_failed"]) == (SAMPLES, SAMPLES)
    assert "8 of 16 probes were not graded: KeyError: 'reward_model'" in caplog.text


def test_nothing_asked_is_nothing_to_wait_for(world):
    outcome = world.patient.run([], {}, replicas=4)
    assert (outcome.answers, outcome.lost) == ({}, [])


def test_workers_that_do_not_start_are_an_error_that_says_why(world):
    config = OmegaConf.merge(world.config, {"actor_rollout_ref": {"model": {"path": "/no/such/folder"}}})
    broken = world.probes(config=config, workers=1)
    asked = requests()[:1]
    with pytest.raises(RayActorError, match="/no/such/folder"):
        broken.run(asked, rows(asked), replicas=4)


def test_reward_workers_are_needed(world):
    with pytest.raises(InputError, match="enable_resource_pool"):
        Probes(world.config, None, None, ProbeSettings(), stop_ids=[STOP])


def test_a_node_that_goes_takes_no_answer_with_it(world):
    """A worker of ours, two engines and a reward worker with it, while probes are under way."""
    until(lambda: world.patient.up() == [0, 1])
    asked = requests()
    survivors = {name: engine for name, engine in world.engines.items() if name in ("engine 0", "engine 2")}

    def deed():
        world.engines = survivors
        os.killpg(world.second.pid, signal.SIGKILL)

    thread = once(world, 20, deed)
    outcome = world.patient.run(asked, rows(asked), replicas=4)
    thread.join()
    assert outcome.answers == expected(asked, world.tokenizer) and outcome.lost == []
    assert outcome.counts["grading_failed"] == 0
    # A replica that nothing was asked of since may be found dead in the next step only.
    again = world.patient.run(asked, rows(asked), replicas=2)
    assert again.answers == outcome.answers and sorted(world.loads()) == ["engine 0", "engine 2"]


def test_without_replicas_all_is_lost_at_once(world):
    for engine in world.engines.values():
        ray.kill(engine)
    asked = requests()
    outcome = world.patient.run(asked, rows(asked), replicas=2)
    assert outcome.answers == {} and len(outcome.lost) == STATES * SAMPLES
    assert sorted(world.loads()) == []
