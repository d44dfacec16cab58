"""The code blocks of docs/other-trainers.md run on small batches and give what `apportion assign` gives.

The trainers are not installed: their classes are stand-ins with the published names and arguments.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from apportion import Rollouts, interchange, make_method
from apportion.engines.base import Continuation, Request
from apportion.integrations.group import GroupCredit

PAGE = (Path(__file__).parents[1] / "docs" / "other-trainers.md").read_text()
BLOCKS = dict(re.findall(r"^```python (\w+)\n(.*?)^```$", PAGE, re.S | re.M))

PROMPT = [50, 51]
PENALTY = 0.25
BREAK, RIGHT, WRONG = 0, 9, 8
# Steps start at 20 and 40; the second response has one step.
LONG = [*range(100, 119), BREAK, *range(120, 139), BREAK, *range(140, 160)]
SHORT = [7, 8, 6]
LOGPROB = [[-0.25 - 0.01 * (t % 7) - (t == 42) for t in range(60)], [-0.5, -2.0, -0.125]]


def run_block(name: str, monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> dict[str, Any]:
    """The names that the block defines; `modules` stand in, dots written as two underscores."""
    for dotted, names in modules.items():
        path = dotted.split("__")
        for depth in range(1, len(path) + 1):
            whole = ".".join(path[:depth])
            if whole not in sys.modules:
                monkeypatch.setitem(sys.modules, whole, ModuleType(whole))
        vars(sys.modules[".".join(path)]).update(names)
    found: dict[str, Any] = {}
    exec(compile(BLOCKS[name], f"docs/other-trainers.md, {name}", "exec"), found)
    return found


def assigned(rows: Sequence[dict[str, Any]], method: str, settings: dict[str, Any] | None = None) -> list[list[float]]:
    batch = interchange.read(enumerate(rows, 1))
    credit = interchange.assign(batch, make_method(method, settings or {}))
    return [values.tolist() for values in credit.token.split(batch.rollouts.length.tolist())]


def rows_of(ids: Sequence[list[int]], rewards: Sequence[float], groups: Sequence[str], **rest: Any) -> list[Any]:
    columns = [{name: values[i] for name, values in rest.items()} for i in range(len(ids))]
    return [
        {"group": g, "reward": r, "token_ids": t, **own}
        for g, r, t, own in zip(groups, rewards, ids, columns, strict=True)
    ]


def decode(ids: list[int]) -> str:
    return "".join("\n\n" if i == BREAK else "w" for i in ids)


class Pool:
    """Five right of eight behind position 20, two behind 40."""

    right: ClassVar = {20: 5, 40: 2}

    def __init__(self) -> None:
        self.positions: set[int] = set()

    async def sample(self, request: Request, m: int) -> Continuation:
        self.positions.add(request.key.position)
        good = m < self.right[request.key.position]
        return Continuation(request.key, m, (RIGHT if good else WRONG,), "stop")

    async def grade(self, origin: Any, ids: list[int]) -> float | None:
        return float(ids[-1] == RIGHT)

    @property
    def evidence(self) -> list[dict[str, Any]]:
        rewards = {p: [1] * n + [0] * (8 - n) for p, n in self.right.items()}
        first = [{"position": p, "rewards": rewards[p]} for p in sorted(self.positions)]
        return [{"continuations": first}, {"continuations": []}]


def test_every_block_of_the_page_is_run_here() -> None:
    mine = Path(__file__).read_text()
    assert len(BLOCKS) == PAGE.count("```python") == 6
    assert all(f'run_block("{name}"' in mine or f'run_block(\n        "{name}"' in mine for name in BLOCKS)


def test_prime_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    def assign_advantages(trace: Any, values: float | list[float]) -> None:
        node = trace.nodes[0]
        total = sum(node.mask)
        node.advantages = [float(values)] * total if isinstance(values, float | int) else list(values)
        assert len(node.advantages) == total

    class GRPOAlgorithm:
        def __init__(self, config: Any, clients: Any) -> None:
            self.clients = clients

        async def score_group(self, episodes: Sequence[Any]) -> None:
            traces = [trace for episode in episodes for trace in episode.traces]
            mean = sum(trace.reward for trace in traces) / len(traces)
            for trace in traces:
                assign_advantages(trace, trace.reward - mean - PENALTY)

    pool = Pool()
    found = run_block(
        "prime_rl", monkeypatch,
        prime_rl__orchestrator__algo__grpo={"GRPOAlgorithm": GRPOAlgorithm},
        prime_rl__orchestrator__algo__routing={"assign_advantages": assign_advantages},
        my_task={"STOP_IDS": (4,), "decode": decode, "grade": pool.grade},
    )  # fmt: skip

    def episode(ids: list[int], reward: float, logprobs: list[float]) -> Any:
        node = SimpleNamespace(
            token_ids=PROMPT + ids, mask=[False] * 2 + [True] * len(ids), logprobs=logprobs, advantages=None,
            reference_logprobs=None, entropies=None,
        )  # fmt: skip
        trace = SimpleNamespace(
            id="t", nodes=[node], branches=[SimpleNamespace(nodes=[node], trainable=True)], reward=reward,
            has_error=False, agent=SimpleNamespace(trainable=True), is_truncated=False,
        )  # fmt: skip
        return SimpleNamespace(id="e", traces=[trace], group=SimpleNamespace(id="q"), run=None)

    config = SimpleNamespace(base_url="http://127.0.0.1:9/v1", api_key_var="NO_KEY", headers=None)
    algorithm = found["ProbePOAlgorithm"](None, SimpleNamespace(train_client=config, model_name="p"))
    algorithm.credit.sample = pool.sample
    episodes = [episode(LONG, 1.0, LOGPROB[0]), episode(SHORT, 0.0, LOGPROB[1])]
    asyncio.run(algorithm.score_group(episodes))
    # Its base is r − μ, undivided, as Dr.GRPO's, less what its settings take off; credit moves with the base.
    rows = rows_of([LONG, SHORT], [1, 0], "qq", evidence=pool.evidence)
    assert pool.positions == {40}
    for one, values in zip(episodes, assigned(rows, "dr_grpo,probepo"), strict=True):
        assert one.traces[0].nodes[0].advantages == pytest.approx([v - PENALTY for v in values], abs=1e-6)


def registry() -> tuple[dict[str, Any], Any]:
    known: dict[str, Any] = {}

    def register_advantage_estimator(name: str) -> Any:
        return lambda function: known.setdefault(name, function)

    return known, register_advantage_estimator


def test_skyrl_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    known, register = registry()
    run_block(
        "skyrl_estimator", monkeypatch,
        skyrl__backends__skyrl_train__utils__ppo_utils={"register_advantage_estimator": register},
    )  # fmt: skip
    # Right-aligned, the two prompts' rows mixed; the reward stands on the last token.
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [0, 1, 1]]).float()
    rewards = torch.zeros(4, 3)
    rewards[:, 2] = torch.tensor([1.0, 0.0, 0.5, 0.25])
    found, returns = known["apportion"](
        token_level_rewards=rewards, response_mask=mask, index=["b", "a", "b", "a"], values=None,
        grpo_norm_by_std=True, gamma=1.0, lambd=1.0, config=None,
    )  # fmt: skip
    rows = rows_of([[1, 2], [1, 2, 3], [1], [1, 2]], [1, 0, 0.5, 0.25], ["b", "a", "b", "a"])
    for got, kept, values in zip(found, mask.bool(), assigned(rows, "opo"), strict=True):
        assert got[kept].tolist() == pytest.approx(values, abs=1e-6) and not got[~kept].any()
    assert torch.equal(found, returns)


def test_skyrl_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, calls = Pool(), []
    known, register = registry()

    class Engines:
        async def generate(self, asked: dict[str, Any], model: str) -> dict[str, Any]:
            (prefix,), (session,) = asked["prompt_token_ids"], asked["session_ids"]
            calls.append((session, asked["sampling_params"]))
            position = len(prefix) - len(PROMPT)
            seen = sum(len(PROMPT) + position == at for at in lengths)
            lengths.append(len(prefix))
            pool.positions.add(position)
            good = seen < pool.right[position]
            return {"response_ids": [[RIGHT if good else WRONG]], "stop_reasons": ["stop"]}

    lengths: list[int] = []

    class SkyRLGymGenerator:
        inference_engine_client, policy_model_name = Engines(), "policy"

        async def generate(self, input_batch: dict[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
            return {
                "prompt_token_ids": [PROMPT] * 3, "response_ids": [LONG, SHORT, SHORT], "rewards": [1.0, 0.0, 1.0],
                "loss_masks": [[1] * 60, [1] * 3, [1] * 3], "stop_reasons": ["stop"] * 3,
                "rollout_logprobs": [*LOGPROB, LOGPROB[1]],
                "trajectory_ids": [SimpleNamespace(instance_id=name) for name in "qqz"],
            }  # fmt: skip

    found = run_block(
        "skyrl_generator", monkeypatch,
        skyrl__backends__skyrl_train__utils__ppo_utils={"register_advantage_estimator": register},
        skyrl__train__generators__skyrl_gym_generator={"SkyRLGymGenerator": SkyRLGymGenerator},
    )  # fmt: skip
    generator = found["CreditGenerator"]()
    generator.credit = GroupCredit(
        make_method("probepo"), sample=generator.sample, grade=pool.grade, decode=decode, max_new_tokens=64, run="s"
    )

    def asked(phase: str) -> dict[str, Any]:
        told = SimpleNamespace(training_phase=phase, global_step=5)
        return {"sampling_params": {"temperature": 0.7, "max_tokens": 64}, "batch_metadata": told}

    assert asyncio.run(generator.generate(asked("eval")))["rewards"] == [1.0, 0.0, 1.0] and not calls
    batch = asyncio.run(generator.generate(asked("train"), disable_tqdm=True))
    assert {session for session, _ in calls} == {"q/0"} and len({p["seed"] for _, p in calls}) == len(calls) == 8
    assert all((p["temperature"], p["max_tokens"]) == (0.7, 24) for _, p in calls)
    rows = rows_of([LONG, SHORT], [1, 0], "qq", evidence=pool.evidence)
    expected = assigned(rows, "probepo", {"epsilon": 1e-6})
    for got, values in zip(batch["rewards"], [*expected, [0.0] * 3], strict=True):
        assert got == pytest.approx(values, abs=1e-6)
    rewards = torch.tensor([batch["rewards"][1]])
    given, returns = known["as_generated"](token_level_rewards=rewards, response_mask=torch.ones(1, 3), index=["q"])
    assert torch.equal(given, rewards) and torch.equal(returns, rewards)


def test_openrlhf(monkeypatch: pytest.MonkeyPatch) -> None:
    class RemoteExperienceMaker:
        strategy = SimpleNamespace(args=SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=2)))

        def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
            for each in experiences:
                each.advantages = torch.full(each.action_mask.shape, 9.0)
            return experiences

    found = run_block(
        "openrlhf", monkeypatch,
        openrlhf__trainer__ppo_utils__experience_maker={"RemoteExperienceMaker": RemoteExperienceMaker},
    )  # fmt: skip

    def experience(index: list[int], rows: list[tuple[list[int], float, list[float]]], width: int) -> Any:
        sequences, mask, logprob = torch.zeros(len(rows), width).long(), torch.zeros(len(rows), width - 1), []
        for i, (ids, _, own) in enumerate(rows):
            sequences[i, : 2 + len(ids)] = torch.tensor(PROMPT + ids)
            mask[i, 1 : 1 + len(ids)] = 1
            logprob.append([7.0, *own, *[7.0] * (width - 2 - len(ids))])
        return SimpleNamespace(
            index=index, sequences=sequences, action_mask=mask, action_log_probs=torch.tensor(logprob),
            rewards=torch.tensor([r for _, r, _ in rows]), truncated=torch.zeros(len(rows)), advantages=None,
        )  # fmt: skip

    a, b = ([1, 2, 3], 1.0, [-0.1, -2.0, -0.05]), ([4, 5], 0.0, [-0.3, -1.5])
    c, d = ([6], 0.25, [-0.7]), ([7, 8], 0.75, [-0.2, -0.9])
    # Prompts are index // 2: a and b, c and d, whichever experience they are in.
    experiences = [experience([0, 3], [a, d], 6), experience([2, 1], [c, b], 5)]
    method, seen = found["METHOD"], []

    def assign(batch: Rollouts, evidence: Any, base: Any) -> Any:
        seen.append(batch.token_ids.tolist())
        return method.assign(batch, evidence, base)

    found["METHOD"] = SimpleNamespace(base=method.base, assign=assign)
    found["CreditExperienceMaker"]().compute_advantages_and_returns(experiences)
    order = [a, d, c, b]
    assert seen == [[token for ids, _, _ in order for token in ids]]
    rows = rows_of(
        [ids for ids, _, _ in order], [r for _, r, _ in order], "pqqp", old_logprob=[own for _, _, own in order]
    )
    expected = assigned(rows, "cw_grpo", {"epsilon": 1e-9})
    found_rows = [(each.advantages[i], each.action_mask[i].bool()) for each in experiences for i in range(2)]
    for (got, kept), values in zip(found_rows, expected, strict=True):
        assert got[kept].tolist() == pytest.approx(values, abs=1e-6)
        assert (got[~kept] == 9).all()


def test_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_block("nemo_rl", monkeypatch)
    prompt_ids = torch.tensor([[5, 6], [5, 0], [5, 6], [5, 0], [5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]).float()
    logprob = torch.arange(20.0).reshape(5, 4).mul(-0.05).sub(0.1)
    rewards = torch.tensor([1.0, 0.5, 0.0, 0.25, 4.0])
    got = found["ApportionEstimator"](None, None).compute_advantage(
        prompt_ids=prompt_ids, rewards=rewards, mask=mask, repeated_batch={"total_reward": rewards},
        valid_mask=torch.tensor([1.0, 1, 1, 1, 0]), logprobs_policy=logprob,
    )  # fmt: skip
    kept = [row.nonzero()[:, 0].tolist() for row in mask]
    rows = rows_of(
        [[1] * len(at) for at in kept], [1, 0.5, 0, 0.25, None], "pqpqp",
        old_logprob=[logprob[i, at].tolist() for i, at in enumerate(kept)],
    )  # fmt: skip
    assert got.shape == mask.shape and not got[~mask.bool()].any() and not got[4].any()
    for row, at, values in zip(got, kept, assigned(rows, "cw_grpo"), strict=True):
        assert row[at].tolist() == pytest.approx(values, abs=1e-6)


def test_slime(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_block("slime", monkeypatch)

    def sample(group: int, ids: list[int], reward: float, loss_mask: list[int] | None = None) -> Any:
        return SimpleNamespace(
            group_index=group, tokens=PROMPT + ids, response_length=len(ids), loss_mask=loss_mask,
            get_reward_value=lambda args: reward,
        )  # fmt: skip

    samples = [sample(3, [1, 2], 1.0), sample(1, [1], 0.0), sample(3, [1, 2, 3], 0.0, [1, 0, 0]), sample(1, [2], 2.0)]
    raw, advantages = found["post_process"](None, samples)
    rows = rows_of(
        [[1, 2], [1], [1, 2, 3], [2]], [1, 0, 0, 2], ["3", "1", "3", "1"], mask=[[1, 1], [1], [1, 0, 0], [1]]
    )
    assert raw == [1.0, 0.0, 0.0, 2.0]
    assert advantages == pytest.approx([values[0] for values in assigned(rows, "opo")], abs=1e-6)
