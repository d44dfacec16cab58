"""`CreditConfig`: README's keywords, every refusal by name, and all that TRL's own configuration can do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import HfArgumentParser
from trl import GRPOConfig

from apportion.credit.baselines import GRPO
from apportion.credit.probepo import ProbePO
from apportion.credit.registry import _paths
from apportion.errors import InputError
from apportion.train import CreditConfig, CreditTrainer

BASE: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": []}


def make(**changes: Any) -> CreditConfig:
    return CreditConfig("out", **{**BASE, **changes})


def test_keywords_of_the_method_are_its_settings() -> None:
    config = make(method="probepo", budget=80, samples=16, epsilon=0.3, num_generations=4)
    assert config.make_method() == ProbePO(budget=80, samples=16)
    # `epsilon` is TRL's clip range; the method's own goes into `credit`.
    assert config.epsilon == 0.3 and config.num_generations == 4
    assert make(credit={"epsilon": 0.5, "seed": 3}, alpha=1.0).make_method() == ProbePO(epsilon=0.5, seed=3, alpha=1)
    assert make(method="grpo").make_method() == GRPO()


def test_the_script_of_the_readme(policy: Path, tmp_path: Path) -> None:
    """A model's folder, a reward, a data set, and keywords of both TRL and the method."""
    trainer = CreditTrainer(
        model=str(policy), reward_funcs=tiny.last_digit, train_dataset=tiny.dataset(),
        args=CreditConfig(
            str(tmp_path), max_steps=1, per_device_train_batch_size=8, use_cpu=True, bf16=False, report_to=[],
            max_completion_length=24, method="probepo", budget=40, samples=8,
        ),
    )  # fmt: skip
    trainer.train()
    assert trainer.credit_method == ProbePO(budget=40, samples=8)
    assert trainer.state.log_history[0]["credit/error/conserved"] < 1e-6


def test_third_party_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("third_party")

    class Mine(GRPO):
        name = "mine"
        strength: float = 1.0

    module.Mine = Mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "third_party", module)
    paths = {**_paths(), "mine": "third_party:Mine"}
    monkeypatch.setattr("apportion.credit.registry._paths", lambda: paths)
    assert make(method="mine", strength=2.0).make_method() == Mine(strength=2.0)


def test_round_trips() -> None:
    config = make(method="probepo", alpha=0.25, run_folder="runs/a")
    as_dict = json.loads(json.dumps(config.to_dict()))
    assert as_dict["credit"] == {"alpha": 0.25} and as_dict["run_folder"] == "runs/a"
    parser = HfArgumentParser(CreditConfig)
    flat = {key: as_dict[key] for key in ("output_dir", "method", "credit", "run_folder", "use_cpu", "bf16")}
    (parsed,) = parser.parse_dict(flat)
    assert parsed.make_method() == config.make_method() and parsed.run_folder == "runs/a"
    words = ["--output_dir", "out", "--use_cpu", "True", "--bf16", "False", "--credit", '{"alpha": 0.25}']
    (parsed,) = parser.parse_args_into_dataclasses(words)
    assert parsed.make_method() == config.make_method() and parsed.logging_steps == 1
    assert isinstance(parsed, GRPOConfig) and "alpha" in repr(config)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"budgt": 40}, "budgt", "did you mean 'budget'"),
        ({"learning_rte": 1}, "learning_rte", "did you mean 'learning_rate'"),
        ({"credit": {"alpa": 1}}, "alpa", "did you mean 'alpha'"),
        ({"credit": {"alpha": 1}, "alpha": 2}, "credit.alpha", "once"),
        ({"credit": '{"alpha": 1}', "n0": 2}, "credit", "dict"),
        ({"method": "probpo"}, "method", "did you mean 'probepo'"),
        ({"budget": 4}, "probepo.budget", "at least samples"),
        ({"alpha": "much"}, "probepo.alpha", "number"),
        ({"num_generations": 1}, "num_generations", "at least 2"),
        ({"record_every": 0}, "record_every", "1 or more"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level", "would vanish"),
        ({"loss_type": "vespo"}, "loss_type", "loss_type='dapo'"),
        ({"use_liger_kernel": True}, "use_liger_kernel", "leave it out"),
        ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold", "single tokens"),
        ({"use_vllm": True}, "use_vllm", "probe_engine"),
        ({"probe_engine": "sglang"}, "probe_engine", "'transformers' or 'vllm'"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching", "paged"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 3}}, "generation_kwargs", "as the rollouts are"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation", "μ and σ"),
        ({"method": "rloo", "multi_objective_aggregation": "normalize_then_sum"},
         "multi_objective_aggregation", "rloo"),
        ({"fsdp": "full_shard"}, "fsdp", "DDP"),
        ({"rescue_tokens": 0, "rescue_cue": "#"}, "rescue_tokens", "1 or more"),
    ],
)  # fmt: skip
def test_refusals_name_field_and_fix(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        make(**changes)
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "vespo"},
        {"importance_sampling_level": "sequence"},
        {"off_policy_mask_threshold": 0.1},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"generation_kwargs": {"no_repeat_ngram_size": 3}},
    ],
)
def test_what_is_refused_for_token_credit_is_fine_for_grpo(changes: dict[str, Any]) -> None:
    make(method="grpo", **changes)


def test_trainer_refuses_by_name(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="args: got GRPOConfig"):
        CreditTrainer(model=tiny.load(policy), reward_funcs=tiny.last_digit, train_dataset=tiny.dataset(),
                      args=GRPOConfig(**tiny.options(tmp_path)))  # fmt: skip
    with pytest.raises(InputError, match="processing_class: got images"):
        data = tiny.dataset().add_column("image", [None] * 8)
        tiny.trainer(policy, tmp_path, train_dataset=data)
    with pytest.warns(UserWarning), pytest.raises(InputError, match="rollout_func"):
        CreditTrainer(
            model=tiny.load(policy), reward_funcs=tiny.last_digit, train_dataset=tiny.dataset(),
            processing_class=tiny.make_tokenizer(), args=CreditConfig(**tiny.options(tmp_path)),
            rollout_func=lambda prompts, trainer: {},
        )  # fmt: skip


def test_import_is_light() -> None:
    code = "import apportion.train, sys; assert not {'trl', 'transformers', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
