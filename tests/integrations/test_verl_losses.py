"""verl's policy losses and per-token advantages: which of them give each token its own, and which do not.

A change of one token's advantage has to move that token's gradient and nobody else's. Twice the advantage everywhere is
no test of that: a loss that averages over a response passes it.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: make cluster has an environment with it")

from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

from apportion.integrations.verl.settings import TOKEN_LOSSES

ROWS, TOKENS = 3, 5


def actor(loss: str) -> object:
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}", "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.n=2",
        ])  # fmt: skip
    OmegaConf.resolve(config.actor_rollout_ref.actor)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def gradient(loss: str, config: object, advantages: torch.Tensor) -> torch.Tensor:
    """Of the loss to each token's log-probability, near the old policy."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(ROWS, TOKENS, generator=generator) - 0.5
    new = (old + 0.02 * torch.randn(ROWS, TOKENS, generator=generator)).requires_grad_()
    mask = torch.ones(ROWS, TOKENS)
    mask[1, 3:] = 0
    value, _ = get_policy_loss_fn(loss)(
        old_log_prob=old, log_prob=new, advantages=advantages, response_mask=mask, loss_agg_mode="token-mean",
        config=config, rollout_is_weights=None,
    )  # fmt: skip
    (found,) = torch.autograd.grad(value, new)
    return found


def moved(loss: str) -> list[set[tuple[int, int]]]:
    """For some tokens: whose gradients move when that token's advantage does."""
    config = actor(loss)
    advantages = torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(1))
    before = gradient(loss, config, advantages)
    out = []
    for place in ((0, 0), (0, 4), (1, 1), (2, 3)):
        other = advantages.clone()
        other[place] *= 1.5
        apart = (gradient(loss, config, other) - before).abs() > 1e-7
        out.append({(int(i), int(j)) for i, j in apart.nonzero()})
    return out


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_each_token_takes_its_own_advantage(loss: str) -> None:
    assert moved(loss) == [{(0, 0)}, {(0, 4)}, {(1, 1)}, {(2, 3)}]


def test_a_loss_over_whole_sequences_does_not() -> None:
    everyone = [{(row, token) for token in range(3 if row == 1 else TOKENS)} for row in (0, 0, 1, 2)]
    assert moved("geo_mean") == everyone
