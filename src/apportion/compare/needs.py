"""What a method needs that neither the record of a step nor the run it belongs to can give, found before long work."""

from __future__ import annotations

from apportion.compare.recorded import Step
from apportion.compare.source import Source
from apportion.credit.baselines import GRPO
from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import stages_of
from apportion.errors import InputError
from apportion.measure.batch import answers_of
from apportion.train.compatibility import check_data
from apportion.train.models import model_folder
from apportion.train.settings import RunConfig

_ASKED = frozenset({"continuations", "belief", "sensitivity", "confidence", "divergence", "step_labels"})
STATISTICS = ("old_logprob", "entropy")
"""Fields of a batch that any later model can fill in, if with its own numbers."""


def unrecorded(step: Step, method: CreditMethod) -> str | None:
    """Why no model could help: the record lacks something that was there only when it was made; or None."""
    rollouts = step.rollouts
    if "tree" in method.needs and rollouts.path is None:
        return "its responses are leaves of trees, and the record has no `path`"
    if "steps" in method.needs and rollouts.boundary is None and (rollouts.text is None or rollouts.char_start is None):
        return "it looks for steps, and the record has neither text with offsets nor boundaries"
    if _ASKED & method.needs and rollouts.prompt_ids is None:
        return "it measures, and the record has no `prompt_ids` for prefixes to start with"
    return None


def unlike(config: RunConfig | str, method: CreditMethod) -> str | None:
    """Why the recorded μ and divisor are not this method's; or None. Without a configuration nothing is known."""
    how = "" if isinstance(config, str) else config.trainer.get("multi_objective_aggregation", "sum_then_normalize")
    if how in ("", "sum_then_normalize") or not method.grouped or isinstance(method, GRPO):
        return None
    return f"the run normalised its rewards one by one ({how}), and they have no common μ and σ"


def unread(step: Step, method: CreditMethod) -> list[str]:
    """Fields of the batch that the method reads and the record lacks, which a forward pass can fill in."""
    fields = (*STATISTICS, "ref_logprob")
    return [name for name in fields if name in method.needs and getattr(step.rollouts, name) is None]


def asks_model(step: Step, method: CreditMethod) -> bool:
    """Whether what the record lacks is read from a model; steps are judged by a verifier."""
    return bool((_ASKED - {"step_labels"}) & method.needs or unread(step, method))


def unanswerable(step: Step, method: CreditMethod, source: Source) -> str | None:
    """Why the run's data, verifier or tokenizer cannot serve what the method asks of a model; or None."""
    rows = source.rows
    try:
        check_data(method, set(rows[0]) if rows else set(), rows, source.problems.steps is not None)
    except InputError as error:
        return f"{error.field} has {error.got}; it needs {error.expected}"
    if {"belief", "confidence"} & method.needs and not any(map(answers_of, rows)):
        return "it asks for the gold answer, and no row has one"
    for stage in stages_of(method):
        cue = getattr(stage, "cue", None)
        if cue is not None and not _has_tokens(source, cue):
            return f"{stage.name}.cue={cue!r} has no tokens in the model's alphabet: give one by --set"
    if "ref_logprob" in unread(step, method):
        try:
            model_folder(source.config.model.name)
        except InputError:
            return (
                "it reads ref_logprob, which is not recorded, and the model that the run started from "
                f"({source.config.model.name}) is not here"
            )
    return None


def _has_tokens(source: Source, text: str) -> bool:
    try:
        return bool(source.ids(text))
    # Tokenizers fail in ways of their own.
    except Exception:
        return False
