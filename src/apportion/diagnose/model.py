"""The policy at hand for diagnostics that sample from it: keyed continuations, graded, within a token budget.

Shapes: none, these are records and token ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from apportion.diagnose.reading import Recorded
from apportion.engines.base import Continuation, ContinuationEngine, Cost, Key, Request, Sampling
from apportion.engines.sampling import draw, filtered, uniforms
from apportion.errors import InputError
from apportion.train.settings import RunConfig

T = TypeVar("T")
# Prompts as text, responses as token ids, gold answers; None where the verifier abstains.
Grade = Callable[[Sequence[str], Sequence[Sequence[int]], Sequence[str]], Sequence[float | None]]
# A prefix, the token that followed it, and the key of the draw: another token in its place.
Redraw = Callable[[Sequence[int], int, Key], int]


@dataclass(frozen=True)
class Prefix:
    """A response to go on with: a recorded prompt, and the response's token ids so far.

    Attributes:
        kind: of sampling. Two prefixes of one response with the same kind and length are the same state.
    """

    recorded: Recorded
    row: int
    ids: tuple[int, ...] = field(repr=False)
    kind: str

    @classmethod
    def of(cls, recorded: Recorded, row: int, position: int, kind: str) -> Prefix:
        """The recorded response before `position`."""
        start = int(recorded.rollouts.offsets[row])
        return cls(recorded, row, tuple(recorded.rollouts.token_ids[start : start + position].tolist()), kind)

    @property
    def whole(self) -> tuple[int, ...]:
        """The token ids with those of the prompt before them."""
        rollouts = self.recorded.rollouts
        if rollouts.prompt_ids is None:
            raise InputError("prompt_ids", "none recorded", "the prompt's token ids: prefixes start with them")
        return (*rollouts.prompt_ids[int(rollouts.group[self.row])].tolist(), *self.ids)

    def followed(self, ids: Sequence[int], kind: str) -> Prefix:
        """The same response some tokens later."""
        return Prefix(self.recorded, self.row, (*self.ids, *ids), kind)


@dataclass
class Bench:
    """What the diagnostics sample from.

    Attributes:
        name: of the weights, for the report.
        sampling: that of the run's rollouts. limit: T_max, the most tokens of a response.
        seed: of the random streams, which share none with the run's own.
        tick: called with the tokens generated so far.
        cost: what was spent; `forward_tokens` are those read to redraw tokens, the engine's prefills not counted.
        continuations: how many were generated.
    """

    name: str
    engine: ContinuationEngine
    redraw: Redraw
    grade: Grade
    sampling: Sampling
    limit: int
    seed: int = 0
    tick: Callable[[int], None] = lambda generated: None
    cost: Cost = field(default_factory=Cost)
    continuations: int = 0

    def key(self, state: Prefix) -> Key:
        """Names the state: random streams are drawn from it."""
        recorded = state.recorded
        name, sample = recorded.rollouts.name(state.row), recorded.sample[state.row]
        return Key(f"{self.seed}/diagnose/{state.kind}", recorded.step, name, sample, len(state.ids))

    def room(self, state: Prefix) -> int:
        """Tokens that the response may still take."""
        return max(0, self.limit - len(state.ids))

    def continued(self, states: Sequence[Prefix], samples: int, tokens: int) -> list[list[Continuation]]:
        """`samples` continuations of each state, of at most `tokens` tokens, in the order of m; lost ones missing."""
        keys = [self.key(state) for state in states]
        asked = [
            Request(key, state.whole, samples, min(tokens, self.room(state)))
            for key, state in zip(keys, states, strict=True) if self.room(state)
        ]  # fmt: skip
        found: dict[Key, list[Continuation]] = {key: [] for key in keys}
        for c in self.engine.continuations(asked, self.sampling) if asked else ():
            found[c.key].append(c)
            self.cost.generated += len(c.token_ids)
            self.continuations += 1
            self.tick(self.cost.generated)
        return [sorted(found[key], key=lambda c: c.m) for key in keys]

    def graded(self, responses: Sequence[Prefix]) -> Sequence[float | None]:
        """The rewards of whole responses; None where the verifier abstains."""
        if not responses:
            return []
        return self.grade(
            [each.recorded.prompts[each.row] for each in responses], [each.ids for each in responses],
            [each.recorded.golds[each.row] for each in responses],
        )  # fmt: skip

    def rewards(self, states: Sequence[Prefix], samples: int) -> list[list[float]]:
        """For each state the rewards of `samples` continuations to the end, without those that have none."""
        found = self.continued(states, samples, self.limit)
        whole = [
            (k, state.followed(c.token_ids, state.kind))
            for k, (state, each) in enumerate(zip(states, found, strict=True)) for c in each
        ]  # fmt: skip
        out: list[list[float]] = [[] for _ in states]
        for (k, _), reward in zip(whole, self.graded([each for _, each in whole]), strict=True):
            if reward is not None:
                out[k].append(reward)
        return out

    def rounds(self, units: Sequence[T], most: Callable[[T], int], budget: int) -> Iterator[list[T]]:
        """Units in order, as many at a time as are sure to fit into what is left of `budget` generated tokens.

        Args:
            most: the most tokens that a unit may generate.
        """
        began, at = self.cost.generated, 0
        while at < len(units):
            left, taken = budget - (self.cost.generated - began), []
            while at < len(units) and most(units[at]) <= left:
                left -= most(units[at])
                taken.append(units[at])
                at += 1
            if not taken:
                return
            yield taken


def keyed(seed: int, recorded: Recorded, row: int, what: str) -> int:
    """A number that only the seed, the response (step, group and its number there) and `what` decide."""
    text = f"{seed}/{recorded.step}/{recorded.rollouts.name(row)}/{recorded.sample[row]}/{what}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def in_turn(items: Sequence[tuple[Recorded, int, T]], seed: int) -> list[T]:
    """(step, response, item) in the order in which a budget is spent on them [ours].

    Later steps come first, for the saved weights are nearer to theirs; in each, one response of every group before
    the second of any. Which, a hash decides.
    """
    drawn = sorted(((keyed(seed, step, row, "turn"), step, row, item) for step, row, item in items), key=lambda x: x[0])
    turn: dict[tuple[int, int], int] = {}
    order = []
    for number, step, row, item in drawn:
        group = (step.step, int(step.rollouts.group[row]))
        turn[group] = turn.get(group, -1) + 1
        order.append(((-step.step, turn[group], number), item))
    return [item for _, item in sorted(order, key=lambda pair: pair[0])]


def open_bench(config: RunConfig, model: str, seed: int, tick: Callable[[int], None]) -> Bench:
    """Loads the model and the run's own reward and sampling settings.

    Args:
        model: `embedded`, `smollm2`, or a folder.

    Raises:
        InputError: a model that cannot be loaded, or a configuration whose data or trainer options cannot be used.
    """
    import torch

    from apportion.engines.scoring import Scorer
    from apportion.engines.transformers import TransformersEngine
    from apportion.train.data import load_data
    from apportion.train.models import load_model, load_tokenizer, model_folder
    from apportion.train.prepare import resolve, sampling_of, trainer_args

    config = resolve(config)
    args = trainer_args(config)
    try:
        folder = model_folder(model)
        tokenizer: Any = load_tokenizer(folder)
        policy: Any = load_model(folder, config.model.dtype)
    except InputError as error:
        raise InputError("--model", error.got, error.expected, error.fix) from None
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    policy = policy.to("cuda" if torch.cuda.is_available() else "cpu")
    sampled = sampling_of(args, tokenizer)
    # Some models name more ends of a response than their tokenizer does.
    ends = getattr(policy.generation_config, "eos_token_id", None) or []
    stop = dict.fromkeys([*sampled.stop_ids, *(ends if isinstance(ends, list) else [ends])])
    sampling = Sampling(
        tuple(stop), sampled.temperature, sampled.top_k, sampled.top_p, sampled.min_p, sampled.repetition_penalty
    )
    # Only the reward is needed: one problem stands for all.
    one = config.data.model_copy(update={"count": 1, "limit": 1, "system": None})
    alone = config.run.model_copy(update={"evaluate_samples": 0})
    reward = load_data(config.model_copy(update={"data": one, "run": alone}), chat=False).reward

    def grade(prompts: Sequence[str], ids: Sequence[Sequence[int]], golds: Sequence[str]) -> list[float | None]:
        texts = tokenizer.batch_decode([list(each) for each in ids], skip_special_tokens=True)
        found = reward(prompts=list(prompts), completions=texts, answer=list(golds))
        return [None if value is None or value != value else float(value) for value in found]

    scorer = Scorer(policy, tokenizer.pad_token_id)

    def redraw(ids: Sequence[int], original: int, key: Key) -> int:
        with scorer.measuring():
            logits_1V = scorer.forward([ids], keep=1).logits[:, -1].float()
        # A response that ends has nothing to go on with; some logit is left, whatever the filters.
        logits_1V[:, [original, *sampling.stop_ids]] = -torch.inf
        uniform_11 = torch.tensor([[uniforms(key, 0, 1)[0]]], dtype=torch.float64, device=logits_1V.device)
        return int(draw(filtered(logits_1V, sampling), uniform_11))

    engine = TransformersEngine(policy, tokenizer.pad_token_id)
    limit = args.max_completion_length
    assert limit is not None
    return Bench(model, engine, redraw, grade, sampling, limit, seed, tick, scorer.cost)
