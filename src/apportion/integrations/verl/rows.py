"""verl's rows as a frozen batch, and credit as verl's rows. Everything goes by row key, `{uid}_{session}_{index}`.

verl reorders rows to balance its ranks and fills the batch up with rows tagged `is_padding`, which belong to no group.
Shapes: _R responses, _N flat tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from apportion.errors import InputError
from apportion.integrations.verl.base import verl_base
from apportion.measure.batch import Batch, base_of
from apportion.rollouts import Rollouts
from apportion.segments import token_offsets

Decode = Callable[[Sequence[int]], str]

# verl's name of what is per token, and ours.
_STATISTICS = {"entropy": "entropy", "old_log_probs": "old_logprob", "ref_log_prob": "ref_logprob"}
_TOKENS = ("prompts", "responses", "response_mask", "rm_scores", "advantages")
# What verl adds to a row. The rest is the data set's, which a reward function may read any part of.
_OWN = {
    *_TOKENS, *_STATISTICS, "input_ids", "position_ids", "attention_mask", "loss_mask", "multi_modal_inputs", "metrics",
    "num_turns", "extra_fields", "log_probs", "rollout_log_probs", "routed_experts", "values", "returns",
    "token_level_rewards", "rollout_is_weights", "teacher_ids", "teacher_logprobs", "dummy_tensor",
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """A step's responses as verl has them, in our order.

    Attributes:
        keys: R row keys: groups side by side, sessions rising. tags: what verl noted of each.
        about: R dicts of what the data set said of each prompt, which rewards are computed from.
        batch: the same responses as methods read them.
    """

    keys: list[str]
    tags: list[Mapping[str, Any]]
    about: list[dict[str, Any]]
    batch: Batch


@dataclass(frozen=True)
class Reader:
    """Reads a step's rows.

    Attributes:
        decode: token ids to text, special tokens and spaces as they are. eos: ids that end a response.
        limit: tokens that a response may have. normalised: whether verl divides by σ.
        text: whether the text of the responses is read. part: number of the batch among those of the same step.
    """

    decode: Decode
    eos: frozenset[int]
    limit: int
    normalised: bool
    text: bool

    def read(self, meta: Any, part: int = 0) -> Rows:
        """The batch that verl has just computed advantages of.

        Args:
            meta: verl's KVBatchMeta.

        Raises:
            InputError: a session with several outputs, rewards that are infinite.
            RuntimeError: verl's advantages are not what its rule makes of its rewards.
        """
        own = [i for i, tag in enumerate(meta.tags) if not tag.get("is_padding", False)]
        keys, tags = [meta.keys[i] for i in own], [meta.tags[i] for i in own]
        _refuse_several_outputs(keys)
        first = tq.kv_batch_get(keys=keys[:1], partition_id=meta.partition_id)
        names = list(first.keys())
        said = [name for name in names if name not in _OWN]
        wanted = [*said, *(name for name in (*_TOKENS, *_STATISTICS) if name in names)]
        found = tq.kv_batch_get(keys=keys, partition_id=meta.partition_id, select_fields=wanted)
        columns = {name: _column(found, name, len(keys)) for name in wanted}
        # In verl's order: a mean over a group's members in another one may end in another bit.
        base = self._base(keys, columns)
        order = _order(keys, columns)
        keys, tags = [keys[i] for i in order], [tags[i] for i in order]
        columns = {name: [values[i] for i in order] for name, values in columns.items()}
        about = [{name: columns[name][i] for name in said} for i in range(len(keys))]
        return Rows(keys, tags, about, self._batch(keys, columns, about, part, [each[order] for each in base]))

    def _batch(
        self,
        keys: list[str],
        columns: Mapping[str, list[Any]],
        about: list[dict[str, Any]],
        part: int,
        base: Sequence[Tensor],
    ) -> Batch:
        prompts = [ids.tolist() for ids in columns["prompts"]]
        responses = [ids.tolist() for ids in columns["responses"]]
        groups = _groups(keys)
        first = {name: i for i, name in reversed(list(enumerate(groups)))}
        mask = [m.bool().tolist() for m in columns["response_mask"]]
        rest: dict[str, Any] = {
            ours: torch.cat(columns[theirs]).float() for theirs, ours in _STATISTICS.items() if theirs in columns
        }
        length = torch.tensor([len(ids) for ids in responses])
        if self.text:
            read = [token_offsets(self.decode, ids, prompt) for ids, prompt in zip(responses, prompts, strict=True)]
            rest["text"] = tuple(text for _, text in read)
            rest["char_start"] = torch.tensor([start for starts, _ in read for start in starts], dtype=torch.int64)
        number = {name: i for i, name in enumerate(dict.fromkeys(groups))}
        rollouts = Rollouts(
            token_ids=torch.tensor([t for ids in responses for t in ids], dtype=torch.int64),
            offsets=torch.cat([length.new_zeros(1), length.cumsum(0)]),
            group=torch.tensor([number[name] for name in groups]),
            reward=_rewards(columns).double(),
            mask=torch.tensor([m for row in mask for m in row], dtype=torch.bool),
            truncated=torch.tensor([len(ids) >= self.limit and ids[-1] not in self.eos for ids in responses]),
            prompt_ids=tuple(torch.tensor(prompts[first[name]]) for name in number),
            names=_names([about[first[name]] for name in number], part),
            **rest,
        )
        texts = [self.decode(ids) for ids in prompts] if self.text else [""] * len(keys)
        return Batch(rollouts, base_of(rollouts, *base), [_row(each) for each in about], texts, slice(0, len(keys)))

    def _base(self, keys: Sequence[str], columns: Mapping[str, list[Any]]) -> tuple[Tensor, Tensor, Tensor]:
        """[R] μ, divisor and advantage of verl's GRPO; of the scored members where a verdict is missing."""
        reward, advantage = _rewards(columns), _advantages(columns)
        names = {name: i for i, name in enumerate(dict.fromkeys(_groups(keys)))}
        group = torch.tensor([names[name] for name in _groups(keys)])
        scored = (~torch.isnan(reward)).nonzero()[:, 0]
        compared = torch.tensor([bool(mask.any()) for mask in columns["response_mask"]])
        if len(scored) < len(reward):
            # One NaN makes the whole group NaN in verl. Who is left alone by that has nothing to compare with.
            alone = torch.bincount(group[scored], minlength=len(names))[group] == 1
            alone &= torch.bincount(group)[group] > 1
            advantage = _of_scored(reward, group, scored, self.normalised).masked_fill(alone, 0.0)
            compared &= ~alone
        mean, scale = torch.zeros_like(reward), torch.ones_like(reward)
        mean[scored], scale[scored] = verl_base(
            reward[scored], group[scored], advantage[scored], self.normalised, compared[scored]
        )
        return mean, scale, advantage


def write_advantages(meta: Any, keys: Sequence[str], rollouts: Rollouts, token_N: Tensor) -> None:
    """Puts float32 advantages, one a token, in the place of verl's; rows of other keys stay as they are."""
    pieces = list(token_N.float().split(rollouts.length.tolist()))
    nested = torch.nested.as_nested_tensor(pieces, layout=torch.jagged)
    tq.kv_batch_put(
        keys=list(keys), partition_id=meta.partition_id, fields=TensorDict({"advantages": nested}, batch_size=len(keys))
    )


def versions(tags: Sequence[Mapping[str, Any]]) -> list[tuple[int | None, int | None]]:
    """Of each row the first and the last version of the weights that it was sampled by."""
    return [(tag.get("min_global_steps"), tag.get("max_global_steps")) for tag in tags]


def _refuse_several_outputs(keys: Sequence[str]) -> None:
    for key in keys:
        if key.rsplit("_", 1)[1] != "0":
            raise InputError(
                f"row {key}", "a second output of one session", "one output a session",
                "per-token credit knows single responses; use an agent loop that returns one output",
            )  # fmt: skip


def _column(found: TensorDict, name: str, count: int) -> list[Any]:
    """A value a row: tensors for what is nested, else plain Python."""
    value = found[name]
    rows = list(value.unbind()) if isinstance(value, Tensor) else list(value)
    if len(rows) != count:
        raise RuntimeError(f"verl's field {name} has {len(rows)} values for {count} rows")
    return [getattr(row, "data", row) if not isinstance(row, Tensor) else row for row in rows]


def _order(keys: Sequence[str], columns: Mapping[str, list[Any]]) -> list[int]:
    """Rows by data set index, prompt, group and session, so that a run's records do not depend on its balancing."""
    index = columns.get("index", [0] * len(keys))

    def place(i: int) -> tuple[Any, ...]:
        uid, session, _ = keys[i].rsplit("_", 2)
        return str(index[i]).rjust(20), columns["prompts"][i].tolist(), uid, int(session)

    return sorted(range(len(keys)), key=place)


def _names(about: Sequence[Mapping[str, Any]], part: int) -> tuple[str, ...]:
    """A name a group that a second run has as well, which verl's uid is not: the data set's index, numbered."""
    seen: dict[str, int] = {}
    names = []
    for each in about:
        name = str(each.get("index", ""))
        seen[name] = number = seen.get(name, -1) + 1
        names.append(f"{name}.{part}.{number}" if part else f"{name}.{number}" if number else name)
    return tuple(names)


def _groups(keys: Sequence[str]) -> list[str]:
    return [key.rsplit("_", 2)[0] for key in keys]


def _rewards(columns: Mapping[str, list[Any]]) -> Tensor:
    """[R] float32, as verl adds them up."""
    return torch.stack([scores.float().sum() for scores in columns["rm_scores"]])


def _advantages(columns: Mapping[str, list[Any]]) -> Tensor:
    """[R] float32 verl's own, which it spreads evenly over the trainable tokens of a response; 0 where it has none."""
    out = torch.zeros(len(columns["advantages"]))
    for i, (values, mask) in enumerate(zip(columns["advantages"], columns["response_mask"], strict=True)):
        own = values[mask.bool()].float()
        if len(own):
            out[i] = own[0]
            if not torch.equal(own, own[:1].expand_as(own)) and not torch.isnan(own).all():
                raise RuntimeError("verl's advantages differ between the tokens of a response: another estimator ran")
    return out


def _of_scored(reward_R: Tensor, group_R: Tensor, scored: Tensor, normalised: bool) -> Tensor:
    """[R] verl's own rule over the responses that have a verdict, 0 for the others."""
    out = torch.zeros_like(reward_R)
    if len(scored):
        found, _ = compute_grpo_outcome_advantage(
            token_level_rewards=reward_R[scored][:, None].clone(), response_mask=torch.ones(len(scored), 1),
            index=group_R[scored].numpy(), norm_adv_by_std_in_grpo=normalised,
        )  # fmt: skip
        out[scored] = found[:, 0]
    return out


def _row(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a measurement may ask of the data set: the gold answer, and a marked span of the prompt."""
    extra, graded = about.get("extra_info") or {}, about.get("reward_model") or {}
    return {"ground_truth": graded.get("ground_truth"), "span": extra.get("span"), "index": about.get("index")}
