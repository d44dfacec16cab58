"""examples/loop.py is the specification that the trainer equals, probes and all.

Seen to catch: a second wave that repeats the first's random streams (in the loop, and planted in the trainer). The
other planted faults are listed in `tests/train/test_bit_equal.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset

from apportion.credit.registry import make_method
from apportion.engines.base import Sampling
from apportion.measure.tokens import token_logprobs_and_entropies
from apportion.tasks import ArithmeticTask, Problem, generate, load_policy
from apportion.train import CreditConfig, CreditTrainer

PATH = Path(__file__).parents[1] / "examples" / "loop.py"
TASK = ArithmeticTask(operations=4, seed=3)
PROMPTS, SIZE, SEED = 4, 4, 11


@pytest.fixture(scope="module")
def loop_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loop", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loop"] = module
    spec.loader.exec_module(module)
    return module


def even(text: str) -> float:
    """1 where the last digit is even, so that groups are mixed however well the policy does."""
    digits = [c for c in text if c.isdigit()]
    return float(bool(digits) and int(digits[-1]) % 2 == 0)


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [even(c) for c in completions]


def make_loop(module: ModuleType) -> Any:
    class Even(module.Loop):  # type: ignore[name-defined,misc]
        def grade(self, problem: Problem, ids: Sequence[int]) -> float:
            return even(self.tokenizer.decode(ids, skip_special_tokens=True))

    return Even(*load_policy(), TASK.max_response, SIZE, SEED)


SETTINGS: dict[str, dict[str, Any]] = {
    "probepo": {"alpha": 1.0, "budget": 16, "samples": 4, "min_gap": 2, "window": 2, "shortlist": 1.0},
    "probepo neyman": {
        "alpha": 1.0, "budget": 16, "samples": 4, "min_gap": 2, "window": 2, "allocation": "neyman", "pilot": 2,
    },
    "vineppo": {"samples": 2},
    "grpo": {},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_trainer_equals_loop(loop_module: ModuleType, tmp_path: Path, name: str) -> None:
    """Both get the loop's rollouts and nothing else: each probes with its own engine and forms its own base."""
    method, settings = name.split()[0], SETTINGS[name]
    problems = generate(TASK, "train", PROMPTS)
    loop = make_loop(loop_module)
    rollouts = loop.freeze(problems, step=1)
    credit, continuations = loop_module.credit_of(
        make_method(method, settings), rollouts, loop.measure(rollouts, problems, step=1)
    )
    bounds = rollouts.offsets.tolist()
    ids = [rollouts.token_ids[a:b].tolist() for a, b in pairwise(bounds)]

    class Recorded(CreditTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            assert rollouts.prompt_ids is not None
            asked = [ids.tolist() for ids in rollouts.prompt_ids for _ in range(SIZE)]
            assert [list(p) for p in prompt_ids] == asked
            return [list(row) for row in ids], None

    model, tokenizer = load_policy()
    trainer = Recorded(
        model=model, processing_class=tokenizer, reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [p.prompt for p in problems]}),
        args=CreditConfig(
            str(tmp_path), method=method, credit=settings, max_steps=1, shuffle_dataset=False, seed=SEED,
            per_device_train_batch_size=PROMPTS * SIZE, num_generations=SIZE, use_cpu=True, bf16=False,
            max_completion_length=TASK.max_response, report_to=[], save_strategy="no", disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.train()
    batch, theirs = trainer.last_credit
    assert torch.equal(batch.rollouts.token_ids, rollouts.token_ids)
    assert torch.equal(batch.rollouts.reward, rollouts.reward)
    # TRL forms its base in float32, the loop in float64.
    assert torch.allclose(theirs.token, credit.token, atol=2e-6)
    assert trainer.state.log_history[0]["probe/continuations"] == continuations
    if method == "grpo":
        assert continuations == 0
        return
    assert continuations > 0 and credit.segments is not None and theirs.segments is not None
    for field in ("row", "start", "end", "raw", "samples"):
        assert torch.equal(getattr(theirs.segments, field), getattr(credit.segments, field)), field
    assert credit.token.unique().numel() > 4


def test_frozen_statistics_are_those_of_each_response_alone(loop_module: ModuleType) -> None:
    loop = make_loop(loop_module)
    rollouts = loop.freeze(generate(TASK, "train", 2), step=1)
    assert rollouts.prompt_ids is not None and rollouts.old_logprob is not None and rollouts.entropy is not None
    assert loop.sampling == Sampling(stop_ids=(loop.tokenizer.eos_token_id,))
    for row in range(len(rollouts)):
        span = slice(int(rollouts.offsets[row]), int(rollouts.offsets[row + 1]))
        prompt, ids = rollouts.prompt_ids[int(rollouts.group[row])], rollouts.token_ids[span]
        with torch.no_grad():
            logits = loop.model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        logprob, entropy = token_logprobs_and_entropies(logits, ids, 1.0)
        assert torch.allclose(rollouts.old_logprob[span], logprob, atol=1e-5)
        assert torch.allclose(rollouts.entropy[span], entropy, atol=1e-5)


def test_update_is_the_token_mean_policy_gradient(loop_module: ModuleType) -> None:
    """loss = −Σ A_t·log π_t / Σ 1 has the same gradient on policy; written out response by response."""
    loop = make_loop(loop_module)
    rollouts = loop.freeze(generate(TASK, "train", 2), step=1)
    credit, _ = loop_module.credit_of(make_method("grpo"), rollouts, lambda jobs, first: [])
    loss = torch.zeros(())
    assert rollouts.prompt_ids is not None
    for row in range(len(rollouts)):
        span = slice(int(rollouts.offsets[row]), int(rollouts.offsets[row + 1]))
        prompt, ids = rollouts.prompt_ids[int(rollouts.group[row])], rollouts.token_ids[span]
        logits = loop.model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        loss = loss - (credit.token[span] * logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]).sum()
    (loss / len(rollouts.token_ids)).backward()
    expected = {n: p.grad.clone() for n, p in loop.model.named_parameters() if p.grad is not None}

    class Keep(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.kept = [p.grad.clone() for group in self.param_groups for p in group["params"]]

    optimizer = Keep(loop.model.parameters(), lr=0.0)
    norm = loop.update(optimizer, rollouts, credit)
    scale = min(1.0, 1.0 / (norm + 1e-6))
    assert norm > 0
    for (name, _), found in zip(loop.model.named_parameters(), optimizer.kept, strict=True):
        assert torch.allclose(found, expected[name] * scale, atol=1e-5), name


def test_loop_runs_and_repeats(loop_module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "2", "--prompts", "2", "--size", "4", "--operations", "4", "--set", "min_gap=2"]
    first = loop_module.main([*words, "--set", "window=2"])
    assert first == loop_module.main([*words, "--set", "window=2"]) and len(first) == 2
    assert capsys.readouterr().out.count("step") == 4


def test_loop_is_readable() -> None:
    lines = PATH.read_text().splitlines()
    assert len(lines) <= 300
    assert not any("trl" in line for line in lines if line.startswith(("import", "from")))
