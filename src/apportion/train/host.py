"""What TRL decided about one generation batch, read without changing it.

Shapes: _R responses of all ranks in rank order, _B responses of this rank, _T padded tokens, _F reward functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import trl
from accelerate.utils import gather_object
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import nanstd

from apportion.engines.trees import Leaf
from apportion.measure.batch import READ_IN_TEXT, Batch, base_of
from apportion.rollouts import Rollouts
from apportion.segments import token_offsets
from apportion.train.compatibility import measures
from apportion.train.reference import count_pass, evaluating, reference_logps

if TYPE_CHECKING:
    from apportion.train.streaming import Streamed
    from apportion.train.trainer import CreditTrainer

# What TRL adds to σ; `trl_base` is checked against TRL's own advantages every step, so a change cannot hide.
_EPSILON = 1e-4


@dataclass
class Capture:
    """Collected through the trainer's own methods while TRL generates and scores one batch.

    Attributes:
        rows: this rank's data set rows, one a response.
        token_ids: this rank's completions as sampled, before any padding.
        rewards: (R, F) of all ranks, NaN where a function abstained.
        passes: TRL's no-gradient passes over the batch: log-probabilities, entropies (None for a reference
            model), and whether the pass drew random numbers, which only dropout does.
        leaves: of each response, where the responses are trees; None where they are not. filler: which of them only
            fill a place. generated: tokens of all trees.
        streamed: what came of the batch where rollouts and probes were decoded together.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    rewards: Tensor | None = None
    passes: list[tuple[Tensor, Tensor | None, bool]] = field(default_factory=list)
    leaves: list[Leaf] | None = None
    filler: list[bool] = field(default_factory=list)
    generated: int = 0
    streamed: Streamed | None = None


def weighted(rewards_RF: Tensor, weights_F: Tensor) -> Tensor:
    """[R] TRL's weighted sum of what the reward functions gave, NaN where all of them abstained."""
    reward = (rewards_RF * weights_F.to(rewards_RF.device)).nansum(dim=1)
    return reward.masked_fill(torch.isnan(rewards_RF).all(dim=1), torch.nan)


def trl_base(
    rewards_RF: Tensor, weights_F: Tensor, group_size: int, scale_rewards: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[R] reward, μ, divisor and advantage by TRL's rule for `sum_then_normalize`, in TRL's own arithmetic.

    σ is the sample deviation of the scored members, of the group or of the batch; the divisor is σ + 1e-4, or 1
    for `scale_rewards="none"`.
    """
    reward = weighted(rewards_RF, weights_F)
    grouped = reward.view(-1, group_size)
    mean = torch.nanmean(grouped, dim=1).repeat_interleave(group_size)
    centred = reward - mean
    if scale_rewards == "none":
        return reward, mean, torch.ones_like(reward), torch.nan_to_num(centred, nan=0.0)
    if scale_rewards == "batch":
        std = nanstd(reward).expand_as(reward)
    else:
        std = nanstd(grouped, dim=1).repeat_interleave(group_size)
    scale = std + _EPSILON
    return reward, mean, scale, torch.nan_to_num(centred / scale, nan=0.0)


def check_base(trainer: CreditTrainer, advantage_R: Tensor, output: dict[str, Any], local: slice) -> None:
    """Raises RuntimeError where TRL's advantages are not, bit for bit, what `trl_base` makes of its rewards."""
    if trainer.args.multi_objective_aggregation != "sum_then_normalize":
        return
    if not torch.equal(advantage_R[local], output["advantages"]):
        gap = (advantage_R[local] - output["advantages"]).abs().max()
        raise RuntimeError(
            f"TRL {trl.__version__} no longer computes advantages as (r − μ)/(σ + {_EPSILON}) with "
            f"scale_rewards={trainer.args.scale_rewards!r}: they differ by {float(gap):.3g}. Its μ and σ are what "
            "credit is measured in, so training stops here; install a TRL release that the tests name"
        )


def token_statistics(trainer: CreditTrainer, capture: Capture, output: dict[str, Any]) -> dict[str, Tensor]:
    """(B, T) float32 log-probabilities and entropies at the sampling temperature, as far as they are needed.

    Our own sampler reads them as it draws. TRL's own pass over the old policy is used where it makes one and dropout
    was off in it; else one more no-gradient pass is made, without dropout.

    Raises:
        RuntimeError: the model's head returned less than float32, in which entropies tie.
    """
    method, stats = trainer.credit_method, {}
    old = output.get("old_per_token_logps")
    reused = next(((p, e) for p, e, drew in capture.passes if p is old and e is not None and not drew), None)
    if capture.streamed is not None:
        reused = capture.streamed.read
    if reused is None and ({"entropy", "old_logprob", "continuations"} & method.needs):
        reused = statistics_pass(trainer, output)
    if reused is not None:
        stats["old_logprob"], stats["entropy"] = reused
    elif old is not None:
        stats["old_logprob"] = old
    if "ref_per_token_logps" in output:
        stats["ref_logprob"] = output["ref_per_token_logps"]
    elif "ref_logprob" in method.needs:
        stats["ref_logprob"] = reference_logps(trainer, output)
    for name, values in stats.items():
        if values.dtype not in (torch.float32, torch.float64):
            raise RuntimeError(
                f"{name}: got {values.dtype} from TRL's head; expected float32, in which they do not tie"
            )
    return stats


def statistics_pass(trainer: CreditTrainer, output: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of TRL's batch under the current weights, without dropout."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    checkpointing = trainer.args.gradient_checkpointing_kwargs
    count_pass(trainer, ids)
    with torch.no_grad(), evaluating(trainer.model), disable_gradient_checkpointing(trainer.model, checkpointing):
        logprob, entropy, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention, output["completion_ids"].size(1),
            batch_size=trainer.args.per_device_train_batch_size, compute_entropy=True,
        )  # fmt: skip
    return logprob, entropy


def gather_batch(trainer: CreditTrainer, capture: Capture, output: dict[str, Any], occurrence: int) -> Batch:
    """The whole generation batch on every rank, in TRL's row order.

    Args:
        occurrence: number of the batch's first prompt among those of this optimiser step.

    Raises:
        RuntimeError: TRL's advantages or its order of responses are not what they were.
        InputError: a reward or a token statistic that is not finite.
    """
    assert capture.rewards is not None
    size = trainer.num_generations
    reward, mean, scale, advantage = trl_base(capture.rewards, trainer.reward_weights, size, trainer.args.scale_rewards)
    count = len(capture.rows)
    local = slice(trainer.accelerator.process_index * count, (trainer.accelerator.process_index + 1) * count)
    check_base(trainer, advantage, output, local)
    if trainer.args.multi_objective_aggregation != "sum_then_normalize":
        # Only methods that read nothing but TRL's advantage come here with it.
        advantage = trainer.accelerator.gather(output["advantages"])
    responses: list[dict[str, Any]] = gather_object(_responses(trainer, capture, output))
    rollouts = rollouts_of(responses, reward.double().cpu(), size, occurrence)
    if measures(trainer.credit_method):
        _check_order(responses, size)
    base = base_of(rollouts, mean, scale, advantage)
    return Batch(rollouts, base, [r["row"] for r in responses], [r["prompt"] for r in responses], local)


def _responses(trainer: CreditTrainer, capture: Capture, output: dict[str, Any]) -> list[dict[str, Any]]:
    """This rank's responses as objects that can travel: tensors on the CPU, cut to the response's length."""
    stats = {name: values.float().cpu() for name, values in token_statistics(trainer, capture, output).items()}
    mask = output["completion_mask"] * output.get("tool_mask", 1)
    mask, prompt_ids = mask.bool().cpu(), output["prompt_ids"].cpu()
    prompt_mask = output["prompt_mask"].bool().cpu()
    out = []
    for i, (row, ids) in enumerate(zip(capture.rows, capture.token_ids, strict=True)):
        prompt = prompt_ids[i][prompt_mask[i]].tolist()
        own = {name: values[i, : len(ids)] for name, values in stats.items()}
        leaf = capture.leaves[i] if capture.leaves else None
        if leaf is not None:
            # Of the distributions that it was sampled from, whatever pass TRL made since.
            own["old_logprob"] = torch.tensor(leaf.logprobs)
        read = capture.streamed.texts[i] if capture.streamed else read_text(trainer, prompt, ids)
        out.append({**response_of(trainer, row, prompt, ids, mask[i, : len(ids)], read, own), "leaf": leaf})
    return out


def read_text(trainer: CreditTrainer, prompt: list[int], ids: list[int]) -> tuple[list[int], str] | None:
    """Where each token starts in the response's text, and that text; None where nothing reads it."""
    if READ_IN_TEXT & trainer.credit_method.needs or trainer.args.run_folder is not None:
        return token_offsets(trainer.decode, ids, prompt)
    return None


def truncated(trainer: CreditTrainer, ids: list[int]) -> bool:
    """Whether the length limit ended a response, as TRL tells it."""
    return ids[-1] not in {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}


def response_of(
    trainer: CreditTrainer,
    row: dict[str, Any],
    prompt: list[int],
    ids: list[int],
    mask_T: Tensor,
    read: tuple[list[int], str] | None,
    stats: dict[str, Tensor],
) -> dict[str, Any]:
    """A response as an object that can travel. `read`: see `read_text`."""
    return {
        "row": {key: value for key, value in row.items() if key not in ("image", "images")},
        "prompt": "" if read is None else trainer.decode(prompt),
        "prompt_ids": torch.tensor(prompt), "token_ids": torch.tensor(ids), "mask": mask_T,
        "truncated": truncated(trainer, ids),
        "text": None if read is None else read[1], "char_start": None if read is None else torch.tensor(read[0]),
        "stats": stats, "leaf": None,
    }  # fmt: skip


def rollouts_of(responses: list[dict[str, Any]], reward_R: Tensor, size: int, occurrence: int) -> Rollouts:
    """Whole groups of `size` responses side by side, the first of them the step's prompt number `occurrence`."""
    length = torch.tensor([len(r["token_ids"]) for r in responses])
    groups = len(responses) // size
    with_text = responses[0]["text"] is not None
    leaves: list[Leaf] = [r["leaf"] for r in responses if r["leaf"] is not None]
    boundary = torch.zeros(int(length.sum()), dtype=torch.bool)
    for at, leaf in zip((length.cumsum(0) - length).tolist(), leaves, strict=False):
        boundary[[at + start for start in leaf.starts]] = True

    def stat(name: str) -> Tensor | None:
        return torch.cat([r["stats"][name] for r in responses]) if name in responses[0]["stats"] else None

    return Rollouts(
        token_ids=torch.cat([r["token_ids"] for r in responses]),
        offsets=torch.cat([length.new_zeros(1), length.cumsum(0)]),
        # TRL lays the responses of a prompt side by side, over ranks too, and groups rewards by that.
        group=torch.arange(groups).repeat_interleave(size),
        reward=reward_R,
        mask=torch.cat([r["mask"] for r in responses]),
        truncated=torch.tensor([r["truncated"] for r in responses]),
        prompt_ids=tuple(r["prompt_ids"] for r in responses[::size]),
        text=tuple(r["text"] for r in responses) if with_text else None,
        char_start=torch.cat([r["char_start"] for r in responses]) if with_text else None,
        names=tuple(str(occurrence + g) for g in range(groups)),
        old_logprob=stat("old_logprob"),
        entropy=stat("entropy"),
        ref_logprob=stat("ref_logprob"),
        boundary=boundary if leaves else None,
        path=tuple(leaf.path for leaf in leaves) if leaves else None,
    )


def _check_order(responses: list[dict[str, Any]], size: int) -> None:
    for i, response in enumerate(responses):
        if not torch.equal(response["prompt_ids"], responses[i - i % size]["prompt_ids"]):
            raise RuntimeError(
                f"TRL {trl.__version__} no longer lays the {size} responses of a prompt side by side: response {i} has "
                "another prompt than the first of its group. Install a TRL release that the tests name"
            )


def random_state() -> list[Tensor]:
    """The states of torch's global generators, to see whether something drew from them."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in _cuda())]


def _cuda() -> list[int]:
    """The CUDA device in use, if any; asking about others would claim memory on them."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
