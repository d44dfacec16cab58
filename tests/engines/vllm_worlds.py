"""What the tests of the vLLM engine share: models, requests, and hosts of them."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import FakeClient, FakeLLM, Hashed
from policies import VOCABULARY, ids, llama
from torch import nn

from apportion.engines.base import Continuation, Key, Request, Sampling
from apportion.engines.vllm import VLLMEngine
from apportion.engines.vllm_hosts import Host

STOP = Sampling((3,))
LONGEST = 256
INSTALLED = importlib.util.find_spec("vllm") is not None
REAL = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed; `make nightly` installs it and runs this")
# vLLM on the CPU has no heads of less than 32. Its end token (5) is none of the tests' stop tokens.
_SHAPE = {"hidden_size": 128, "eos_token_id": 5, "tie_word_embeddings": True}
LLAMA = llama(**_SHAPE, initializer_range=0.1).eval()
OTHER_LLAMA = llama(**_SHAPE, initializer_range=0.15).eval()
MODEL, OTHER = Hashed(VOCABULARY), Hashed(VOCABULARY, seed=1)


def fake(host: Host) -> bool:
    return isinstance(getattr(host, "llm", None), FakeLLM) or isinstance(getattr(host, "client", None), FakeClient)


def models(host: Host) -> tuple[nn.Module, nn.Module]:
    """What the host holds at first, and other weights of its shape."""
    return (MODEL, OTHER) if fake(host) else (LLAMA, OTHER_LLAMA)


def weights(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, value.detach()) for name, value in model.named_parameters(remove_duplicate=False)]


def engine_of(host: Host, version: Callable[[], Any] = lambda: 0) -> VLLMEngine:
    """Of a host whose weights are those that are trained."""
    return VLLMEngine(host, version, version)


def run(engine: VLLMEngine, asked: Sequence[Request], sampling: Sampling = STOP) -> set[Continuation]:
    out = list(engine.continuations(asked, sampling))
    assert len(set(out)) == len(out)
    return set(out)


def ask(n: int = 8, budget: int = 6, length: int = 70, prompt: str = "p", **change: Any) -> Request:
    return Request(Key("run", 0, prompt, 0, change.pop("position", 0)), ids(length, len(prompt)), n, budget, **change)


def next_logits(host: Host, prefix: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return models(host)[0](torch.tensor([list(prefix)])).logits[0, -1].float()


def logprobs_of(model: nn.Module, row: Sequence[int], prompt: int) -> torch.Tensor:
    """[T] float64, of the tokens after the prompt."""
    with torch.no_grad():
        logp = model(torch.tensor([list(row)])).logits[0, :-1].double().log_softmax(-1)
    return logp.gather(1, torch.tensor(row[1:])[:, None])[prompt - 1 :, 0]


def many(host: Host, samples: int) -> int:
    """As many samples as tell of vLLM's sampler; the fake's is our own, under test elsewhere."""
    return 300 if fake(host) else samples


def chi_square(seen: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """χ² and its 99.9 % quantile (Wilson–Hilferty), small cells pooled."""
    big = expected >= 5
    observed = torch.cat([seen[big], seen[~big].sum()[None]])
    wanted = torch.cat([expected[big], expected[~big].sum()[None]])
    kept = wanted > 0
    assert (observed[~kept] == 0).all()
    df = int(kept.sum()) - 1
    chi2 = float(((observed - wanted)[kept] ** 2 / wanted[kept]).sum())
    return chi2, df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3


def states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
