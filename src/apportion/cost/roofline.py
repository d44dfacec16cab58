"""Seconds of a forward or backward pass: the slower of arithmetic and memory, and what every operation costs anyway.

A pass is four kinds of work, one after the other: matrix products, attention, the operations between them, and copies
of the cache. Of each the roofline (Williams, Waterman and Patterson, 2009) is taken, max(FLOPs/peak, bytes/bandwidth).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from apportion.cost.hardware import Hardware
from apportion.cost.shape import BYTES, ModelShape

# A backward pass computes two products for each of the forward (one without gradients of weights), and attention's
# takes 2.5 times as long (FlashAttention-2, arXiv 2307.08691). It reads and writes twice as much between them [ours].
_ATTENTION_BACKWARD, _TRAFFIC_BACKWARD = 2.5, 2.0
# Softmax, log-probability, entropy or a draw pass over a row of logits about so often, in float32 [ours].
_LOGIT_PASSES = 8


@dataclass(frozen=True)
class Call:
    """`times` equal passes of a model. All counts are of one pass and include padding.

    Attributes:
        tokens: whose keys, values and states are computed.
        pairs: of a query and a key, over all rows.
        cached: tokens whose keys and values are read from a cache; copied: those
            read from one place and written to another, counted twice.
        logits: rows that reach the vocabulary.
        backward: products of the backward for each of the forward: 2; 1 where no weight gets a gradient; 0 for none.
        recompute: gradient checkpointing, one more forward.
        loop: the Python around a decoding step: transformers' `generate`, or the probing engine's slots.
    """

    times: float
    tokens: float
    pairs: float
    cached: float = 0.0
    copied: float = 0.0
    logits: float = 0.0
    backward: float = 0.0
    recompute: bool = False
    loop: Literal["", "generate", "slots"] = ""

    @property
    def forward_tokens(self) -> float:
        return self.times * self.tokens

    @property
    def backward_tokens(self) -> float:
        return self.times * self.tokens if self.backward else 0.0


def padded(rows: float, width: float, *, times: float = 1.0, masked: bool = True, **rest: float | bool) -> Call:
    """A pass over rows of one padded width. Without a mask attention skips what lies ahead, half of the pairs."""
    return Call(times, rows * width, rows * width * width * (1.0 if masked else 0.5), **rest)  # type: ignore[arg-type]


def decode(times: float, rows: float, width: float, loop: Literal["generate", "slots"]) -> Call:
    """Steps of one token a row over `width` cached tokens. `generate`'s cache grows by being copied: read, written."""
    seen = rows * width
    return Call(times, rows, seen, cached=seen, copied=2 * seen if loop == "generate" else 0.0, logits=rows, loop=loop)


def seconds(call: Call, shape: ModelShape, hardware: Hardware, dtype: str, stored: str | None = None) -> float:
    """Seconds of a call.

    Args:
        dtype: of the arithmetic. stored: of the weights, where that is another.

    One row at batch 1 on an ideal device is weights/bandwidth, the embedding's left out: Llama-7B in bfloat16 on
    3.35 TB/s takes 13.21 GB / 3.35 TB/s = 3.94 ms.
    """
    if not call.times:
        return 0.0
    whole = hardware.training if call.backward else hardware.decoding if call.loop else hardware.forward
    work, host = (
        whole * work_seconds(call, shape, hardware, dtype, stored or dtype),
        host_seconds(call, shape, hardware),
    )
    return call.times * (max(work, host) if hardware.overlaps else work + host)


def host_seconds(call: Call, shape: ModelShape, hardware: Hardware) -> float:
    """Seconds of one pass that do not depend on its size. A backward starts twice as many operations [ours]."""
    overheads = hardware.overheads
    passes = 1.0 + call.recompute + (2.0 if call.backward else 0.0)
    found = passes * (overheads.call + shape.layers * overheads.layer)
    if call.loop == "generate":
        found += overheads.generate
    elif call.loop == "slots":
        found += overheads.slots + overheads.row * call.tokens
    return found


def work_seconds(call: Call, shape: ModelShape, hardware: Hardware, dtype: str, stored: str) -> float:
    """Seconds of one pass: products, output matrix, attention, what lies between, copies."""
    size, weight, peak = BYTES[dtype], BYTES[stored], hardware.flops[dtype]
    again = 1.0 + call.recompute
    products, attention, traffic = again, again, again
    if call.backward:
        products += call.backward
        attention += _ATTENTION_BACKWARD
        traffic += _TRAFFIC_BACKWARD

    def product(weights: float, rows: float) -> float:
        moved = weights * weight
        read = moved / (hardware.reading or hardware.rate(moved))
        return max(2 * weights * rows / (peak * hardware.matmul), read)

    body = shape.layers * product(shape.layer_parameters, call.tokens)
    head = 0.0
    if call.logits:
        row = call.logits * shape.vocab * 4
        head = product(shape.vocab * shape.hidden, call.logits) + _LOGIT_PASSES * row / hardware.rate(row)
    cache = shape.kv_numbers * size
    share = hardware.decode if call.loop else hardware.attention
    scores = max(
        4 * shape.layers * shape.heads * shape.head_dim * call.pairs / (peak * share),
        call.cached * cache / hardware.rate(call.cached * cache / 2 / shape.layers),
    )
    between = shape.layers * shape.traffic * call.tokens * size / hardware.rate(call.tokens * shape.hidden * size)
    copies = call.copied * cache / hardware.rate(call.copied * cache / 2 / shape.layers)
    # The output matrix lies outside what is checkpointed.
    head *= products - call.recompute
    return products * body + head + attention * scores + traffic * between + copies


def exchange(numbers: float, size: int, hardware: Hardware, sharded: bool, passes: float) -> float:
    """Seconds that devices spend to sum gradients: 2(n−1)/n of their bytes in an all-reduce once a step; where weights
    are sharded, three times (n−1)/n of the weights' bytes in each of `passes` (gathered twice, scattered once).
    """
    n = hardware.devices
    if n == 1:
        return 0.0
    sent = (n - 1) / n * numbers * size * (3 * passes if sharded else 2)
    return sent / (hardware.link * hardware.network)
