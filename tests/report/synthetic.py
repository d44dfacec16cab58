"""A run folder that looks like a real one: chained arithmetic, a policy that errs, ProbePO's own credit.

The policy is a coin: each step is right with a chance that grows over training, and a wrong step is fatal.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apportion.credit.registry import make_method
from apportion.groups import grpo_base
from apportion.measure.evidence import Continuations, Evidence
from apportion.records import RunFolder, credit_rows, rollout_rows, verdict_of
from apportion.rollouts import Rollouts
from apportion.tasks import ArithmeticTask, generate

VOCABULARY = "0123456789+-*=?#!\n"
EOS = len(VOCABULARY)


def write_run(
    path: Path, *, steps: int = 3, prompts: int = 4, group: int = 8, method: str = "probepo",
    settings: Mapping[str, Any] | None = None, logged: int = 60,
) -> RunFolder:  # fmt: skip
    """Writes a run with `steps` recorded steps, the last of `logged`, and metrics of all of them."""
    run = RunFolder(path)
    credit = make_method(method, settings or {"min_gap": 8, "window": 4})
    for k in range(logged):
        skill = 0.86 + 0.08 * k / logged
        rng = random.Random(k)
        run.log(
            {
                "step": 10 * (k + 1), "reward": skill**8 + rng.gauss(0, 0.02),
                "credit/acr": 0.3 - 0.1 * k / logged,
                "credit/p99_abs_advantage": 2 + rng.gauss(0, 0.1), "credit/zero_variance": 0.28,
                "probe/ratio": 2.1 + rng.gauss(0, 0.05), "probe/continuations": 40.0 * prompts,
                "tokens/actor": 600.0 * prompts, "probe/tokens": 1260.0 * prompts, "step_time": 1.6,
                "seconds/generate": 0.4, "seconds/probe": 1.1, "logprob_gap": float("nan") if k < 3 else 2e-7,
            }
        )  # fmt: skip
        if k >= logged - steps:
            _record(run, 10 * (k + 1), skill, rng, prompts, group, credit)
    (path / "config.toml").write_text('method = "probepo"\n\n[task]\noperations = 8\n')
    return run


def _record(run: RunFolder, step: int, skill: float, rng: random.Random, prompts: int, group: int, credit: Any) -> None:
    problems = generate(ArithmeticTask(seed=step), "train", prompts)
    owners = [problem for problem in problems for _ in range(group)]
    # The first prompt is hopeless, so that a collapsed group is there to be labelled.
    texts = [_solve(p, "", 0.3 if p is problems[0] else skill, rng) for p in owners]
    ids = [_encode(text) for text in texts]
    entropy = [[_entropy(text, t, rng) for t in range(len(row))] for text, row in zip(texts, ids, strict=True)]
    names = [f"prompt-{problems.index(p)}" for p in owners]
    rollouts = Rollouts.from_lists(
        ids, names, [_reward(p, t) for p, t in zip(owners, texts, strict=True)],
        entropy=entropy, old_logprob=[[-h * rng.uniform(0.2, 2) for h in row] for row in entropy],
        text=tuple(texts), char_start=[list(range(len(row))) for row in ids],
        truncated=[i % 11 == 10 for i in range(len(ids))],
    )  # fmt: skip
    base = grpo_base(rollouts)
    entries, evidence = [], []
    for job in credit.plan(rollouts, base):
        problem, prefix = owners[job.row], texts[job.row][: job.position]
        rewards = []
        for m in range(job.samples):
            text = _solve(problem, prefix, skill, rng)
            rewards.append(_reward(problem, text))
            evidence.append(
                {
                    "key": f"{step}/{job.row}/{job.position}/{m}", "kind": job.kind,
                    "group": rollouts.name(job.row), "row": job.row, "position": job.position, "m": m,
                    "token_ids": _encode(text[job.position :]), "text": text[job.position :],
                    "reward": rewards[-1], "verdict": verdict_of(rewards[-1]),
                    "finish": "stop", "rescued": m == 5,
                }
            )  # fmt: skip
        entries += [(row, position, rewards) for row, position in job.pivots]
    found = Evidence(Continuations.from_rewards(rollouts, entries))
    result = credit.assign(rollouts, found, base)
    run.write("rollouts", step, rollout_rows(rollouts, [p.prompt for p in owners], [p.answer for p in owners]))
    run.write("evidence", step, evidence)
    run.write("credit", step, credit_rows(rollouts, result, base.mean.tolist(), base.scale.tolist()))


def _solve(problem: Any, prefix: str, skill: float, rng: random.Random) -> str:
    """A worked solution that goes on from `prefix`, which ends where a paragraph does."""
    paragraphs = prefix.split("\n\n")[:-1] if prefix else []
    wrong = any(p not in problem.steps for p in paragraphs)
    for k in range(len(paragraphs), len(problem.steps)):
        left = problem.steps[k].split("=")[0]
        if wrong:
            left = paragraphs[-1].split("=")[1][:2] + left[2:]
        wrong = wrong or rng.random() > skill
        paragraphs.append(f"{left}={rng.randrange(100):02d}" if wrong else problem.steps[k])
    last = paragraphs[-1].split("=")[1]
    return "\n\n".join([*paragraphs, f"#{last}"])


def _reward(problem: Any, text: str) -> float:
    return float(text.endswith(f"#{problem.answer}") and all(p in problem.steps for p in text.split("\n\n")[:-1]))


def _encode(text: str) -> list[int]:
    return [VOCABULARY.index(c) for c in text] + [EOS]


def _entropy(text: str, t: int, rng: random.Random) -> float:
    """High where a result is written, low where the text copies."""
    after = text[max(0, t - 2) : t]
    return rng.uniform(0.3, 1.6) if "=" in after else rng.uniform(0.0, 0.08)
