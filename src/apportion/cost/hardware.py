"""Machines by name. GPU figures are the vendors' data sheets; nothing of them has been measured here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from apportion.errors import InputError, nearest


@dataclass(frozen=True)
class Overheads:
    """Seconds that a number of operations takes however small they are.

    Attributes:
        call: a forward of a model, its layers not counted. layer: one layer of it.
        generate: one turn of transformers' generation loop, beside the forward.
        slots: one turn of apportion's probing engine; row: each continuation in it.
        token: text offsets and records of one generated token. grade: verifying one response.
        step: one optimiser step, beside its passes.
    """

    call: float = 0.0
    layer: float = 0.0
    generate: float = 0.0
    slots: float = 0.0
    row: float = 0.0
    token: float = 0.0
    grade: float = 0.0
    step: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """One machine of `devices` equal ones.

    Attributes:
        flops: peak of matrix products, a second, by the type they are computed in.
        bandwidth: bytes a second; or pairs of (bytes of a tensor, bytes a second), where caches matter.
        reading: bytes a second of weights that are read for a few rows; None where that is the bandwidth.
        memory: bytes of a device. link: bytes a second between two devices, each way.
        matmul, attention, decode, stream, network: shares of the peaks that are achieved, by matrix products, by
            attention with many queries and with one, by memory, by the link.
        forward, training, decoding: seconds of whole passes over those of their pieces: without a gradient, with one,
            and of one token a row.
        overlaps: the host runs ahead of the device, so that overheads are hidden behind longer work.
        source: where the figures are from.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: tuple[tuple[float, float], ...]
    memory: float
    devices: int = 1
    reading: float | None = None
    link: float = math.inf
    matmul: float = 1.0
    attention: float = 1.0
    decode: float = 1.0
    stream: float = 1.0
    network: float = 1.0
    forward: float = 1.0
    training: float = 1.0
    decoding: float = 1.0
    overheads: Overheads = field(default_factory=Overheads)
    overlaps: bool = False
    source: str = ""

    def rate(self, size: float) -> float:
        """Bytes a second of operations on tensors of `size` bytes: between two measured sizes, on a log scale."""
        (low, rate), *rest = self.bandwidth
        for high, other in rest:
            if size < high:
                share = (math.log(max(size, low)) - math.log(low)) / (math.log(high) - math.log(low))
                return self.stream * math.exp((1 - share) * math.log(rate) + share * math.log(other))
            low, rate = high, other
        return self.stream * rate


# Eager transformers launches some 25 kernels a layer from Python [ours]; the host's work on text is that of a CPU.
_EAGER = Overheads(call=1e-3, layer=7e-4, generate=2e-3, slots=2e-3, row=5e-6, token=2e-5, grade=2e-3, step=0.05)


def _gpu(name: str, bf16: float, fp32: float, terabytes: float, gigabytes: float, link: float) -> Hardware:
    """A data sheet's peaks, and the shares of them that are assumed. float32 is not TF32, which torch leaves off.

    Matrix products: for whole steps of Llama 3 on H100 38 to 43 % of the peak are published (arXiv 2407.21783), so 50 %
    for the products alone [ours]. Attention: FlashAttention-2 reaches 35 % on H100 (arXiv 2407.08608). Memory 80 % and
    link 70 % [ours].
    """
    return Hardware(
        name, {"bfloat16": bf16 * 1e12, "float32": fp32 * 1e12}, ((1.0, terabytes * 1e12),), gigabytes * 1e9,
        link=link * 1e9, matmul=0.5, attention=0.35, decode=0.35, stream=0.8, network=0.7, overheads=_EAGER,
        overlaps=True, source="the vendor's data sheet, dense, not verified here",
    )  # fmt: skip


# TFLOPS in bfloat16 and float32, TB/s, GB, GB/s of the link each way (NVLink; PCIe 4.0 x16 for the last two).
NAMED = {
    each.name: each
    for each in (
        _gpu("h100", 989.4, 66.9, 3.35, 80, 450),
        _gpu("h200", 989.4, 66.9, 4.8, 141, 450),
        _gpu("a100-80", 312, 19.5, 2.039, 80, 300),
        _gpu("a100-40", 312, 19.5, 1.555, 40, 300),
        _gpu("rtx4090", 165.2, 82.6, 1.008, 24, 32),
        _gpu("l40s", 362.05, 91.6, 0.864, 48, 32),
    )
}
HERE = "here"


# What CUDA calls them. The PCIe models of H100 and A100 have other figures.
_DEVICES = {
    r"H100 80GB HBM3": "h100", r"H200$": "h200", r"A100-SXM\d-80GB": "a100-80", r"A100-SXM\d-40GB": "a100-40",
    r"RTX 4090$": "rtx4090", r"L40S$": "l40s",
}  # fmt: skip


def named_device(name: str, devices: int = 1) -> Hardware | None:
    """The machine of so many GPUs that CUDA calls `name`; None where it has none of the figures."""
    found = next((short for pattern, short in _DEVICES.items() if re.search(pattern, name)), None)
    return None if found is None else find_hardware(f"{found}x{devices}")


def find_hardware(name: str) -> Hardware:
    """`h100`, or `h100x8` for eight of them. `here` is made by `calibrate`, not found.

    Raises:
        InputError: no machine of that name.
    """
    base, count = name.strip().lower(), "1"
    # rtx4090 ends like a number of machines.
    if base not in NAMED and (split := re.fullmatch(r"(.+?)x([1-9][0-9]{0,4})", base)):
        base, count = split[1], split[2]
    if base not in NAMED:
        known = [*NAMED, "h100x8", "a100-80x8", HERE]
        raise InputError(
            "--hardware", repr(name), f"one of {', '.join(NAMED)}, with xN for N of them (h100x8), or {HERE}"
            f"{nearest(name.strip().lower(), known) or nearest(base, known)}",
        )  # fmt: skip
    devices = int(count)
    return replace(NAMED[base], name=base if devices == 1 else f"{base}x{devices}", devices=devices)
