"""Where reasoning may be cut: pure functions from text, token ids or token statistics to boundaries.

A boundary is a token position, the first token of its segment. Rules that read text work on character offsets
first (`step_starts`, `vineppo_steps`); `token_offsets` and `char_to_token` lead from there to tokens.
"""

from apportion.segments.cuts import entropy_cuts, fixed_length_cuts, low_probability_cuts
from apportion.segments.offsets import char_to_token, token_offsets
from apportion.segments.steps import DEFAULT_MARKERS, keep_tail, merge_close, step_starts
from apportion.segments.vineppo import vineppo_steps

__all__ = [
    "DEFAULT_MARKERS",
    "char_to_token",
    "entropy_cuts",
    "fixed_length_cuts",
    "keep_tail",
    "low_probability_cuts",
    "merge_close",
    "step_starts",
    "token_offsets",
    "vineppo_steps",
]
