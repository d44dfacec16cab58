"""A language model that is a function of the token ids so far, and slow trees grown by it one token at a time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from policies import processors
from torch import nn
from transformers import LlamaConfig

from apportion.engines.base import Key, Sampling
from apportion.engines.trees import Leaf

STOP, SIZE = 3, 8
NEVER = float("-inf")
History = tuple[int, ...]
Policy = Callable[[History], Sequence[float]]


class Scripted(nn.Module):
    """Logits are `policy` of the prompt and everything after it, read back from the keys that the cache holds.

    `fed` keeps, for every token that a forward computed, the history up to it; `rows` the rows of every forward,
    `decoded` of those after the prefill.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy, self.fed = policy, list[History]()
        self.embedding = nn.Embedding(SIZE, 1)
        self.config = LlamaConfig(vocab_size=SIZE, num_hidden_layers=1)
        self.rows, self.decoded = list[int](), list[int]()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self, input_ids, past_key_values=None, attention_mask=None, position_ids=None, use_cache=True, logits_to_keep=0
    ):
        assert not self.training and not torch.is_grad_enabled()
        self.rows.append(len(input_ids))
        new = input_ids[:, None, :, None].float()
        keys, values = past_key_values.update(new, -new, 0)
        assert torch.equal(keys, -values)
        seen = keys[:, 0, :, 0].long()
        if attention_mask is None:
            self.fed += [tuple(row[: n + 1]) for row in seen.tolist() for n in range(len(row))]
            at = logits_to_keep.tolist()
        else:
            assert position_ids[:, 0].tolist() == (attention_mask.sum(1) - 1).tolist()
            kept = [tuple(row[mask].tolist()) for row, mask in zip(seen, attention_mask, strict=True)]
            self.fed += kept
            self.decoded.append(len(kept))
            return SimpleNamespace(
                logits=torch.tensor([[self.policy(row)] for row in kept]), past_key_values=past_key_values
            )
        logits = [[self.policy(tuple(row[: n + 1])) for n in at] for row in seen.tolist()]
        return SimpleNamespace(logits=torch.tensor(logits), past_key_values=past_key_values)


@cache
def hashed(stop: float = -1.0) -> Policy:
    """Other logits after every history, the same in every run; `stop` is added to the stop token's."""

    @cache
    def policy(history: History) -> list[float]:
        fill = random.Random(str(history))
        return [fill.gauss(0, 1.5) + (stop if token == STOP else 0.0) for token in range(SIZE)]

    return policy


def forced(tokens: Sequence[int], prompt: int = 1) -> Policy:
    """Always the same response; its last token is repeated for ever."""

    def policy(history: History) -> list[float]:
        token = tokens[min(len(history) - prompt, len(tokens) - 1)]
        return [0.0 if t == token else NEVER for t in range(SIZE)]

    return policy


def slow_branch(
    policy: Policy, prompt: History, before: History, budget: int, sampling: Sampling, key: Key, number: int
) -> tuple[list[int], list[float], bool]:
    """A segment after `before`, everything computed anew for each token: tokens, log-probabilities, stopped."""
    uniform = np.random.Generator(np.random.Philox(key=key.stream(number)))
    ids, new, logprobs = [*prompt, *before], [], []
    while len(new) < budget:
        logits = torch.tensor([policy(tuple(ids))])
        logprobs_V = (logits[0].double() / sampling.temperature).log_softmax(0)
        p = processors(sampling)(torch.tensor([ids]), logits)[0].double().softmax(0)
        u, below, token = uniform.random(), 0.0, -1
        for j, mass in enumerate(p.tolist()):
            below += mass
            if u < below:
                token = j
                break
        ids.append(token)
        new.append(token)
        logprobs.append(float(logprobs_V[token]))
        if token in sampling.stop_ids:
            return new, logprobs, True
    return new, logprobs, False


def same(got: Iterable[Leaf], wanted: Iterable[Leaf]) -> None:
    """Equal leaf by leaf, log-probabilities within 1e-5."""
    got, wanted = list(got), list(wanted)
    assert [_without(leaf) for leaf in got] == [_without(leaf) for leaf in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert len(a.logprobs) == len(a.token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=1e-6)


def _without(leaf: Leaf) -> tuple[object, ...]:
    return leaf.prompt, leaf.token_ids, leaf.starts, leaf.path, leaf.finish


def fed_once(prompts: Sequence[History], leaves: Sequence[Leaf]) -> Counter[History]:
    """The histories that have to be computed: all of a prompt and, of each edge, all but a response's last token.

    Every edge counts once, however many leaves are below it; equal tokens on two edges count twice.
    """
    edges: dict[tuple[int, str], tuple[History, int, bool]] = {}
    for leaf in leaves:
        bounds = [*leaf.starts, len(leaf.token_ids)]
        for d, node in enumerate(leaf.path):
            last = d == len(leaf.path) - 1
            edges[leaf.prompt, node] = (leaf.token_ids[: bounds[d + 1]], bounds[d], last)
    out = Counter(prompt[: n + 1] for prompt in prompts for n in range(len(prompt)))
    for (prompt, _), (response, start, last) in edges.items():
        out.update((*prompts[prompt], *response[: n + 1]) for n in range(start, len(response) - last))
    return out


def drawn(leaves: Sequence[Leaf]) -> int:
    """Tokens on all edges, each edge once."""
    edges = {}
    for leaf in leaves:
        bounds = [*leaf.starts, len(leaf.token_ids)]
        edges |= {(leaf.prompt, node): bounds[d + 1] - bounds[d] for d, node in enumerate(leaf.path)}
    return sum(edges.values())


def chi_square(seen: Counter, expected: dict) -> tuple[float, float]:
    """χ² and its 99.9 % quantile (Wilson–Hilferty) for cells that are all large enough."""
    assert min(expected.values()) >= 5 and set(seen) <= set(expected)
    df = len(expected) - 1
    chi2 = sum((seen[cell] - wanted) ** 2 / wanted for cell, wanted in expected.items())
    return chi2, df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3
