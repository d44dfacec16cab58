"""A batch of responses that stands in for one that nobody has sampled yet, so that a method can plan on it.

A method's cost is what its own `plan` asks for. That depends on where steps start, on entropies, on which groups are
mixed and on which openings are shared; here all of that is drawn from a few assumptions [ours].
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from apportion.rollouts import Rollouts

# How else an answer may be stated, for patterns that do not find it.
_STATED = ("\\boxed{42}", "#42", "#### 42", "The answer is 42.", "Answer: 42", "<answer>42</answer>")


@dataclass(frozen=True)
class Workload:
    """One generation batch of one device, as it is expected.

    Attributes:
        rows: responses. size: those of a prompt. prompt, longest_prompt: tokens, mean and most.
        response, longest: tokens of a response, mean and most in a batch. limit: most that it may have.
        step: tokens of a reasoning step. characters: of a token.
        spread: lengths are spread from short to `longest`; else all but one are equal.
        pass_rate: share of right responses. agreement: probability that a response takes the next step that the
            right ones take, so that it goes on sharing their tokens; 0 shares nothing but the prompt.
        low: share of tokens whose probability is below 0.9.
        gold: tokens of a gold answer. answer: how a response states its own.
    """

    rows: int
    size: int
    prompt: float
    longest_prompt: int
    response: float
    longest: int
    limit: int
    step: int = 40
    characters: int = 4
    spread: bool = True
    pass_rate: float = 0.5
    agreement: float = 0.0
    low: float = 0.2
    gold: int = 3
    answer: str = "\\boxed{42}"

    @property
    def groups(self) -> int:
        """Prompts, of which the last may have its other responses on another device."""
        return -(-self.rows // self.size)

    @property
    def live(self) -> float:
        """Share of groups with right and wrong responses, where all problems are equally hard: 1 − p^G − (1 − p)^G."""
        return 1 - self.pass_rate**self.size - (1 - self.pass_rate) ** self.size


def stated_answer(work: Workload, pattern: str | None) -> str:
    """The answer as responses state it, or in another form that the pattern finds; empty where it finds none."""
    if pattern is None:
        return work.answer
    return next((text for text in (work.answer, *_STATED) if re.search(pattern, text)), "")


def lengths_of(work: Workload) -> list[int]:
    """[R] tokens of each response: their mean is `response` up to rounding, and one has `longest`."""
    rows, mean, longest = work.rows, work.response, work.longest
    if rows == 1 or longest <= mean:
        return [max(1, round(mean))] * rows
    if not work.spread:
        rest = max(1.0, (mean * rows - longest) / (rows - 1))
        return [longest] + [max(1, round(rest * (i + 1)) - round(rest * i)) for i in range(rows - 1)]
    # Quantiles of u^(1/a) on (0, longest], whose mean is longest·a/(a + 1). In an order without a pattern.
    power = (longest - mean) / mean
    ranked = [max(1, round(longest * ((k + 0.5) / rows) ** power)) for k in range(rows)]
    ranked[-1] = longest
    return [ranked[k] for k in sorted(range(rows), key=lambda k: _uniform(k, 7))]


def standin(work: Workload, answer: str, draw: int = 0, worst: bool = False) -> Rollouts:
    """The batch. Draw `draw` is the same at every call.

    Args:
        answer: how a response states its answer, see `stated_answer`.
        worst: every group is mixed, no two responses share an opening, and every token may be a cut.
    """
    ids: list[list[int]] = []
    texts, starts, rewards = [], [], []
    lengths = lengths_of(work)
    for i, length in enumerate(lengths):
        group, member = divmod(i, work.size)
        draws = ((_uniform(i * 4096 + k, 2 * draw + 1)) for k in range(10**9))
        pieces = _pieces(work, length, answer)
        shared = length
        right = _uniform(i, 2 * draw + 2) < work.pass_rate
        if worst:
            right, shared = member % 2 == 0, 0
        elif not work.agreement:
            shared = 0
        else:
            steps = max(1, math.ceil(length / work.step))
            kept = next((k for k in range(steps) if next(draws) >= work.agreement), steps)
            right, shared = kept == steps and length < work.limit, kept * work.step
        # Ids are names of states: those of a shared opening are the group's, the others a response's own.
        ids.append([group * 10**6 + t if t < shared else (i + 1) * 10**9 + t for t in range(length)])
        texts.append("".join(pieces))
        at = [0]
        for piece in pieces:
            at.append(at[-1] + len(piece))
        starts.append(at[:-1])
        rewards.append(float(right))
    entropy = [[-math.log(1 - _uniform(t, 11 + draw)) for t in row] for row in ids]
    low = 1.0 if worst else work.low
    logprob = [[-0.7 if _uniform(t, 13 + draw) < low else -0.01 for t in row] for row in ids]
    rollouts = Rollouts.from_lists(
        ids, [i // work.size for i in range(work.rows)], rewards, truncated=[n >= work.limit for n in lengths],
        text=tuple(texts), char_start=starts, entropy=entropy, old_logprob=logprob, ref_logprob=logprob,
        prompt_ids=tuple(
            torch.arange(round(work.prompt)) + 10**15 + g * 10**6 for g in range(work.groups)
        ),
    )  # fmt: skip
    return rollouts


def _pieces(work: Workload, length: int, answer: str) -> list[str]:
    """The text of each token: paragraphs of `step` tokens, the answer at the end, and an EOS without text."""
    word = "a" * (work.characters - 1) + " " if work.characters > 1 else "a"
    breaks = ["\n", "\n"] if work.characters == 1 else ["\n\n"]
    paragraph = [word] * max(1, work.step - len(breaks)) + breaks
    body = (paragraph * (length // len(paragraph) + 1))[:length]
    if length >= work.limit or not answer:
        return body
    ending = [answer[i : i + work.characters] for i in range(0, len(answer), work.characters)] + [""]
    return body[: max(0, length - len(ending))] + ending[-length:]


def _uniform(number: int, stream: int) -> float:
    """[0, 1): a fixed scramble of the number (splitmix64's finaliser)."""
    x = (number * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return ((x ^ (x >> 31)) >> 11) / 2**53
