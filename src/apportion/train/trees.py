"""Tree rollouts inside TRL's generation batch, and single edges of trees as its training samples.

TRL sees a prompt's leaves as its `num_generations` completions. Where a tree has fewer, copies of its last leaf fill
the places: they get no reward and are not trained on.
Shapes: _B rows, _T padded tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl.trainer.utils import pad

from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import stages_of
from apportion.credit.record import Credit
from apportion.credit.spo_tree import SPOTree
from apportion.credit.treepo import TreePO
from apportion.engines.base import Sampling
from apportion.engines.growing import TreeSampler
from apportion.engines.spo_tree import SPOTreeRule
from apportion.engines.treepo import TreePORule
from apportion.engines.trees import Leaf, Rule
from apportion.errors import InputError
from apportion.rollouts import Rollouts
from apportion.train.reference import reference_logps
from apportion.train.replay import Edge, EdgeReplay, edges_of

if TYPE_CHECKING:
    from apportion.train.trainer import CreditTrainer


def tree_method(method: CreditMethod) -> CreditMethod | None:
    """The method whose responses are trees: itself, a stage of a pipeline, or none."""
    return next((stage for stage in stages_of(method) if "tree" in stage.needs), None)


def tree_rule(method: CreditMethod) -> tuple[Rule, int]:
    """How the method's trees grow, and the most leaves that one has.

    Raises:
        InputError: trees are not sampled for this method here, or its settings make no tree.
    """
    try:
        if isinstance(method, SPOTree):
            return SPOTreeRule(method.branching, method.level_tokens), prod(method.branching)
        if isinstance(method, TreePO):
            return TreePORule(method.width, method.depth, method.segment_tokens), method.width
    except InputError as error:
        raise InputError(error.field.removeprefix(f"{method.name}."), error.got, error.expected, error.fix) from None
    raise InputError(
        "method", method.name, "spo_tree or treepo: those are the trees that are sampled here",
        f"sample the trees of {method.name} elsewhere and use `apportion assign`",
    )  # fmt: skip


class Trees:
    """Samples the trees of a trainer's method, and keeps the edges that wait to be trained.

    Attributes:
        replay: SPO-tree's queue; None where whole responses are trained.
    """

    def __init__(self, trainer: CreditTrainer, sampling: Sampling) -> None:
        method = tree_method(trainer.credit_method)
        assert method is not None
        self.trainer, self.sampling = trainer, sampling
        rule, self.leaves = tree_rule(method)
        self.sampler = TreeSampler(
            trainer.accelerator.unwrap_model(trainer.model), trainer._tokenizer.pad_token_id, rule,
            max_batch=trainer.args.probe_rows,
        )  # fmt: skip
        self.replay = EdgeReplay(method.edges, method.wait) if isinstance(method, SPOTree) else None

    def sample(self, prompts: Sequence[Sequence[int]], step: int, first: int) -> tuple[list[Leaf], list[bool], int]:
        """A row for each of the prompts, of which every `leaves` are the same one.

        Args:
            first: number of the batch's first prompt among those of this optimiser step.

        Returns:
            the rows' leaves, which rows are fillers, and the number of tokens that were generated.
        """
        size = self.leaves
        unique = [tuple(ids) for ids in prompts[::size]]
        before = self.sampler.cost.generated
        found = self.sampler.sample(
            unique, self.sampling, str(self.trainer.args.seed), step, self.trainer.max_completion_length,
            names=[str(first + p) for p in range(len(unique))],
        )  # fmt: skip
        rows, filler = [], []
        for p in range(len(unique)):
            mine = [leaf for leaf in found if leaf.prompt == p]
            rows += mine + [mine[-1]] * (size - len(mine))
            filler += [False] * len(mine) + [True] * (size - len(mine))
        return rows, filler, self.sampler.cost.generated - before

    def edges(self, rollouts: Rollouts, credit: Credit, step: int) -> dict[str, Tensor]:
        """TRL's batch with an edge a row in place of the leaves: the oldest ones first, at most so many a prompt.

        `prompt_samples` says of each row how many samples its prompt contributed to the batch. The number of rows
        is a multiple of the chunks that TRL cuts the batch into; rows without a trained token fill the last.
        """
        assert self.replay is not None
        self.replay.add(edges_of(rollouts, credit, step))
        taken = self.replay.take(step)
        rows = [edge for edges in taken for edge in edges]
        samples = [len(edges) for edges in taken for _ in edges]
        chunks = self.trainer.args.steps_per_generation
        missing = -len(rows) % chunks if rows else chunks
        counts = {name: self.replay.counts[name] for name in ("trained", "zero", "expired")}
        for name, value in {**counts, "waiting": len(self.replay)}.items():
            self.trainer.record_metric(f"tree/edges_{name}", float(value))
        self.replay.counts.clear()
        return self._batch(rows, samples, missing)

    def _batch(self, edges: Sequence[Edge], samples: Sequence[int], fillers: int) -> dict[str, Tensor]:
        trainer = self.trainer
        device, blank = trainer.accelerator.device, trainer._tokenizer.pad_token_id

        def padded(rows: Iterable[Sequence[Any]], filler: Any, dtype: torch.dtype, side: str) -> Tensor:
            tensors = [torch.tensor(row, dtype=dtype) for row in [*rows, *[[filler]] * fillers]]
            return pad(tensors, padding_value=filler, padding_side=side).to(device)

        prompts = [(*edge.prompt_ids, *edge.prefix_ids) for edge in edges]
        whole, number = torch.int64, torch.float32
        batch = {
            "prompt_ids": padded(prompts, blank, whole, "left"),
            "prompt_mask": padded([[1] * len(ids) for ids in prompts], 0, whole, "left"),
            "completion_ids": padded([edge.token_ids for edge in edges], blank, whole, "right"),
            "completion_mask": padded([[1] * len(edge.token_ids) for edge in edges], 0, whole, "right"),
            "old_per_token_logps": padded([edge.old_logprob for edge in edges], 0.0, number, "right"),
            "advantages": torch.tensor([edge.advantage for edge in edges] + [0.0] * fillers, device=device),
            "prompt_samples": torch.tensor([*samples, *[0] * fillers], device=device),
        }
        # A row that attends to nothing has no distribution at all.
        batch["prompt_mask"][len(edges) :, -1] = 1
        batch["num_items_in_batch"] = batch["completion_mask"].sum()
        if trainer.beta != 0.0:
            batch["ref_per_token_logps"] = reference_logps(trainer, batch)
        return batch
