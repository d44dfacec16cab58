"""Whether probes are of the policy that is trained: a few of them scored by verl's actors as well.

A replica that has reloaded its weights from disk still calls itself by the newest version; its probabilities tell.
Shapes: _T tokens of a probe.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_from_nested

from apportion.measure.gap import Gap

# What verl's actors read of a row; the rest of a real row comes along as it is, but for what is one value a token.
_STALE = (
    "entropy", "log_probs", "old_log_probs", "ref_log_prob", "advantages", "returns", "values", "token_level_rewards",
    "rollout_is_weights", "routed_experts", "teacher_ids", "teacher_logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class Scored:
    """A probe with the log-probabilities that its replica gave its tokens, [T] at the sampling temperature."""

    prefix_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def probe_gap(actors: Any, like: Any, probes: Sequence[Scored], temperature: float) -> Gap:
    """|ln p of the replica − ln p of the actor| over the probes' tokens.

    One forward of the actors over these rows, while their weights are those that the probes were sampled with.

    Args:
        actors: verl's worker group. like: the KVBatchMeta of the step, a row of which lends its other fields.
        probes: whole micro-batches for every data-parallel rank.
    """
    if not probes:
        return Gap()
    source = tq.kv_batch_get(keys=like.keys[:1], partition_id=like.partition_id)[0]
    if source["position_ids"].dim() > 1:
        # Positions of a model that sees: they depend on its pictures.
        return Gap()
    names = [name for name in list(source.keys()) if name not in _STALE]
    template = {name: source[name] for name in names}
    name = f"gap{uuid.uuid4().hex}"
    keys = [f"{name}_{i}_0" for i in range(len(probes))]
    tags = [
        {**like.tags[0], "is_padding": True, "prompt_len": len(p.prefix_ids), "response_len": len(p.token_ids),
         "seq_len": len(p.prefix_ids) + len(p.token_ids)} for p in probes
    ]  # fmt: skip
    rows = [{**template, **_row(probe), "uid": name} for probe in probes]
    fields = list_of_dict_to_tensordict(rows)
    try:
        tq.kv_batch_put(keys=keys, partition_id=like.partition_id, fields=fields, tags=tags)
        extra = {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
        actors.compute_log_prob(
            KVBatchMeta(keys=keys, tags=tags, partition_id=like.partition_id, extra_info={**like.extra_info, **extra})
        )
        wanted = ["log_probs", "response_mask"]
        found = tq.kv_batch_get(keys=keys, partition_id=like.partition_id, select_fields=wanted)
        ours = response_from_nested(found["log_probs"], found["response_mask"]).unbind()
    finally:
        tq.kv_clear(keys=keys, partition_id=like.partition_id)
    gap = Gap()
    for probe, actor in zip(probes, ours, strict=True):
        apart = (torch.tensor(probe.logprobs).double() - actor.double()).abs()
        gap += Gap(float(apart.max()), float(apart.sum()), len(apart))
    return gap


def _row(probe: Scored) -> dict[str, Any]:
    prompts, responses = (torch.tensor(ids, dtype=torch.int64) for ids in (probe.prefix_ids, probe.token_ids))
    ids, mask = torch.cat([prompts, responses]), torch.ones_like(responses)
    return {
        "prompts": prompts, "responses": responses, "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(len(ids)), "response_mask": mask, "loss_mask": mask,
        "rm_scores": torch.zeros(len(responses)), "rollout_log_probs": torch.tensor(probe.logprobs),
    }  # fmt: skip
