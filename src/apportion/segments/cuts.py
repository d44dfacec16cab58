"""Boundaries from token statistics. Every function treats one response.

Shapes: _T tokens of one response.
"""

import torch
from torch import Tensor


def low_probability_cuts(
    old_logprob_T: Tensor, threshold: float = 0.9, interval: int = 5, mask_T: Tensor | None = None
) -> list[int]:
    """Cutpoints of SPO-chain: tokens with old probability < threshold, every interval-th. [paper]

    The first such token is taken. A cut at position t is the state just before token t: prefix [0, t) is
    measured and token t starts the segment. SPO counts states by their last token, so that its state is t − 1
    (p = [.95, .5, .99, .8, .3, .97, .6], interval 2: states [0, 3], here [1, 4]). A result that begins with 0
    means that the prompt itself is measured, and then the first segment has a base.

    Args: old_logprob_T in nats; mask_T, 1 on trainable tokens (all, if None): others are never cuts.
    Raises ValueError on a wrong shape, a threshold outside (0, 1] or an interval below 1.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold: got {threshold}, expected a probability in (0, 1]; SPO uses 0.9")
    if interval < 1:
        raise ValueError(f"interval: got {interval}, expected at least 1; SPO uses 5")
    logprob_T, trainable_T = _response("old_logprob", old_logprob_T, mask_T)
    low_T = (logprob_T.exp() < threshold) & trainable_T
    return low_T.nonzero().flatten()[::interval].tolist()


def entropy_cuts(entropy_T: Tensor, percentile: float = 97.0, mask_T: Tensor | None = None) -> list[int]:
    """Cutpoints of GRPO-VPS: {t : H_t ≥ τ}, τ a percentile of the response's own entropies. [paper; 97 ours]

    τ interpolates linearly between order statistics [ours]. With all entropies equal every token is a cut.
    Position 0 may be among them: it is the prompt.

    Args: entropy_T in nats; mask_T, 1 on trainable tokens (all, if None): τ and the cuts run over those
    alone. Raises ValueError on a wrong shape or a percentile outside [0, 100].
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile: got {percentile}, expected 0 to 100; a quantile is a hundredth of it")
    values_T, trainable_T = _response("entropy", entropy_T, mask_T)
    if not trainable_T.any():
        return []
    tau = torch.quantile(values_T[trainable_T], percentile / 100)
    return ((values_T >= tau) & trainable_T).nonzero().flatten().tolist()


def fixed_length_cuts(length: int, size: int) -> list[int]:
    """Starts of segments of `size` tokens, the first segment left out; the last one may be shorter.

    Raises ValueError when size is below 1.
    """
    if size < 1:
        raise ValueError(f"size: got {size}, expected at least 1 token a segment")
    return list(range(size, length, size))


def _response(name: str, values_T: Tensor, mask_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values in float32 or better and the boolean mask, shapes checked."""
    if values_T.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(values_T.shape)}, expected one dimension; pass one response")
    if mask_T is None:
        mask_T = torch.ones_like(values_T)
    if mask_T.shape != values_T.shape:
        raise ValueError(
            f"mask: got shape {tuple(mask_T.shape)}, expected {tuple(values_T.shape)}; "
            f"give one value for each value of {name}"
        )
    return values_T.to(torch.promote_types(values_T.dtype, torch.float32)), mask_T.bool()
