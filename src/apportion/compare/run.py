"""A comparison: every method's credit on the same recorded responses, kept as soon as it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import apportion
from apportion.compare import needs, store
from apportion.compare.measure import Lacking, gather
from apportion.compare.opened import Opened
from apportion.compare.recorded import Held, Step, read
from apportion.compare.source import Source, Weights, open_source, weights_of
from apportion.credit.method import CreditMethod
from apportion.credit.registry import make_method, method_names_of
from apportion.diagnose.reading import run_config
from apportion.engines.base import Cost
from apportion.errors import InputError
from apportion.records import RunFolder, credit_rows
from apportion.rollouts import Rollouts
from apportion.train.settings import RunConfig

Progress = Callable[[str, str, int], None]
"""Called with a method, with what is being done ("" where it is the same), and with how much of it was done since."""


def compare(
    run: Path,
    methods: Sequence[str],
    step: int | None = None,
    model: str | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Progress = lambda method, doing, done: None,
) -> int:
    """Assigns the methods on a recorded step and keeps what came of it under RUN/compare (see `store`).

    The run's own method keeps its settings and its recorded credit. What another one asks is taken from the record
    where the record answers exactly that, and measured with a model else. A result that is there for the same
    settings, model and record is kept as it is, so a comparison that was stopped goes on.

    Args:
        methods: registered names, or pipelines with `+`; two or more. step: the last recorded one where left out.
        model: see `source.weights_of`. settings: for a method, what differs from its defaults, or from the run's
            settings for the run's own method.

    Returns:
        the step.

    Raises:
        InputError: fewer than two methods, an unknown one or an unknown setting, no such step, or methods that
            cannot be had on this record: all of them are named before any long work.
    """
    return Comparison.of(run, methods, step, model, settings or {}, progress).carry_out()


@dataclass
class Comparison:
    """What `compare` does, in parts: everything is checked when it is made, and `carry_out` does the work."""

    run: Path
    step: Step
    methods: Mapping[str, CreditMethod]
    config: RunConfig | str
    model: str | None
    progress: Progress
    refused: dict[str, str] = field(default_factory=dict)
    asking: set[str] = field(default_factory=set)
    _passes: dict[tuple[str, ...], tuple[dict[str, Any], Cost, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, run: Path, methods: Sequence[str], step: int | None, model: str | None,
        settings: Mapping[str, Mapping[str, Any]], progress: Progress,
    ) -> Comparison:  # fmt: skip
        """Checked, see `compare`."""
        names = list(dict.fromkeys("+".join(method_names_of(name)) for name in methods))
        if len(names) < 2:
            raise InputError("--methods", ", ".join(names) or "none", "two or more, such as probepo,vineppo")
        folder = RunFolder(run)
        recorded = folder.recorded_steps()
        if step is not None and step not in recorded:
            raise InputError(
                "--step", step, f"a recorded step: {recorded[0]} to {recorded[-1]}, {len(recorded)} in all"
            )
        found = read(folder, recorded[-1] if step is None else step)
        made = {name: _method(name, found, settings.get(name, {})) for name in names}
        comparison = cls(run, found, made, run_config(run), model, progress)
        comparison._check()
        return comparison

    def carry_out(self) -> int:
        """Does the methods one after the other."""
        for name, method in self.methods.items():
            if name == self._own:
                self._keep_recorded(name, method)
            else:
                self._keep_assigned(name, method)
        store.show(self.run, self.step.number, list(self.methods))
        return self.step.number

    @property
    def _own(self) -> str | None:
        """The run's method, where it is asked for with the settings that it had."""
        own = self.step.own
        return own.name if own is not None and self.methods.get(own.name) == own else None

    @cached_property
    def _held(self) -> Held:
        return Held(self.step)

    @cached_property
    def _record(self) -> str:
        return store.record_digest(self.run, self.step.number)

    @cached_property
    def _weights(self) -> Weights:
        return weights_of(self.run, self.model)

    @cached_property
    def _source(self) -> Source:
        if isinstance(self.config, str):
            raise InputError("RUN", self.config, "the configuration that the run was trained with")
        return open_source(self.config, self._weights, self.step)

    @cached_property
    def _model(self) -> dict[str, Any]:
        """What stands for the model in digests: its weights, and how it is asked."""
        asked = self._source.config
        sections = {name: getattr(asked, name).model_dump() for name in ("data", "reward", "model")}
        weights = store.weights_digest(self._weights.folder)
        return {"weights": weights, "trainer": asked.trainer, "seed": asked.run.seed, **sections}

    @cached_property
    def _opened(self) -> Opened:
        return Opened(self._source, self._weights, self.step)

    @cached_property
    def _gap(self) -> dict[str, Any] | None:
        gap = self._opened.gap(self.step.rollouts)
        return None if gap is None else {"mean": gap.mean, "largest": gap.largest, "tokens": gap.tokens}

    def _check(self) -> None:
        """Finds what every method still asks of a model, and refuses all that cannot be had, in one error."""
        for name, method in self.methods.items():
            if name == self._own:
                continue
            if why := needs.unrecorded(self.step, method) or needs.unlike(self.config, method):
                self.refused[name] = why
            elif needs.unread(self.step, method):
                self.asking.add(name)
            else:
                try:
                    gather(self.step, self.step.rollouts, method, self._held)
                except Lacking:
                    self.asking.add(name)
                except InputError as error:
                    self.refused[name] = str(error)
        for name in self.asking:
            try:
                why = needs.unanswerable(self.step, self.methods[name], self._source)
            except InputError as error:
                why = str(error)
            if why:
                self.refused[name] = why
        if self.refused:
            ordered = [f"{name} ({self.refused[name]})" for name in self.methods if name in self.refused]
            raise InputError(
                "--methods", "; ".join(ordered), "methods that this record and its run can serve",
                "leave out the ones named, or give what they lack",
            )  # fmt: skip

    def _keep_recorded(self, name: str, method: CreditMethod) -> None:
        """The run's own credit as it was recorded, and whether the rules of today make the same of the record."""
        told: dict[str, Any] = {
            "record": self._record, "provenance": "recorded", "settings": method.model_dump(mode="json"), "model": None,
            "gap": None, "statistics": [], "states": {"reused": 0, "measured": 0}, "cost": None,
        }  # fmt: skip
        told["digest"] = store.digest(told)
        if not self._is_kept(name, told["digest"]):
            told["reproduced"] = self._reproduced(method)
            store.keep(self.run, name, self.step.number, self.step.credit, self.step.recorded.evidence, told)

    def _reproduced(self, method: CreditMethod) -> bool | None:
        """None where the record does not hold all that the method measured."""
        try:
            found = gather(self.step, self.step.rollouts, method, self._held)
            credit = method.assign(self.step.rollouts, found.evidence, self.step.base)
        except (Lacking, InputError):
            return None
        return bool((credit.token == self.step.recorded.advantage.float()).all())

    def _keep_assigned(self, name: str, method: CreditMethod) -> None:
        asks = name in self.asking
        by_model = asks and needs.asks_model(self.step, method)
        told: dict[str, Any] = {
            "record": self._record, "provenance": "measured" if asks else "assigned",
            "settings": method.model_dump(mode="json"),
        }  # fmt: skip
        digest = store.digest({**told, "asked": self._model if asks else None, "apportion": apportion.__version__})
        if self._is_kept(name, digest):
            return
        self.progress(name, "measuring" if asks else "assigning", 0)
        opened = self._opened if asks else None
        gap = self._gap if by_model else None
        rollouts, filled, spent, seconds = self._filled(name, method)
        began, before = time.perf_counter(), opened.cost if opened else Cost()
        if opened:
            opened.tick = lambda done: self.progress(name, "", done)
        found = gather(self.step, rollouts, method, self._held, opened)
        credit = method.assign(rollouts, found.evidence, self.step.base)
        seconds += time.perf_counter() - began
        cost = spent + (opened.cost if opened else Cost()) - before
        told |= {
            "digest": digest, "model": self._weights.name if by_model else None, "gap": gap, "statistics": filled,
            "states": {"reused": found.reused, "measured": found.measured},
            "cost": {
                "generated": cost.generated, "forward": cost.forward_tokens, "backward": cost.backward_tokens,
                "seconds": seconds,
            },
            "reproduced": None,
        }  # fmt: skip
        base = self.step.base
        rows = credit_rows(rollouts, credit, base.mean.tolist(), base.scale.tolist())
        store.keep(self.run, name, self.step.number, rows, found.rows, told)

    def _filled(self, name: str, method: CreditMethod) -> tuple[Rollouts, list[str], Cost, float]:
        """The responses with what the method reads of them and the record lacks, the names of that, tokens, seconds."""
        rollouts, lacking = self.step.rollouts, needs.unread(self.step, method)
        cost, seconds = Cost(), 0.0
        for fields in (needs.STATISTICS, ("ref_logprob",)):
            if wanted := [each for each in lacking if each in fields]:
                self.progress(name, f"reading {' and '.join(wanted)}", 0)
                values, spent, took = self._read(fields)
                rollouts = replace(rollouts, **{each: values[each] for each in wanted})
                cost, seconds = cost + spent, seconds + took
        return rollouts, lacking, cost, seconds

    def _read(self, fields: tuple[str, ...]) -> tuple[dict[str, Any], Cost, float]:
        """A pass over the responses, made once; every method that needs it is charged for it."""
        if fields not in self._passes:
            began, before, rollouts = time.perf_counter(), self._opened.cost, self.step.rollouts
            whole = fields == needs.STATISTICS
            values = self._opened.statistics(rollouts) if whole else (self._opened.reference(rollouts),)
            spent = self._opened.cost - before
            self._passes[fields] = dict(zip(fields, values, strict=True)), spent, time.perf_counter() - began
        return self._passes[fields]

    def _is_kept(self, name: str, digest: str) -> bool:
        kept = store.about(self.run, name, self.step.number)
        return kept is not None and kept.get("digest") == digest


def _method(name: str, step: Step, given: Mapping[str, Any]) -> CreditMethod:
    """The method with its defaults, or with the run's settings where it is the run's, and what differs from them."""
    method = make_method(name, given)
    if step.own is None or step.own.name != name:
        return method
    if "+" not in name:
        return make_method(name, {**step.own.settings, **given})
    # Settings of a pipeline come as `stage.setting`, or as a table of a stage.
    tables = {stage: dict(table) for stage, table in step.own.settings.items()}
    for key, value in given.items():
        stage, dot, own = key.partition(".")
        tables[stage] |= {own: value} if dot else value
    return make_method(name, tables)
