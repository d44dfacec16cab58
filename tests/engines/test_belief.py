"""Forced answers: one forward of a response and its branches reads what separate sequences read.

Hand numbers come from a bigram model: after the cue 3 comes 1 with 1/2, after 1 comes 2 with 2/3.

Planted faults seen caught: positions that restart in a branch, or an answer at its cue's; a branch that sees the
trunk one token or wholly beyond its end, another branch, another answer, its own future, or no cue; another row's
trunk; the column before the cue's last, or later tokens a column early; without a cue a position late; the cue
scored; T not applied; the worst answer, or a mean over its tokens; windows and ALiBi packed; either limit ignored;
the response's end refused; a trunk that is not causal, takes a mask, is padded on the left or has no positions;
branches without a mask; the scale lost; the whole mask a column off or upside down; branches whose columns are not
counted, or that always run over a cache; empty answers and prompts let in; training mode or gradients left on.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from bigram import bigram, gap, separate, sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import VOCABULARY, ids, llama, mistral, qwen2
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from apportion.engines.base import BeliefRequest, Key
from apportion.engines.belief import beliefs
from apportion.engines.scoring import PackedMask, Scorer
from apportion.errors import InputError
from apportion.tasks import load_policy
from apportion.tasks.arithmetic import ArithmeticTask, generate


def key(prompt: str, sample: int = 0) -> Key:
    return Key("run", 7, prompt, sample, 0)


def requests() -> list[BeliefRequest]:
    """Responses of several lengths; cues of 3, 1 and no tokens; answers of 1 to 4 tokens; both ends asked about."""
    a, b, cue = ids(30, 1), ids(19, 2), (7, 9, 4)
    return [
        BeliefRequest(key("a", 0), a, 6, (0, 5, 6, 17, 24), cue, ((8, 5),)),
        BeliefRequest(key("a", 1), a[:25], 6, (3, 11), cue, ((8, 5, 5, 11), (8, 6), (12,))),
        BeliefRequest(key("b", 0), b, 3, (16, 0, 7), cue[:1], ((4,), (9, 9, 9))),
        BeliefRequest(key("b", 1), b[:9], 1, (0, 1, 8), (), ((6, 7), (5,))),
        BeliefRequest(key("b", 2), b, 3, (), cue, ((6,),)),
        BeliefRequest(key("b", 3), b[:3], 3, (0,), cue, ((6, 10, 15),)),
    ]


def slowly(model: PreTrainedModel, asked: list[BeliefRequest], temperature: float = 1.0) -> dict[Key, list[float]]:
    """The reference: a sequence for each answer at each position, and a sum over the answer's tokens."""
    out = {}
    for r in asked:
        out[r.key] = []
        for position in r.positions:
            opening = (*r.ids[: r.prompt + position], *r.cue_ids)
            sums = [
                sum(logprob for logprob, _ in separate(model, (*opening, *answer), len(opening), temperature))
                for answer in r.answers
            ]
            out[r.key].append(max(sums))
    return out


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = dict(n_embd=32, n_layer=2, n_head=4, initializer_range=0.4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


def gemma2() -> Gemma2ForCausalLM:
    """Eager attention, every other layer with a window, logits capped at the end."""
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, initializer_range=0.4, final_logit_softcapping=2.0,
            attn_implementation="eager",
        )
    )  # fmt: skip


MODELS = {
    "grouped heads": llama,
    "eager": lambda: llama(attn_implementation="eager"),
    "biases": qwen2,
    "learned positions": gpt2,
    "capped logits": gemma2,
    "wide window": lambda: mistral(64),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_equals_separate(name: str, temperature: float) -> None:
    model = MODELS[name]()
    expected = slowly(model, requests(), temperature)
    scorer = Scorer(model, 0, temperature=temperature)
    with sizes(model) as seen:
        assert gap(list(beliefs(scorer, requests())), expected) < 1e-5
    # Five trunks of up to 30 tokens; behind them at most 5 cues of 3 tokens, and 2 branches that feed 3 + 1 of answers.
    assert [shape[:2] for shape in seen] == [(5, 30 + 5 * 3 + 2 * 4)]
    assert scorer.cost.forwards == 1 and scorer.cost.forward_tokens == 5 * 53


class Attention(TorchDispatchMode):
    """Of every call of torch's attention: columns that ask, columns that are asked, those of the mask, and causal."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, int | None, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "scaled_dot_product" in str(func):
            mask = kwargs.get("attn_mask")
            causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
            self.calls.append((args[0].shape[2], args[1].shape[2], None if mask is None else mask.shape[2], causal))
        return func(*args, **kwargs)


def test_the_trunk_takes_the_causal_kernel_and_the_branches_a_mask() -> None:
    model = llama()
    with Attention() as seen:
        list(beliefs(Scorer(model, 0), requests()))
    assert seen.calls == 2 * [(30, 30, None, True), (23, 53, 23, False)], "in each of two layers"


def test_the_whole_mask_by_hand() -> None:
    """A trunk of 2, and a branch of 2 that goes on from its first column."""
    low = torch.finfo(torch.float32).min
    branches = torch.tensor([[0, low, 0, low], [0, low, 0, 0]])[None, None]
    mask = PackedMask.of(branches)
    assert mask.shape == (1, 1, 4, 4) and mask.dtype == torch.float32
    expected = torch.cat([torch.tensor([[0, low, low, low], [0, 0, low, low]])[None, None], branches], dim=2)
    for found in (mask + 0, mask[:, :, :, :4], mask.expand(1, 1, -1, -1), torch.add(torch.zeros(4, 4), other=mask)):
        assert type(found) is torch.Tensor and torch.equal(found, expected)
    query, key, value = torch.randn((3, 1, 2, 4, 8), generator=torch.Generator().manual_seed(0))
    apart = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.5)
    torch.testing.assert_close(apart, scaled_dot_product_attention(query, key, value, expected, scale=0.5))


def test_a_narrow_window_falls_back_to_separate_sequences() -> None:
    model = mistral(8)
    expected = slowly(model, requests())
    with sizes(model) as seen:
        assert gap(list(beliefs(Scorer(model, 0), requests())), expected) < 1e-5
    assert len(seen) == 5, "one forward a response, its answers batched"


def test_positions_that_change_with_the_length_are_not_packed() -> None:
    """Beyond its original 18 tokens longrope encodes all positions another way: rows of each kind go by themselves.

    No sequence of `requests` has 19 tokens, of which the last is not fed.
    """
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 18, "factor": 2.0,
        "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
    }  # fmt: skip
    model = llama(rope_parameters=rope)
    scorer = Scorer(model, 0)
    assert (scorer.steady, scorer.sliceable(18), scorer.sliceable(19)) == (18, True, False)
    assert Scorer(llama(), 0).steady == float("inf")
    assert gap(list(beliefs(scorer, requests())), slowly(model, requests())) < 1e-5
    assert list(scorer.batches([18, 19, 17, 20])) == [[3], [1], [0, 2]]


def test_which_sequences_may_share_a_forward() -> None:
    model = mistral(8)
    assert Scorer(model, 0).packs(8) and not Scorer(model, 0).packs(9)
    for name, value in (("_attn_implementation", "flex_attention"), ("alibi", True)):
        changed = llama()
        assert Scorer(changed, 0).packs(99)
        setattr(changed.config, name, value)
        assert not Scorer(changed, 0).packs(99)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 999),
    tokens=st.sampled_from([1, 25, 60, 16_384]),
    logits=st.sampled_from([1, 4, 9, 1_000]),
    pad=st.integers(0, VOCABULARY - 1),
    parts=st.integers(1, 3),
)
def test_order_batch_and_split_change_nothing(seed: int, tokens: int, logits: int, pad: int, parts: int) -> None:
    asked = requests()
    random.Random(seed).shuffle(asked)
    scorer = Scorer(MODEL, pad, max_tokens=tokens, max_logits=logits * VOCABULARY)
    with sizes(MODEL) as seen:
        found = [reading for part in range(parts) for reading in beliefs(scorer, asked[part::parts])]
    assert gap(found, EXPECTED) < 1e-5
    # The widest branch holds a cue of 3 and answers that feed 3 + 1 tokens, of which 1 + 4 columns predict.
    for rows, columns, numbers in seen:
        alone = rows == 1 and (numbers == 0 or columns <= 3 + 4)
        assert rows * columns <= tokens or alone
        assert numbers <= scorer.max_logits or (alone and numbers <= 5 * VOCABULARY)
    assert sum(rows * columns for rows, columns, _ in seen) == scorer.cost.forward_tokens


@pytest.mark.parametrize(
    ("limits", "trunks"),
    [({"max_logits": VOCABULARY}, [(5, 30)]), ({"max_tokens": 1}, [(1, n) for n in (30, 17, 19, 9, 3)])],
)
def test_each_trunk_is_computed_once_whatever_the_limits(limits: dict[str, int], trunks: list[tuple[int, int]]) -> None:
    with sizes(MODEL) as seen:
        list(beliefs(Scorer(MODEL, 0, **limits), requests()))
    assert [shape[:2] for shape in seen if shape[2] == 0] == trunks
    assert len(seen) - len(trunks) == sum(len(r.positions) for r in requests()), "a forward a branch"


def test_hand_numbers() -> None:
    def belief(cue: tuple[int, ...], *answers: tuple[int, ...], temperature: float = 1.0) -> list[float]:
        scorer = Scorer(bigram(), 0, temperature=temperature)
        (reading,) = beliefs(scorer, [BeliefRequest(key("p"), (0, 3, 1, 2), 2, (0, 1, 2), cue, answers)])
        return reading.values.exp().tolist()

    near = pytest.approx
    assert belief((3,), (1, 2)) == near([1 / 3] * 3)  # 1/2 · 2/3, wherever it stands
    assert belief((0, 3), (1, 2)) == near([1 / 3] * 3)  # a longer cue costs nothing
    assert belief((3,), (1,)) == near([1 / 2] * 3)
    assert belief((3,), (1, 0), (2, 0)) == near([5 / 48] * 3)  # 1/24 and 1/6 · 5/8
    # At temperature 1/2 the weights are squared: 9/12 · 64/70.
    assert belief((3,), (1, 2), temperature=0.5) == near([24 / 35] * 3)
    # Without a cue the tokens before the positions are 3, 1 and 2: p(0) is 1/6, 1/12 and 5/8.
    assert belief((), (0,)) == near([1 / 6, 1 / 12, 5 / 8])


def test_bfloat16_is_upcast_before_the_softmax() -> None:
    # ln p = 2 − ln(e² + 3); rounded to bfloat16 it would be off by .001 or more.
    model = bigram([[2.0, 0.0, 0.0, 0.0]] * 4).to(torch.bfloat16)
    (reading,) = beliefs(Scorer(model, 0), [BeliefRequest(key("p"), (1, 2), 1, (1,), (3,), ((0,),))])
    want = 2 - math.log(math.exp(2) + 3)
    assert abs(float(torch.tensor(want).to(torch.bfloat16)) - want) > 5e-4
    assert float(reading.values[0]) == pytest.approx(want, abs=1e-6)
    model = llama().to(torch.bfloat16)
    assert gap(list(beliefs(Scorer(model, 0), requests())), slowly(model, requests())) < 0.05


def test_leaves_no_trace() -> None:
    model = llama(attention_dropout=0.5).train()
    model.model.layers[1].eval()
    model.gradient_checkpointing_enable()
    model.lm_head.weight.requires_grad_(False)
    modes, wanted = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = []
    for reading in beliefs(Scorer(model, 0, max_tokens=60), requests()):
        found.append(reading)
        assert [m.training for m in model.modules()] == modes, "between results the model is the host's"
        assert torch.is_grad_enabled()
    next(beliefs(Scorer(model, 0, max_tokens=60), requests()))  # and a caller that stops early
    assert gap(found, EXPECTED) < 1e-5, "no dropout while measuring"
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(reading.values.requires_grad for reading in found)


def test_belief_of_the_embedded_policy_grows_along_worked_solutions() -> None:
    model, tokenizer = load_policy()
    asked = []
    for problem in generate(ArithmeticTask(), "test", 6):
        prompt, response, answer, cue = (
            tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (problem.prompt, problem.solution, problem.answer, "#")
        )
        positions = (0, *(t + 2 for t in range(len(problem.solution)) if problem.solution.startswith("\n\n", t)))
        asked.append(BeliefRequest(key(problem.prompt), prompt + response, len(prompt), positions, cue, (answer,)))
    found = list(beliefs(Scorer(model, tokenizer.pad_token_id), asked))
    assert gap(found, slowly(model, asked)) < 1e-5
    for reading in found:
        assert reading.values.exp()[-1] > 0.9 > reading.values.exp()[0]


def test_lora() -> None:
    peft = pytest.importorskip("peft", reason="needs apportion[peft]")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, lora_dropout=0.5)
    model = peft.get_peft_model(llama(), config).train()
    found = list(beliefs(Scorer(model, 0), requests()))
    assert gap(found, slowly(model, requests())) < 1e-5 < gap(found, EXPECTED)
    prompted = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(InputError, match="prompt learning"):
        Scorer(prompted, 0)


def test_nothing_asked_nothing_run() -> None:
    with sizes(MODEL) as seen:
        assert list(beliefs(Scorer(MODEL, 0), [])) == []
        (reading,) = beliefs(Scorer(MODEL, 0), requests()[4:5])
    assert not seen and reading.values.shape == (0,) and reading.values.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"answers": ()}, "answers"),
        ({"answers": ((4,), ())}, "answers"),
        ({"prompt": 0}, "prompt"),
        ({"prompt": 9}, "prompt"),
        ({"positions": (2, 6)}, "position"),
        ({"positions": (-1,)}, "position"),
    ],
)
def test_requests_that_cannot_be_answered(change: dict, field: str) -> None:
    whole = dict(key=key("p"), ids=ids(8), prompt=3, positions=(2, 5), cue_ids=(7,), answers=((4,),))
    with sizes(MODEL) as seen, pytest.raises(InputError, match=field):
        list(beliefs(Scorer(MODEL, 0), [*requests(), BeliefRequest(**{**whole, **change})]))
    assert not seen


MODEL = llama()
EXPECTED = slowly(MODEL, requests())


def test_per_token_prefers_the_long_answer_whose_tokens_are_likelier() -> None:
    """After 3 comes 1 with 3/6, then 2 with 8/12, then 0 with 5/8: (1, 2, 0) has 5/24, whose cube root is .593; (1)
    has 1/2. As wholes 1/2 is the larger one, a token the other."""
    asked = BeliefRequest(key("p"), (0, 3), 1, (1,), (), ((1,), (1, 2, 0)))
    scorer = Scorer(bigram(), pad_id=0)
    whole, mean = (next(beliefs(scorer, [replace(asked, per_token=each)])).values for each in (False, True))
    assert whole.exp().item() == pytest.approx(1 / 2)
    assert mean.exp().item() == pytest.approx((5 / 24) ** (1 / 3))
