"""Bytes that a device holds at the fullest moment of a step, by part."""

from __future__ import annotations

from dataclasses import dataclass

from apportion.cost.shape import BYTES, ModelShape

# Tokens of a tile of TRL's fused head; weights of two layers are whole at a time where they are sharded [ours].
_TILE, _WHOLE_LAYERS = 4096, 2
# What a CUDA context, its libraries and fragmentation leave free [ours].
USABLE = 0.92
# Bytes of optimiser state a trained weight, where it is not two numbers of the weight's own type.
_STATES = {"8bit": 2.0, "adafactor": 0.1, "sgd": 0.0}


@dataclass(frozen=True)
class Training:
    """What of a recipe the memory depends on.

    Attributes:
        trained: weights that get gradients. dtype: of the weights; adapter weights are float32.
        compute: dtype of the passes. optimizer: TRL's name. recompute: gradient checkpointing.
        copies: of the whole model beside the policy: a reference. shards: devices that share weights, gradients and
            states. micro: tokens of a micro-batch, padding included; scored: those that reach the vocabulary.
        cached: tokens in the cache while rollouts are generated. engine: bytes that a serving engine takes instead.
        fused: logits are computed in tiles; else those of a whole micro-batch are kept, and their gradients.
        beside: tokens whose logits are computed without gradients while the engine is awake.
    """

    trained: int
    adapter: bool
    dtype: str
    compute: str
    optimizer: str
    recompute: bool
    copies: int
    shards: int
    micro: float
    scored: float
    cached: float
    engine: float = 0.0
    fused: bool = True
    beside: float = 0.0


def memory_of(shape: ModelShape, training: Training) -> dict[str, float]:
    """Bytes by part: weights, reference, gradients, optimizer, activations, logits, cache (or engine), and `peak`.

    The cache (or engine) and what an update needs are never held together: peak = weights + reference + optimizer +
    max(cache, gradients + activations + logits). Llama-7B in float32 with AdamW holds 4 + 4 + 8 bytes a weight: 26.95,
    26.95 and 53.91 GB.
    """
    weight, number = BYTES[training.dtype], BYTES[training.compute]
    kept = 4 if training.adapter else weight
    state = next((size for name, size in _STATES.items() if name in training.optimizer), 2.0 * kept)
    weights = shape.parameters * weight / training.shards + (training.trained * kept if training.adapter else 0)
    if training.shards > 1:
        weights += _WHOLE_LAYERS * shape.layer_parameters * weight
    # Recomputed from its layer's input, one layer at a time.
    layers = shape.layers * shape.hidden + shape.saved if training.recompute else shape.layers * shape.saved
    parts = {
        "weights": weights,
        "reference": training.copies * shape.parameters * weight / training.shards,
        "gradients": training.trained * kept / training.shards,
        "optimizer": training.trained * state / training.shards,
        "activations": training.micro * layers * number,
        # A tile in float32, and its gradient.
        "logits": 2.0 * min(_TILE, training.scored) * shape.vocab * 4,
        "cache": training.cached * shape.kv_numbers * number,
    }
    if not training.fused:
        parts["logits"] += 2.0 * training.scored * shape.vocab * number
    if training.engine:
        del parts["cache"]
        parts["engine"] = training.engine
    update = parts["gradients"] + parts["activations"] + parts["logits"]
    generation = parts.get("engine", parts.get("cache", 0.0)) + training.beside * shape.vocab * number
    return parts | {"peak": parts["weights"] + parts["reference"] + parts["optimizer"] + max(generation, update)}
