"""Tokens, seconds and memory of one optimiser step, from a run's configuration and a machine's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from apportion.cost.demand import Demand, demand, planned
from apportion.cost.hardware import Hardware
from apportion.cost.memory import USABLE, Training, memory_of
from apportion.cost.roofline import Call, decode, exchange, padded, seconds
from apportion.cost.serving import Serving
from apportion.cost.shape import BYTES, ModelShape
from apportion.cost.standin import Workload, standin, stated_answer
from apportion.cost.trees import grown
from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import fresh_budget, stages_of
from apportion.errors import InputError

# Stand-in groups that a prediction averages over, and tokens of one stand-in batch that are worth their time.
_GROUPS, _TOKENS = 48, 400_000
# AdamW reads weight, gradient and two states and writes all but the gradient; clipping reads the gradient.
_ADAM_TRAFFIC = 8
_MEASURED = frozenset({"continuations", "belief", "sensitivity", "confidence", "divergence"})

PEAK = "memory/peak"
"""Name of a run's measured memory, in bytes."""


@dataclass(frozen=True)
class Prediction:
    """One optimiser step of all devices.

    Attributes:
        tokens: by kind, under the names that a step's metrics have.
        seconds: by phase, as the run's clock has them; parts: the same seconds, finer.
        memory: bytes a device by part, `peak` among them. fits: whether that is within the device's memory.
        cap: tokens and seconds as above, the larger of these and of those where every group is mixed, no two responses
            share an opening and every token may be a cut; responses are no longer than in these.
        work: what was assumed. notes: what the figures leave out.
        uncounted: names of `tokens` and phases that leave out what a run spends there, so that they cannot be set
            against its own.
    """

    method: str
    hardware: Hardware
    tokens: Mapping[str, float]
    seconds: Mapping[str, float]
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    work: Workload
    cap: Prediction | None = None
    notes: tuple[str, ...] = ()
    uncounted: frozenset[str] = frozenset()

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def fits(self) -> bool:
        return self.memory["peak"] <= USABLE * self.hardware.memory

    def metrics(self) -> dict[str, float]:
        """`predicted/NAME` for each NAME of a run's log that this can be set against; memory in bytes."""
        named = {**self.tokens, **{f"seconds/{phase}": value for phase, value in self.seconds.items()}}
        kept = {name: value for name, value in named.items() if name.removeprefix("seconds/") not in self.uncounted}
        return {f"predicted/{name}": float(value) for name, value in {**kept, PEAK: self.memory["peak"]}.items()}


@dataclass(frozen=True)
class Plan:
    """What of a resolved recipe a step's cost depends on, beside the workload.

    Attributes:
        micro: rows of a micro-batch; steps: micro-batches of an optimiser step on one device.
        generations: generation batches of an optimiser step, less than 1 where one serves several.
        old, reference: passes over the batch that TRL makes without gradients for itself.
        stream: one loop samples and probes; predicted as if one came after the other.
        graded: whether a response's grading costs what a mathematical answer's does.
        serving: the engine beside the trainer that generates, None where the trainer's own weights do.
        packed: most tokens of a micro-batch whose rows are laid end to end; 0 where they are padded to one width.
    """

    method: CreditMethod
    training: Training
    micro: float
    steps: int
    generations: float
    old: int
    reference: int
    vllm: bool
    stream: bool
    probe_rows: int
    graded: bool
    tokens: Callable[[str], int] = field(repr=False)
    serving: Serving | None = None
    packed: int = 0


def predict(shape: ModelShape, plan: Plan, work: Workload, hardware: Hardware) -> Prediction:
    """The prediction for one optimiser step; a pure function of its arguments.

    Raises:
        InputError: a machine without figures for the arithmetic's type.
    """
    if plan.training.compute not in hardware.flops:
        raise InputError("model.dtype", plan.training.compute, f"one of {', '.join(hardware.flops)} on {hardware.name}")
    expected = _predict(shape, plan, work, hardware, worst=False)
    worst = _predict(shape, plan, work, hardware, worst=True)
    cap = replace(
        worst, tokens=_larger(expected.tokens, worst.tokens), parts=_larger(expected.parts, worst.parts),
        seconds=_larger(expected.seconds, worst.seconds),
    )  # fmt: skip
    return replace(expected, cap=cap, notes=_notes(plan, expected), uncounted=_uncounted(plan, expected))


def _larger(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: max(value, b[name]) for name, value in a.items()}


def _unplanned(plan: Plan, found: Prediction) -> bool:
    """The method measures, and planned nothing on text that stands in."""
    tokens = ("probe/tokens", "measure/forward_tokens")
    return bool(plan.method.needs & _MEASURED) and not any(found.tokens[name] for name in tokens)


def _uncounted(plan: Plan, found: Prediction) -> frozenset[str]:
    names = set() if plan.graded else {"grade"}
    if "step_labels" in plan.method.needs:
        names.add("probe")
    if plan.stream:
        names |= {
            "generate",
            "probe",
            "grade",
            "credit",
            *(name for name in found.tokens if name.startswith("measure/")),
        }
    if _unplanned(plan, found):
        names |= {"probe", *(name for name in found.tokens if name.startswith(("probe/", "measure/")))}
    return frozenset(names)


def _notes(plan: Plan, found: Prediction) -> tuple[str, ...]:
    needs, notes = plan.method.needs, []
    if _unplanned(plan, found):
        notes.append(f"Nothing is counted for {found.method}'s measurements: it plans none on text that stands in.")
    if "step_labels" in needs:
        notes.append("The step verifier's time is not counted.")
    if plan.stream:
        notes.append("trainer.stream samples and probes in one loop; predicted as if probes came after the responses.")
    if found.hardware.overlaps:
        notes.append("Figures of the data sheet and shares of it that are assumed, none measured: see docs/cost.md.")
    if not found.fits and plan.training.shards == 1 and found.hardware.devices > 1 and not needs & _MEASURED:
        notes.append("Every device holds all weights and states; trainer.fsdp would divide them.")
    return tuple(notes)


def _predict(shape: ModelShape, plan: Plan, work: Workload, hardware: Hardware, worst: bool) -> Prediction:
    method, needs, serving = plan.method, plan.method.needs, plan.serving
    engine = hardware if serving is None else serving.replica(hardware)
    # What is generated and measured is counted by replica, which has the rows of `split` devices.
    split = hardware.devices // engine.devices
    served = replace(work, rows=work.rows * split)
    rollout, generated, rows, width = _rollout(shape, plan, served, engine)
    asked = _measured(shape, plan, served, engine, worst)
    rows, response = rows / split, width - work.longest_prompt
    batch = padded(plan.micro, width, times=rows / plan.micro, logits=plan.micro * response)
    if plan.packed:
        length = work.prompt + work.response
        batch = padded(plan.micro, length, times=rows / plan.micro, masked=False, logits=plan.micro * work.response)
    owns_old = {"entropy", "old_logprob", "continuations"} & needs and not plan.old
    owns_reference = "ref_logprob" in needs and not plan.reference
    own = bool(owns_old) + bool(owns_reference)
    without_weights = 1.0 if plan.training.adapter else 2.0
    update = replace(batch, times=plan.steps, backward=without_weights, recompute=plan.training.recompute)

    def timed(calls: list[tuple[float, Call]]) -> float:
        dtype, stored = plan.training.compute, plan.training.dtype
        return sum(times * seconds(call, shape, hardware, dtype, stored) for times, call in calls)

    def engaged(calls: list[tuple[float, Call]]) -> float:
        if serving is None:
            return timed(calls)
        alone = sum(times * seconds(call, shape, engine, serving.dtype) for times, call in calls)
        return alone + serving.summing(calls, shape, hardware)

    often, overheads = plan.generations, hardware.overheads
    size = 4 if plan.training.adapter else BYTES[plan.training.dtype]
    sharded = plan.training.shards > 1
    moved = shape.parameters if sharded else plan.training.trained
    states = plan.training.trained / plan.training.shards * size * _ADAM_TRAFFIC
    graded = (rows + asked.continuations / split) * often * plan.graded
    # Under a serving engine one process reads all rollouts; probes are read where they are graded.
    texts = hardware.devices if serving else 1
    parts = {
        "rollouts": engaged([(often, call) for call in rollout]),
        "reference and old log-probabilities": timed([(often * (plan.old + plan.reference), batch)]),
        "probing": engaged([(often, call) for call in asked.probing]),
        "reading": timed([(often / split, call) for call in asked.reading]),
        "grading": graded * overheads.grade,
        "log-probabilities for credit": timed([(often * own, batch)]),
        "text and records": often * (texts * work.rows * work.response + asked.generated / split) * overheads.token,
        "passes of the update": timed([(1.0, update)]),
        "optimizer": states / hardware.rate(states) + overheads.step,
        "exchange of gradients": exchange(moved, size, hardware, sharded, plan.steps),
    }
    first = ["rollouts", "reference and old log-probabilities"]
    phases = {
        "generate": first, "probe": ["probing", "reading"], "grade": ["grading"],
        "credit": ["log-probabilities for credit", "text and records"],
        "update": ["passes of the update", "optimizer", "exchange of gradients"],
    }  # fmt: skip
    extra = [*asked.probing, *asked.reading, *([replace(batch, times=batch.times * split)] * own)]
    n = engine.devices
    tokens = {
        "tokens/actor": n * often * generated,
        "probe/tokens": n * often * asked.generated,
        "probe/continuations": n * often * asked.continuations,
        "measure/forwards": n * often * sum(call.times for call in extra),
        "measure/forward_tokens": n * often * sum(call.forward_tokens for call in extra),
        "measure/backward_tokens": n * often * sum(call.backward_tokens for call in extra),
    }
    cached = rows * width if not plan.vllm else rows * (work.prompt + work.response)
    training = replace(
        plan.training, micro=plan.packed or plan.micro * width, scored=plan.packed or plan.micro * response,
        cached=cached, copies=int(bool(plan.reference or owns_reference) and not plan.training.adapter),
        engine=serving.share * hardware.memory if serving else 0.0,
        beside=plan.packed if serving and not serving.sleeps else 0.0,
    )  # fmt: skip
    return Prediction(
        method.name, hardware, tokens, {phase: sum(parts[name] for name in names) for phase, names in phases.items()},
        parts, memory_of(shape, training), work,
    )  # fmt: skip


def _rollout(shape: ModelShape, plan: Plan, work: Workload, engine: Hardware) -> tuple[list[Call], float, float, int]:
    """Passes of one generation batch, tokens it generates, rows that are trained, and their padded width."""
    width = work.longest_prompt + work.longest
    if plan.serving is not None:
        calls = plan.serving.rollouts(work, plan.serving.cache(shape, engine))
        return calls, work.rows * work.response, work.rows, width
    tree = grown(plan.method, work, plan.probe_rows)
    if tree is not None:
        return tree.calls, tree.generated, tree.trained or work.rows, width
    prefill = padded(work.rows, work.longest_prompt, logits=work.rows)
    generated = work.rows * work.response
    if plan.vllm:
        # A row leaves when it ends, so the batch is full for as long as a mean response takes.
        turns = decode(work.response, work.rows, work.prompt + work.response / 2, "slots")
    else:
        turns = decode(work.longest - 1, work.rows, work.longest_prompt + work.longest / 2, "generate")
    return [prefill, turns], generated, work.rows, width


def _measured(shape: ModelShape, plan: Plan, work: Workload, engine: Hardware, worst: bool) -> Demand:
    """One generation batch's measurements on one device: means over a few stand-in batches."""
    method = plan.method
    if not _MEASURED & method.needs:
        return Demand()
    patterns = (getattr(stage, "answer_pattern", None) for stage in stages_of(method))
    answer = stated_answer(work, next(filter(None, patterns), None))
    # A batch too long to lay out is planned on in part, and its passes are taken as often as it is larger.
    most = max(1, int(_TOKENS / (work.size * work.response)))
    groups = min(work.groups, most)
    draws = 1 if worst else max(1, min(-(-_GROUPS // groups), most // groups))
    fresh = fresh_budget(method)
    room: dict[str, Any] = {"slots": plan.probe_rows}
    if plan.serving is not None:
        room = {"slots": plan.serving.slots, "cache": plan.serving.cache(shape, engine), "paged": True}
    found = []
    for draw in range(draws):
        rollouts = standin(replace(work, rows=groups * work.size), answer, draw, worst)
        jobs = planned(method, rollouts)
        found.append(demand(jobs, rollouts, work, shape, plan.tokens, fresh_budget=fresh, **room))
    share = work.rows / (groups * work.size) / draws
    return Demand(
        tuple(replace(call, times=call.times * share) for each in found for call in each.probing),
        tuple(replace(call, times=call.times * share) for each in found for call in each.reading),
        round(share * sum(each.generated for each in found)),
        round(share * sum(each.continuations for each in found)),
    )
