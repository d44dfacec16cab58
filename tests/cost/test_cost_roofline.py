"""The roofline against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.cost import NAMED, Hardware, ModelShape, Overheads, find_hardware, read_shape
from apportion.cost.hardware import named_device
from apportion.cost.memory import Training, memory_of
from apportion.cost.roofline import Call, decode, exchange, padded, seconds
from apportion.errors import InputError
from apportion.tasks import policy_path

LLAMA_7B = ModelShape.llama(32, 4096, 32, 32, 128, 11008, 32000, tied=False)
IDEAL = Hardware("ideal", {"bfloat16": 1e15, "float32": 1e14}, ((1.0, 2e12),), 80e9)
ONE = ModelShape.llama(1, 2, 1, 1, 2, 4, 8, tied=True)


def test_parameters_of_known_models():
    # The published counts: 6,738,415,616; Qwen2.5-0.5B's 494,032,768 less its biases of q, k and v (24·(896 + 2·128)).
    assert LLAMA_7B.parameters == 6_738_415_616
    qwen = ModelShape.llama(24, 896, 14, 2, 64, 4864, 151_936, tied=True)
    assert qwen.parameters == 494_032_768 - 24 * (896 + 2 * 128)
    # Llama-3-8B: grouped keys.
    assert ModelShape.llama(32, 4096, 32, 8, 128, 14336, 128_256, tied=False).parameters == 8_030_261_248


def test_cache_of_a_token():
    # 2·32·32·128 numbers; Llama-3-8B has a quarter of the heads.
    assert LLAMA_7B.kv_numbers * 2 == 524_288
    assert ModelShape.llama(32, 4096, 32, 8, 128, 14336, 128_256, tied=False).kv_numbers * 2 == 131_072


def test_the_embedded_policys_shape_is_read_from_its_configuration():
    shape = read_shape(policy_path())
    # card.json says 173,760.
    assert shape.parameters == 173_760
    assert shape == ModelShape.llama(3, 64, 4, 1, 32, 192, 20, tied=True)


def test_biases_and_plain_mlps_are_counted(tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=10, n_positions=16).save_pretrained(tmp_path)
    # A layer: c_attn 8·24 + 24, c_proj 8·8 + 8, fc 8·32 + 32, proj 32·8 + 8, two norms of 16: 872; positions 16·8 and
    # the last norm's bias of 8 are spread over the layers: (2·872 + 128 + 8)/2.
    shape = read_shape(tmp_path)
    assert (shape.layer_parameters, shape.intermediate, shape.kv_heads) == (872 + 68, 32, 2)


def test_decoding_one_row_is_weights_over_bandwidth():
    machine = replace(find_hardware("h100"), overheads=Overheads(), matmul=1.0, attention=1.0, decode=1.0, stream=1.0)
    took = seconds(decode(1, 1, 1, "slots"), LLAMA_7B, machine, "bfloat16")
    # 32 layers and the output matrix, 2 bytes each, over 3.35 TB/s: 3.944 ms. The rest is below a thousandth.
    assert took == pytest.approx((32 * 202_383_360 + 32_000 * 4096) * 2 / 3.35e12, rel=2e-3)
    slower = seconds(decode(1, 1, 1, "slots"), LLAMA_7B, replace(machine, reading=3.35e11), "bfloat16")
    assert slower == pytest.approx(10 * took, rel=2e-3)
    # A cache of 8,192 tokens is 8,192·512 KiB = 4.29 GB more: 1.282 ms.
    more = seconds(decode(1, 1, 8192, "slots"), LLAMA_7B, machine, "bfloat16") - took
    assert more == pytest.approx(8191 * 524_288 / 3.35e12, rel=1e-6)


def test_many_tokens_are_bound_by_arithmetic():
    # 8 rows of 2,048 without a mask: 2·6,476,267,520·16,384 FLOPs of layers, 4·32·4096·(8·2048²/2) of attention, on
    # 1e15: 212.2 and 8.8 ms; between the products 32·(20 + 18 + 12)·4096 + 5·11008 numbers of 2 bytes at 2e12.
    call = padded(8, 2048, masked=False)
    layers = 2 * 32 * 202_383_360 * 16_384 / 1e15
    attention = 4 * 32 * 4096 * 8 * 2048**2 / 2 / 1e15
    between = 32 * (50 * 4096 + 5 * 11_008) * 16_384 * 2 / 2e12
    assert seconds(call, LLAMA_7B, IDEAL, "bfloat16") == pytest.approx(layers + attention + between)
    # A mask hides nothing from the arithmetic: all pairs.
    full = seconds(padded(8, 2048), LLAMA_7B, IDEAL, "bfloat16")
    assert full == pytest.approx(layers + 2 * attention + between)
    # Backward: products twice more, attention 2.5 times more, traffic twice more; with recomputing one more of each.
    back = seconds(replace(call, backward=2.0), LLAMA_7B, IDEAL, "bfloat16")
    assert back == pytest.approx(3 * layers + 3.5 * attention + 3 * between)
    again = seconds(replace(call, backward=2.0, recompute=True), LLAMA_7B, IDEAL, "bfloat16")
    assert again == pytest.approx(4 * layers + 4.5 * attention + 4 * between)
    assert seconds(replace(call, backward=1.0), LLAMA_7B, IDEAL, "bfloat16") == pytest.approx(back - layers)


def test_the_output_matrix_is_not_recomputed():
    call = padded(8, 2048, backward=2.0)
    head = 2 * 32_000 * 4096 * 16_384 / 1e15 + 8 * 16_384 * 32_000 * 4 / 2e12
    for recompute in (False, True):
        plain, scored = (replace(call, recompute=recompute, logits=rows) for rows in (0.0, 16_384.0))
        more = seconds(scored, LLAMA_7B, IDEAL, "bfloat16") - seconds(plain, LLAMA_7B, IDEAL, "bfloat16")
        assert more == pytest.approx(3 * head)


def test_the_growing_cache_is_read_and_written():
    call, kept = decode(3, 4, 100, "generate"), decode(3, 4, 100, "slots")
    copied = 3 * 2 * 400 * LLAMA_7B.kv_numbers * 2 / 2e12
    assert seconds(call, LLAMA_7B, IDEAL, "bfloat16") - seconds(kept, LLAMA_7B, IDEAL, "bfloat16") == pytest.approx(
        copied
    )


def test_overheads_add_up_or_hide():
    slow = replace(IDEAL, overheads=Overheads(call=5.0, layer=1.0, generate=0.5, slots=0.25, row=0.125))
    ahead = replace(slow, overlaps=True)
    # One layer: 5 + 1 a forward, and three of them with a backward.
    assert seconds(padded(1, 1), ONE, slow, "float32") == pytest.approx(6.0)
    assert seconds(padded(1, 1, backward=2.0), ONE, slow, "float32") == pytest.approx(18.0)
    assert seconds(decode(2, 4, 3, "generate"), ONE, slow, "float32") == pytest.approx(2 * 6.5)
    assert seconds(decode(2, 4, 3, "slots"), ONE, slow, "float32") == pytest.approx(2 * (6.25 + 4 * 0.125))
    large = padded(8, 2048, times=3.0)
    work = seconds(large, LLAMA_7B, IDEAL, "bfloat16")
    assert seconds(large, LLAMA_7B, ahead, "bfloat16") == pytest.approx(3 * (5 + 32))
    assert seconds(large, LLAMA_7B, slow, "bfloat16") == pytest.approx(work + 3 * (5 + 32))


def test_bandwidth_between_two_sizes():
    machine = replace(IDEAL, bandwidth=((1e3, 8e9), (1e5, 2e9)), stream=0.5)
    # On a log scale the middle of 1e3 and 1e5 is 1e4, and that of 8e9 and 2e9 is 4e9.
    assert [machine.rate(size) for size in (1, 1e3, 1e4, 1e5, 1e9)] == pytest.approx([4e9, 4e9, 2e9, 1e9, 1e9])


def test_exchange_of_gradients():
    eight = replace(find_hardware("h100x8"), network=1.0)
    # 2·7/8 of 10 GB over 450 GB/s; sharded 3·7/8 in each of two passes.
    assert exchange(5e9, 2, eight, sharded=False, passes=2) == pytest.approx(2 * 7 / 8 * 1e10 / 450e9)
    assert exchange(5e9, 2, eight, sharded=True, passes=2) == pytest.approx(2 * 3 * 7 / 8 * 1e10 / 450e9)
    assert exchange(5e9, 2, NAMED["h100"], sharded=True, passes=2) == 0


def test_memory_of_7b_in_float32_and_sharded():
    whole = Training(LLAMA_7B.parameters, False, "float32", "float32", "adamw_torch", True, 0, 1, 1000.0, 800.0, 2000.0)
    parts = memory_of(LLAMA_7B, whole)
    assert [parts[name] / 1e9 for name in ("weights", "gradients", "optimizer")] == pytest.approx(
        [26.954, 26.954, 53.907], abs=1e-3
    )
    # 1,000 tokens: the input of 32 layers, 4096 each, and one layer's 6h + 2q + 2k + 4i = 10·4096 + 4·11008.
    assert parts["activations"] == 1000 * (32 * 4096 + 10 * 4096 + 4 * 11_008) * 4
    assert parts["logits"] == 2 * 800 * 32_000 * 4
    assert parts["cache"] == 2000 * 262_144 * 4
    update = parts["gradients"] + parts["activations"] + parts["logits"]
    assert parts["peak"] == pytest.approx(parts["weights"] + parts["optimizer"] + max(update, parts["cache"]))
    eighth = memory_of(LLAMA_7B, replace(whole, shards=8))
    assert eighth["optimizer"] == parts["optimizer"] / 8
    # Two layers are whole at a time.
    assert eighth["weights"] == pytest.approx(parts["weights"] / 8 + 2 * 202_383_360 * 4)
    kept = memory_of(LLAMA_7B, replace(whole, recompute=False))
    assert kept["activations"] == 1000 * 32 * (10 * 4096 + 4 * 11_008) * 4


def test_memory_with_an_adapter_and_other_optimizers():
    rank = LLAMA_7B.lora(8)
    # A layer's q, k, v, o: 8·8192 each; gate, up, down: 8·15104 each. Published for r = 8 on all linear: 19,988,480.
    assert rank == 19_988_480
    lora = Training(rank, True, "bfloat16", "bfloat16", "adamw_torch_fused", True, 0, 1, 1.0, 1.0, 0.0)
    parts = memory_of(LLAMA_7B, lora)
    assert parts["gradients"] == 4 * rank and parts["optimizer"] == 8 * rank
    assert parts["weights"] == 2 * LLAMA_7B.parameters + 4 * rank
    full = replace(lora, trained=LLAMA_7B.parameters, adapter=False)
    for name, size in (("adamw_bnb_8bit", 2.0), ("sgd", 0.0), ("adamw_torch", 4.0)):
        assert memory_of(LLAMA_7B, replace(full, optimizer=name))["optimizer"] == size * LLAMA_7B.parameters


def test_names_of_machines():
    assert find_hardware("H100x8").devices == 8 and find_hardware("a100-80x2").name == "a100-80x2"
    assert find_hardware("rtx4090").memory == 24e9 and find_hardware("h100x1").name == "h100"
    for wrong, near in (("h10", "'h100'"), ("h100x0", "h100"), ("a100", "a100"), ("l40", "'l40s'"), ("", "h100")):
        with pytest.raises(InputError, match=r"--hardware: got .*expected one of h100, .*") as error:
            find_hardware(wrong)
        assert near in str(error.value)


def test_names_that_cuda_gives():
    for name, short in (
        ("NVIDIA H100 80GB HBM3", "h100x2"), ("NVIDIA H200", "h200x2"), ("NVIDIA A100-SXM4-40GB", "a100-40x2"),
        ("NVIDIA GeForce RTX 4090", "rtx4090x2"), ("NVIDIA L40S", "l40sx2"),
    ):  # fmt: skip
        assert named_device(name, 2).name == short
    for name in ("NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090 D", "NVIDIA L40", "Tesla T4"):
        assert named_device(name) is None


def test_every_named_machine_has_plausible_figures():
    for machine in NAMED.values():
        assert machine.flops["bfloat16"] > machine.flops["float32"] > 1e13 and machine.devices == 1
        assert 0.8e12 <= machine.bandwidth[0][1] <= 5e12 and "not verified" in machine.source
        assert machine.overlaps and 0 < machine.matmul < 1 and math.isfinite(machine.link)


counts = st.integers(1, 512)


@given(rows=counts, width=counts, more=st.integers(1, 64), backward=st.sampled_from([0.0, 1.0, 2.0]))
def test_more_work_never_takes_less(rows, width, more, backward):
    for machine in (NAMED["h100"], IDEAL):
        took = seconds(padded(rows, width, backward=backward), LLAMA_7B, machine, "bfloat16")
        assert took <= seconds(padded(rows + more, width, backward=backward), LLAMA_7B, machine, "bfloat16")
        assert took <= seconds(padded(rows, width + more, backward=backward), LLAMA_7B, machine, "bfloat16")
        assert took <= seconds(
            padded(rows, width, backward=backward), LLAMA_7B, replace(machine, matmul=0.01), "bfloat16"
        )


@given(times=st.floats(0, 1e4), rows=counts, width=counts)
def test_calls_add_up(times, rows, width):
    once = seconds(decode(1, rows, width, "slots"), LLAMA_7B, NAMED["h200"], "bfloat16")
    assert seconds(decode(times, rows, width, "slots"), LLAMA_7B, NAMED["h200"], "bfloat16") == pytest.approx(
        times * once
    )
    assert Call(times, rows, rows, backward=2.0).backward_tokens == times * rows
