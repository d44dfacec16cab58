"""The trainer's configuration: TRL's `GRPOConfig`, the credit method and where to keep the run's records."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from trl import GRPOConfig

from apportion.credit.method import CreditMethod
from apportion.credit.registry import make_method, method_class, method_names_of
from apportion.errors import InputError, nearest
from apportion.train.compatibility import check_config


@dataclass
class CreditConfig(GRPOConfig):
    """`GRPOConfig` with a credit method. Every TRL option means what it means in TRL.

        CreditConfig("out", method="probepo", budget=40, samples=8, learning_rate=1e-6)

    A keyword that is no field of this class is taken for a setting of the method, of whichever method is
    registered under that name. A setting whose name TRL has taken (`seed`, `epsilon`, `beta`) goes into `credit`:
    `credit={"seed": 1}`. On a command line or in a file all of them go there.

    Attributes:
        method: registered name of the credit method (`apportion methods` lists them), or a list of names: a
            pipeline (see `apportion.credit.pipeline`).
        credit: the method's settings; what is left out keeps the method's default. For a pipeline a dict for
            each of its methods: `{"probepo": {"budget": 24}}`.
        run_folder: where metrics.jsonl and the rollouts, evidence and credit of each step are written (see
            `apportion.records`); None keeps no records.
        record_every: optimiser steps between recorded batches; metrics are written at every log.
        probe_rows: most continuations that are generated at a time on one device.
        probe_engine: what generates the probes: "transformers", the trained model itself, or "vllm": TRL's with
            `use_vllm=True`, else one of our own in this process, made from the model and updated before it measures.
        probe_gap: mean difference, in nats, between vLLM's and the trainer's log-probabilities of the probed prefixes
            above which a warning is given [ours].
        stream: the probing engine samples the rollouts as well ([ours]; methods that probe, one process): a group is
            graded and probed as soon as its last rollout has ended, from the rollouts' own cache. Reward functions are
            then called with a group at a time. Off, or where a prompt is too long for the engine, TRL samples.
        probe_stop: regular expression; a probe ends where its new text holds a match, looked for every 8 tokens
            ([ours]). Rollouts go on, so what a policy would still change after its answer is not seen. None: no such
            end.
        rescue_cue: text that a probe cut off by the length limit gets appended before at most `rescue_tokens`
            greedy tokens ([ours]; ProbePO's appendix C names the rescue). None: no rescue.
        rescue_answer: regular expression; a probe whose text it is found in has an answer and needs no rescue.
        rescue_tokens: tokens at the end of the limit that are kept for a rescue.
        logging_steps: 1 here (10 in TRL), so that every step has its metrics.

    Raises:
        InputError: an unknown method or setting, a value that its setting does not take, or a TRL option that
            per-token credit cannot be combined with; the message names it, the reason and the fix.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "credit"]

    # A factory, because Hugging Face's argument parser drops the default of a list.
    method: str | list[str] = field(
        default_factory=lambda: "probepo",
        metadata={"help": "Registered name of the credit method, or names: a pipeline."},
    )
    credit: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Settings of the credit method, e.g. '{\"alpha\": 0.5}'."}
    )
    run_folder: str | None = field(default=None, metadata={"help": "Folder for the run's records."})
    record_every: int = field(default=1, metadata={"help": "Optimiser steps between recorded batches."})
    probe_rows: int = field(default=256, metadata={"help": "Most continuations generated at a time."})
    probe_engine: str = field(default="transformers", metadata={"help": "What generates probes: transformers or vllm."})
    probe_gap: float = field(default=0.05, metadata={"help": "Mean log-probability gap, in nats, that is warned of."})
    stream: bool = field(default=False, metadata={"help": "Sample and probe in one loop of our own engine."})
    probe_stop: str | None = field(
        default=None, metadata={"help": "Regular expression that ends a probe where its text holds a match."}
    )
    rescue_cue: str | None = field(
        default=None, metadata={"help": "Text appended to a probe that was cut off before its answer."}
    )
    rescue_answer: str = field(
        default=r"\\boxed\s*\{", metadata={"help": "Regular expression that finds an answer in a probe's text."}
    )
    rescue_tokens: int = field(default=64, metadata={"help": "Tokens kept for a rescued probe's answer."})
    logging_steps: float = field(default=1, metadata={"help": "Optimiser steps between logs."})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = {f.name for f in fields(type(self))}
        settings = {key: kwargs.pop(key) for key in list(kwargs) if key not in names}
        given = kwargs.get("credit") or {}
        if settings and isinstance(given, str):
            raise InputError("credit", "text beside keywords of the method", "one of the two", "pass a dict")
        if both := sorted(settings.keys() & given):
            raise InputError(f"credit.{both[0]}", "the setting twice", "it once", "leave it out of `credit`")
        inherited = {f.name for f in fields(GRPOConfig)}
        for own in fields(type(self)):
            if own.name not in inherited:
                default = own.default_factory() if own.default_factory is not MISSING else own.default
                setattr(self, own.name, kwargs.pop(own.name, default))
        if settings:
            self.credit = {**given, **settings}
        super().__init__(*args, **{"logging_steps": type(self).logging_steps, **kwargs})

    def __post_init__(self) -> None:
        method_names_of(self.method)
        if self.record_every < 1:
            raise InputError("record_every", self.record_every, "1 or more", "1 records every step")
        if self.probe_rows < 1:
            raise InputError("probe_rows", self.probe_rows, "1 or more")
        if self.probe_engine not in ("transformers", "vllm"):
            raise InputError("probe_engine", repr(self.probe_engine), "'transformers' or 'vllm'")
        if not isinstance(self.stream, bool):
            raise InputError("stream", repr(self.stream), "True or False")
        for name in ("probe_stop", "rescue_answer"):
            if (pattern := getattr(self, name)) is not None:
                _check_pattern(name, pattern)
        if self.rescue_tokens < 1:
            raise InputError("rescue_tokens", self.rescue_tokens, "1 or more", "rescue_cue=None turns rescues off")
        if self.num_generations is not None and self.num_generations < 2:
            raise InputError(
                "num_generations", self.num_generations, "at least 2: one response has nothing to be compared with",
                "set num_generations=8, as the papers do",
            )  # fmt: skip
        super().__post_init__()
        check_config(self, self.make_method())

    def make_method(self) -> CreditMethod:
        """The credit method with its settings.

        Raises:
            InputError: an unknown setting, with the nearest name, or a value that the setting does not take.
        """
        settings = self.credit or {}
        if not isinstance(settings, dict):
            raise InputError("credit", repr(settings), "a JSON object of the method's settings")
        names = method_names_of(self.method)
        if len(names) == 1:
            own = sorted(method_class(names[0]).model_fields)
            for key in settings:
                if key not in own:
                    known = {*own, *(f.name for f in fields(self))}
                    raise InputError(
                        key, "an unknown setting",
                        f"a setting of {names[0]} ({', '.join(own)}) or of TRL's GRPOConfig{nearest(key, known)}",
                    )  # fmt: skip
        return make_method(names, settings)


def _check_pattern(name: str, pattern: Any) -> None:
    try:
        empty = re.compile(pattern).search("") is not None
    except (re.error, TypeError) as error:
        raise InputError(name, repr(pattern), f"a regular expression: {error}") from None
    if empty:
        raise InputError(name, repr(pattern), "a regular expression that does not find itself in an empty text")
