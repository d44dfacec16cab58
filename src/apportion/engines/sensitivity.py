"""How much each reasoning token bears on the response's own answer (OAR): by perturbation, and by gradient.

Shapes: _B rows, _W columns, _P positions that predict the answer, _R reasoning tokens, _H size of an embedding,
_V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from apportion.engines.base import Reading, SensitivityRequest
from apportion.engines.divergence import kl
from apportion.engines.scoring import Scorer
from apportion.errors import InputError
from apportion.measure.plan import Representation

# A batch of suffixes starts where its first one does: an eighth of that length in rows computes a sixteenth too much.
_ROWS_SHARE, _FEW_ROWS = 8, 16


def sensitivities(scorer: Scorer, requests: Sequence[SensitivityRequest]) -> Iterator[Reading]:
    """I_t of the reasoning tokens of every request. OAR [paper]; distributions at the scorer's temperature [ours].

    The answer is read at one of three representations [paper]: `last`, the distribution at the last position
    before its first token; `answer_mean`, the softmax of the mean of the logits over the positions that predict
    its tokens; `answer_joint`, φ, the mean log-likelihood of its tokens.

    "perturb", OAR-P [paper]: I_t = KL(p ‖ p with token t replaced by the pad id, still attended); for φ,
    max(0, φ − φ with it replaced). R + 1 forwards, each only over what its replacement changes.

    "gradient", OAR-G [paper]: noise N(0, `noise`²) is added to the reasoning tokens' embeddings, J = KL(p ‖ p
    noisy), for φ its fall, and I_t = |Σ_h ∂J/∂e_{t,h} · e_{t,h}|, at the noisy embeddings with e the token's
    own [ours: which e is open]. Two forwards and one backward a batch. The noise is drawn on the CPU from `seed`
    and the key. `max_tokens` bounds the activations that a backward pass needs. p and p noisy differ little, so the
    model should be in float32: on the embedded policy bfloat16 was up to 65 % off float64, float32 .01 %.

    KL and φ are formed in float64; a logit of −inf on both sides adds 0. A row whose answer alone has more than
    `scorer.max_logits` logits goes alone.

    Yields:
        Readings of `reasoning` values, [R] float64, at least 0, in any order; "perturb" in nats.

    Raises:
        InputError: an answer that overlaps the reasoning or leaves the response, no prompt, or a gradient without
            noise.
    """
    for request in requests:
        _check(request)
    for request in requests:
        if not request.reasoning:
            yield Reading(request.key, torch.zeros(0, dtype=torch.float64))
        elif request.estimator == "perturb":
            with scorer.measuring():
                values_R = _perturbed(scorer, request)
            yield Reading(request.key, values_R)
    for representation in get_args(Representation):
        asked = [
            request
            for request in requests
            if (request.estimator, request.representation) == ("gradient", representation) and request.reasoning
        ]
        for batch in _gradient_batches(scorer, asked):
            with scorer.measuring(gradients=True), _frozen(scorer.model):
                readings = _gradients(scorer, batch)
            yield from readings


def _check(request: SensitivityRequest) -> None:
    (start, end), length = request.answer, len(request.ids) - request.prompt
    if request.prompt < 1 or not 0 <= request.reasoning <= start < end <= length:
        raise InputError(
            f"request {request.key}",
            f"a prompt of {request.prompt}, {request.reasoning} reasoning tokens and the answer {start}:{end}",
            f"a prompt, then reasoning, then at least one answer token within the response's {length}",
        )
    if request.estimator == "gradient" and not request.noise > 0:
        raise InputError("noise", request.noise, "above 0: without noise J and its gradient are 0", "1e-3, as in OAR")


def _columns(request: SensitivityRequest) -> range:
    """The columns whose logits represent the answer: each predicts the token behind it."""
    first = request.prompt + request.answer[0] - 1
    return range(first, first + 1 if request.representation == "last" else request.prompt + request.answer[1] - 1)


def _row(request: SensitivityRequest) -> tuple[int, ...]:
    """The ids that these columns depend on."""
    return request.ids[: _columns(request).stop]


def _answer(scorer: Scorer, request: SensitivityRequest, logits_BPV: Tensor) -> Tensor:
    """(B, V) log-probabilities that represent the answer, or [B] φ; float64."""
    if request.representation == "answer_joint":
        answer_P = torch.tensor([request.ids[column + 1] for column in _columns(request)], device=logits_BPV.device)
        logp_BPV = (logits_BPV.double() / scorer.temperature).log_softmax(-1)
        return logp_BPV.gather(2, answer_P[None, :, None].expand(len(logp_BPV), -1, 1)).mean((1, 2))
    return (logits_BPV.mean(1, dtype=torch.float64) / scorer.temperature).log_softmax(-1)


def _perturbed(scorer: Scorer, request: SensitivityRequest) -> Tensor:
    """[R] OAR-P. Replacing a token leaves the keys and values before it as they are: only what follows is run."""
    row, columns = _row(request), torch.tensor(_columns(request), device=scorer.device)
    shared, cache = scorer.sliceable(len(row)), DynamicCache()
    rest = {"use_cache": True, scorer.cache_name: cache} if shared else {}
    clean = _answer(scorer, request, scorer.forward([row], columns, **rest).logits)
    # The keys of the opening are held for every row, so a row counts whole.
    at_once = min(scorer.max_tokens // len(row), scorer.rows_of_logits // len(columns))
    values, at, end = [], request.prompt, request.prompt + request.reasoning
    while at < end:
        start, count = 0, at_once
        if shared:
            start, count = at, min(at_once, max((len(row) - at) // _ROWS_SHARE, _FEW_ROWS))
            rest[scorer.cache_name] = Cache(layers=[_Opening(layer, start) for layer in cache.layers])
        replaced = range(at, min(at + max(count, 1), end))
        rows = [[*row[start:column], scorer.pad_id, *row[column + 1 :]] for column in replaced]
        other = _answer(scorer, request, scorer.forward(rows, columns - start, **rest).logits)
        if request.representation == "answer_joint":
            # An answer that the model rules out cannot fall further; −inf − −inf is no number.
            values.append(torch.where(clean > -torch.inf, clean - other, 0.0))
        else:
            values.append(kl(clean, other))
        at = replaced.stop
    return torch.cat(values).clamp(min=0.0).cpu()


class _Opening(DynamicLayer):
    """The first columns of one row's keys and values, lent to every row of a batch; nothing is added to them."""

    def __init__(self, whole: DynamicLayer, columns: int) -> None:
        super().__init__()
        self.keys, self.values = whole.keys[:, :, :columns], whole.values[:, :, :columns]
        self.device, self.dtype, self.is_initialized = self.keys.device, self.keys.dtype, True

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        opening_keys, opening_values = (t.expand(len(keys), -1, -1, -1) for t in (self.keys, self.values))
        return torch.cat([opening_keys, keys], -2), torch.cat([opening_values, values], -2)


def _gradient_batches(scorer: Scorer, requests: Sequence[SensitivityRequest]) -> Iterator[list[SensitivityRequest]]:
    """Batches within both limits. The columns kept of a batch are those of any of its rows."""
    for indices in scorer.batches([len(_row(request)) for request in requests]):
        batch: list[SensitivityRequest] = []
        columns: set[int] = set()
        for request in (requests[i] for i in indices):
            columns |= set(_columns(request))
            if batch and (len(batch) + 1) * len(columns) > scorer.rows_of_logits:
                yield batch
                batch, columns = [], set(_columns(request))
            batch.append(request)
        yield batch


def _gradients(scorer: Scorer, requests: Sequence[SensitivityRequest]) -> list[Reading]:
    """OAR-G of requests with one representation. Rows are independent: the gradient of ΣJ is each row's own."""
    rows = [_row(request) for request in requests]
    kept = sorted({column for request in requests for column in _columns(request)})
    keep = torch.tensor(kept, device=scorer.device)
    width = max(map(len, rows))
    ids_BW = torch.tensor([[*row, *[scorer.pad_id] * (width - len(row))] for row in rows], device=scorer.device)
    embeds_BWH = scorer.model.get_input_embeddings()(ids_BW).detach()
    noisy_BWH = embeds_BWH.clone()
    spans = [slice(request.prompt, request.prompt + request.reasoning) for request in requests]
    for b, (request, span) in enumerate(zip(requests, spans, strict=True)):
        stream = torch.Generator().manual_seed(request.key.stream(request.seed))
        noise_RH = torch.randn((request.reasoning, embeds_BWH.shape[2]), generator=stream) * request.noise
        noisy_BWH[b, span] += noise_RH.to(noisy_BWH.device)
    joint = requests[0].representation == "answer_joint"
    clean_BKV = None
    if not joint:  # φ of the clean row is a constant: it has no gradient.
        with torch.no_grad():
            clean_BKV = scorer.forward(rows, keep).logits
    noisy_BWH.requires_grad_()
    scorer.count(ids_BW.numel(), backward=ids_BW.numel())
    noisy_BKV = scorer.model(inputs_embeds=noisy_BWH, use_cache=False, logits_to_keep=keep).logits
    moved = torch.zeros((), dtype=torch.float64, device=noisy_BKV.device)
    for b, request in enumerate(requests):
        at = [kept.index(column) for column in _columns(request)]
        noisy = _answer(scorer, request, noisy_BKV[b : b + 1, at])
        if clean_BKV is None:
            moved = moved - noisy.sum()
        else:
            moved = moved + kl(_answer(scorer, request, clean_BKV[b : b + 1, at]), noisy).sum()
    (grad_BWH,) = torch.autograd.grad(moved, noisy_BWH)
    values_BW = (grad_BWH.double() * embeds_BWH).sum(-1).abs().cpu()
    values = (values_BW[b, span] for b, span in enumerate(spans))
    return [Reading(request.key, each) for request, each in zip(requests, values, strict=True)]


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient, so none is computed and no activation is kept for one; put back after."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
