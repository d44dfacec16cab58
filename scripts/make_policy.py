"""Make the policy embedded in apportion: a character-level Llama trained on worked chained arithmetic.

    python scripts/make_policy.py

Trains on fresh problems of the train split, and stops by accuracy, not by loss: once the answers sampled at
temperature 1 are right often enough, so that reinforcement learning has something left to teach. It takes
minutes on one core. The same seed, versions and kind of machine give the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
from pathlib import Path

import torch
import transformers
from rich.progress import Progress
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from apportion.tasks import ALPHABET, CORRECTION, ArithmeticTask, Problem, Split, check_steps, generate, verify

POLICY = Path(__file__).resolve().parents[1] / "src/apportion/tasks/policy"
MAIN = 8  # operations of the main setting
BATCH = {count: 16 if count == MAIN else 6 for count in range(4, 13)}  # operations: problems, 64 in all
LEARNING_RATE = 3e-3
CHECK_EVERY, CHECK_SIZE, TEST_SIZE = 10, 512, 200
HOPELESS = 0.1  # mean loss a token above which few solutions come out right, so that sampling is not worth it
HELD_OUT = 10**9  # seeds from here on are not trained on


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; no token of its own, no clean-up, an error on any other character."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    characters = Tokenizer(models.WordLevel(vocabulary))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,  # generation on CPU is bound by the cache: this doubles its speed
        head_dim=32,  # vLLM on CPU has no kernel for heads of 16
        max_position_embeddings=1024,
        initializer_range=0.1,  # about 1 / sqrt(hidden size); the usual 0.02 learns half as fast here
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def solution_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> torch.Tensor:
    """Mean cross-entropy over the tokens of the worked solutions and their EOS."""
    texts = [problem.prompt + problem.solution + tokenizer.eos_token for problem in problems]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, problem in zip(labels, problems, strict=True):
        row[: len(problem.prompt)] = -100
    return model(**batch, labels=labels).loss


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], max_new_tokens: int
) -> list[str]:
    """One response a prompt, from the policy's own distribution; prompts of one length."""
    batch = tokenizer(prompts, return_tensors="pt")
    ids = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: ArithmeticTask,
    split: Split,
    count: int,
    group: int,
) -> dict[str, float]:
    """How ``group`` responses to each of ``count`` problems fare; the standard error is that over problems."""
    problems = [problem for problem in generate(task, split, count) for _ in range(group)]
    responses = sample(model, tokenizer, [problem.prompt for problem in problems], task.max_response)
    pairs = list(zip(problems, responses, strict=True))
    right = torch.tensor([verify(response, problem) for problem, response in pairs])
    share = right.view(count, group).double().mean(1)
    paragraphs = [ok for problem, response in pairs for _, ok in check_steps(problem, response)]
    return {
        "problems": count,
        "group": group,
        "accuracy": share.mean().item(),
        "stderr": share.std().item() / math.sqrt(count),
        "mixed_groups": ((share > 0) & (share < 1)).double().mean().item(),
        "paragraphs_ok": sum(paragraphs) / len(paragraphs),
        "responses_with_correction": sum(CORRECTION in response for response in responses) / len(responses),
    }


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, target: float, detour: float, most_steps: int
) -> int:
    """Trains until the sampled accuracy on held-out problems reaches ``target``; the steps it took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    held_out = ArithmeticTask(MAIN, seed=HELD_OUT)
    with Progress() as progress:
        bar = progress.add_task("", total=most_steps)
        accuracy = 0.0
        for step in range(1, most_steps + 1):
            fresh = [
                problem
                for operations, count in BATCH.items()
                for problem in generate(ArithmeticTask(operations, detour=detour, seed=step), "train", count)
            ]
            loss = solution_loss(model, tokenizer, fresh)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(bar, advance=1, description=f"loss {loss.item():.3f}  accuracy {accuracy:.3f}")
            if step % CHECK_EVERY or loss.item() > HOPELESS:
                continue
            accuracy = measure(model, tokenizer, held_out, "train", CHECK_SIZE, group=1)["accuracy"]
            progress.console.print(f"step {step}: loss {loss.item():.3f}, accuracy {accuracy:.3f}")
            if accuracy >= target:
                return step
    raise SystemExit(f"accuracy {accuracy:.3f} after {most_steps} steps, target {target}: raise --most-steps")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded policy.")
    parser.add_argument("--out", type=Path, default=POLICY, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.35, help="sampled accuracy at which training stops")
    parser.add_argument("--detour", type=float, default=0.1, help="share of worked solutions with a detour")
    parser.add_argument("--most-steps", type=int, default=2000)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    steps = train(model, tokenizer, options.target, options.detour, options.most_steps)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)  # written for the owner alone, but packages are for all

    by_operations = {}
    for operations in BATCH:
        by_operations[operations] = measure(model, tokenizer, ArithmeticTask(operations), "test", TEST_SIZE, group=8)
        print(operations, by_operations[operations])
    card = {
        "command": " ".join(["python", "scripts/make_policy.py", *sys.argv[1:]]),
        **{name: value for name, value in vars(options).items() if name != "out"},
        "steps": steps,
        "parameters": model.num_parameters(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.machine(),
        "split": "test",
        "temperature": 1.0,
        "by_operations": by_operations,
        "sha256": hashlib.sha256((options.out / "model.safetensors").read_bytes()).hexdigest(),
    }
    (options.out / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
