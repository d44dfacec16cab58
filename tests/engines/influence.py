"""The slow way to OAR's sensitivities: whole sequences one by one, the rules in plain loops; and what to ask."""

from __future__ import annotations

import copy
import math
from functools import partial
from types import SimpleNamespace

import torch
from policies import ids
from torch import Tensor, nn
from transformers import MistralConfig

from apportion.engines.base import Key, Reading, SensitivityRequest
from apportion.engines.scoring import Scorer
from apportion.engines.sensitivity import sensitivities

LAST, MEAN, JOINT = REPRESENTATIONS = ("last", "answer_mean", "answer_joint")


def ask(
    sequence: tuple[int, ...], prompt: int, reasoning: int, answer: tuple[int, int], estimator: str,
    representation: str, noise: float = 1e-3, seed: int = 0, name: str = "p",
) -> SensitivityRequest:  # fmt: skip
    key = Key("run", 3, name, 0, 0)
    return SensitivityRequest(key, sequence, prompt, reasoning, answer, estimator, representation, noise, seed)


def key_less(r: SensitivityRequest) -> tuple:
    return r.ids, r.prompt, r.reasoning, r.answer, r.estimator, r.representation, r.noise, r.seed


def asked(estimator: str, representations: tuple[str, ...] = REPRESENTATIONS) -> list[SensitivityRequest]:
    """Several lengths, cues and answers; one answer directly behind the reasoning, one with text behind it."""
    shapes = [(5, 14, (17, 20), 20), (3, 9, (9, 11), 13), (8, 21, (23, 24), 24), (1, 1, (2, 6), 6), (4, 0, (3, 5), 7)]
    return [
        ask(ids(p + length, seed=p), p, r, answer, estimator, representation, name=f"{p}/{representation}")
        for p, r, answer, length in shapes
        for representation in representations
    ]


def read(scorer: Scorer, requests: list[SensitivityRequest]) -> dict[Key, Tensor]:
    out: dict[Key, Tensor] = {}
    for reading in sensitivities(scorer, requests):
        assert isinstance(reading, Reading) and reading.key not in out
        assert reading.values.dtype == torch.float64 and not reading.values.requires_grad
        out[reading.key] = reading.values
    assert out.keys() == {request.key for request in requests}
    return out


def one(model: nn.Module, request: SensitivityRequest, pad: int = 0, **rest: object) -> list[float]:
    return read(Scorer(model, pad, **rest), [request])[request.key].tolist()


def log_softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    total = math.fsum(math.exp(s - top) for s in scores)
    return [s - top - math.log(total) for s in scores]


def represented(logits: list[list[float]], request: SensitivityRequest, temperature: float) -> list[float]:
    """The log-probabilities, or φ alone in a list. `logits[i]` predicts the token at i + 1."""
    start, end = request.prompt + request.answer[0], request.prompt + request.answer[1]
    rows = [[z / temperature for z in row] for row in logits]
    if request.representation == LAST:
        return log_softmax(rows[start - 1])
    if request.representation == MEAN:
        size = end - start
        return log_softmax([math.fsum(rows[i - 1][v] for i in range(start, end)) / size for v in range(len(rows[0]))])
    return [math.fsum(log_softmax(rows[i - 1])[request.ids[i]] for i in range(start, end)) / (end - start)]


def change(clean: list[float], other: list[float]) -> float:
    """KL(clean ‖ other), or φ's fall."""
    if len(clean) == 1:
        return clean[0] - other[0]
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(clean, other, strict=True) if a > -math.inf)


def naive_perturbed(
    model: nn.Module, request: SensitivityRequest, pad: int = 0, temperature: float = 1.0
) -> list[float]:
    def state(sequence: list[int]) -> list[float]:
        with torch.no_grad():
            return represented(model(torch.tensor([sequence])).logits[0].double().tolist(), request, temperature)

    was_training = model.training
    model.eval()
    clean = state(list(request.ids))
    out = []
    for t in range(request.reasoning):
        sequence = list(request.ids)
        sequence[request.prompt + t] = pad
        out.append(max(0.0, change(clean, state(sequence))))
    model.train(was_training)
    return out


def naive_gradient(model: nn.Module, request: SensitivityRequest, temperature: float = 1.0) -> list[float]:
    """Central differences of J along each token's own embedding, from its noisy one. For a float64 model."""
    embeds = model.get_input_embeddings().weight.detach()[list(request.ids)]
    stream = torch.Generator().manual_seed(request.key.stream(request.seed))
    noise = torch.randn((request.reasoning, embeds.shape[1]), generator=stream) * request.noise
    noisy = embeds.clone()
    for t in range(request.reasoning):
        noisy[request.prompt + t] += noise[t]

    def state(inputs: Tensor) -> list[float]:
        with torch.no_grad():
            return represented(model(inputs_embeds=inputs[None]).logits[0].tolist(), request, temperature)

    out, clean, h = [], state(embeds), 1e-4
    for t in range(request.prompt, request.prompt + request.reasoning):
        ends = []
        for side in (h, -h):
            moved = noisy.clone()
            moved[t] += side * embeds[t]
            ends.append(change(clean, state(moved)))
        out.append(abs(ends[0] - ends[1]) / (2 * h))
    return out


def exact(model: nn.Module) -> nn.Module:
    """A float64 copy. transformers' RMSNorm rounds to float32 whatever the model is, so it is written out here."""
    model = copy.deepcopy(model).double()

    def normed(norm: nn.Module, x: Tensor) -> Tensor:
        return norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = partial(normed, module)
    return model


class Averages(nn.Module):
    """logits_i is the mean of the embeddings up to i: every number below is a line of arithmetic."""

    def __init__(self, *rows: tuple[float, float]) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.tensor(rows, dtype=torch.float32), freeze=False)
        self.config = MistralConfig(vocab_size=2, sliding_window=1)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids=None, inputs_embeds=None, logits_to_keep=0, use_cache=False) -> SimpleNamespace:
        e = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        logits = e.cumsum(1) / torch.arange(1, e.shape[1] + 1)[:, None]
        return SimpleNamespace(logits=logits[:, logits_to_keep])
