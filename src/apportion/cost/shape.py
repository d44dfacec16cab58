"""What of a model its cost depends on, and what counts in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.errors import InputError

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocab: as in the model's config.json.
        tied: the output matrix is the embedding.
        layer_parameters: weights of one layer.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    layer_parameters: int

    @classmethod
    def llama(
        cls,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate: int,
        vocab: int,
        tied: bool,
    ) -> ModelShape:
        """A layer of q, k, v and o, a gated MLP and two norms, without biases."""
        queries, keys = heads * head_dim, kv_heads * head_dim
        own = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * intermediate + 2 * hidden
        return cls(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, tied, own)

    @property
    def parameters(self) -> int:
        """All weights: layers, embedding, output matrix where it is one of its own, and the last norm.

        Llama-7B (32 layers, 4096, 11008, 32000, untied): 32·(4·4096² + 3·4096·11008 + 2·4096) + 2·32000·4096 + 4096
        = 6,738,415,616.
        """
        return self.layers * self.layer_parameters + self.vocab * self.hidden * (2 - self.tied) + self.hidden

    @property
    def kv_numbers(self) -> int:
        """Numbers that a token leaves in the cache: 2·layers·kv_heads·head_dim (Llama-7B: 262,144, or 512 KiB in
        bfloat16).
        """
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def traffic(self) -> int:
        """Numbers that one token's operations between the matrix products read and write in one layer [ours].

        Counted over the eager operations of a Llama layer: two norms 14h, two residuals 6h, the rotary
        embedding 10(q + k), the gate 5i, and attention 8q + 2k: keys and values are repeated for every query's head,
        and its output is laid out anew. What products read and write is in their own rate.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 20 * self.hidden + 18 * queries + 12 * keys + 5 * self.intermediate

    @property
    def saved(self) -> int:
        """Numbers of one token that one layer keeps for its backward pass: 6h + 2q + 2k + 4i [ours].

        For h = q = k it is of the size of Korthikanti et al.'s 34·h bytes (arXiv 2205.05198) in 16 bit.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 6 * self.hidden + 2 * queries + 2 * keys + 4 * self.intermediate

    def lora(self, rank: int) -> int:
        """Weights of a LoRA adapter on all seven matrices of every layer: rank·(in + out) each."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = 2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * ends


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in a folder. Its config.json is enough: no weights are read.

    Raises:
        InputError: a configuration that cannot be read, or a mixture of experts, whose cost this does not model.
    """
    from transformers import AutoConfig

    def read() -> Any:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    return _shape(f"{folder}, whose config.json", read)


def shape_from(numbers: Mapping[str, Any]) -> ModelShape:
    """The shape of a model whose folder is not here, from the entries of its config.json that decide it.

    Raises:
        InputError: as `read_shape`.
    """
    from transformers import AutoConfig

    return _shape("numbers that", lambda: AutoConfig.for_model(**numbers))


def _shape(named: str, read: Callable[[], Any]) -> ModelShape:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = read()
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # Every architecture fails in its own way.
    except Exception as error:
        raise InputError(
            "model.name", f"{named} makes no language model ({str(error).splitlines()[0][:120]})",
            "a causal language model that transformers knows",
        ) from error  # fmt: skip
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise InputError("model.name", f"{named} makes a mixture of experts", "a dense model: experts are not modelled")
    hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
    vocab, tied = text.vocab_size, bool(getattr(config, "tie_word_embeddings", False))
    total = sum(p.numel() for p in model.parameters())
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    return ModelShape(
        layers, hidden, heads, getattr(text, "num_key_value_heads", None) or heads,
        getattr(text, "head_dim", None) or hidden // heads, inner, vocab, tied,
        (total - vocab * hidden * (2 - tied) - hidden) // layers,
    )  # fmt: skip
