"""The interchange file: JSONL in, `Rollouts` and `Evidence` out; `Credit` and `Job`s in, JSONL out.

One JSON object a line, one line a response. Everything here is pure: lines come in and lines go out, and no
file is opened. Fields that are not ours are carried along untouched.
"""

from apportion.interchange.batch import Batch, assign, lines_for_rows, plan, read, singletons
from apportion.interchange.lines import credit_lines, request_lines, to_line
from apportion.interchange.recorded import recorded_rows
from apportion.interchange.rows import Row, objects, text_field

__all__ = [
    "Batch",
    "Row",
    "assign",
    "credit_lines",
    "lines_for_rows",
    "objects",
    "plan",
    "read",
    "recorded_rows",
    "request_lines",
    "singletons",
    "text_field",
    "to_line",
]
