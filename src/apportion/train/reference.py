"""The reference model of methods that read one: TRL keeps it for a KL term only.

Shapes: _B rows, _T padded tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing

if TYPE_CHECKING:
    from apportion.train.trainer import CreditTrainer


def frozen_copy(model: nn.Module) -> nn.Module | None:
    """The policy as it is now, never to be trained; None for PEFT, whose adapter can be switched off instead.

    Made before training starts and before a checkpoint is loaded, so that a resumed run has the same one.
    """
    if hasattr(model, "peft_config"):
        return None
    reference = copy.deepcopy(model).eval()
    return reference.requires_grad_(False)


def count_pass(trainer: CreditTrainer, ids: Tensor) -> None:
    """Counts a pass of TRL's over (B, P+T) ids that it makes for us alone."""
    trainer.passes.forwards += -(-len(ids) // trainer.args.per_device_train_batch_size)
    trainer.passes.forward_tokens += ids.numel()


def reference_logps(trainer: CreditTrainer, rows: dict[str, Tensor]) -> Tensor:
    """(B, T) float32 log-probabilities of the completions under the reference model, at the sampling temperature.

    TRL's own reference model where it has one; else the trainer's frozen copy, or the policy without its adapter.
    """
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    attention = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    checkpointing = trainer.args.gradient_checkpointing_kwargs
    model: Any = trainer.ref_model if trainer.ref_model is not None else trainer.reference

    def logps(model: Any) -> Tensor:
        count_pass(trainer, ids)
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, checkpointing):
            found: Tensor = trainer._get_per_token_logps_and_entropies(
                model, ids, attention, rows["completion_ids"].size(1),
                batch_size=trainer.args.per_device_train_batch_size,
            )[0]  # fmt: skip
        return found

    if model is not None:
        return logps(model)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    with evaluating(policy), policy.disable_adapter():
        return logps(trainer.model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off, and the key-value cache that gradient checkpointing forbids in training mode back."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
