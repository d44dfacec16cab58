"""Tiny random models, and the slow way to continue a prefix: one token at a time, everything run again."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from apportion.engines.base import Continuation, Key, Request, Sampling

VOCABULARY = 20
_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.4,
)  # fmt: skip


def llama(**change: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, **change}))


def qwen2() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES))


def mistral(window: int) -> MistralForCausalLM:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=window))


def processors(sampling: Sampling) -> LogitsProcessorList:
    """What `generate` builds for these settings, in its order."""
    out = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        out.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature != 1:
        out.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        out.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        out.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        out.append(MinPLogitsWarper(sampling.min_p))
    return out


def naive(model: PreTrainedModel, requests: list[Request], sampling: Sampling) -> set[Continuation]:
    """The reference: no cache, no batch, transformers' own processors, one numpy sum a token."""
    was_training, done = model.training, set()
    model.eval()
    for request in requests:
        for m in range(request.first, request.first + request.samples):
            uniform = np.random.Generator(np.random.Philox(key=request.key.stream(m)))
            ids, new, finish = list(request.prefix_ids), [], "length"
            while len(new) < request.budget and finish != "stop":
                with torch.no_grad():
                    logits = model(torch.tensor([ids])).logits[:, -1].float()
                scores = processors(sampling)(torch.tensor([ids]), logits)[0].double().numpy()
                p = np.exp(scores - scores.max())
                u, below, token = uniform.random() * p.sum(), 0.0, -1
                for j, mass in enumerate(p):
                    below += mass
                    if u < below:
                        token = j
                        break
                ids.append(token)
                new.append(token)
                finish = "stop" if token in sampling.stop_ids else "length"
            done.add(Continuation(request.key, m, tuple(new), finish))
    model.train(was_training)
    return done


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids, none of them 3, the stop token of the tests."""
    fill = torch.Generator().manual_seed(seed)
    return tuple((torch.randint(4, VOCABULARY, (count,), generator=fill)).tolist())


def requests(samples: int = 3, limit: int = 24) -> list[Request]:
    """Two prompts of 6 and 3 tokens; a response of each with several pivots; two responses open alike."""
    out = []
    for prompt, (length, positions) in {"a": (6, (0, 4, 9, 15)), "b": (3, (2, 11))}.items():
        full = ids(length + 20, seed=length)
        for at in positions:
            out.append(Request(Key("run", 7, prompt, 0, at), full[: length + at], samples, limit - at))
    fork = (*ids(26, seed=6)[:8], *ids(9, seed=99))
    out.append(Request(Key("run", 7, "a", 1, 11), fork, samples, 5))
    out.append(Request(Key("run", 7, "a", 2, 2), fork[:8], 1, 1, first=4))
    return out
