"""The `apportion` block of verl's configuration, and what of verl's own options it can be combined with.

On verl's command line: `+apportion.method=probepo +apportion.settings.budget=40`, with
`trainer.v1.trainer_mode=apportion_sync`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from apportion.credit.method import CreditMethod
from apportion.credit.registry import make_method
from apportion.errors import InputError, nearest
from apportion.measure.batch import READ

Refusal = tuple[bool, str, object, str, str]

# Policy losses of verl in which a token's gradient takes that token's own advantage and no other's; each is tested.
# verl's gspo is among them: its ratio is the sequence's, its gradient the token's (GSPO-token).
TOKEN_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "sapo", "gpg", "cispo", "gspo")


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ProbeSettings(_Block):
    """How probes are spread over verl's replicas."""

    workers: int = Field(0, ge=0, description="Ray actors that ask and grade; 0: as many as verl's agent loop has")
    in_flight: int = Field(256, ge=1, description="continuations that may be out at a time, for each replica")
    retries: int = Field(2, ge=0, description="how often what did not come back is asked again")
    timeout_s: float = Field(600.0, gt=0, description="seconds after which a piece of work is asked again")
    replicas: Literal["awake", "wake_again"] = Field(
        "awake",
        description="awake: rollout replicas sleep only after the probes; wake_again: they sleep while the trainer "
        "computes log-probabilities, and are given the same weights again for the probes",
    )
    gap: float = Field(0.05, gt=0, description="mean log-probability gap, in nats, above which a warning is given")
    max_staleness: int | None = Field(
        None, ge=0, description="probes by weights this many versions away from their response's are left out"
    )


class RescueSettings(_Block):
    """Cutoff rescue (see `measure.probe.Rescue`) [ours]; the paper names it (ProbePO, appendix C)."""

    cue: str = Field(min_length=1, description="text that a cut-off probe is continued with")
    answer: str = Field(r"\\boxed\{", description="regular expression: a text it is found in has an answer")
    tokens: int = Field(64, ge=1, description="tokens kept for it at the end of the budget")

    @field_validator("answer")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return value


class CreditSettings(_Block):
    """What is asked of apportion in a verl run."""

    method: str | tuple[str, ...] = Field(description="a registered method, or several as a pipeline")
    settings: dict[str, Any] = Field(default_factory=dict, description="the method's, or one table a stage")
    run_folder: str | None = Field(None, description="where rollouts, evidence and credit are recorded; none: nowhere")
    record_every: int = Field(1, ge=1, description="steps between records")
    seed: int = Field(0, description="of the probes' random streams")
    probe: ProbeSettings = ProbeSettings()
    rescue: RescueSettings | None = None
    step_verifier: str | None = Field(None, description="module:function, for methods that read verdicts on steps")

    @classmethod
    def of(cls, block: Mapping[str, Any] | None) -> CreditSettings:
        """Reads the block.

        Raises:
            InputError: there is none, an unknown or ill-typed option, a method that is not registered.
        """
        if not block:
            raise InputError("apportion", "no such block in the configuration", "one that names a method",
                             "add +apportion.method=probepo")  # fmt: skip
        try:
            found = cls.model_validate(dict(block))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("apportion", *first["loc"])))
            known = _known(first["loc"][:-1])
            hint = nearest(str(first["loc"][-1]), known) if first["type"] == "extra_forbidden" else ""
            expected = f"one of {', '.join(known)}{hint}" if first["type"] == "extra_forbidden" else first["msg"]
            raise InputError(where, repr(first.get("input")), expected) from None
        found.make_method()
        return found

    def make_method(self) -> CreditMethod:
        """The method.

        Raises:
            InputError: it is not registered, or a setting that it does not have.
        """
        try:
            return make_method(list(self.method) if isinstance(self.method, tuple) else self.method, self.settings)
        except InputError as error:
            # A setting of one method stands in `settings` itself, that of a stage in the stage's table.
            name = "method" if error.field == "method" else f"settings.{error.field.removeprefix(f'{self.method}.')}"
            raise InputError(f"apportion.{name}", error.got, error.expected, error.fix) from None

    def load_step_verifier(self) -> Any:
        """The function that `step_verifier` names, None where it names none.

        Raises:
            InputError: there is no such function.
        """
        if self.step_verifier is None:
            return None
        module, _, name = self.step_verifier.partition(":")
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(
                "apportion.step_verifier", repr(self.step_verifier), f"module:function that can be imported ({error})"
            ) from None


def _known(where: tuple[Any, ...]) -> list[str]:
    """The options of the block that an unknown one was found in."""
    model: Any = {"probe": ProbeSettings, "rescue": RescueSettings}.get(str(where[0]) if where else "", CreditSettings)
    return list(model.model_fields)


def check_config(config: Any, settings: CreditSettings, method: CreditMethod) -> None:
    """Raises InputError for the first option of verl's that the method cannot be combined with."""
    for wrong, field, got, expected, fix in _refusals(config, settings, method):
        if wrong:
            raise InputError(field, got, expected, fix)


def _refusals(config: Any, settings: CreditSettings, method: CreditMethod) -> Iterator[Refusal]:
    name, needs = method.name, method.needs
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss.get("loss_mode", "vanilla")
    correction = config.algorithm.get("rollout_correction", None) or {}
    yield (
        "tree" in needs, "apportion.method", name,
        "a method of flat groups: verl's agent loop samples no trees", "train trees with apportion train, which does",
    )  # fmt: skip
    yield (
        config.algorithm.adv_estimator != "grpo", "algorithm.adv_estimator", repr(config.algorithm.adv_estimator),
        f"'grpo', whose μ and σ {name}'s credit is measured in", "set algorithm.adv_estimator=grpo",
    )  # fmt: skip
    yield (
        bool(config.algorithm.use_kl_in_reward), "algorithm.use_kl_in_reward", True,
        "False: a reward with a KL term in it is not that of a verdict, which probes are compared with",
        "set actor_rollout_ref.actor.use_kl_loss=True for a KL term in the loss",
    )  # fmt: skip
    yield (
        method.per_token and loss not in TOKEN_LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode", repr(loss),
        f"one of {', '.join(TOKEN_LOSSES)}: those are tested to give each token its own advantage; a loss that "
        f"averages over a sequence would lose {name}'s credit",
        "set loss_mode=vanilla",
    )  # fmt: skip
    yield (
        bool({"entropy", "continuations"} & needs) and bool(correction.get("bypass_mode", False)),
        "algorithm.rollout_correction.bypass_mode", True,
        f"False: in bypass mode verl computes no entropies, which {name} places its probes by",
        "set algorithm.rollout_correction.bypass_mode=False",
    )  # fmt: skip
    yield (
        "entropy" in needs and not _float32(actor) and not actor.get("entropy_from_logits_with_chunking", False),
        "actor_rollout_ref.actor.entropy_from_logits_with_chunking", False,
        f"True: verl computes entropies of bfloat16 logits in bfloat16 else, where those that {name} ranks tie",
        "set actor_rollout_ref.actor.entropy_from_logits_with_chunking=True",
    )  # fmt: skip
    yield (
        "ref_logprob" in needs and not actor.use_kl_loss, "actor_rollout_ref.actor.use_kl_loss", False,
        f"True: {name} reads the reference model's log-probabilities, which verl computes for a KL term only",
        "set use_kl_loss=True, with kl_loss_coef=0 where no KL term is wanted",
    )  # fmt: skip
    yield (
        "step_labels" in needs and settings.step_verifier is None, "apportion.step_verifier", "none",
        f"module:function of a verifier of single steps, whose verdicts {name} reads", "name one",
    )  # fmt: skip
    yield (
        settings.rescue is not None and "continuations" not in needs, "apportion.rescue", "a block",
        f"none with {name}, which makes no probes", "leave it out",
    )  # fmt: skip
    if "continuations" in needs:
        yield from _probing(config, name)
    if READ & needs:
        yield from _reading(config, name)


def _probing(config: Any, name: str) -> Iterator[Refusal]:
    rollout, reward = config.actor_rollout_ref.rollout, config.reward.reward_model
    agent = rollout.agent.get("default_agent_loop", "single_turn_agent")
    yield (
        agent != "single_turn_agent" or bool(rollout.multi_turn.enable), "actor_rollout_ref.rollout.agent", repr(agent),
        f"single_turn_agent without multi_turn: {name} continues a response from its middle, where a tool's or an "
        "environment's state is gone",
        "use a method without probes, such as ep_grpo",
    )  # fmt: skip
    yield (
        bool(reward.enable) and not reward.enable_resource_pool, "reward.reward_model.enable_resource_pool", False,
        f"True: a reward model that shares the actor's GPUs answers once a step only, and {name}'s probes are graded "
        "as they come",
        "give the reward model a pool of its own, or grade by rule",
    )  # fmt: skip
    engine = rollout.name
    yield (
        engine not in ("vllm", "sglang", "apportion_transformers"), "actor_rollout_ref.rollout.name", repr(engine),
        "vllm, sglang or apportion_transformers: probes through others are not tested", "set rollout.name=vllm",
    )  # fmt: skip


def _reading(config: Any, name: str) -> Iterator[Refusal]:
    model, engine = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.get("fsdp_config", None) or {}
    lora = max(model.get("lora_rank", 0) or 0, (model.get("lora", None) or {}).get("rank", 0) or 0)
    copy = f"{name} reads a plain copy of the actor's model"
    yield (
        bool(model.get("use_fused_kernels", False)), "actor_rollout_ref.model.use_fused_kernels", True,
        f"False: {copy}, and fused kernels replace the forward of its class", "leave it out",
    )  # fmt: skip
    yield (
        lora > 0 or model.get("lora_adapter_path", None) is not None, "actor_rollout_ref.model.lora_rank", lora,
        f"0: {copy}, for which verl gives adapters apart from the weights; that is not tested", "train all weights",
    )  # fmt: skip
    yield (
        bool((engine.get("qat", None) or {}).get("enable", False)), "actor_rollout_ref.actor.fsdp_config.qat.enable",
        True, f"False: {copy}, without quantisation", "leave it out",
    )  # fmt: skip


def _float32(actor: Any) -> bool:
    """Whether the actor's logits come in float32."""
    engine = actor.get("fsdp_config", None) or {}
    precision = engine.get("mixed_precision", None) or {}
    return engine.get("dtype", "bfloat16") == "float32" or precision.get("param_dtype", None) in ("fp32", "float32")
