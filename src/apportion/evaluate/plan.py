"""What an evaluation will ask: its settings, and for each set the prompts, keys and sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from apportion.engines.base import Sampling
from apportion.errors import InputError, nearest
from apportion.evaluate import prompts
from apportion.evaluate.benches import CHAIN, ProblemSet
from apportion.evaluate.grading import GRADERS, TASK, by_spelling
from apportion.evaluate.policy import Policy
from apportion.evaluate.prompts import Prompt
from apportion.evaluate.records import sample_key
from apportion.evaluate.sources import Problem
from apportion.tasks import ArithmeticTask

MAX_TOKENS = 1024
USUAL_K = 8

Unreadable = Literal["error", "drop", "spelling"]


@dataclass(frozen=True)
class Settings:
    """How models are sampled and graded.

    Attributes:
        n: samples a problem; each set's own default where None.
        k: of pass@k and maj@k; 8, or n where that is smaller, where None.
        max_tokens: of a response; 1024, or what the embedded task's longest response takes, where None.
        grader: decides the numbers; math, or the embedded task's own check, where None.
        second_grader: judges the same samples, so that the two can be compared.
        unreadable: what a gold that a grader cannot read is: an error; or its problem is left out ("drop"), which
            changes the set; or judged by the answer's spelling ("spelling"), as evaluators do that compare strings
            where they cannot parse. [ours]
        prompt: a style of `prompts`; by the model's family where None.
        batch: samples decoded together and written as one file.

    Raises:
        InputError: a setting outside its range.
    """

    n: int | None = None
    k: tuple[int, ...] | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    grader: str | None = None
    second_grader: str | None = None
    unreadable: str = "error"
    prompt: str | None = None
    batch: int = 64

    def __post_init__(self) -> None:
        numbers = {"--n": self.n, "--max-tokens": self.max_tokens, "--batch": self.batch}
        for name, value in [*numbers.items(), *(("--k", k) for k in self.k or ())]:
            if value is not None and value < 1:
                raise InputError(name, value, "1 or more")
        if self.seed < 0:
            raise InputError("--seed", self.seed, "0 or more")
        for name, grader in (("--grader", self.grader), ("--second-grader", self.second_grader)):
            if grader is not None and grader not in GRADERS:
                raise InputError(name, repr(grader), f"one of {', '.join(GRADERS)}{nearest(grader, GRADERS)}")
        if math.isinf(self.temperature):
            raise InputError("--temperature", self.temperature, "a finite number")
        if self.unreadable not in get_args(Unreadable):
            raise InputError("--unreadable", repr(self.unreadable), f"one of {', '.join(get_args(Unreadable))}")
        self.sampling(())

    def sampling(self, stop_ids: Sequence[int]) -> Sampling:
        """The engine's sampling settings.

        Raises:
            InputError: a temperature, top-k or top-p outside its range.
        """
        try:
            return Sampling(tuple(stop_ids), self.temperature, self.top_k, self.top_p)
        except InputError as error:
            option = error.field.removeprefix("sampling.").replace("_", "-")
            raise InputError(f"--{option}", error.got, error.expected.replace("top_k=1", "--top-k 1")) from None


@dataclass(frozen=True)
class Item:
    """A problem with its prompt and the key of its samples.

    Attributes:
        unread: graders that cannot read its gold, where it is judged by spelling instead.
    """

    problem: Problem
    prompt: Prompt
    key: str
    unread: frozenset[str] = frozenset()

    def judge(self, grader: str) -> str:
        """The name under which the grader's verdicts on this problem are kept."""
        return by_spelling(grader) if grader in self.unread else grader


@dataclass(frozen=True)
class Work:
    """A set as it will be sampled.

    Attributes:
        graders: the first one's verdicts make the numbers.
        dropped: problems left out for a gold that a grader cannot read.
    """

    problems: ProblemSet
    style: str
    n: int
    ks: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    graders: tuple[str, ...]
    items: tuple[Item, ...]
    dropped: int = 0

    @property
    def name(self) -> str:
        """The set's name."""
        return self.problems.name


def plan(policy: Policy, problems: ProblemSet, settings: Settings) -> Work:
    """Prompts, keys and sampling of a set for a model.

    Raises:
        InputError: n smaller than a k, a style that does not suit model or set, two graders that are one, a grader
            given for the embedded task, a prompt that the tokenizer refuses or that leaves no room for a response.
    """
    n = settings.n or problems.bench.n
    ks = settings.k or (min(USUAL_K, n),)
    if too_large := [k for k in ks if k > n]:
        raise InputError("--k", too_large[0], f"at most n = {n}, the samples a problem of {problems.name}",
                         "raise --n or lower --k")  # fmt: skip
    style, graders, max_tokens = _ways(policy, problems, settings)
    sampling = settings.sampling(tuple(dict.fromkeys([*policy.stop_ids, *prompts.turn_ends(style, policy.tokenizer)])))
    items = tuple(
        _item(policy, problems, problem, style, sampling, max_tokens, settings.seed) for problem in problems.problems
    )
    return Work(problems, style, n, tuple(dict.fromkeys(ks)), max_tokens, sampling, graders, items)


def _ways(policy: Policy, problems: ProblemSet, settings: Settings) -> tuple[str, tuple[str, ...], int]:
    """Prompt style, graders and most tokens of a response."""
    if problems.name == CHAIN:
        given = {"--grader": settings.grader, "--second-grader": settings.second_grader, "--prompt": settings.prompt}
        for option, value in given.items():
            if value is not None:
                raise InputError(option, value, f"nothing for {CHAIN}: it has its own prompts and its own check")
        return prompts.TASK, (TASK,), settings.max_tokens or ArithmeticTask().max_response
    grader = settings.grader or GRADERS[0]
    if settings.second_grader == grader:
        raise InputError("--second-grader", grader, f"another grader than the first, {grader}")
    graders = tuple(each for each in (grader, settings.second_grader) if each)
    style = prompts.style_of(policy.tokenizer, policy.model_type, settings.prompt)
    return style, graders, settings.max_tokens or MAX_TOKENS


def _item(
    policy: Policy, problems: ProblemSet, problem: Problem, style: str, sampling: Sampling, max_tokens: int, seed: int
) -> Item:
    where = f"{problems.name}: {problems.source}, row {problem.row}"
    try:
        prompt = prompts.render(style, policy.tokenizer, problem.text)
    # Tokenizers and chat templates fail in ways of their own.
    except Exception as error:
        raise InputError(
            where, f"{_shown(problem.text)}, which the model's tokenizer or chat template refuses ({error})",
            "text in the tokenizer's alphabet, and messages that its chat template takes",
        ) from error  # fmt: skip
    if policy.context is not None and len(prompt.ids) + max_tokens > policy.context:
        raise InputError(where, f"a prompt of {len(prompt.ids)} tokens, with --max-tokens {max_tokens}",
                         f"at most {policy.context} together, the model's context", "lower --max-tokens")  # fmt: skip
    key = sample_key(
        weights=policy.fingerprint, prompt=prompt.ids, sampling=asdict(sampling), max_tokens=max_tokens, seed=seed,
        # Two problems of one text are sampled independently.
        stream=[problems.name, problem.id],
    )  # fmt: skip
    return Item(problem, prompt, key)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
