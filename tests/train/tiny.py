"""A random policy of a few thousand parameters whose responses hold paragraphs, and rewards that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from apportion.train import CreditConfig, CreditTrainer

WORDS = ["<pad>", "<eos>", "a", "b", "c", "1", "2", "3", "+", "=", "\n\n"]

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '+' + m['content'] + '=' }}"
    "{% else %}{{ m['content'] + '<eos>' }}{% endif %}{% endfor %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n\n|[\s\S]"), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left",
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    tokenizer.chat_template = CHAT
    return tokenizer


def save_model(folder: Path, dropout: float = 0.0) -> Path:
    """A folder with a tiny Llama, always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        attention_dropout=dropout, initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder)


def dataset(rows: int = 8, chat: bool = False) -> Dataset:
    prompts = ["".join(WORDS[2 + (i + j) % 6] for j in range(2 + i % 3)) for i in range(rows)]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": p}] for p in prompts] if chat else prompts,
            "answer": [WORDS[5 + i % 3] for i in range(rows)],
        }
    )


def last_digit(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 where the last of 1, 2, 3 in the text is the row's answer."""
    out = []
    for completion, gold in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        digits = [c for c in text if c in "123"]
        out.append(float(bool(digits) and digits[-1] == gold))
    return out


PROBEPO: dict[str, Any] = {"budget": 8, "samples": 4, "min_gap": 1, "window": 2}


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 24, "learning_rate": 1e-2, "max_steps": 2, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "disable_tqdm": True, "logging_steps": 1, "seed": 7, **changes,
    }  # fmt: skip


def trainer(policy: Path, folder: Path, *, cls: type[CreditTrainer] = CreditTrainer, **changes: Any) -> CreditTrainer:
    """A trainer on CPU; `changes` go to `CreditConfig`, those that `CreditTrainer` knows to it."""
    own = {
        key: changes.pop(key)
        for key in (
            "model",
            "reward_funcs",
            "train_dataset",
            "eval_dataset",
            "peft_config",
            "callbacks",
            "processing_class",
            "step_verifier",
        )
        if key in changes
    }
    method = changes.pop("method", "probepo")
    settings = PROBEPO if method == "probepo" and "credit" not in changes else {}
    args = CreditConfig(**options(folder, method=method, **{**settings, **changes}))
    given: dict[str, Any] = {
        "model": load(policy), "reward_funcs": last_digit, "train_dataset": dataset(),
        "processing_class": make_tokenizer(), **own,
    }  # fmt: skip
    return cls(args=args, **given)


class StopAfter(TrainerCallback):
    """Ends a run after some steps; its learning rate is that of the whole run all the same."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.steps


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
