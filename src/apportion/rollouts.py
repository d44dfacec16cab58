"""The frozen batch: every response of a step, flat and never padded.

Shapes: _N flat tokens, _R responses, _P prompts (groups), (R, W) padded at the edge only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.errors import InputError

# Log-probabilities above 0 and entropies below it are impossible; bf16 engines overshoot by about this much.
_ROUNDING = 1e-2

# Numbers that are worked on at once: with a few temporaries they fit into a core's cache.
_BLOCK = 1 << 16

# Optional per-token fields and the dtype they take when they come as lists.
_TOKEN_FIELDS = {
    "old_logprob": torch.float32,
    "ref_logprob": torch.float32,
    "entropy": torch.float32,
    "boundary": torch.bool,
    "char_start": torch.int64,
}


@dataclass(frozen=True, eq=False)
class Rollouts:
    """R responses of P prompts, N tokens in all, laid end to end (EOS included: it is an action).

    Response i owns tokens `offsets[i]` to `offsets[i+1]`. "Position" always means a token's place inside its
    own response, from 0. Everything is on the CPU and detached. Statistics of tokens where `mask` is False
    carry no meaning, may come as NaN and are stored as 0.

    Attributes:
        token_ids: [N] int64.
        offsets: [R+1] int64, from 0 to N.
        group: [R] int64, the prompt each response answers: 0 … P-1. Members of a group may stand anywhere.
        reward: [R] floating, NaN where the verifier abstained.
        mask: [N] bool, True on trainable tokens.
        truncated: [R] bool, True where the response ended at the length limit and not by EOS.
        old_logprob: [N] log-probability of the sampled token at the sampling temperature, nats.
        ref_logprob: [N] the same under the reference model.
        entropy: [N] entropy, in nats, of the distribution that produced each token.
        prompt_ids: P tensors of prompt tokens.
        boundary: [N] bool, True where the host says that a new step starts.
        bounded: [R] bool, the responses that `boundary` speaks for; all of them where left out.
        text: R decoded responses; None for one whose steps `boundary` marks.
        char_start: [N] int64, the character of `text` at which each token starts; never falls in a response.
        path: R tuples of node ids, for tree rollouts.
        names: P names of the groups, for records and messages.

    Raises:
        InputError: a wrong shape, dtype, length or range, naming the field. Nothing is sliced to fit.
    """

    token_ids: Tensor
    offsets: Tensor
    group: Tensor
    reward: Tensor
    mask: Tensor
    truncated: Tensor
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    entropy: Tensor | None = None
    prompt_ids: tuple[Tensor, ...] | None = None
    boundary: Tensor | None = None
    bounded: Tensor | None = None
    text: tuple[str | None, ...] | None = None
    char_start: Tensor | None = None
    path: tuple[tuple[str, ...], ...] | None = None
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "reward", self.reward.detach())
        for name in ("old_logprob", "ref_logprob", "entropy"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, value.detach().masked_fill(~self.mask, 0.0))

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[Sequence[int]],
        group: Sequence[object],
        reward: Sequence[float | None],
        *,
        mask: Sequence[Sequence[int]] | None = None,
        truncated: Sequence[bool] | None = None,
        **rest: Any,
    ) -> Rollouts:
        """Builds the batch from one list a response. `group` may hold any hashable names, `reward` None.

        Per-token fields in `rest` (`old_logprob`, `ref_logprob`, `entropy`, `boundary`, `char_start`) are R
        lists; None in them stands for "no value" and is refused on trainable tokens. The others are passed on
        as they are.

        Raises:
            InputError: a list whose length is not that of its response's `token_ids`, or a fraction where a
                whole number belongs.
        """
        lengths = [len(row) for row in token_ids]
        names = tuple(dict.fromkeys(group))
        index = {name: i for i, name in enumerate(names)}
        for field, dtype in _TOKEN_FIELDS.items():
            if rest.get(field) is not None:
                rest[field] = _flatten(field, rest[field], lengths, dtype)
        ones = [[1] * n for n in lengths]
        return cls(
            token_ids=_flatten("token_ids", token_ids, lengths, torch.int64),
            offsets=_offsets(torch.tensor(lengths, dtype=torch.int64)),
            group=torch.tensor([index[name] for name in group], dtype=torch.int64),
            reward=torch.tensor([float("nan") if r is None else r for r in reward], dtype=torch.float64),
            mask=_flatten("mask", ones if mask is None else mask, lengths, torch.bool),
            truncated=torch.tensor([False] * len(lengths) if truncated is None else list(truncated), dtype=torch.bool),
            names=tuple(str(name) for name in names),
            **rest,
        )

    @classmethod
    def from_padded(
        cls,
        token_ids: Tensor,
        present: Tensor,
        group: Tensor,
        reward: Tensor,
        *,
        mask: Tensor | None = None,
        truncated: Tensor | None = None,
        **rest: Any,
    ) -> Rollouts:
        """Builds the batch from a trainer's padded (R, W) tensors, whichever side the padding is on.

        Args:
            token_ids: (R, W) int64.
            present: (R, W) bool, True where a token was really sampled. Build it from lengths, never from
                `token_ids != pad`: where pad is EOS that drops the EOS.
            group: (R,) any integer ids.
            reward: (R,) NaN where the verifier abstained.
            mask: (R, W) trainable tokens; `present` where left out.
            rest: `old_logprob`, `ref_logprob`, `entropy`, `boundary`, `char_start` as (R, W), others as they
                are.

        Raises:
            InputError: a tensor that is not (R, W).
        """
        if present.ndim != 2:
            raise InputError("present", f"shape {tuple(present.shape)}", "two dimensions, (R, W)")
        present = present.bool()
        mask = present if mask is None else mask.bool()
        for field in _TOKEN_FIELDS:
            if rest.get(field) is not None:
                rest[field] = _same_shape(field, rest[field], present)[present]
        _same_shape("token_ids", token_ids, present)
        names, dense = torch.unique(group, return_inverse=True)
        return cls(
            token_ids=token_ids[present],
            offsets=_offsets(present.sum(1)),
            group=dense,
            reward=reward,
            mask=_same_shape("mask", mask, present)[present],
            truncated=torch.zeros(len(reward), dtype=torch.bool) if truncated is None else truncated,
            **{"names": tuple(str(name) for name in names.tolist()), **rest},
        )

    def to_padded(self, values: Tensor, width: int | None = None, fill: float = 0) -> Tensor:
        """Lays [N] values out as (R, width), padded on the right with `fill`.

        Raises:
            InputError: `values` is not [N], or `width` is smaller than the longest response.
        """
        longest = int(self.length.max()) if len(self) else 0
        width = longest if width is None else width
        if values.shape != self.token_ids.shape:
            raise InputError("values", tuple(values.shape), f"shape {tuple(self.token_ids.shape)}")
        if width < longest:
            raise InputError("width", width, f"at least the longest response, {longest}")
        return values.new_full((len(self), width), fill).masked_scatter_(self._present(width), values)

    def select(self, rows: Sequence[int] | Tensor) -> Rollouts:
        """The batch of these rows, in this order. Groups that lose all their members are renumbered away.

        Raises:
            InputError: a mask of booleans in place of row numbers.
        """
        index = torch.as_tensor(rows)
        if index.dtype == torch.bool:
            raise InputError("rows", "booleans", "row numbers", "pass `mask.nonzero()[:, 0]`")
        index = index.long()
        length = self.length[index]
        token = repeated(self.offsets[:-1][index], length) + _within(length)
        kept, dense = torch.unique(self.group[index], return_inverse=True)
        change: dict[str, Any] = {"group": dense, "offsets": _offsets(length)}
        for field, value in ((f.name, getattr(self, f.name)) for f in fields(self)):
            if value is None or field in change:
                continue
            if field in ("prompt_ids", "names"):
                change[field] = tuple(value[g] for g in kept.tolist())
            elif field in ("text", "path"):
                change[field] = tuple(value[i] for i in index.tolist())
            else:
                change[field] = value[index if field in ("reward", "truncated", "bounded") else token]
        return replace(self, **change)

    def __len__(self) -> int:
        return len(self.reward)

    @cached_property
    def length(self) -> Tensor:
        """[R] tokens of each response."""
        return self.offsets[1:] - self.offsets[:-1]

    @cached_property
    def row(self) -> Tensor:
        """[N] the response each token belongs to."""
        return self.spread(torch.arange(len(self)))

    @cached_property
    def position(self) -> Tensor:
        """[N] each token's place inside its response."""
        return _within(self.length)

    @cached_property
    def sample(self) -> list[int]:
        """R numbers: a response's own among those of its group, from 0, in the order of the batch."""
        count = [0] * self.groups
        out = []
        for group in self.group.tolist():
            out.append(count[group])
            count[group] += 1
        return out

    @cached_property
    def trainable(self) -> Tensor:
        """[R] number of trainable tokens, float64 (it is only ever divided by)."""
        return self.row_count(self.mask)

    @cached_property
    def scored(self) -> Tensor:
        """[R] bool: has a reward and at least one trainable token, so group statistics count it."""
        return ~torch.isnan(self.reward) & (self.trainable > 0)

    @cached_property
    def counted(self) -> Tensor:
        """[N] bool: trainable tokens of responses with a reward."""
        return self.mask & self.spread(self.scored)

    @property
    def groups(self) -> int:
        """P, the number of prompts."""
        return int(self.group.max()) + 1 if len(self) else 0

    def spread(self, values: Tensor) -> Tensor:
        """[N] each response's one of [R] values on all its tokens."""
        return repeated(values, self.length)

    def row_sum(self, values: Tensor) -> Tensor:
        """[R] sums of [N] numbers over each response, in float64; 0 for an empty one."""
        return self._by_row(np.add, values, 0, np.float64)

    def row_count(self, flags: Tensor) -> Tensor:
        """[R] float64, how many of [N] flags are True in each response."""
        if flags.numpy().all():
            return self.length.double()
        return self._by_row(np.add, flags.view(torch.int8), 0, np.int32).double()

    def row_min(self, values: Tensor) -> Tensor:
        """[R] the smallest of [N] numbers in each response; ∞ for an empty one."""
        return self._by_row(np.minimum, values, torch.inf)

    def row_max(self, values: Tensor) -> Tensor:
        """[R] the largest of [N] numbers in each response; −∞ for an empty one."""
        return self._by_row(np.maximum, values, -torch.inf)

    def before(self, position: Tensor) -> Tensor:
        """[N] bool: tokens that stand before their response's one of [R] positions, which may lie outside it."""
        head = torch.minimum(position.clamp(min=0), self.length)
        pieces = torch.stack([head, self.length - head], 1).flatten()
        return repeated(torch.tensor([True, False]).repeat(len(self)), pieces)

    def running_sum(self, values: Tensor) -> Tensor:
        """[N] the sum of each of [N] numbers and those before it in its response."""
        found = torch.empty_like(values)
        for block in in_blocks(values.numpy(), self.length.numpy(), 0):
            summed = torch.from_numpy(block.values)
            torch.cumsum(summed, 1, out=summed)
            block.into(found.numpy())
        return found

    def _present(self, width: int) -> Tensor:
        return torch.arange(width) < self.length[:, None]

    def _by_row(self, reduce: np.ufunc, values: Tensor, empty: float, dtype: type | None = None) -> Tensor:
        # Tokens of a response lie side by side, which makes this several times faster than scattering them. A piece
        # of `reduceat` reaches to the next start, so the starts of empty responses are left out.
        some = self.length.numpy() > 0
        found = np.full(len(self), empty, dtype=dtype or values.numpy().dtype)
        if some.any():
            found[some] = reduce.reduceat(values.numpy(), self.offsets.numpy()[:-1][some], dtype=dtype)
        return torch.from_numpy(found)

    def row_mean(self, values: Tensor) -> Tensor:
        """[R] float64 means over each response's trainable tokens; 0 where it has none."""
        return self.row_sum(keep(values, self.mask)) / self.trainable.clamp(min=1)

    def unstopped_text(self) -> list[str]:
        """R texts without that of the stop token, which ends the last step and is no part of it."""
        assert self.text is not None and self.char_start is not None
        uncut = (self.truncated | (self.length == 0)).tolist()
        return [
            (text or "")[: None if whole else int(self.char_start[end - 1])]
            for text, end, whole in zip(self.text, self.offsets[1:].tolist(), uncut, strict=True)
        ]

    def name(self, row: int) -> str:
        """How messages and records call the group of a response."""
        group = int(self.group[row])
        return self.names[group] if self.names else str(group)


def _offsets(length: Tensor) -> Tensor:
    return torch.cat([length.new_zeros(1), length.cumsum(0)])


def _within(length: Tensor) -> Tensor:
    """0, 1, … inside each run of the given lengths."""
    start = repeated(length.cumsum(0) - length, length)
    return torch.arange(len(start)).sub_(start)


def repeated(values: Tensor, times: Tensor) -> Tensor:
    """Each of [K] values as often as `times` says, in a seventh of the time of torch.repeat_interleave."""
    return torch.from_numpy(np.repeat(values.numpy(), times.numpy()))


@dataclass(frozen=True)
class Block:
    """Some rows of values, laid out side by side.

    Attributes:
        rows: [r] int64, which rows they are.
        values: (r, W), every row's values and what fills it up behind them. May be written to.
        present: (r, W) bool, False where it is filled up.
    """

    rows: np.ndarray
    values: np.ndarray
    present: np.ndarray
    _span: slice
    _chosen: np.ndarray

    def into(self, found: np.ndarray) -> None:
        """Writes the block's values to their places in [K] flat ones."""
        found[self._span][self._chosen] = self.values[self.present]


def in_blocks(values: np.ndarray, length: np.ndarray, fill: float) -> Iterator[Block]:
    """Lays [K] values out in rows of [R] lengths, some rows at a time: about `_BLOCK` values, which a cache holds.

    Rows of a block are of like length, up to twice as long as another, so that no long response pads all others.
    """
    end = length.cumsum()
    start, size = end - length, np.ceil(np.log2(np.maximum(length, 1)))
    piece = start // _BLOCK
    for number in np.unique(piece[length > 0]):
        own = np.arange(*np.searchsorted(piece, (number, number + 1)))
        own = own[length[own] > 0]
        span = slice(start[own[0]], end[own[-1]])
        for same in np.unique(size[own]):
            like = size[own] == same
            rows, chosen = own[like], np.repeat(like, length[own])
            present = np.arange(length[rows].max()) < length[rows][:, None]
            laid = np.full(present.shape, fill, dtype=values.dtype)
            laid[present] = values[span][chosen]
            yield Block(rows, laid, present, span, chosen)


def keep(values: Tensor, flags: Tensor, other: float = 0.0) -> Tensor:
    """[K] values where [K] flags are True, `other` elsewhere; the same tensor where all are."""
    return values if flags.numpy().all() else torch.where(flags, values, other)


def keep_(values: Tensor, flags: Tensor, other: float = 0.0) -> Tensor:
    """`keep` that writes into `values`: memory that is new costs more than the arithmetic."""
    return values if flags.numpy().all() else values.masked_fill_(~flags, other)


def _same_shape(field: str, value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        raise InputError(field, f"shape {tuple(value.shape)}", f"shape {tuple(like.shape)}, that of `present`")
    return value


def _flatten(field: str, rows: Sequence[Sequence[float | None]], lengths: list[int], dtype: torch.dtype) -> Tensor:
    if len(rows) != len(lengths):
        raise InputError(field, f"{len(rows)} rows", f"{len(lengths)}, one a response")
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        if len(row) != n:
            raise InputError(f"{field} of row {i}", f"{len(row)} values", f"{n}, one a token")
    flat = torch.tensor([torch.nan if value is None else value for row in rows for value in row])
    if not dtype.is_floating_point and flat.is_floating_point() and len(flat):
        raise InputError(field, "fractions or missing values", "whole numbers")
    return flat.to(dtype)


def _check(b: Rollouts) -> None:
    """Raises InputError at the first field that is not what the class promises."""
    n, r = b.token_ids.numel(), max(b.offsets.numel() - 1, 0)
    shapes = {
        "token_ids": (b.token_ids, n, (torch.int64,)),
        "offsets": (b.offsets, r + 1, (torch.int64,)),
        "group": (b.group, r, (torch.int64,)),
        "reward": (b.reward, r, (torch.float32, torch.float64)),
        "mask": (b.mask, n, (torch.bool,)),
        "truncated": (b.truncated, r, (torch.bool,)),
        "old_logprob": (b.old_logprob, n, (torch.float32, torch.float64)),
        "ref_logprob": (b.ref_logprob, n, (torch.float32, torch.float64)),
        "entropy": (b.entropy, n, (torch.float32, torch.float64)),
        "boundary": (b.boundary, n, (torch.bool,)),
        "bounded": (b.bounded, r, (torch.bool,)),
        "char_start": (b.char_start, n, (torch.int64,)),
    }
    for field, (value, size, dtypes) in shapes.items():
        if value is None:
            continue
        if value.shape != (size,):
            raise InputError(field, f"shape {tuple(value.shape)}", f"shape ({size},)")
        if value.dtype not in dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            got = f"dtype {str(value.dtype).removeprefix('torch.')}"
            raise InputError(field, got, wanted, "convert it before, so that no precision is lost unseen")
        if value.device.type != "cpu":
            raise InputError(field, f"a tensor on {value.device}", "one on the CPU", "pass `tensor.cpu()`")
    if b.offsets[0] != 0 or b.offsets[-1] != n or (b.offsets[1:] < b.offsets[:-1]).any():
        raise InputError("offsets", b.offsets.tolist()[:8], f"R+1 numbers from 0 to {n}, never falling")
    if torch.isinf(b.reward).any():
        row = int(torch.isinf(b.reward).nonzero()[0])
        raise InputError(
            f"reward of row {row}",
            float(b.reward[row]),
            "a finite number, or NaN where the verifier abstained",
        )
    if r and not torch.equal(torch.unique(b.group), torch.arange(int(b.group.max()) + 1)):
        raise InputError("group", torch.unique(b.group).tolist()[:8], "every number from 0 to P-1")
    for field, value, low, high in (
        ("old_logprob", b.old_logprob, -torch.inf, _ROUNDING),
        ("ref_logprob", b.ref_logprob, -torch.inf, _ROUNDING),
        ("entropy", b.entropy, -_ROUNDING, torch.inf),
    ):
        if value is None:
            continue
        bad = b.mask & ~(torch.isfinite(value) & (value >= low) & (value <= high))
        if bad.any():
            at = int(bad.nonzero()[0])
            row = int(torch.searchsorted(b.offsets, at, right=True)) - 1
            where = f"{float(value[at])} at row {row}, position {at - int(b.offsets[row])}"
            raise InputError(field, where, f"a finite number from {low} to {high} on every trainable token")
    for field, items, size in (
        ("prompt_ids", b.prompt_ids, b.groups),
        ("names", b.names, b.groups),
        ("text", b.text, r),
        ("path", b.path, r),
    ):
        if items is not None and len(items) != size:
            raise InputError(field, f"{len(items)} entries", f"{size}")
    if b.char_start is not None:
        if b.text is None:
            raise InputError("text", "nothing", "the text that `char_start` counts in")
        falls = (b.char_start.diff() < 0) & (b.row.diff() == 0)
        if falls.any():
            row = int(b.row[falls.nonzero()[0]])
            raise InputError(f"char_start of row {row}", "a value below the one before", "values that never fall")
