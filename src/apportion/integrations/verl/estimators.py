"""Methods that read nothing but rewards, as estimators of verl's: `algorithm.adv_estimator=apportion_NAME`.

There is one for every registered method with empty `needs`, those of other packages too. Their settings stand under
`algorithm.apportion`: `+algorithm.apportion.epsilon=1e-7`. What verl has itself is read where verl has it:
`algorithm.norm_adv_by_std_in_grpo` for the base, which is verl's GRPO (σ + 1e-6, sample deviation), and
`algorithm.gamma` for REINFORCE++.

`apportion_grpo` is verl's `grpo` bit for bit. How the others differ from verl's estimators of the same rule: a group of
one and a group whose rewards are all equal get exactly 0, and the deviation of a batch is divided by as σ + ε, not as
√(σ² + ε). In all of them a response without a reward (NaN) or without a trainable token, such as a padding row, is in
no statistic and gets 0.

What verl does not show an estimator: token ids, which responses were cut off (a method reads -1 and False), row keys,
tags, log-probabilities, entropies. So:

- An agent loop that returns several outputs a session makes each a member of the group, as with verl's own estimators
  but `grpo`.
- A method that remembers something from batch to batch (`avspo`) is refused: an estimator takes no part in checkpoints.
- `cw_grpo` and `ep_grpo` need log-probabilities and cannot be estimators. Nor are they policy losses here: a policy
  loss of verl sees one micro-batch without group ids. Their statistics are those of a prompt group or of the whole
  batch, whose rows verl balances over ranks and splits into micro-batches, so a loss would compute other weights, and
  others again with another `ppo_micro_batch_size_per_gpu` or number of GPUs. `ep_grpo` needs entropies and a reference
  model's log-probabilities besides, which a policy loss is not given.

The trainer mode does all of these: `trainer.v1.trainer_mode=apportion_sync +apportion.method=NAME`.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

from apportion.credit.method import CreditMethod
from apportion.credit.registry import make_method, method_class, method_names
from apportion.credit.reinforce_pp import ReinforcePP
from apportion.errors import InputError
from apportion.groups import Base
from apportion.integrations.verl.base import verl_base
from apportion.measure.batch import base_of
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts

PREFIX = "apportion_"
_BLOCK = "algorithm.apportion"
# σ of the base that verl supplies. A method's own settings of these names are for where nobody supplies one.
_VERLS = {"ddof": 1, "epsilon": 1e-6}

log = logging.getLogger(__name__)


def register() -> None:
    """Adds the estimators to verl. A second call changes nothing.

    A method of another package that cannot be loaded is left out with a warning.
    """
    for name in method_names():
        try:
            local = not method_class(name).needs
        except InputError as error:
            log.warning("apportion: no estimator for verl of method %s: %s", name, error)
            continue
        if local:
            register_adv_est(PREFIX + name)(Estimator(name))


@dataclass(frozen=True)
class Estimator:
    """verl's calling convention around the method of that name.

    Attributes:
        name: registered name of a method with empty `needs`.
    """

    name: str

    def __call__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Sequence[Hashable] | None = None,
        config: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Advantages, and the same once more in the place of returns, as verl's outcome estimators have it.

        Args:
            token_level_rewards: (R, W); a response's reward is their sum. NaN where there is no verdict.
            response_mask: (R, W), not 0 on trainable tokens.
            index: R hashable group ids, in any order.
            config: verl's `algorithm` block, of which `apportion`, `norm_adv_by_std_in_grpo` and `gamma` are read.
            others: what verl passes to other estimators; not read.

        Returns:
            (R, W) float32, twice: 0 on masked tokens.

        Raises:
            InputError: an unknown or unusable setting, no group ids, rewards that are infinite, or a method with a
                memory.
        """
        method = self._method(config)
        rollouts = self._rollouts(token_level_rewards.detach().cpu().float(), response_mask.cpu().bool(), index, method)
        normalised = config is None or bool(config.get("norm_adv_by_std_in_grpo", True))
        credit = method.assign(rollouts, Evidence(), _base(rollouts, normalised))
        advantage = rollouts.to_padded(credit.token, response_mask.shape[1]).to(token_level_rewards.device)
        return advantage, advantage

    def _method(self, config: Any) -> CreditMethod:
        """The method with the settings of verl's configuration."""
        cls = method_class(self.name)
        if cls.after is not CreditMethod.after:
            raise InputError(
                "algorithm.adv_estimator", PREFIX + self.name,
                f"a method without memory: verl's checkpoints hold nothing of an estimator, and what {self.name} has "
                "learnt would be lost where a run is resumed",
                "set trainer.v1.trainer_mode=apportion_sync, algorithm.adv_estimator=grpo and "
                f"+apportion.method={self.name}",
            )  # fmt: skip
        given = _block(config)
        for name, value in _VERLS.items():
            if cls.uses_base and name in given and _of_nobody(cls, name) and not _same(given[name], value):
                raise InputError(
                    f"{_BLOCK}.{name}", given[name], f"{value}, or nothing: the base and its σ are verl's",
                    "leave it out",
                )  # fmt: skip
        if cls is ReinforcePP:
            if "gamma" in given:
                raise InputError(f"{_BLOCK}.gamma", given["gamma"], "nothing: verl has it", "set algorithm.gamma")
            given["gamma"] = 1.0 if config is None else config.get("gamma", 1.0)
        try:
            return make_method(self.name, given)
        except InputError as error:
            field = f"{_BLOCK}.{error.field.removeprefix(f'{self.name}.')}"
            raise InputError(field, error.got, error.expected, error.fix) from None

    def _rollouts(
        self, rewards: Tensor, mask: Tensor, index: Sequence[Hashable] | None, method: CreditMethod
    ) -> Rollouts:
        """verl's rows as they came. What stands behind a row's last trainable token is taken for padding."""
        present = mask.flip(1).cumsum(1).flip(1) > 0
        if isinstance(method, ReinforcePP):
            _refuse_early(rewards, present)
        if index is None and method.grouped:
            raise InputError("uid", "none", f"one a row: {PREFIX}{self.name} compares the responses of a prompt")
        # As keys of a dict no two elements of a tensor are alike.
        ids: Sequence[Hashable] = range(len(mask)) if index is None else getattr(index, "tolist", lambda: index)()
        if len(ids) != len(mask):
            raise InputError("uid", f"{len(ids)} values", f"{len(mask)}, one a row")
        number: dict[Hashable, int] = {}
        group = torch.tensor([number.setdefault(each, len(number)) for each in ids], dtype=torch.int64)
        return Rollouts.from_padded(
            torch.full(mask.shape, -1), present, group, rewards.sum(-1), mask=mask, names=tuple(map(str, number))
        )


def _base(rollouts: Rollouts, normalised: bool) -> Base:
    """verl's GRPO over the scored responses, in the order of verl's rows.

    Where the others of a group dropped out, the one that is left gets 0: verl's rule for a group of one is for prompts
    that were answered once.
    """
    rows = rollouts.scored.nonzero()[:, 0]
    reward, group = rollouts.reward[rows], rollouts.group[rows]
    found, _ = compute_grpo_outcome_advantage(
        token_level_rewards=reward[:, None], response_mask=torch.ones(len(rows), 1), index=group.numpy(),
        norm_adv_by_std_in_grpo=normalised,
    )  # fmt: skip
    advantage, mean, scale = torch.zeros(len(rollouts)), torch.zeros(len(rollouts)), torch.ones(len(rollouts))
    advantage[rows] = found[:, 0]
    mean[rows], scale[rows] = verl_base(reward, group, found[:, 0], normalised)
    members, scored = (torch.bincount(each, minlength=rollouts.groups) for each in (rollouts.group, group))
    advantage[((scored == 1) & (members > 1))[rollouts.group]] = 0.0
    return base_of(rollouts, mean, scale, advantage)


def _block(config: Any) -> dict[str, Any]:
    """The settings under `algorithm.apportion`, which the command line adds with `+algorithm.apportion.NAME=VALUE`."""
    block = None if config is None else config.get("apportion", None)
    if OmegaConf.is_config(block):
        block = OmegaConf.to_container(block, resolve=True)
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise InputError(_BLOCK, repr(block), "a table of the method's settings", f"write +{_BLOCK}.SETTING=VALUE")
    return {str(key): value for key, value in block.items()}


def _of_nobody(cls: type[CreditMethod], name: str) -> bool:
    """Whether the setting is the one that every method has, for where no host supplies the base."""
    return cls.model_fields[name].description == CreditMethod.model_fields[name].description


def _same(given: Any, value: float) -> bool:
    try:
        return float(given) == value
    except (TypeError, ValueError):
        return False


def _refuse_early(rewards: Tensor, present: Tensor) -> None:
    """Raises InputError for the first reward that stands before its response's last trainable token."""
    before = torch.cat([present[:, 1:], torch.zeros_like(present[:, :1])], dim=1)
    early = before & (rewards != 0) & ~rewards.isnan()
    if early.any():
        row, position = early.nonzero()[0].tolist()
        raise InputError(
            f"token_level_rewards of row {row}", f"{float(rewards[row, position]):g} at position {position}",
            "one reward a response, on its last token, from which reinforce_pp discounts",
            "keep the KL term out of the reward: algorithm.use_kl_in_reward=False, actor.use_kl_loss=True",
        )  # fmt: skip
