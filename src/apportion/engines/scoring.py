"""Forward passes that measure: counted, in evaluation mode, without a trace in the model.

The kinds of measurement are functions over a `Scorer`, a file each: `belief`, `confidence`, `divergence`,
`logprobs`, `sensitivity`. Each answers its requests keyed, in any order, a bounded number of tokens at a time.
Shapes: _B rows, _W columns, _K kept positions, _N tokens, _V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from apportion.engines.base import Cost
from apportion.errors import InputError


class PackedMask(Tensor):
    """(B, 1, W, W), added to attention's scores in rows of a trunk, which is causal, and of branches behind it.

    torch's attention gets the two apart: without a mask the trunk takes the causal kernel, which skips the half that
    nobody looks at, and only the branches' rows are ever numbers. Whatever else a model does with the mask, as eager
    attention does, it does with all of them.
    """

    branches_B1QW: Tensor

    @classmethod
    def of(cls, branches_B1QW: Tensor) -> PackedMask:
        """Of the rows of the mask that are the branches': the last Q."""
        batch, _, _, width = branches_B1QW.shape
        mask = branches_B1QW.new_zeros(1).expand(batch, 1, width, width).as_subclass(cls)
        mask.branches_B1QW = branches_B1QW
        return mask

    def whole(self) -> Tensor:
        """The same, all numbers."""
        _, _, own, width = self.branches_B1QW.shape
        lowest = torch.finfo(self.branches_B1QW.dtype).min
        trunk_XW = self.branches_B1QW.new_full((width - own, width), lowest).triu(1)
        return torch.cat([trunk_XW.expand(len(self.branches_B1QW), 1, -1, -1), self.branches_B1QW], dim=-2)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        if func.__name__ == "__get__":  # the shape, the type or the device
            return super().__torch_function__(func, types, args, kwargs)
        return func(*map(_whole, args), **{name: _whole(value) for name, value in (kwargs or {}).items()})


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, PackedMask) else value


def _attend(
    query_BHWD: Tensor, key_BHWD: Tensor, value_BHWD: Tensor, attn_mask: PackedMask,
    dropout_p: float = 0.0, is_causal: bool = False, **rest: Any,
) -> Tensor:  # fmt: skip
    mask_B1QW = attn_mask.branches_B1QW
    trunk = slice(mask_B1QW.shape[3] - mask_B1QW.shape[2])
    parts = (
        scaled_dot_product_attention(
            query_BHWD[:, :, trunk], key_BHWD[:, :, trunk], value_BHWD[:, :, trunk], None, dropout_p, True, **rest
        ),
        scaled_dot_product_attention(
            query_BHWD[:, :, trunk.stop :], key_BHWD, value_BHWD, mask_B1QW, dropout_p, is_causal, **rest
        ),
    )
    # Heads lie behind positions in memory, as models want them next.
    return torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)


class Scorer:
    """A causal language model of transformers, plain or PEFT-wrapped, for scoring.

    Args:
        model: hand in the unwrapped model (`accelerator.unwrap_model`): ranks make different numbers of forwards.
        pad_id: any valid token id; what stands behind a row's end is never attended to.
        temperature: of every distribution that is read; logits are upcast to float32 before they are divided.
        max_tokens: padded tokens of one forward; a longer row goes alone.
        max_logits: numbers in one tensor of logits, which bounds the kept positions of a forward.

    Attributes:
        cost: what was spent so far.
        cache_name: what the model calls its cache, as an argument and in its output.

    Raises:
        InputError: a limit below 1, PEFT prompt learning (its virtual tokens are no prefix of ids), or a model
            without `logits_to_keep`.
    """

    def __init__(
        self,
        model: nn.Module,
        pad_id: int,
        *,
        temperature: float = 1.0,
        max_tokens: int = 16_384,
        max_logits: int = 2**26,
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_logits", max_logits)):
            if value < 1:
                raise InputError(name, value, "at least 1")
        if not temperature > 0:
            raise InputError("temperature", temperature, "above 0")
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise InputError("model", "PEFT prompt learning", "a plain model or adapters in its layers (LoRA)")
        self.model: Any = getattr(model, "get_base_model", lambda: model)()
        accepted = inspect.signature(self.model.forward).parameters
        if "logits_to_keep" not in accepted:
            raise InputError("model", type(model).__name__, "a causal language model with `logits_to_keep`")
        self.pad_id, self.temperature = pad_id, temperature
        self.max_tokens, self.max_logits = max_tokens, max_logits
        # transformers renamed the argument, and the output field with it, within version 5.
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._positions = "position_ids" in accepted
        self.cost = Cost()

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def vocabulary(self) -> int:
        """Numbers in one row of logits."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    @property
    def rows_of_logits(self) -> int:
        """Rows that one tensor of logits may have."""
        return max(1, self.max_logits // self.vocabulary)

    @property
    def continues(self) -> bool:
        """Whether several tokens can go on from a cache at once: some linear attention takes them one by one."""
        return self.sliceable(0)

    @property
    def steady(self) -> float:
        """Tokens up to which a position is encoded the same in a sequence of any length, as RoPE need not be."""
        config = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        # Some models have one for each type of layer.
        each = [rope] if "rope_type" in rope else [own for own in rope.values() if isinstance(own, dict)]
        limit = config.max_position_embeddings if each else 0
        return min(
            (own.get("original_max_position_embeddings") or limit for own in each
             if own.get("rope_type") in ("dynamic", "longrope")),
            default=float("inf"),
        )  # fmt: skip

    def sliceable(self, longest: int) -> bool:
        """Whether every layer keeps every key of sequences this long, in the order of their tokens, as it was."""
        return longest <= self.steady and all(
            type(layer) is DynamicLayer
            or (type(layer) is DynamicSlidingWindowLayer and longest <= layer.sliding_window)
            for layer in DynamicCache(config=self.model.config).layers
        )

    def packs(self, longest: int) -> bool:
        """Whether sequences this long may share a forward: the attention takes any mask, and positions are given.

        Flash and flex attention take no such mask, and ALiBi reads positions off it.
        """
        config = self.model.config
        masked = config._attn_implementation in ("sdpa", "eager") and not getattr(config, "alibi", False)
        return masked and self._positions and self.sliceable(longest)

    @contextmanager
    def measuring(self, gradients: bool = False) -> Iterator[None]:
        """Evaluation mode, so neither dropout nor checkpointing; modes are put back after.

        Args:
            gradients: leave autograd on, for a backward pass to the embeddings.
        """
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.set_grad_enabled(gradients):
                yield
        finally:
            for module in training:
                module.training = True

    def forward(self, rows: Sequence[Sequence[int]], keep: Tensor | int = 0, **rest: Any) -> Any:
        """The model's output for rows padded on the right, where causal attention does not look.

        Args:
            keep: `logits_to_keep`: 0 for all positions, a number of last ones, or [K] columns.
        """
        width = max(map(len, rows))
        ids_BW = torch.tensor([[*row, *[self.pad_id] * (width - len(row))] for row in rows], device=self.device)
        self.count(ids_BW.numel())
        return self.model(input_ids=ids_BW, use_cache=rest.pop("use_cache", False), logits_to_keep=keep, **rest)

    def columns(self, rows: Sequence[Sequence[int]], first: int) -> Iterator[tuple[int, Tensor]]:
        """Logits of padded rows from column `first` on, as many columns at a time as `max_logits` allows.

        Where that takes several forwards they go on from a cache, and no token is computed twice. Not all linear
        attention can go on by several tokens (Mamba's cannot): a model that has some reads the opening again.

        Yields:
            The first column of a part, and its (B, K, V) logits.
        """
        width = max(map(len, rows))
        at_once = max(1, self.rows_of_logits // len(rows))
        cuts = [0, *range(first + at_once, width, at_once), width]
        caching, cache = len(cuts) > 2 and self.continues and width <= self.steady, None
        for start, stop in pairwise(cuts):
            kept = max(start, first)
            part = [row[start if caching else 0 : stop] for row in rows]
            out = self.forward(part, stop - kept, use_cache=caching, **{self.cache_name: cache})
            cache = getattr(out, self.cache_name)
            yield kept, out.logits

    def count(self, tokens: int, backward: int = 0) -> None:
        """Adds one forward of `tokens`, and a backward through `backward` tokens where there was one."""
        self.cost.forwards += 1
        self.cost.forward_tokens += tokens
        self.cost.backwards += backward > 0
        self.cost.backward_tokens += backward

    def batches(self, lengths: Sequence[int], rows_each: int = 1) -> Iterator[list[int]]:
        """Indices of requests grouped by falling length, so that `rows_each` padded rows of each fit one forward.

        A length at which positions are not `steady` has a forward of its own.
        """
        batch: list[int] = []
        for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            width = lengths[batch[0]] if batch else lengths[i]
            if batch and ((len(batch) + 1) * rows_each * width > self.max_tokens or width > self.steady):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch
