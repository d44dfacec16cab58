"""prime-rl's group hook against its published shape, and against verifiers' own traces where they are installed.

The fakes have the fields of `verifiers.v1` 0.4.0 that the adapter reads; `test_verifiers_still_has_what_we_read` names
the one that moved.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from apportion import Base, Credit, CreditMethod, Evidence, InputError, Rollouts, make_method
from apportion.credit.method import Need
from apportion.engines.base import Continuation, Key, Request, Sampling
from apportion.integrations.group import GroupCredit
from apportion.integrations.prime_rl import score_group, through

BREAK, EOS, RIGHT, WRONG = 0, 4, 9, 8
PROBEPO = {"budget": 8, "samples": 4, "min_gap": 1, "window": 1, "shortlist": 1, "n0": 4, "alpha": 1}


@dataclass
class Node:
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] | None = None
    reference_logprobs: list[float] | None = None
    entropies: list[float] | None = None


@dataclass
class Branch:
    nodes: list[Node]
    trainable: bool = True


@dataclass
class Trace:
    nodes: list[Node]
    reward: float
    branches: list[Branch] = field(default_factory=list)
    has_error: bool = False
    agent: Any = field(default_factory=lambda: SimpleNamespace(trainable=True))
    is_truncated: bool = False
    id: str = "t"

    def __post_init__(self) -> None:
        self.branches = self.branches or [Branch(self.nodes)]


def episode(*traces: Trace, group: str | None = "g", step: int | None = 3) -> SimpleNamespace:
    run = None if step is None else SimpleNamespace(work=SimpleNamespace(step=step))
    return SimpleNamespace(
        id="e", traces=list(traces), group=None if group is None else SimpleNamespace(id=group), run=run
    )


def answer(ids: list[int], reward: float, host: float | None = None, **rest: Any) -> Trace:
    """A single turn behind the prompt (50, 51), whose last scaffold token stands in the sampled message's node."""
    values = None if host is None else [host] * len(ids)
    told = {"logprobs": [-0.5] * len(ids), **rest}
    return Trace(
        [Node([50], [False]), Node([51, *ids], [False] + [True] * len(ids), advantages=values, **told)], reward
    )


def decode(ids: list[int]) -> str:
    return "".join("\n\n" if i == BREAK else "." if i == EOS else "w" for i in ids)


def pair(host: bool = True) -> list[Trace]:
    """Steps of the first start at 4 and 7; the second has one step."""
    return [
        answer([1, 2, 3, BREAK, 5, 6, BREAK, 8, 9, EOS], 1.0, 0.5 if host else None),
        answer([7, 8, EOS], 0.0, -0.5 if host else None),
    ]


def run(credit: GroupCredit, *episodes: Any) -> dict[int, list[float]]:
    """id of a trace → what it was assigned."""
    got: dict[int, list[float]] = {}

    def assign(trace: Trace, values: list[float]) -> None:
        assert id(trace) not in got
        got[id(trace)] = values

    asyncio.run(score_group(credit, episodes, assign))
    return got


class Pool:
    """Three right of four behind position 4, one of four behind position 7."""

    def __init__(self, late: random.Random | None = None, lost: set[tuple[int, int]] = frozenset()) -> None:
        self.asked: list[tuple[Request, int]] = []
        self.late, self.lost = late, lost

    async def sample(self, request: Request, m: int) -> Continuation:
        self.asked.append((request, m))
        if self.late is not None:
            await asyncio.sleep(self.late.random() / 100)
        if (request.key.position, m) in self.lost:
            raise ConnectionError("replica gone")
        right = m < 3 if request.key.position == 4 else m < 1
        return Continuation(request.key, m, (RIGHT if right else WRONG,), "stop")

    async def grade(self, trace: Trace, ids: list[int]) -> float | None:
        assert ids[:-1] == trace.nodes[1].token_ids[1 : len(ids)]
        return float(ids[-1] == RIGHT)


def probing(pool: Pool, **rest: Any) -> GroupCredit:
    settings = {**PROBEPO, **rest.pop("settings", {})}
    return GroupCredit(
        make_method("probepo", settings), sample=pool.sample, grade=pool.grade, decode=decode, max_new_tokens=12, **rest
    )


# V = (.5, .625, .375, 1) and no division: D = .125 ×4, −.25 ×3, .625 ×3, mean .1625; A = .5 + D − .1625.
HAND = [0.4625] * 4 + [0.0875] * 3 + [0.9625] * 3


@pytest.mark.parametrize("host", [True, False])
def test_probepo_through_the_pool(host: bool) -> None:
    pool, traces = Pool(), pair(host)
    credit = probing(pool)
    got = run(credit, *(episode(trace) for trace in traces))
    assert got[id(traces[0])] == pytest.approx(HAND, abs=1e-7)
    assert got[id(traces[1])] == [-0.5] * 3
    assert credit.counts == {"probes": 8, "pivots": 2, "dropped_pivots": 0}


def test_every_request_has_its_prefix_its_budget_its_key_and_its_seed() -> None:
    pool, traces = Pool(), pair()
    run(probing(pool, run="r7"), *(episode(trace, group="q", step=9) for trace in traces))
    prefix = (50, 51, 1, 2, 3, BREAK, 5, 6, BREAK)
    assert {(r.key, r.prefix_ids, r.budget, m) for r, m in pool.asked} == {
        (Key("r7", 9, "q", 0, p), prefix[: 2 + p], 12 - p, m) for p in (4, 7) for m in range(4)
    }
    assert len({r.key.stream(m) for r, m in pool.asked}) == 8


def test_the_order_in_which_probes_come_back_changes_nothing() -> None:
    expected = [0.4625] * 4
    for seed in range(5):
        traces = pair()
        got = run(probing(Pool(random.Random(seed)), in_flight=1 + seed), episode(*traces))
        assert got[id(traces[0])][:4] == pytest.approx(expected, abs=1e-7)


def test_failed_probes_are_dropped_and_counted() -> None:
    # Behind position 4 two of three: V = (3·2/3 + 4·.5)/7 = 4/7. D = 1/14 ×4, −11/56 ×3, 5/8 ×3, mean 11/70.
    pool, traces = Pool(lost={(4, 1)}), pair()
    credit = probing(pool)
    got = run(credit, episode(*traces))
    assert got[id(traces[0])] == pytest.approx([29 / 70] * 4 + [41 / 280] * 3 + [271 / 280] * 3, abs=1e-6)
    assert credit.counts["failed"] == 1 and credit.counts["dropped_pivots"] == 0


def test_a_state_without_one_probe_is_no_pivot_and_no_probe_at_all_is_the_hosts() -> None:
    # Only position 7 is left: V = (.5, .375, 1): D = −.125 ×7, .625 ×3, mean .1; A = .275, 1.025.
    traces = pair()
    credit = probing(Pool(lost={(4, m) for m in range(4)}))
    got = run(credit, episode(*traces))
    assert got[id(traces[0])] == pytest.approx([0.275] * 7 + [1.025] * 3, abs=1e-7)
    assert credit.counts["dropped_pivots"] == 1
    every = {(p, m) for p in (4, 7) for m in range(4)}
    traces = pair()
    assert run(probing(Pool(lost=every)), episode(*traces)) == {id(traces[0]): [0.5] * 10, id(traces[1]): [-0.5] * 3}


def test_a_probe_that_never_comes_back_is_given_up() -> None:
    class Stuck(Pool):
        async def sample(self, request: Request, m: int) -> Continuation:
            if (request.key.position, m) == (4, 1):
                await asyncio.sleep(60)
            return await super().sample(request, m)

    traces, credit = pair(), None
    credit = probing(Stuck(), timeout=0.05)
    got = run(credit, episode(*traces))
    assert credit.counts["failed"] == 1
    assert got[id(traces[0])][0] == pytest.approx(29 / 70, abs=1e-6)


@pytest.mark.parametrize("tokens", [(), (RIGHT,) * 9])
def test_a_continuation_that_is_empty_or_beyond_its_budget_is_dropped(tokens: tuple[int, ...]) -> None:
    class Off(Pool):
        async def sample(self, request: Request, m: int) -> Continuation:
            c = await super().sample(request, m)
            return Continuation(c.key, m, tokens, "stop") if (request.key.position, m) == (4, 1) else c

    traces, credit = pair(), probing(Off())
    got = run(credit, episode(*traces))
    assert credit.counts["failed"] == 1
    assert got[id(traces[0])][0] == pytest.approx(29 / 70, abs=1e-6)


def test_an_answer_to_another_request_is_dropped() -> None:
    class Crossed(Pool):
        async def sample(self, request: Request, m: int) -> Continuation:
            c = await super().sample(request, m)
            return Continuation(c.key, 0, c.token_ids, "stop") if (request.key.position, m) == (4, 1) else c

    credit = probing(Crossed())
    run(credit, episode(*pair()))
    assert credit.counts["failed"] == 1


def test_an_abstention_is_left_out_and_counted() -> None:
    class Silent(Pool):
        async def grade(self, trace: Trace, ids: list[int]) -> float | None:
            reward = await super().grade(trace, ids)
            first = len(ids) == 5 and not self.counted
            self.counted = self.counted or first
            return float("nan") if first else reward

        counted = False

    traces, credit = pair(), probing(Silent())
    got = run(credit, episode(*traces))
    assert credit.counts["abstained"] == 1 and not credit.counts["failed"]
    assert got[id(traces[0])][0] == pytest.approx(29 / 70, abs=1e-6)


def test_alpha_0_is_the_hosts_number_bit_for_bit() -> None:
    # .1 + .2 has more bits than float32 holds.
    traces = pair()
    for trace, host in zip(traces, (0.1 + 0.2, -0.1), strict=True):
        trace.nodes[1].advantages = [host] * sum(trace.nodes[1].mask)
    got = run(probing(Pool(), settings={"alpha": 0}), episode(*traces))
    assert got == {id(traces[0]): [0.1 + 0.2] * 10, id(traces[1]): [-0.1] * 3}


def test_without_advantages_the_base_is_r_less_the_mean_in_float32() -> None:
    traces = [answer([1, EOS], reward) for reward in (1.0, 0.0, 0.0)]
    got = run(GroupCredit(make_method("grpo")), *(episode(trace) for trace in traces))
    # 1/3 rounds to 11184811·2⁻²⁵; 1 less that lies between two float32 and goes to the even one.
    assert [got[id(trace)] for trace in traces] == [[11184810 * 2**-24] * 2, *[[-11184811 * 2**-25] * 2] * 2]


def test_local_methods_read_the_groups_own_log_probabilities() -> None:
    # CW-GRPO's numbers [note]: the host's advantages are 1 and −1.
    traces = [
        answer([1, 2, EOS], 1.0, 1.0, logprobs=[-0.1, -2.0, -0.05]),
        answer([1, 2, EOS], 0.0, -1.0, logprobs=[-0.3, -1.5, -0.2]),
    ]
    got = run(GroupCredit(make_method("cw_grpo")), episode(*traces))
    assert got[id(traces[0])] == pytest.approx([1.1292, 0.3536, 1.0714], abs=5e-5)
    assert got[id(traces[1])] == pytest.approx([-1.3354, -0.8719, -1.2385], abs=5e-5)
    traces[1].nodes[1].logprobs = [-0.3, -1.5]
    with pytest.raises(InputError, match="old_logprob"):
        run(GroupCredit(make_method("cw_grpo")), episode(*traces))


def test_vineppo_measures_the_prompt_too() -> None:
    # Values .5 (prompt), .75, .25 and r = 1: increments .25, −.5, .75. The second trace: prompt .5, then r = 0.
    class Vine(Pool):
        async def sample(self, request: Request, m: int) -> Continuation:
            right = {0: 2, 4: 3, 7: 1}[request.key.position]
            return Continuation(request.key, m, (RIGHT if m < right else WRONG,), "stop")

        async def grade(self, trace: Trace, ids: list[int]) -> float | None:
            return float(ids[-1] == RIGHT)

    pool, traces = Vine(), pair()
    credit = GroupCredit(
        make_method("vineppo", {"samples": 4}), sample=pool.sample, grade=pool.grade, decode=decode, max_new_tokens=12
    )
    got = run(credit, episode(*traces))
    assert got[id(traces[0])] == pytest.approx([0.25] * 4 + [-0.5] * 3 + [0.75] * 3)
    assert got[id(traces[1])] == pytest.approx([-0.5] * 3)


def test_a_second_wave_draws_from_new_streams() -> None:
    pool = Pool()
    run(probing(pool, settings={"allocation": "neyman", "pilot": 2}), episode(*pair()))
    asked = [(request.key, m) for request, m in pool.asked]
    assert len(asked) == len(set(asked)) == 8
    assert {m for _, m in asked[:4]} == {0, 1} and min(m for _, m in asked[4:]) == 2


def test_multi_turn_traces_get_local_credit_in_the_hosts_order_and_are_not_probed() -> None:
    def turns(reward: float) -> Trace:
        nodes = [
            Node([50], [False]), Node([51, 1, 2], [False, True, True], [-1.0, -1.0]), Node([60, 61], [False, False]),
            Node([52, 3], [False, True], [-1.0]),
        ]  # fmt: skip
        return Trace(nodes, reward)

    traces = [turns(1.0), turns(0.0)]
    assert run(GroupCredit(make_method("grpo")), episode(*traces)) == {
        id(traces[0]): [0.5] * 3, id(traces[1]): [-0.5] * 3,
    }  # fmt: skip
    pool = Pool()
    credit = probing(pool)
    assert run(credit, episode(*traces))[id(traces[0])] == [0.5] * 3
    assert not pool.asked and credit.counts == {"unmeasured_groups": 1}


def test_traces_with_different_prompts_are_not_probed() -> None:
    pool, traces = Pool(), pair()
    traces[1].nodes[0].token_ids = [49]
    credit = probing(pool)
    assert run(credit, episode(*traces))[id(traces[0])] == [0.5] * 10
    assert not pool.asked and credit.counts["unmeasured_groups"] == 1


def test_what_the_host_does_not_train_on_gets_nothing_and_counts_for_nothing() -> None:
    good, bad = answer([1, EOS], 1.0), answer([1, EOS], 0.0)
    failed, frozen = answer([1, EOS], 5.0), answer([1, EOS], 5.0)
    failed.has_error, frozen.agent = True, SimpleNamespace(trainable=False)
    silent = Trace([Node([50, 51], [False, False])], 5.0)
    credit = GroupCredit(make_method("grpo"))
    got = run(credit, episode(good, failed), episode(frozen, silent, bad))
    assert got == {id(good): [0.5] * 2, id(bad): [-0.5] * 2}
    assert run(credit, episode(failed)) == {}


def test_a_branch_that_is_not_trained_on_is_left_out_and_a_shared_node_counts_once() -> None:
    root, first, second, dropped = (Node(ids, [k > 0] * len(ids)) for k, ids in enumerate(([50], [1, 2], [3], [4, 5])))
    forked = Trace(
        [root, first, second, dropped], 1.0,
        [Branch([root, first]), Branch([root, first, second]), Branch([root, first, dropped], trainable=False)],
    )  # fmt: skip
    other = answer([1, EOS], 0.0)
    assert run(GroupCredit(make_method("grpo")), episode(forked, other))[id(forked)] == [0.5] * 3


def test_the_group_and_the_step_may_be_missing() -> None:
    pool = Pool()
    run(probing(pool), episode(*pair(), group=None, step=None))
    assert {(r.key.prompt, r.key.step) for r, _ in pool.asked} == {("e", 0)}


def test_entropies_of_the_host_rank_before_log_probabilities_do() -> None:
    def asked(**rest: Any) -> set[int]:
        pool = Pool()
        first = answer([1, 2, 3, BREAK, 5, 6, BREAK, 8, 9, EOS], 1.0, 0.5, **rest)
        run(probing(pool, settings={"budget": 4}), episode(first, answer([7, EOS], 0.0, -0.5, entropies=[0.1, 0.1])))
        return {request.key.position for request, _ in pool.asked}

    surprised_at_7 = [-0.5] * 7 + [-3.0] + [-0.5] * 2
    assert asked(logprobs=surprised_at_7) == {7}
    assert asked(logprobs=surprised_at_7, entropies=[0.1] * 4 + [2.0] + [0.1] * 5) == {4}


class Weighed(CreditMethod):
    """Credit that depends on entropies, as no built-in method of a single group does."""

    name: ClassVar[str] = "weighed"
    needs: ClassVar[frozenset[Need]] = frozenset({"entropy"})

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        assert rollouts.entropy is None
        return Credit.form(rollouts, base.advantage, method=self.name, settings={}, conserves="none")


def test_credit_that_is_weighed_by_entropy_gets_no_stand_in() -> None:
    traces = [answer([1, EOS], r) for r in (1.0, 0.0)]
    assert run(GroupCredit(Weighed()), episode(*traces)) == {id(traces[0]): [0.5] * 2, id(traces[1]): [-0.5] * 2}


def test_advantages_that_differ_inside_a_trace_are_refused() -> None:
    traces = pair()
    traces[0].nodes[1].advantages = [0.5] * 9 + [0.6]
    with pytest.raises(InputError, match="advantages of trace t: got 2 different ones"):
        run(probing(Pool()), episode(*traces))


@pytest.mark.parametrize(
    ("method", "rest", "field_"),
    [
        ("grpo_vps", {}, "method"),
        ("reinforce_pp", {}, "method"),
        ("spo_tree", {}, "method"),
        ("probepo", {}, "decode"),
        ("probepo", {"decode": decode}, "sample"),
        ("probepo", {"decode": decode, "sample": Pool().sample}, "grade"),
        ("probepo", {"decode": decode, "sample": Pool().sample, "grade": Pool().grade}, "max_new_tokens"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_group(method: str, rest: dict[str, Any], field_: str) -> None:
    with pytest.raises(InputError) as caught:
        GroupCredit(make_method(method), **rest)
    assert caught.value.field == field_


class _Endpoint(BaseHTTPRequestHandler):
    calls: list[tuple[str, dict[str, str], dict[str, Any]]]
    lock: threading.Lock

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.calls.append((self.path, dict(self.headers), body))
        params = body["sampling_params"]
        at = len(body["token_ids"]) - 2
        seeds = {Key("0", 3, "g", 0, p).stream(m) % 2**31: (p, m) for p in (4, 7) for m in range(4)}
        position, m = seeds[params["seed"]]
        assert position == at and params["max_tokens"] == 12 - at
        status = 500 if (position, m) == (7, 3) else 200
        right = m < 3 if position == 4 else m < 1
        reason = "abort" if (position, m) == (7, 2) else "stop"
        answer = {"choices": [{"token_ids": [RIGHT if right else WRONG], "finish_reason": reason}]}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[Any]]]:
    handler = type("Handler", (_Endpoint,), {"calls": [], "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler.calls
    server.shutdown()
    server.server_close()


def test_the_policys_endpoint_is_asked_in_tokens(
    endpoint: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, calls = endpoint
    monkeypatch.setenv("POOL_KEY", "secret")
    config = SimpleNamespace(base_url=url, api_key_var="POOL_KEY", headers={"X-Team": "a"})
    clients = SimpleNamespace(train_client=config, model_name="policy")
    sampling = Sampling((EOS,), temperature=0.7, top_p=0.9)
    traces, credit = pair(), probing(Pool())
    credit.sample = through(clients, sampling, threads=3)
    got = run(credit, episode(*traces))
    assert len(calls) == 8 and {path for path, _, _ in calls} == {"/inference/v1/generate"}
    for _, headers, body in calls:
        assert body["model"] == "policy"
        assert (headers["Authorization"], headers["X-Team"]) == ("Bearer secret", "a")
        params = body["sampling_params"]
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 0.9, -1)
        assert params["stop_token_ids"] == [EOS]
    assert {headers["X-Session-Id"] if "X-Session-Id" in headers else headers["X-Session-ID"]
            for _, headers, _ in calls} == {"0-3-g-0"}  # fmt: skip
    # Behind 7 one of two: V = (2·.5 + 4·.5)/6 = .5. D = .125 ×4, −.125 ×3, .5 ×3, mean .1625.
    assert credit.counts["failed"] == 2
    assert got[id(traces[0])] == pytest.approx([0.4625] * 4 + [0.2125] * 3 + [0.8375] * 3, abs=1e-7)


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@pytest.mark.skipif(not _importable("verifiers.v1"), reason="verifiers is not installed (pip install verifiers==0.4.0)")
def test_verifiers_still_has_what_we_read() -> None:
    import verifiers.v1 as vf
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Branch

    def has(cls: Any, *names: str) -> list[str]:
        return [f"{cls.__name__}.{name}" for name in names if name not in cls.model_fields and not hasattr(cls, name)]

    node = ("token_ids", "mask", "logprobs", "advantages", "reference_logprobs", "entropies")
    moved = [
        *has(MessageNode, *node), *has(Branch, "nodes", "trainable"), *has(AgentInfo, "trainable"),
        *has(vf.Trace, "id", "nodes", "branches", "reward", "has_error", "agent", "is_truncated"),
        *has(vf.Episode, "id", "traces", "group", "run"), *has(TrainClientConfig, "base_url", "api_key_var", "headers"),
    ]  # fmt: skip
    assert not moved, f"moved in verifiers: {', '.join(moved)}"


@pytest.mark.skipif(not _importable("verifiers.v1"), reason="verifiers is not installed (pip install verifiers==0.4.0)")
def test_real_traces_are_read_like_the_fakes() -> None:
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Reward
    from verifiers.v1.types import AssistantMessage, UserMessage

    def real(fake: Trace) -> Any:
        prompt, sampled = fake.nodes
        nodes = [
            MessageNode(message=UserMessage(content="q"), token_ids=prompt.token_ids, mask=prompt.mask),
            MessageNode(
                parent=0, sampled=True, message=AssistantMessage(content="a"), token_ids=sampled.token_ids,
                mask=sampled.mask, logprobs=sampled.logprobs, advantages=sampled.advantages,
            ),
        ]  # fmt: skip
        return vf.Trace.model_construct(
            nodes=nodes,
            calls=[],
            agent=SimpleNamespace(trainable=True),
            ok=True,
            rewards={"r": Reward(score=fake.reward)},
        )

    traces = [real(trace) for trace in pair()]
    got = run(probing(Pool()), episode(*traces))
    assert got[id(traces[0])] == pytest.approx(HAND, abs=1e-7) and got[id(traces[1])] == [-0.5] * 3


@pytest.mark.skipif(not _importable("prime_rl"), reason="prime-rl is not installed: it is on no package registry")
def test_prime_rl_still_has_the_hook() -> None:
    import inspect

    homes = ("prime_rl.orchestrator.train.algo", "prime_rl.orchestrator.algo")
    home = next(name for name in homes if _importable(f"{name}.base"))
    base, routing = importlib.import_module(f"{home}.base"), importlib.import_module(f"{home}.routing")
    assert inspect.iscoroutinefunction(base.Algorithm.score_group), "Algorithm.score_group is no coroutine"
    assert list(inspect.signature(base.Algorithm.score_group).parameters) == ["self", "episodes"], "score_group"
    assert list(inspect.signature(base.Algorithm.__init__).parameters)[:3] == ["self", "config", "clients"], "__init__"
    assert list(inspect.signature(routing.assign_advantages).parameters) == ["trace", "values"], "assign_advantages"
    assert "ALGORITHM_CLASSES" in vars(importlib.import_module(home)), "ALGORITHM_CLASSES"
