"""Edges of trees as training samples, and the queue in which those wait that an update has no room for.

Shapes: _E edges, _P prompts, _N tokens of all edges, _S segments (one an edge of a response).
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from apportion.credit.record import Credit
from apportion.credit.tree import edges_of as laid_edges
from apportion.credit.tree import tree_of
from apportion.errors import InputError
from apportion.rollouts import Rollouts


@dataclass(frozen=True)
class Edge:
    """A segment of a tree that is trained by itself: prompt and prefix are given, its tokens are the actions.

    Attributes:
        prefix_ids: response tokens before the edge.
        old_logprob: log-probability, in nats, of each of `token_ids` when it was sampled.
        advantage: of every one of them.
        born: the update whose policy sampled it.

    Raises:
        InputError: no token, a log-probability too few or too many, or a number that is not finite.
    """

    prompt_ids: tuple[int, ...] = field(repr=False)
    prefix_ids: tuple[int, ...] = field(repr=False)
    token_ids: tuple[int, ...]
    old_logprob: tuple[float, ...]
    advantage: float
    born: int

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.old_logprob) != len(self.token_ids):
            got = f"{len(self.old_logprob)} values for {len(self.token_ids)} tokens"
            raise InputError("edge.old_logprob", got, "one a token, and at least one token")
        for name, values in (("old_logprob", self.old_logprob), ("advantage", (self.advantage,))):
            if not all(map(math.isfinite, values)):
                raise InputError(f"edge.{name}", values, "finite numbers")


def edges_of(rollouts: Rollouts, credit: Credit, update: int) -> list[Edge]:
    """Every edge of a batch of tree rollouts once, in the order in which its rows first run through it.

    A node is its group and the whole path to it, and all responses below an edge hold the same tokens there. The
    advantage is that of the first response below it that is scored: an unscored one has 0, which says nothing of
    the edge. An edge without a scored response is left out.

    Args:
        credit: one that gives an edge's tokens one advantage, as `spo_tree` does.
        update: the number of the update whose policy sampled the batch.

    Raises:
        InputError: `path`, `prompt_ids` or `old_logprob` is missing; a path does not fit its row; an edge has
            masked tokens, or more than one advantage.
    """
    if rollouts.prompt_ids is None or rollouts.old_logprob is None:
        lacking = "prompt_ids" if rollouts.prompt_ids is None else "old_logprob"
        raise InputError(lacking, "none", "a value for every token of a tree rollout")
    laid = laid_edges(rollouts, tree_of(rollouts, credit.method), credit.method)
    prompts = [tuple(ids.tolist()) for ids in rollouts.prompt_ids]
    scored, group = rollouts.scored.tolist(), rollouts.group.tolist()
    found, seen = [], set[int]()
    columns = (laid.row, laid.start, laid.end, laid.node, rollouts.offsets[laid.row])
    for row, start, end, node, offset in zip(*(column.tolist() for column in columns), strict=True):
        if node in seen or not scored[row]:
            continue
        seen.add(node)
        edge = slice(offset + start, offset + end)
        if not rollouts.mask[edge].all():
            raise InputError(
                f"mask of row {row}", f"a masked token at positions {start} to {end - 1}",
                "edges whose tokens are all trained", "mask the whole response or nothing of it",
            )  # fmt: skip
        advantage = credit.token[edge]
        if (advantage != advantage[0]).any():
            raise InputError(
                f"credit of row {row}", f"several advantages at positions {start} to {end - 1}",
                "one an edge, as spo_tree gives it", f"do not train edges of {credit.method} by themselves",
            )  # fmt: skip
        found.append(
            Edge(
                prompts[group[row]], tuple(rollouts.token_ids[offset : edge.start].tolist()),
                tuple(rollouts.token_ids[edge].tolist()), tuple(rollouts.old_logprob[edge].tolist()),
                float(advantage[0]), update,
            )
        )  # fmt: skip
    return found


class EdgeReplay:
    """SPO-tree's queue [paper]: at most `edges` (32) of a prompt train in an update, the rest may wait.

    Edges with advantage 0 are dropped when they are added. The others come out in the order in which they went in,
    so older ones first [ours], with their creation-time log-probabilities. One that would have waited for more than
    `wait` (8) updates after its own is dropped. A prompt is its token ids: where it is sampled again while edges of
    it wait, old and new ones share the number [ours].

    Attributes:
        counts: edges dropped, `zero` and `expired`, and `trained`.

    Raises:
        InputError: `edges` below 1 or `wait` below 0.
    """

    def __init__(self, edges: int = 32, wait: int = 8) -> None:
        for name, value, least in (("edges", edges, 1), ("wait", wait, 0)):
            if value < least:
                raise InputError(name, value, f"at least {least}")
        self.edges, self.wait = edges, wait
        self.counts = Counter[str]()
        self._waiting: dict[tuple[int, ...], deque[Edge]] = {}

    def __len__(self) -> int:
        """Edges that wait."""
        return sum(map(len, self._waiting.values()))

    def add(self, edges: Iterable[Edge]) -> None:
        """Lets edges wait, those of advantage 0 excepted."""
        for edge in edges:
            if edge.advantage == 0:
                self.counts["zero"] += 1
            else:
                self._waiting.setdefault(edge.prompt_ids, deque()).append(edge)

    def take(self, update: int) -> list[list[Edge]]:
        """What trains in this update: a list a prompt, prompts in the order in which they started to wait.

        Raises:
            InputError: an edge was born in a later update.
        """
        taken = []
        for prompt, edges in list(self._waiting.items()):
            if (newest := max(edge.born for edge in edges)) > update:
                raise InputError("update", update, f"at least {newest}, in which a waiting edge was born")
            fresh = deque(edge for edge in edges if update - edge.born <= self.wait)
            self.counts["expired"] += len(edges) - len(fresh)
            if chosen := [fresh.popleft() for _ in range(min(self.edges, len(fresh)))]:
                taken.append(chosen)
                self.counts["trained"] += len(chosen)
            if fresh:
                self._waiting[prompt] = fresh
            else:
                del self._waiting[prompt]
        return taken

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Everything that waits, as the tensors and the metadata of a safetensors file.

        Tensors: `prompt_ids` and `prompt_length` [P], `waiting` [P] edges of each; `prefix_ids`, `prefix_length`
        [E]; `token_ids` [N], `token_length` [E]; `old_logprob` [N] float64; `advantage` [E] float64; `born` [E].
        """
        edges = [edge for queue in self._waiting.values() for edge in queue]
        tensors = {
            "waiting": _whole(map(len, self._waiting.values())),
            "old_logprob": torch.tensor([p for edge in edges for p in edge.old_logprob], dtype=torch.float64),
            "advantage": torch.tensor([edge.advantage for edge in edges], dtype=torch.float64),
            "born": _whole(edge.born for edge in edges),
        }
        for name, rows in (
            ("prompt", list(self._waiting)),
            ("prefix", [edge.prefix_ids for edge in edges]),
            ("token", [edge.token_ids for edge in edges]),
        ):
            tensors[f"{name}_ids"] = _whole(token for row in rows for token in row)
            tensors[f"{name}_length"] = _whole(map(len, rows))
        return tensors, {"replay": json.dumps({"counts": self.counts})}

    def load_state_dict(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Replaces what waits by what `state_dict` gave."""

        def rows(name: str) -> list[tuple[int, ...]]:
            return _rows(tensors[f"{name}_ids"], tensors[f"{name}_length"])

        logprobs = _rows(tensors["old_logprob"], tensors["token_length"])
        advantages, born = tensors["advantage"].tolist(), tensors["born"].tolist()
        edges = zip(rows("prefix"), rows("token"), logprobs, advantages, born, strict=True)
        self.counts = Counter(json.loads(metadata["replay"])["counts"])
        self._waiting = {
            prompt: deque(Edge(prompt, *next(edges)) for _ in range(count))
            for prompt, count in zip(rows("prompt"), tensors["waiting"].tolist(), strict=True)
        }


def _whole(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _rows(flat: Tensor, length: Tensor) -> list[tuple]:
    return [tuple(part.tolist()) for part in flat.split(length.tolist())]
