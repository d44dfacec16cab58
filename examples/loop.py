"""The whole idea in one file: ProbePO on the embedded policy, in a plain AdamW loop without TRL.

    python examples/loop.py                        ProbePO, 20 steps on one core
    python examples/loop.py --method grpo          the same without probes
    python examples/loop.py --steps 100 --set alpha=1 --set budget=80

Freeze rollouts → plan what to measure → measure → assign credit → update. `apportion.train.CreditTrainer` does the
same inside TRL; a test holds its advantages equal to those that `credit_of` finds for the same rollouts.

Shapes: _N flat tokens, _R responses, _P prompts, (R, W) responses padded on the right, _V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from apportion.credit.method import CreditMethod
from apportion.credit.record import Credit
from apportion.credit.registry import make_method, method_names
from apportion.engines.base import Key, Request, Sampling
from apportion.engines.transformers import TransformersEngine
from apportion.groups import grpo_base
from apportion.measure.evidence import Continuations, Evidence
from apportion.measure.plan import Job
from apportion.measure.tokens import token_logprobs_and_entropies
from apportion.rollouts import Rollouts
from apportion.segments import token_offsets
from apportion.tasks import ArithmeticTask, Problem, generate, load_policy, verify

# Answers jobs: one (row, position, rewards) entry a job. `first` numbers its continuations, so that a second wave
# on the same state draws from streams of its own.
Measure = Callable[[Sequence[Job], int], list[tuple[int, int, list[float]]]]


class Loop:
    """A policy, a task, and how rollouts and probes are sampled.

    Args:
        budget: most tokens a response may have (T_max).
        size: responses a prompt (G).
        seed: of every sampled token.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, budget: int, size: int, seed: int
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.budget, self.size, self.run = budget, size, str(seed)
        self.sampling = Sampling(stop_ids=(self.tokenizer.eos_token_id,))
        self.engine = TransformersEngine(self.model, self.tokenizer.pad_token_id)

    def freeze(self, problems: Sequence[Problem], step: int) -> Rollouts:
        """Samples `size` responses a problem and grades them. Nothing later changes this batch.

        A rollout is a continuation of its prompt, so engine and keyed streams are those of the probes.
        """
        prompts = [tuple(self.tokenizer(problem.prompt)["input_ids"]) for problem in problems]
        requests = [
            Request(Key(f"{self.run}/rollout", step, str(p), 0, 0), ids, self.size, self.budget)
            for p, ids in enumerate(prompts)
        ]
        found = {(int(c.key.prompt), c.m): c for c in self.engine.continuations(requests, self.sampling)}
        rows = [(p, found[p, m]) for p in range(len(problems)) for m in range(self.size)]
        ids = [list(c.token_ids) for _, c in rows]
        texts = [token_offsets(self.decode, row, prompts[p]) for (p, _), row in zip(rows, ids, strict=True)]
        with torch.no_grad():
            logits = self.logits([prompts[p] for p, _ in rows], ids)
        # The distribution a token was drawn from, for the entropies that rank step boundaries.
        stats = [
            token_logprobs_and_entropies(logits[i, : len(row)], torch.tensor(row), self.sampling.temperature)
            for i, row in enumerate(ids)
        ]
        return Rollouts.from_lists(
            ids,
            group=[p for p, _ in rows],
            reward=[self.grade(problems[p], row) for (p, _), row in zip(rows, ids, strict=True)],
            truncated=[c.finish == "length" for _, c in rows],
            old_logprob=[logprob.tolist() for logprob, _ in stats],
            entropy=[entropy.tolist() for _, entropy in stats],
            char_start=[starts for starts, _ in texts],
            text=tuple(text for _, text in texts),
            prompt_ids=tuple(torch.tensor(prompt) for prompt in prompts),
        )

    def measure(self, rollouts: Rollouts, problems: Sequence[Problem], step: int) -> Measure:
        """Continues each planned prefix with the same policy and grades the whole response with the same verifier."""
        assert rollouts.prompt_ids is not None
        prompt_ids = rollouts.prompt_ids

        def answer(jobs: Sequence[Job], first: int) -> list[tuple[int, int, list[float]]]:
            prefix, requests = {}, []
            for job in jobs:
                p, start = int(rollouts.group[job.row]), int(rollouts.offsets[job.row])
                kept = rollouts.token_ids[start : start + job.position].tolist()
                key = Key(self.run, step, str(p), job.row % self.size, job.position)
                prefix[key] = kept
                ids = (*prompt_ids[p].tolist(), *kept)
                requests.append(Request(key, ids, job.samples, self.budget - job.position, first))
            rewards: dict[Key, list[float]] = {key: [] for key in prefix}
            for c in self.engine.continuations(requests, self.sampling):
                rewards[c.key].append(self.grade(problems[int(c.key.prompt)], [*prefix[c.key], *c.token_ids]))
            # A state that several responses share was measured once and serves all of them.
            return [
                (row, position, rewards[request.key])
                for job, request in zip(jobs, requests, strict=True)
                for row, position in job.pivots
            ]

        return answer

    def update(self, optimizer: torch.optim.Optimizer, rollouts: Rollouts, credit: Credit) -> float:
        """One step on −Σ A_t·π(t)/π_old(t) over the batch's trainable tokens, divided by their number (DAPO's mean).

        With one update a batch the ratio is 1 and no clip ever acts, so there is none. Returns the gradient norm.
        """
        assert rollouts.prompt_ids is not None
        optimizer.zero_grad()
        tokens = int(rollouts.mask.sum())
        for rows in torch.arange(len(rollouts)).split(64):
            part = rollouts.select(rows)
            assert part.prompt_ids is not None
            bounds = part.offsets.tolist()
            ids = [part.token_ids[a:b].tolist() for a, b in pairwise(bounds)]
            logits = self.logits([part.prompt_ids[g].tolist() for g in part.group.tolist()], ids)
            logprob = (logits[part.row, part.position] / self.sampling.temperature).log_softmax(-1)
            logprob_N = logprob.gather(1, part.token_ids[:, None])[:, 0]
            # The rows of a part stand side by side in the batch, and so do their tokens.
            first = int(rollouts.offsets[rows[0]])
            advantage_N = credit.token[first : first + len(logprob_N)]
            loss = -(torch.exp(logprob_N - logprob_N.detach()) * advantage_N)[part.mask].sum() / tokens
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        return float(norm)

    def logits(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Tensor:
        """(R, W, V) logits that produce each token of the responses. All prompts of a task are of one length."""
        width, start = max(map(len, responses)), len(prompts[0])
        pad = self.tokenizer.pad_token_id
        rows = [[*p, *r, *[pad] * (width - len(r))] for p, r in zip(prompts, responses, strict=True)]
        # Padding is on the right, where causal attention does not look: no mask.
        return self.model(input_ids=torch.tensor(rows)).logits[:, start - 1 : -1].float()

    def grade(self, problem: Problem, ids: Sequence[int]) -> float:
        return float(verify(self.tokenizer.decode(ids, skip_special_tokens=True), problem))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def credit_of(method: CreditMethod, rollouts: Rollouts, measure: Measure) -> tuple[Credit, int]:
    """Base, plan, measure, assign. Returns the credit and the number of continuations that it took."""
    base = grpo_base(rollouts)
    jobs = method.plan(rollouts, base)
    entries = measure(jobs, 0)
    evidence = Evidence(Continuations.from_rewards(rollouts, entries))
    if more := method.refine(rollouts, base, evidence):
        entries += measure(more, max(job.samples for job in jobs))
        jobs = [*jobs, *more]
        evidence = Evidence(Continuations.from_rewards(rollouts, entries))
    return method.assign(rollouts, evidence, base), sum(job.samples for job in jobs)


def batches(problems: Sequence[Problem], count: int) -> Iterator[list[Problem]]:
    """`count` problems at a time, in order."""
    stream = iter(problems)
    while batch := list(islice(stream, count)):
        yield batch


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains and prints one line a step. Returns the mean reward of each step."""
    parser = argparse.ArgumentParser(description="GRPO with per-token credit in a plain loop.")
    parser.add_argument("--method", default="probepo", choices=method_names())
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the method")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step")
    parser.add_argument("--size", type=int, default=8, help="responses a prompt")
    parser.add_argument("--operations", type=int, default=8, help="steps of a problem")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)

    method = make_method(options.method, dict(pair.split("=", 1) for pair in options.set))
    task = ArithmeticTask(options.operations, seed=options.seed)
    loop = Loop(*load_policy(), task.max_response, options.size, options.seed)
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    problems = generate(task, "train", options.steps * options.prompts)
    rewards = []
    for step, batch in enumerate(batches(problems, options.prompts), start=1):
        start = time.perf_counter()
        rollouts = loop.freeze(batch, step)
        credit, continuations = credit_of(method, rollouts, loop.measure(rollouts, batch, step))
        norm = loop.update(optimizer, rollouts, credit)
        rewards.append(float(rollouts.reward.mean()))
        kept = credit.invariants.get("conserved", 0.0)
        print(
            f"step {step:3d}  reward {rewards[-1]:.3f}  continuations {continuations:4d}  "
            f"max|A| {float(credit.token.abs().max()):5.2f}  conserved to {kept:.0e}  grad {norm:6.3f}  "
            f"{time.perf_counter() - start:.1f} s",
            flush=True,
        )
    return rewards


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
