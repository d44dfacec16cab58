"""Between characters and tokens.

Shapes: _N tokens of one response, _S boundaries.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

REPLACEMENT = "\ufffd"  # what decoders print for bytes that form no character (yet)
CHARACTER = 4  # a UTF-8 character has at most this many bytes, so at most this many tokens
CONTEXT = 4  # whole characters or tokens decoded along: the first token of a window may lose its space
WINDOW = 16  # tokens after which the window is moved on


def token_offsets(
    decode: Callable[[list[int]], str], ids: Sequence[int], context: Sequence[int] = ()
) -> tuple[list[int], str]:
    """Character start of each token, found from the ids; text is never tokenised again.

    `decode` turns ids into text and keeps special tokens and spaces as they are, e.g.
    `lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)`.
    `context` holds the prompt's ids (its end is enough). It matters to tokenizers of the SentencePiece kind,
    whose decoder strips the first space: with it, `decode(context + ids) == decode(context) + text`; without
    it, `decode(ids) == text`.

    Returns (starts, text): one start a token, never decreasing, and the text that they point into. Tokens
    that hold parts of one character all start where the character does. Bytes that never form a character are
    printed as U+FFFD; in a run of those a token may start at the run's beginning. A decoder that takes back
    good characters because of bad bytes far behind them (byte fallback) differs from `text` in that run only.

    Where the tokens' own texts join to the whole one, as in byte-level tokenizers but for split characters, their
    lengths are the answer. Else each token costs one decode of a short window: time is linear in their number. [ours]
    """
    lead = list(context[-WINDOW:])
    while lead and decode(lead).startswith(REPLACEMENT):  # the slice may have cut a character in two
        del lead[0]
    stream = lead + list(ids)

    base, before = 0, decode(lead) if lead else ""  # before = text of stream[base:i]
    piece = {i: decode([i]) for i in {*ids}}
    pieces = [piece[i] for i in ids]
    joined = "".join(pieces)
    # Decoders strip, and never add, what a token would show beside others: one that lost something shows in the whole.
    if REPLACEMENT not in joined and (not ids or decode(stream) == before + joined):
        return list(accumulate(map(len, pieces), initial=0))[: len(pieces)], joined
    text, taken = "", len(before)  # the window's first `taken` characters are context, or in `text` already
    starts: list[int] = []
    clean: deque[int] = deque([0], maxlen=CONTEXT + 1)  # last cuts that split no character
    for i in range(len(lead), len(stream)):
        complete = not before.endswith(REPLACEMENT)
        if complete:
            clean.append(i)
        if complete and i - base > WINDOW:
            text += before[taken:]
            base = clean[0]
            before = decode(stream[base:i])
            taken = len(before)
        elif i - base > 2 * WINDOW:
            # Nothing but broken bytes: let go of those that no coming byte can mend.
            cut = _separable(decode, stream, base, i, before)
            head = decode(stream[base:cut])
            text += head[taken:]
            base, before, taken = cut, decode(stream[cut:i]), max(taken - len(head), 0)
        now = decode(stream[base : i + 1])
        start = len(text) + _start(before, now) - taken
        starts.append(max(start, starts[-1] if starts else 0))
        before = now
    return starts, text + before[taken:]


def _start(before: str, now: str) -> int:
    """Where the newest token starts in the window's text, given that text without it and with it."""
    if not before.endswith(REPLACEMENT):
        return len(before)
    if now.startswith(before) and now[len(before) :][:1] not in ("", REPLACEMENT):
        return len(before)  # the broken bytes stayed broken, and the token is good text behind them
    return len(before.rstrip(REPLACEMENT))


def _separable(decode: Callable[[list[int]], str], stream: list[int], base: int, i: int, before: str) -> int:
    """A cut of stream[base:i] that splits no character and leaves the last, unfinished one behind it."""
    late = range(i - CHARACTER, i - 2 * CHARACTER, -1)
    return next((k for k in late if decode(stream[base:k]) + decode(stream[k:i]) == before), i - CHARACTER)


def char_to_token(token_starts: Sequence[int] | Tensor, char_offsets: Sequence[int] | Tensor) -> Tensor:
    """First token whose start is at or after each character offset.

    Args: token_starts (N,), never decreasing; char_offsets (S,). Returns int64 (S,); N where no token starts
    that late. A delimiter that ends inside a token is thereby left to the segment before, and the next token
    starts the new one; of several tokens that share a character, the first is taken. [paper: ProbePO Stage 2]

    Raises ValueError when token_starts decrease.
    """
    starts_N = _ascending("token_starts", token_starts)
    return torch.searchsorted(starts_N, torch.as_tensor(char_offsets, dtype=torch.long))


def _ascending(name: str, values: Sequence[int] | Tensor) -> Tensor:
    tensor = torch.as_tensor(values, dtype=torch.long)
    if tensor.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected one dimension; pass one response")
    falls = (tensor[1:] < tensor[:-1]).nonzero()
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"{name}: {int(tensor[at])} is followed by {int(tensor[at + 1])} at position {at + 1}, "
            "expected values that never decrease; pass one response at a time, in order"
        )
    return tensor
