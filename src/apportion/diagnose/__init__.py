"""Diagnostics of a run: pure functions over recorded batches, and one line a diagnostic for `apportion diagnose`.

What records alone answer: `collapse` (ACR), `polarity`, `noise`, `belief`, `tails`. What needs the model as well:
`informativeness`, `forks`. `stats` has the intervals, `report` puts the lines together.
"""
