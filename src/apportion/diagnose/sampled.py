"""The lines that sample from the model, within a budget of generated tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from apportion.diagnose.forks import ForkSettings, boundaries, capture, measure_forks
from apportion.diagnose.informativeness import informativeness, measure_losses, pairs
from apportion.diagnose.lines import ABOUT, SAMPLED, Line
from apportion.diagnose.model import Bench
from apportion.diagnose.reading import Recorded
from apportion.diagnose.stats import Counts, ratio, spearman
from apportion.errors import InputError


def sampled_lines(
    steps: Sequence[Recorded], bench: Bench, settings: ForkSettings, budget: int, progress: Callable[[str], None]
) -> list[Line]:
    """Token informativeness on at most half of the budget, forks on what is left.

    Args:
        progress: called with what is being done.
    """
    progress("perturbing tokens")
    first = _informativeness(steps, bench, settings.samples, budget // 2)
    progress("forking at boundaries")
    return [first, *_forks(steps, bench, settings, budget - bench.cost.generated)]


def _informativeness(steps: Sequence[Recorded], bench: Bench, samples: int, budget: int) -> Line:
    name = SAMPLED[0]
    try:
        units = pairs(steps, bench)
    except InputError as error:
        return Line.without(name, f"needs {error.field}: got {error.got}")
    if not units:
        return Line.without(name, "no right response has two tokens to perturb")
    both, high, low = informativeness(measure_losses(units, bench, samples, budget))
    beside = {f"at {which} entropies": ratio(each, "").value for which, each in (("high", high), ("low", low))}
    return Line(name, ratio(both, ABOUT[name].nothing), beside)


def _forks(steps: Sequence[Recorded], bench: Bench, settings: ForkSettings, budget: int) -> list[Line]:
    names = SAMPLED[1:]
    try:
        units = boundaries(steps, settings, bench.seed)
    except InputError as error:
        return [Line.without(name, f"needs {error.field}: got {error.got}") for name in names]
    states, lost = measure_forks(units, bench, settings, budget)
    if not states:
        return [Line.without(name, ABOUT[names[0]].nothing) for name in names]
    variance, prompt = [state.variance for state in states], [state.prompt for state in states]
    beside = {"states at 0": float(sum(v == 0 for v in variance)), "states left out": float(lost)}
    correlation = spearman([state.score for state in states], variance, prompt, names=("H_max", "the variance"))
    return [
        Line(names[0], ratio(Counts.of(variance, 1.0, prompt), ABOUT[names[0]].nothing), beside),
        Line(names[1], correlation),
        Line(names[2], ratio(capture(states), ABOUT[names[2]].nothing)),
    ]
