"""A run's configuration as what its cost depends on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion.cost.hardware import Hardware
from apportion.cost.memory import Training
from apportion.cost.predict import Plan, Prediction, predict
from apportion.cost.shape import ModelShape, read_shape
from apportion.cost.standin import Workload
from apportion.errors import InputError

if TYPE_CHECKING:
    from apportion.train.settings import RunConfig

# Rows of the data that are tokenized to learn how long prompts and answers are.
_SAMPLE = 256
# Characters of a token where no tokenizer is asked [ours].
_CHARACTERS = 4


@dataclass(frozen=True)
class Assumed:
    """What a person may say about a run that nobody has seen yet; None is predicted from the configuration.

    Attributes:
        response, longest: tokens of a response, mean and most in a batch.
        prompt: tokens of a prompt; with it neither data nor tokenizer is read.
        step: tokens of a reasoning step. pass_rate: share of right responses.
    """

    response: float | None = None
    longest: int | None = None
    prompt: int | None = None
    step: int | None = None
    pass_rate: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("response", 1), ("longest", 1), ("prompt", 1), ("step", 4)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise InputError(_OPTIONS[name], value, f"at least {least}")
        if self.pass_rate is not None and not 0 <= self.pass_rate <= 1:
            raise InputError("--pass-rate", self.pass_rate, "0 to 1")


_OPTIONS = {
    "response": "--response-length", "longest": "--longest", "prompt": "--prompt-length", "step": "--step-tokens"
}  # fmt: skip


def predict_run(config: RunConfig, hardware: Hardware, assumed: Assumed | None = None) -> Prediction:
    """One optimiser step of a run on a machine.

    Raises:
        InputError: what `apportion train --dry-run` would refuse, a model that this does not know, or lengths
            that do not fit the recipe.
    """
    shape, plan, work = describe(config, hardware.devices, assumed or Assumed())
    return predict(shape, plan, work, hardware)


class Unpredicted(Exception):
    """A run that is not predicted, and in one line why."""


def predict_beside(config: RunConfig, processes: int = 1, *, measure: bool = False) -> Prediction:
    """The prediction to lay beside a run that starts here, in so many processes; see `Prediction.metrics`.

    On GPUs from their data sheet, on a CPU from what this machine was measured at.

    Args:
        measure: a CPU that no figures are kept of is measured now, which takes half a minute.

    Raises:
        Unpredicted: a machine without figures.
        InputError: as `predict_run`.
    """
    import torch

    from apportion.cost.hardware import named_device
    from apportion.cost.kept import kept_machine, measured_machine

    if torch.cuda.is_available() and not config.trainer.get("use_cpu"):
        name = torch.cuda.get_device_name()
        machine = named_device(name, processes)
        if machine is None:
            raise Unpredicted(f"apportion has no figures of {name}")
    elif processes > 1:
        raise Unpredicted(f"{processes} processes share this CPU, and its figures are those of one")
    else:
        machine = kept_machine(config)
        if machine is None and measure:
            machine, _ = measured_machine(config)
        if machine is None:
            file = Path(config.run.folder) / "config.toml"
            raise Unpredicted(
                f"this CPU has not been measured for this model; `apportion cost --config {file}` does it once, in "
                "half a minute, for this and later runs, and --set run.predict=measure before a run starts"
            )
    return predict_run(config, machine)


def describe(config: RunConfig, devices: int, assumed: Assumed) -> tuple[ModelShape, Plan, Workload]:
    """The model's shape, the plan of a step, and one device's generation batch."""
    from apportion.train.models import model_folder
    from apportion.train.prepare import resolve, trainer_args

    config = resolve(config)
    args = trainer_args(config)
    folder = model_folder(config.model.name)
    shape = read_shape(folder)
    prompts, gold, tokens = _lengths(config, folder, assumed)
    generated = args.per_device_train_batch_size * args.steps_per_generation
    every = args.steps_per_generation * args.num_iterations
    work = _workload(config, args, assumed, generated, prompts, gold)
    context = _context(folder)
    if context is not None and work.longest_prompt + work.longest > context:
        raise InputError(
            "--longest" if assumed.longest else "trainer.max_completion_length", work.longest,
            f"at most {context - work.longest_prompt}: the model's context of {context} less the prompt",
        )  # fmt: skip
    lora = config.model.lora
    sharded = bool(args.fsdp) or bool(args.deepspeed)
    training = Training(
        trained=shape.lora(lora) if lora else shape.parameters, adapter=bool(lora), dtype=config.model.dtype,
        compute="bfloat16" if args.bf16 or args.fp16 else config.model.dtype, optimizer=str(args.optim),
        recompute=bool(args.gradient_checkpointing), copies=0, shards=devices if sharded else 1,
        micro=0.0, scored=0.0, cached=0.0,
    )  # fmt: skip
    plan = Plan(
        args.make_method(), training, args.per_device_train_batch_size, args.gradient_accumulation_steps,
        args.gradient_accumulation_steps / every, int(args.gradient_accumulation_steps % every != 0),
        int(args.beta != 0), bool(args.use_vllm), bool(args.stream), args.probe_rows,
        config.data.path is not None and config.reward.kind in ("auto", "math"), tokens,
    )  # fmt: skip
    return shape, plan, work


def _workload(config: RunConfig, args: Any, assumed: Assumed, rows: int, prompts: Sequence[int], gold: int) -> Workload:
    limit = args.max_completion_length
    # Half the limit, and one response of a batch that reaches it; a step of 40 tokens; half of the responses right.
    response, longest, step, passes, rest = limit / 2, limit, 40, 0.5, dict[str, Any]()
    if config.data.path is None:
        response, longest, step, passes = _task(config, rows)
        rest = {"characters": 1, "spread": False, "answer": "#42"}
    response = min(response, limit) if assumed.response is None else assumed.response
    longest = max(min(longest, limit), math.ceil(response)) if assumed.longest is None else assumed.longest
    if max(response, longest) > limit:
        name = "--response-length" if response > limit else "--longest"
        raise InputError(name, max(response, longest), f"at most trainer.max_completion_length={limit}")
    if longest < response:
        raise InputError("--longest", longest, f"at least the mean response, {response:g}")
    step = assumed.step or step
    passes = passes if assumed.pass_rate is None else assumed.pass_rate
    if config.data.path is None:
        # A generated problem has one right way, which the right responses share to the end.
        rest["agreement"] = passes ** (1 / max(1, math.ceil(response / step)))
    return Workload(
        rows, args.num_generations, sum(prompts) / len(prompts), max(prompts), response, longest, limit,
        step=step, pass_rate=passes, gold=gold, **rest,
    )  # fmt: skip


def _task(config: RunConfig, rows: int) -> tuple[float, int, int, float]:
    """Of a generated task: tokens of a worked solution, of the longest of so many, and of its first step, and the share
    of right responses.

    The last and how often a step is corrected are what the embedded policy's card says of as many operations; a
    correction repeats a step and its mark. Where it says nothing the longest is the limit, and one half is right.
    """
    from apportion.tasks import CORRECTION, STEP_DELIMITER, generate, policy_path
    from apportion.train.data import embedded_task

    problems = generate(task := embedded_task(config.data), "train", _SAMPLE)
    # A character is a token, and EOS is one.
    response = sum(len(problem.solution) + 1 for problem in problems) / len(problems)
    step = len(problems[0].steps[0]) + len(STEP_DELIMITER)
    card = {} if config.model.name != "embedded" else json.loads((policy_path() / "card.json").read_text())
    known = card.get("by_operations", {}).get(str(config.data.operations), {})
    longest, corrected = task.max_response, known.get("responses_with_correction", 0.0)
    if 0 < corrected < 1:
        # Of n responses about one has k corrections where n·p^k = 1.
        often = math.ceil(math.log(max(rows, 2)) / -math.log(corrected))
        longest = math.ceil(response) + often * (step + len(CORRECTION))
    return response, longest, step, known.get("accuracy", 0.5)


def _lengths(config: RunConfig, folder: Path, assumed: Assumed) -> tuple[list[int], int, Callable[[str], int]]:
    """Tokens of the first prompts, of a gold answer, and a counter of a text's tokens."""
    if assumed.prompt is not None:
        return [assumed.prompt], 3, lambda text: -(-len(text) // _CHARACTERS)
    from apportion.train.data import load_data
    from apportion.train.models import load_tokenizer

    tokenizer = load_tokenizer(folder)
    few = {"count": min(config.data.count, _SAMPLE), "limit": min(config.data.limit or _SAMPLE, _SAMPLE)}
    short = config.model_copy(
        update={
            "data": config.data.model_copy(update=few),
            "run": config.run.model_copy(update={"evaluate_samples": 0}),
        }
    )
    rows = load_data(short, chat=bool(tokenizer.chat_template)).train

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(text: Any) -> int:
        if isinstance(text, str):
            return len(tokenizer(text)["input_ids"])
        return len(tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=True)["input_ids"])

    golds = [count(str(row["answer"])) for row in rows]
    return [prompt(row["prompt"]) for row in rows], max(1, round(sum(golds) / len(golds))), count


def _context(folder: Path) -> int | None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    found: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found
