"""The `apportion` block of verl's configuration, and the options of verl's that a method refuses, each by its name.

Planted faults that these tests were seen to catch: each refusal switched off, or asked of methods that it does not
concern; float32 not told apart; settings named by the method; options of a block looked up in the wrong one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from apportion.credit.registry import make_method
from apportion.errors import InputError
from apportion.integrations.verl.settings import CreditSettings, check_config


class Config(dict[str, Any]):
    """As much of OmegaConf as the check reads: attributes, `get` and items."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def config(value: Any) -> Any:
    return Config({key: config(each) for key, each in value.items()}) if isinstance(value, dict) else value


# verl's own defaults for these, but for GRPO and entropies in float32.
GOOD: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "rollout_correction": {"bypass_mode": False}},
    "actor_rollout_ref": {
        "hybrid_engine": True,
        "model": {"path": "m", "use_fused_kernels": False, "lora_rank": 0, "lora": {"rank": 0}},
        "actor": {
            "policy_loss": {"loss_mode": "vanilla"}, "entropy_from_logits_with_chunking": True, "use_kl_loss": False,
            "fsdp_config": {"dtype": "bfloat16", "mixed_precision": None, "qat": {"enable": False}},
        },
        "rollout": {
            "name": "vllm", "nnodes": 0, "agent": {"default_agent_loop": "single_turn_agent"},
            "multi_turn": {"enable": False},
        },
    },
    "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
}  # fmt: skip


def check(method: str, *changes: tuple[str, Any], **block: Any) -> None:
    found = copy.deepcopy(GOOD)
    for path, value in changes:
        *where, name = path.split(".")
        at = found
        for part in where:
            at = at[part]
        at[name] = value
    settings = CreditSettings.of({"method": method, **block})
    check_config(config(found), settings, make_method(method))


@pytest.mark.parametrize(
    "method", ["grpo", "probepo", "vineppo", "spo_chain", "cw_grpo", "avspo", "grpo_vps", "oar_p", "oar_g", "spae"]
)
def test_verls_defaults_go_with_every_method(method: str) -> None:
    check(method)


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("probepo", "algorithm.adv_estimator", "rloo"),
        ("grpo", "algorithm.adv_estimator", "gae"),
        ("probepo", "algorithm.use_kl_in_reward", True),
        ("probepo", f"{ACTOR}.policy_loss.loss_mode", "clip_cov"),
        ("ep_grpo", f"{ACTOR}.policy_loss.loss_mode", "geo_mean"),
        ("probepo", "algorithm.rollout_correction.bypass_mode", True),
        ("vineppo", "algorithm.rollout_correction.bypass_mode", True),
        ("probepo", f"{ACTOR}.entropy_from_logits_with_chunking", False),
        ("ep_grpo", f"{ACTOR}.use_kl_loss", False),
        ("oar_p", "actor_rollout_ref.model.use_fused_kernels", True),
        ("grpo_vps", "actor_rollout_ref.model.lora_rank", 8),
        ("spae", f"{ACTOR}.fsdp_config.qat.enable", True),
        ("probepo", f"{ROLLOUT}.name", "trtllm"),
        ("spo_tree", "apportion.method", None),
        ("treepo", "apportion.method", None),
        ("step_verified", "apportion.step_verifier", None),
    ],
)
def test_what_cannot_go_together_is_refused_by_name(method: str, field: str, value: Any) -> None:
    changes = [] if field.startswith("apportion") else [(field, value)]
    with pytest.raises(InputError) as refused:
        check(method, *changes)
    assert refused.value.field == field and refused.value.fix


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ([(f"{ROLLOUT}.agent.default_agent_loop", "tool_agent")], f"{ROLLOUT}.agent"),
        ([(f"{ROLLOUT}.multi_turn.enable", True)], f"{ROLLOUT}.agent"),
        ([("reward.reward_model.enable", True)], "reward.reward_model.enable_resource_pool"),
    ],
)
def test_what_a_probe_cannot_continue_or_be_graded_by(changes: list[tuple[str, Any]], field: str) -> None:
    with pytest.raises(InputError) as refused:
        check("probepo", *changes)
    assert refused.value.field == field
    check("ep_grpo", *changes, (f"{ACTOR}.use_kl_loss", True))


def test_methods_of_one_advantage_a_response_go_with_sequence_losses() -> None:
    check("grpo", (f"{ACTOR}.policy_loss.loss_mode", "geo_mean"))


def test_entropies_in_float32_need_no_chunking() -> None:
    off = (f"{ACTOR}.entropy_from_logits_with_chunking", False)
    check("probepo", off, (f"{ACTOR}.fsdp_config.dtype", "float32"))
    check("cw_grpo", off)


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({}, "apportion"),
        (None, "apportion"),
        ({"method": "probpo"}, "apportion.method"),
        ({"method": "probepo", "settings": {"budgt": 4}}, "apportion.settings.budgt"),
        ({"method": "probepo", "probes": {}}, "apportion.probes"),
        ({"method": "probepo", "probe": {"retry": 1}}, "apportion.probe.retry"),
        ({"method": "probepo", "probe": {"replicas": "asleep"}}, "apportion.probe.replicas"),
        ({"method": "probepo", "probe": {"timeout_s": 0}}, "apportion.probe.timeout_s"),
        ({"method": "probepo", "rescue": {"cue": "x", "answer": "("}}, "apportion.rescue.answer"),
    ],
)
def test_a_fault_in_the_block_is_named(block: dict[str, Any] | None, field: str) -> None:
    with pytest.raises(InputError) as refused:
        CreditSettings.of(block)
    assert refused.value.field == field


def test_misspelt_options_bring_the_nearest_name() -> None:
    with pytest.raises(InputError, match="record_every"):
        CreditSettings.of({"method": "grpo", "record_evry": 2})
    with pytest.raises(InputError, match="retries"):
        CreditSettings.of({"method": "grpo", "probe": {"retry": 2}})


def test_a_pipeline_takes_a_table_a_stage() -> None:
    found = CreditSettings.of({"method": ["avspo", "probepo"], "settings": {"probepo": {"budget": 8}}})
    assert found.make_method().name == "avspo+probepo"


def test_a_rescue_goes_with_probes_only() -> None:
    check("probepo", rescue={"cue": "x"})
    with pytest.raises(InputError, match=r"apportion\.rescue"):
        check("grpo", rescue={"cue": "x"})


def test_a_step_verifier_is_loaded_by_name() -> None:
    assert CreditSettings.of({"method": "grpo", "step_verifier": "json:loads"}).load_step_verifier() is not None
    for wrong in ("json:nothing", "no_such_module:f", "json"):
        with pytest.raises(InputError, match=r"apportion\.step_verifier"):
            CreditSettings.of({"method": "grpo", "step_verifier": wrong}).load_step_verifier()
