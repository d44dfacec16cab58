"""The problems of a run as the trainer's data set, and the reward function that scores them.

Every problem is checked here, before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.errors import InputError, nearest
from apportion.tasks import TASKS, ArithmeticTask, Split, check_steps, generate, load_problems, parse_problem, verify
from apportion.train.settings import DataSection, RunConfig
from apportion.verify import check_gold, prepare
from apportion.verify.arithmetic import arithmetic_verifier
from apportion.verify.lean import LeanVerifier
from apportion.verify.proofs import LeanSettings
from apportion.verify.rewards import verifier_reward
from apportion.verify.steps import Steps, StepVerifier

RewardFunction = Callable[..., list[float | None]]


@dataclass(frozen=True)
class Problems:
    """What is trained and tested on.

    Attributes:
        train, test: rows with `prompt` (text, or messages for a chat model) and `answer`, and the file's other
            columns. `test` is empty for a user's file: its held-out problems are the user's to choose.
        reward: TRL's kind of reward function.
        steps: judges single steps of a response; None where nobody does.
    """

    train: list[dict[str, Any]]
    test: list[dict[str, Any]]
    reward: RewardFunction
    steps: StepVerifier | None = None


def load_data(config: RunConfig, chat: bool) -> Problems:
    """The problems of the configuration, checked.

    Args:
        chat: the model has a chat template, so prompts of a file become messages.

    Raises:
        InputError: an unknown task; a file, column or row that cannot be used; a gold answer that the verifier
            cannot judge against (with its row); a system message for a model without a chat template.
    """
    return _file(config, chat) if config.data.path else _task(config)


def embedded_task(data: DataSection) -> ArithmeticTask:
    """The generated task that the section describes.

    Raises:
        InputError: an unknown task, or settings that it does not take.
    """
    if data.task not in TASKS:
        raise InputError("data.task", repr(data.task), f"one of {', '.join(TASKS)}{nearest(data.task, TASKS)}")
    try:
        return TASKS[data.task](data.operations, data.modulus, data.detour, data.seed)
    except ValueError as error:
        raise InputError("data", error, f"settings of the task {data.task}") from None


def _task(config: RunConfig) -> Problems:
    task = embedded_task(config.data)
    fix = "give data.path to train on problems of your own"
    if config.reward.kind not in ("auto", "task"):
        raise InputError(
            "reward.kind", repr(config.reward.kind), "auto or task, since the problems are generated", fix
        )  # fmt: skip
    if config.reward.steps != "auto":
        raise InputError("reward.steps", repr(config.reward.steps), "auto, since the problems are generated", fix)
    for field in ("settings", "step_settings"):
        if given := getattr(config.reward, field):
            raise InputError(f"reward.{field}", given, "nothing: the task's own check has none", fix)

    def rows(split: Split, count: int) -> list[dict[str, Any]]:
        # The chain itself is what a response must hold to; see methods that blank a span of the prompt.
        return [
            {"prompt": p.prompt, "answer": p.answer, "span": p.prompt.removesuffix("=?\n")}
            for p in generate(task, split, count)
        ]

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        return [
            float(verify(text, parse_problem(prompt, task.modulus)))
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    def steps(
        prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> list[Steps | None]:
        return [
            check_steps(parse_problem(row["prompt"], task.modulus), text)
            for row, text in zip(rows, responses, strict=True)
        ]

    return Problems(rows("train", config.data.count), rows("test", config.run.evaluate_samples), reward, steps)


def _file(config: RunConfig, chat: bool) -> Problems:
    data = config.data
    assert data.path
    kind = "math" if config.reward.kind == "auto" else config.reward.kind
    if kind == "task":
        raise InputError("reward.kind", "'task'", "math, exact or choice, or lean, for problems of a file")
    if data.system is not None and not chat:
        raise InputError("data.system", repr(data.system), "a model with a chat template", "leave it out")
    settings = config.reward.settings
    with _named("reward.settings"):
        prepared = prepare(kind, settings)[1]
        if isinstance(prepared, LeanSettings):
            # Without Lean every verdict would be "abstain".
            prepared.verifier  # noqa: B018
    steps = _steps(config, kind)
    problems = load_problems(Path(data.path), data.problem, data.answer, limit=data.limit)
    rows = []
    for number, problem in enumerate(problems, 1):
        if reason := check_gold(kind, problem["answer"], **settings):
            raise InputError(
                f"{data.path}, row {number}, column {data.answer!r}", repr(problem["answer"])[:80],
                f"an answer that the {kind} verifier can judge against ({reason})",
                "correct or drop the row, or choose another reward.kind",
            )  # fmt: skip
        if isinstance(steps, LeanVerifier):
            with _named(f"{data.path}, row {number}"):
                steps.statement(problem)
        text = problem.pop("problem")
        system = [{"role": "system", "content": data.system}] if data.system else []
        prompt = [*system, {"role": "user", "content": text}] if chat else f"{text}\n"
        rows.append({**problem, "prompt": prompt})

    # TRL names a metric after the function: one name, whatever the verifier.
    return Problems(rows, [], verifier_reward(kind, name="reward", **settings), steps)


def _steps(config: RunConfig, kind: str) -> StepVerifier | None:
    """The step verifier that the configuration names for problems of a file."""
    given = config.reward.step_settings
    if config.reward.steps == "auto":
        if given:
            raise InputError("reward.step_settings", given, "nothing without reward.steps")
        return None
    try:
        with _named("reward.step_settings"):
            if config.reward.steps == "arithmetic":
                return arithmetic_verifier(**given)
            # The reward's gold is the theorem too, under the name that loading gives it.
            return LeanVerifier(**({"statement_column": "answer"} if kind == "lean" else {}) | given)
    except TypeError as error:
        raise InputError(
            "reward.step_settings", error, f"settings of the {config.reward.steps} step verifier"
        ) from None


@contextmanager
def _named(section: str) -> Iterator[None]:
    """What is wrong inside carries the section's name."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{section}: {error.field}", error.got, error.expected, error.fix) from None
