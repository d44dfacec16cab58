"""A serving engine that generates beside the trainer, as vLLM does under verl: replicas of one or several devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from apportion.cost.demand import schedule
from apportion.cost.hardware import Hardware, Overheads
from apportion.cost.roofline import Call, padded
from apportion.cost.shape import BYTES, ModelShape
from apportion.cost.standin import Workload, lengths_of
from apportion.errors import InputError

# A turn of the scheduler around a captured graph, however many layers the graph has [ours].
_TURN = 4e-3


@dataclass(frozen=True)
class Serving:
    """The engine.

    Attributes:
        slots: most rows that a replica decodes together. tensor: devices of a replica, which split every product.
        share: of each of its devices' memory, taken for weights and cache while it is awake.
        dtype: of weights and cache. sleeps: it gives the memory back before the trainer computes.
    """

    slots: int
    tensor: int
    share: float
    dtype: str
    sleeps: bool = True

    def replica(self, hardware: Hardware) -> Hardware:
        """A replica as one device: its devices work on every product together, and launch captured graphs."""
        n = self.tensor
        return replace(
            hardware, flops={name: n * peak for name, peak in hardware.flops.items()},
            bandwidth=tuple((size, n * rate) for size, rate in hardware.bandwidth),
            reading=hardware.reading and n * hardware.reading, memory=n * hardware.memory,
            devices=hardware.devices // n, overheads=Overheads(call=_TURN),
        )  # fmt: skip

    def cache(self, shape: ModelShape, engine: Hardware) -> int:
        """Tokens that the cache of a replica, as `replica` gives it, holds: its share of memory less the weights.

        Llama-7B in bfloat16 on half of 80 GB: (40e9 − 13,476,831,232) / 524,288 B = 50,588.

        Raises:
            InputError: the weights leave room for none.
        """
        size = BYTES[self.dtype]
        room = self.share * engine.memory - shape.parameters * size
        found = int(room / (shape.kv_numbers * size))
        if found < 1:
            raise InputError(
                "gpu_memory_utilization", self.share,
                f"more than {shape.parameters * size / engine.memory:.2f}: the weights alone take that",
                "raise it, or tensor_model_parallel_size",
            )  # fmt: skip
        return found

    def rollouts(self, work: Workload, cache: int) -> list[Call]:
        """Passes in which a replica generates the batch: a prompt is computed once for its group, and a row's slot is
        taken by the next as it ends.
        """
        lengths = lengths_of(work)
        slots = max(1, min(self.slots, int(cache // (work.prompt + work.response))))
        prefill = padded(work.groups, work.prompt, masked=False, logits=work.rows)
        # The first token comes from the prefill.
        return [prefill, *schedule([(round(work.prompt), length - 1) for length in lengths], slots, paged=True)]

    def summing(self, calls: Sequence[tuple[float, Call]], shape: ModelShape, hardware: Hardware) -> float:
        """Seconds that a replica's devices spend to add up their parts of a layer: two all-reduces of its states."""
        n = self.tensor
        if n == 1:
            return 0.0
        moved = 2 * shape.layers * shape.hidden * BYTES[self.dtype] * 2 * (n - 1) / n
        return sum(often * call.forward_tokens * moved for often, call in calls) / (hardware.link * hardware.network)
