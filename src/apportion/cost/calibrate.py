"""This machine, measured in seconds: products, attention, memory, and what small operations cost anyway.

Nothing of a run is looked at: tensors are random, and models are random ones of one to three small layers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from apportion.cost.hardware import HERE, Hardware, Overheads
from apportion.cost.roofline import Call, decode, host_seconds, padded, work_seconds
from apportion.cost.shape import ModelShape, read_shape

if TYPE_CHECKING:
    from apportion.train.settings import RunConfig

# Tokens of a pass: tensors that fit the first cache, the second, and none.
_TOKENS = (4, 256, 2048, 16384)
_BUDGET, _REPEATS = 0.04, 5
# Keys and values that leave a cache of megabytes.
_ROWS, _WIDTH = 128, 128
_SIDE, _MATRICES = 2048, 8
# The random models: their vocabulary, the most weights of a layer, tokens of a row, and of what generation starts from.
_VOCABULARY, _LARGEST, _MIDDLE, _OPENING = 32, 2**25, 96, 64


def calibrate(shape: ModelShape, dtype: str = "float32", *, clock: Callable[[], float] = time.perf_counter) -> Hardware:
    """Measures the CPU in a few seconds, with torch's threads as they are.

    Args:
        shape: products and attention are measured at its sizes. clock: `time.process_time` measures the processor's
            own seconds, which other processes do not lengthen as much.
    """

    def timed(work: Callable[[], object], most: int = 64) -> float:
        """Median seconds of one call."""
        work()
        start = clock()
        work()
        times = max(1, min(most, int(_BUDGET / max(clock() - start, 1e-7))))

        def once() -> float:
            start = clock()
            for _ in range(times):
                work()
            return (clock() - start) / times

        return median(once() for _ in range(_REPEATS))

    # What is drawn here leaves the random streams of a run that starts later where they were.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.no_grad():
            pieces = _pieces(shape, dtype, timed)
        forward, training, decoding = _whole(shape, pieces, dtype, timed)
    return replace(pieces, forward=forward, training=training, decoding=decoding)


def calibrate_for(config: RunConfig, *, clock: Callable[[], float] = time.perf_counter) -> Hardware:
    """This machine, measured at a run's model, arithmetic and threads.

    Raises:
        InputError: a model that cannot be found.
    """
    from apportion.train.models import model_folder

    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    return calibrate(read_shape(model_folder(config.model.name)), arithmetic(config), clock=clock)


def arithmetic(config: RunConfig) -> str:
    """The type that a run's passes are computed in on this machine."""
    bf16 = config.model.dtype == "bfloat16" or config.trainer.get("bf16") is True
    return "bfloat16" if bf16 else "float32"


def _pieces(shape: ModelShape, dtype: str, timed: Callable[..., float]) -> Hardware:
    number = getattr(torch, dtype)
    product = _products(shape, number, timed)
    queries = torch.randn(_ROWS, _WIDTH, shape.heads, shape.head_dim, dtype=number).transpose(1, 2)
    keys, values = (torch.randn(_ROWS, shape.heads, _WIDTH, shape.head_dim, dtype=number) for _ in range(2))
    mask = torch.ones(_ROWS, 1, _WIDTH, _WIDTH, dtype=torch.bool)
    mask[0, 0, :, 0] = False
    took = timed(lambda: functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask))
    attention = 4 * queries.numel() * _WIDTH / took
    # More than a cache holds, in matrices that are read one after the other.
    one, large = torch.randn(1, _SIDE, dtype=number), torch.randn(_MATRICES, _SIDE, _SIDE, dtype=number)
    reading = large.numel() * large.element_size() / timed(lambda: [functional.linear(one, each) for each in large])
    return Hardware(
        HERE, {dtype: product}, tuple(_between(shape, number, tokens, timed) for tokens in _TOKENS),
        float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), reading=reading,
        attention=attention / product, decode=_decoding(shape, number, timed) / product, overheads=_overheads(timed),
        source=f"micro-benchmarks of this machine, threads: {torch.get_num_threads()}, {dtype}",
    )  # fmt: skip


def _products(shape: ModelShape, number: torch.dtype, timed: Callable[..., float]) -> float:
    """FLOPs a second of the seven products of one layer."""
    rows = max(256, min(8192, 2**29 // shape.layer_parameters))
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    h, i = shape.hidden, shape.intermediate
    sizes = [(h, queries), (h, keys), (h, keys), (queries, h), (h, i), (h, i), (i, h)]
    weights = [torch.randn(outer, inner, dtype=number) for inner, outer in sizes]
    states = [torch.randn(rows, inner, dtype=number) for inner, _ in sizes]

    def layer() -> None:
        for state, weight in zip(states, weights, strict=True):
            functional.linear(state, weight)

    return 2 * rows * sum(weight.numel() for weight in weights) / timed(layer)


def _between(shape: ModelShape, number: torch.dtype, tokens: int, timed: Callable[..., float]) -> tuple[float, float]:
    """Bytes of a hidden state of that many tokens, and bytes a second of what a layer does between its products:
    two norms, two residuals, the rotary embedding of queries and keys, the gate; counted as `ModelShape.traffic` does.
    """
    size = torch.empty((), dtype=number).element_size()
    state, other = (torch.randn(tokens, shape.hidden, dtype=number) for _ in range(2))
    gate, up = (torch.randn(tokens, shape.intermediate, dtype=number) for _ in range(2))
    heads = [torch.randn(tokens, n, shape.head_dim, dtype=number) for n in (shape.heads, shape.kv_heads)]
    scale, angle = torch.randn(shape.hidden, dtype=number), torch.randn(tokens, 1, shape.head_dim, dtype=number)
    half = shape.head_dim // 2

    def layer() -> None:
        for _ in range(2):
            scale * (state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6))
            state + other
        for head in heads:
            head * angle + torch.cat([-head[..., half:], head[..., :half]], -1) * angle
        functional.silu(gate) * up

    rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    numbers = 20 * shape.hidden + 10 * rotated + 5 * shape.intermediate
    # An operation that small costs what it costs to start it, which is in a layer's overhead.
    nothing = torch.zeros(1, dtype=number)
    started, took = 25 * timed(lambda: nothing + nothing), timed(layer)
    return float(tokens * shape.hidden * size), tokens * numbers * size / max(took - started, took / 5)


def _decoding(shape: ModelShape, number: torch.dtype, timed: Callable[..., float]) -> float:
    """FLOPs a second of attention with one query, on keys that were just copied, as a growing cache's are.

    The queries of a key's head are packed, as transformers does it.
    """
    rows, steps, group = _ROWS * 2, 8, shape.heads // shape.kv_heads
    one = torch.randn(rows, shape.kv_heads, group, shape.head_dim, dtype=number)
    keys = torch.randn(rows, shape.kv_heads, _WIDTH, shape.head_dim, dtype=number)
    new = keys[:, :, :1]

    def turn(attends: bool) -> None:
        grown = keys
        for _ in range(steps):
            grown = torch.cat([grown, new], dim=-2)
            if attends:
                seen = torch.ones(rows, 1, 1, grown.shape[2], dtype=torch.bool).expand(-1, -1, group, -1)
                functional.scaled_dot_product_attention(one, grown, grown, attn_mask=seen)

    seconds = timed(lambda: turn(True)) - timed(lambda: turn(False))
    return 4 * steps * one.numel() * (_WIDTH + (1 + steps) / 2) / max(seconds, 1e-9)


def _whole(shape: ModelShape, pieces: Hardware, dtype: str, timed: Callable[..., float]) -> tuple[float, float, float]:
    """How much longer than its pieces a whole pass of a random model of two such layers takes: forward, training,
    decoding. 1 for layers too large to be made for this."""
    own = ModelShape.llama(
        2, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, _VOCABULARY, True
    )
    if own.layer_parameters > _LARGEST:
        return 1.0, 1.0, 1.0
    model = _random(own).to(getattr(torch, dtype))
    rows = max(4, min(64, 2**32 // own.layer_parameters // _MIDDLE))
    ids = torch.full((rows, _MIDDLE), 5)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, use_cache=False)

    def training() -> None:
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits.sum().backward()

    many = 4 * rows

    def generate(new: int) -> None:
        given = {"input_ids": ids[:, :_OPENING].repeat(4, 1), "attention_mask": mask[:, :_OPENING].repeat(4, 1)}
        model.generate(**given, do_sample=True, max_new_tokens=new, min_new_tokens=new, top_k=0)

    def ratio(seconds: float, call: Call) -> float:
        # Taken after what it costs anyway; not below 1/4, where noise would have eaten the work.
        host = host_seconds(call, own, pieces)
        return max(0.25, (seconds / call.times - host) / work_seconds(call, own, pieces, dtype, dtype))

    turns = 24
    step = timed(lambda: generate(turns + 2)) - timed(lambda: generate(2))
    whole = padded(rows, _MIDDLE, logits=float(rows * _MIDDLE))
    return (
        ratio(timed(forward), whole),
        ratio(timed(training), replace(whole, backward=2.0)),
        ratio(step, decode(turns, many, _OPENING + 1 + turns / 2, "generate")),
    )


def _random(shape: ModelShape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _overheads(timed: Callable[..., float]) -> Overheads:
    """Of models so small that nothing but overhead is left."""
    from apportion.engines.base import Key, Request, Sampling
    from apportion.engines.transformers import TransformersEngine
    from apportion.segments import token_offsets
    from apportion.tasks import policy_path
    from apportion.train.models import load_tokenizer

    one, three = (_random(ModelShape.llama(n, 16, 2, 1, 8, 16, _VOCABULARY, True)) for n in (1, 3))
    ids, steps = torch.full((2, 4), 5), 12
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    forward = [timed(lambda m=m: m(input_ids=ids, attention_mask=mask, use_cache=True)) for m in (one, three)]
    layer = (forward[1] - forward[0]) / 2
    call = forward[0] - layer

    def generate(new: int) -> None:
        one.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, max_new_tokens=new, min_new_tokens=new, top_k=0
        )

    turn = (timed(lambda: generate(2 + steps)) - timed(lambda: generate(2))) / steps

    def probe(samples: int) -> None:
        engine = TransformersEngine(one, 0)
        request = Request(Key("cost", 0, "0", 0, 0), (5, 6, 7), samples, 2 + steps)
        list(engine.continuations([request], Sampling((31,), min_p=0.0)))

    few, many = timed(lambda: probe(1)), timed(lambda: probe(65))
    row = (many - few) / 64 / (1 + steps)
    tokenizer = load_tokenizer(policy_path())
    text = [4 + i % 10 for i in range(128)]
    token = timed(lambda: token_offsets(lambda part: tokenizer.decode(part, skip_special_tokens=False), text)) / 128
    return Overheads(
        call=max(call, 0.0), layer=max(layer, 0.0), generate=max(turn - call - layer, 0.0),
        slots=max(few / (2 + steps) - call - layer - row, 0.0), row=max(row, 0.0), token=token, grade=2e-3,
    )  # fmt: skip
