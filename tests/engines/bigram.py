"""A model whose next token hangs on the last one alone, in known shares; the slow way to score; what forwards hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from apportion.engines.base import Key, Reading

# Of 4 tokens, the weight of each next one after 0, 1, 2 and 3: after 3 comes 1 with 3 of 6, after 1 comes 2 with 8
# of 12, after 2 comes 0 with 5 of 8.
WEIGHTS = ((1, 1, 1, 1), (1, 1, 8, 2), (5, 1, 1, 1), (1, 3, 1, 1))


def bigram(logits: Sequence[Sequence[float]] | None = None) -> LlamaForCausalLM:
    """A one-layer Llama that adds nothing to a one-hot embedding: `logits[a][b]` for b after a, or ln `WEIGHTS`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, rms_norm_eps=1e-12,
        )
    )  # fmt: skip
    table = torch.tensor(WEIGHTS).log() if logits is None else torch.tensor(logits)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(4))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        # A one-hot row of 4 has the root mean square 1/2.
        model.model.norm.weight.fill_(0.5)
        model.lm_head.weight.copy_(table.T)
    return model


@torch.no_grad()
def separate(
    model: PreTrainedModel, ids: Sequence[int], start: int, temperature: float = 1.0
) -> list[tuple[float, float]]:
    """(log-probability, entropy) of each of `ids[start:]` from a forward of this one sequence, in double."""
    was = model.training
    logits = model.eval()(torch.tensor([ids])).logits[0].double() / temperature
    model.train(was)
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return [(float(logp[t - 1, ids[t]]), float(entropy[t - 1])) for t in range(start, len(ids))]


def gap(found: Sequence[Reading], expected: Mapping[Key, Sequence[float]]) -> float:
    """Largest distance, in nats down to ln p = −1 and relative below, where float32 has no more to give."""
    assert len(found) == len(expected) == len({reading.key for reading in found})
    worst = 0.0
    for reading in found:
        assert reading.values.dtype == torch.float64
        for got, want in zip(reading.values.tolist(), expected[reading.key], strict=True):
            worst = max(worst, abs(got - want) / max(1.0, -want))
    return worst


@contextmanager
def sizes(model: PreTrainedModel) -> Iterator[list[tuple[int, int, int]]]:
    """(rows, tokens a row, numbers in the logits) of every forward."""
    seen: list[tuple[int, int, int]] = []

    def look(module: object, args: object, kwargs: dict, out: object) -> None:
        assert not torch.is_grad_enabled() and not model.training
        seen.append((*kwargs["input_ids"].shape, out.logits.numel()))

    hook = model.register_forward_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()
