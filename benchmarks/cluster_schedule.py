"""Efficiency of probe scheduling on 8 to 512 replicas: apportion's own scheduler, simulated replicas.

    python benchmarks/cluster_schedule.py              measures here, simulates, into benchmarks/cluster_schedule.json
    python benchmarks/cluster_schedule.py --measured   simulates with the figures that are in the JSON
    python benchmarks/cluster_schedule.py --ray        only measures Ray, in an environment that has it, into the JSON

What is simulated and how: `simulated_cluster`. Its figures, three sets:

  embedded   measured here: seconds of a decoding step with b sequences and of a prefilled token, by the transformers
             engine; prefixes, budgets and lengths of the continuations of a ProbePO run that trains (B = 40, M = 8)
  smollm2    the same of SmolLM2-135M, whose continuations are asked for at random positions of its own responses
  qwen3-4b   not measured: the roofline of `apportion.cost` for one H100 (data sheet figures, see `cost/hardware.py`)
             without the host's overheads, for an engine that runs graphs; lengths are smollm2's, stretched to a
             response limit of 4096 tokens

Weak scaling gives each replica 16 prompts of 8 responses (ProbePO's 128 on 8), strong scaling shares 1024 over all.
A group has five pivots of eight continuations, drawn with replacement from the measured groups.

`efficiency` is ideal/makespan. The makespan is the simulated time from the first send until the last answer is with the
driver. The ideal is what no schedule can be below, max(work, chain): `work` is every token at the best rate that a
batch of any size reaches and every prefix prefilled once, shared by all replicas; `chain` is the longest continuation
alone on a replica. Where `chain` is the larger, replicas stand idle whatever is done, and an efficiency says little:
`work_over_makespan` then shows what is used of them. "lengths known" is the efficiency of a schedule that no driver can
have: it knows every length, gives each state to the replica with the least work, starts the longest first, and takes no
time itself. Under weak scaling a replica serves 7 to 20 continuations in each of its slots, one after the other; with
more slots the last of them weigh more.

Ray's processor seconds (`measured.ray`) count unless a key says otherwise. verl's balancer is one process and takes two
calls a continuation, so that no cluster serves more than 1/(2 actor_s_a_call) continuations a second: embedded's end
within milliseconds and meet that limit at 16 replicas, which says nothing of models that need a cluster.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from apportion.cost.hardware import Overheads, find_hardware
from apportion.cost.roofline import Call, decode, seconds
from apportion.cost.shape import ModelShape
from apportion.engines.base import Key, Request, Sampling
from apportion.integrations.verl.scheduler import Piece, Scheduler
from simulated_cluster import Engine, Host, State, bounds, serve

HERE = Path(__file__).with_suffix(".json")
SIZES = (8, 16, 32, 64, 128, 256, 512)
PIVOTS, SAMPLES, PROMPTS_A_REPLICA, PROMPTS = 5, 8, 16, 1024
# (prompt tokens, prefix tokens, budget, sample, lengths) of each pivot of a measured group.
Group = list[tuple[int, int, int, int, list[int]]]
MODELS: dict[str, dict[str, Any]] = {
    "embedded": {
        "dtype": "float32",
        "slots": 64,
        "batches": (1, 2, 4, 8, 16, 32, 64, 128, 256),
        "prefix": 60,
        "new": 24,
    },
    "smollm2": {"dtype": "bfloat16", "slots": 32, "batches": [2**i for i in range(6)], "prefix": 160, "new": 8},
}
QUESTION = "Explain step by step how to find the sum of all whole numbers from 1 to {}, and give the sum."
SMOL_LIMIT, LIMIT = 320, 4096
# What may be out, in times what a replica decodes at once; the replicas of the runs that compare choices.
TIMES, OTHER_TIMES, MIDDLE = 2, (0.5, 1, 1.5, 3, 4), 16
# verl's default number of agent workers, which ours is; a worker's calls of actors for each continuation.
WORKERS, CALLS = 8, 4
SETS = ("embedded", "smollm2", "qwen3-4b")


def engine_of(name: str) -> Any:
    from apportion.engines.transformers import TransformersEngine
    from apportion.train.models import load_model, load_tokenizer, model_folder

    folder = model_folder(name)
    tokenizer: Any = load_tokenizer(folder)
    model: Any = load_model(folder, MODELS[name]["dtype"]).eval()
    return TransformersEngine(model, tokenizer.pad_token_id), tokenizer


def curve_of(name: str, rounds: int = 5) -> dict[str, Any]:
    """Seconds of a step by batch, and of a prefilled token: differences of calls, medians of rounds taken in turns.

    Of the one thread's own processor time, for others use this machine too.
    """
    how = MODELS[name]
    engine, _ = engine_of(name)
    never, draw = Sampling(stop_ids=(-1,)), random.Random(0)

    def taken(requests: int, samples: int, budget: int, prefix: int) -> float:
        prefixes = [tuple(draw.choices(range(5, 15), k=prefix)) for _ in range(requests)]
        asked = [Request(Key("b", 0, str(i), 0, 0), ids, samples, budget) for i, ids in enumerate(prefixes)]
        start = time.process_time()
        list(engine.continuations(asked, never))
        return time.process_time() - start

    steps: dict[int, list[float]] = defaultdict(list)
    prefill: list[float] = []
    length, new, rows = how["prefix"], how["new"], 16
    for turn in range(rounds + 1):
        for b in how["batches"]:
            found = (taken(1, b, new + 1, length) - taken(1, b, 1, length)) / new
            if turn:  # the first round warms up
                steps[b].append(found)
        found = (taken(rows, 1, 1, length) - taken(rows, 1, 1, length // 4)) / (rows * (length - length // 4))
        if turn:
            prefill.append(found)
    # Noise may let a larger batch look faster than a smaller one.
    curve, least = list[tuple[int, float]](), 0.0
    for b in how["batches"]:
        least = max(least, median(steps[b]))
        curve.append((b, round(least, 7)))
    return {"slots": how["slots"], "steps": curve, "prefill": round(max(median(prefill), 0.0), 8)}


def embedded_groups(steps: int = 3) -> list[Group]:
    """The pivots that ProbePO probed in a run that trains, by group, and how long their continuations were."""
    from apportion.records import RunFolder
    from apportion.train.prepare import prepare
    from apportion.train.run import train
    from apportion.train.settings import load_config

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            None,
            {
                "method.name": "probepo", "method.budget": PIVOTS * SAMPLES, "method.samples": SAMPLES,
                "method.min_gap": 4, "run.folder": folder, "run.steps": steps, "run.threads": 1,
                "run.evaluate_samples": 0, "run.predict": "off", "run.checkpoint_every": 1000,
            },
        )  # fmt: skip
        limit = prepare(config).args.max_completion_length
        train(prepare(config))
        run, groups = RunFolder(folder), defaultdict[tuple[int, str], dict[tuple[int, int], list[int]]](dict)
        prompts: dict[tuple[int, str], int] = {}
        for step in run.steps():
            for row in run.read("rollouts", step):
                prompts[step, row["group"]] = len(row["prompt_ids"])
            for row in run.read("evidence", step):
                if row["kind"] == "continuations":
                    pivots = groups[step, row["group"]]
                    pivots.setdefault((row["row"], row["position"]), []).append(len(row["token_ids"]))
    return [
        [
            (prompts[name], prompts[name] + position, limit - position, row, lengths)
            for (row, position), lengths in pivots.items()
        ]
        for name, pivots in groups.items()
        if len(pivots) == PIVOTS
    ]


def smol_groups(prompts: int = 6, responses: int = 2, pivots: int = 2) -> list[Group]:
    """Continuations from random positions of sampled responses."""
    engine, tokenizer = engine_of("smollm2")
    sampling = Sampling(stop_ids=(tokenizer.eos_token_id,))
    asked, place = [], random.Random(0)
    for i in range(prompts):
        chat = [{"role": "user", "content": QUESTION.format(20 + i)}]
        ids = tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        asked.append(Request(Key("rollout", 0, str(i), 0, 0), ids, responses, SMOL_LIMIT))
    found = list(engine.continuations(asked, sampling))
    probes, opening = [], {r.key.prompt: r.prefix_ids for r in asked}
    for c in found:
        for p in sorted(place.sample(range(1, len(c.token_ids)), min(pivots, len(c.token_ids) - 1))):
            key = Key("probe", 0, c.key.prompt, c.m, p)
            prefix = (*opening[c.key.prompt], *c.token_ids[:p])
            probes.append(Request(key, prefix, SAMPLES, SMOL_LIMIT - p))
    lengths: dict[Key, list[int]] = defaultdict(list)
    for c in engine.continuations(probes, sampling):
        lengths[c.key].append(len(c.token_ids))
    groups: dict[str, Group] = defaultdict(list)
    for r in probes:
        row = (len(opening[r.key.prompt]), len(r.prefix_ids), r.budget, r.key.sample, lengths[r.key])
        groups[r.key.prompt].append(row)
    return list(groups.values())


def roofline(groups: Sequence[Group]) -> tuple[dict[str, Any], list[Group]]:
    """Qwen3-4B on an H100, and the groups with everything behind the prompt stretched to a limit of 4096 tokens."""
    shape = ModelShape.llama(36, 2560, 32, 8, 128, 9728, 151_936, True)
    gpu = replace(find_hardware("h100"), overheads=Overheads())
    by = LIMIT / SMOL_LIMIT
    stretched = [
        [
            (prompt, prompt + round(by * (prefix - prompt)), round(by * budget), row, [round(by * n) for n in lengths])
            for prompt, prefix, budget, row, lengths in group
        ]
        for group in groups
    ]
    pivots = [pivot for group in stretched for pivot in group]
    width = mean(prefix + n / 2 for _, prefix, _, _, lengths in pivots for n in lengths)
    # What is left of 80 % of the memory for keys and values of 2 bytes.
    room = (0.8 * gpu.memory - 2 * shape.parameters) / (2 * shape.kv_numbers * (width + 512))
    slots = int(min(256, room) // 16 * 16)
    batches = sorted({1, 2, 4, 8, 16, 32, 64, 96, 128, slots} & set(range(slots + 1)))
    steps = [(b, round(seconds(decode(1, b, width, "slots"), shape, gpu, "bfloat16"), 6)) for b in batches]
    long = 2048
    prefill = seconds(Call(1, long, long * long / 2), shape, gpu, "bfloat16") / long
    return {"slots": slots, "steps": steps, "prefill": round(prefill, 8)}, stretched


def batch(groups: Sequence[Group], prompts: int) -> list[State]:
    """`prompts` groups drawn with replacement, with the pivots that a measured group lacks drawn again."""
    draw, states = random.Random(0), list[State]()
    for p in range(prompts):
        group = draw.choice(groups)
        pivots = draw.sample(group, PIVOTS) if len(group) >= PIVOTS else draw.choices(group, k=PIVOTS)
        for k, (prompt, prefix, budget, row, lengths) in enumerate(pivots):
            # The pivot's number keeps the keys of pivots that were drawn twice apart.
            key = Key("s", 0, str(p), row, prefix * PIVOTS + k)
            own = tuple(lengths) if len(lengths) == SAMPLES else tuple(draw.choices(lengths, k=SAMPLES))
            states.append(State(Request(key, (0,), SAMPLES, budget), prompt, prefix, own))
    return states


def known(states: Sequence[State], engine: Engine, replicas: int) -> float:
    """Makespan with lengths known, longest first, each state where the least work is, and a free host."""
    loads, shares = [(0, i) for i in range(replicas)], defaultdict[int, list[State]](list)
    for state in sorted(states, key=lambda s: -sum(s.lengths)):
        load, i = heapq.heappop(loads)
        shares[i].append(state)
        heapq.heappush(loads, (load + sum(state.lengths), i))
    return max(serve([first(s) for s in share], engine, 1, Host(1), 1 << 30)["makespan_s"] for share in shares.values())


def first(state: State) -> State:
    """The budget says what the length will be: longest budget first is longest first."""
    return replace(state, request=replace(state.request, budget=max(state.lengths)))


class Arrival(Scheduler[int]):
    @staticmethod
    def _rank(piece: Piece) -> tuple[int, int]:
        return 0, 0


def by_response(piece: Piece) -> str:
    key = piece.request.key
    return f"{key.prompt}-{key.sample}"


def one(states: list[State], engine: Engine, replicas: int, host: Host, in_flight: int, **how: Any) -> dict[str, Any]:
    low = bounds(states, engine, replicas)
    found = serve(states, engine, replicas, host, in_flight, **how)
    ideal = max(low.values())
    return {
        "efficiency": round(ideal / found["makespan_s"], 3),
        "work_over_makespan": round(low["work_s"] / found["makespan_s"], 3),
        **{name: round(value, 4) for name, value in low.items()}, "makespan_s": round(found["makespan_s"], 4),
        "busy": round(found["busy"], 3), "pieces": found["pieces"],
        "scheduler_us_a_piece": round(found["scheduler_s_a_piece"] * 1e6, 1),
    }  # fmt: skip


def measure_ray(out: int = 4096, pieces: int = 8192) -> dict[str, Any]:
    """Seconds of the driver for a piece, sent and taken, where so many are out, and of one actor for a call it serves.

    Processor time of all threads of the one process, for others use this machine too.
    """
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error")

    @ray.remote(num_cpus=0)
    class Echo:
        def probe(self, piece: Piece) -> list[int]:
            return list(piece.numbers)

        def acquire(self, name: str) -> int:
            return len(name)

        def spent(self) -> float:
            return time.process_time()

    echo: Any = Echo.remote()
    asked = [Request(Key("r", 0, str(i), 0, 0), tuple(range(1024)), SAMPLES, pieces - i) for i in range(pieces)]
    work = Scheduler(asked, [0], in_flight=out * SAMPLES)
    waiting: dict[Any, Piece] = {}
    ray.get(echo.acquire.remote(""))
    begun = time.process_time()
    while not work.done:
        waiting |= {echo.probe.remote(piece): piece for _, piece in work.start(0.0)}
        ray.wait(list(waiting), num_returns=1)
        for ref in ray.wait(list(waiting), num_returns=len(waiting), timeout=0)[0]:
            piece = waiting.pop(ref)
            work.came(piece, ray.get(ref), 0.0)
    piece_s = (time.process_time() - begun) / pieces
    begun, own = ray.get(echo.spent.remote()), time.process_time()
    for _ in range(4):
        ray.get([echo.acquire.remote(str(i)) for i in range(pieces // 4)])
    call_s, own_s = (ray.get(echo.spent.remote()) - begun) / pieces, (time.process_time() - own) / pieces
    ray.shutdown()
    return {
        "version": ray.__version__, "pieces_out": out, "driver_s_a_piece": round(piece_s, 6),
        "actor_s_a_call": round(call_s, 6), "caller_s_a_call": round(own_s, 6),
    }  # fmt: skip


def study(groups: Sequence[Group], engine: Engine, host: Host, sizes: Sequence[int]) -> dict[str, Any]:
    """Weak and strong scaling with the defaults, and at a few replicas every other choice."""
    some, default = batch(groups, PROMPTS_A_REPLICA * MIDDLE), TIMES * engine.slots
    free = replace(host, driver_s=0.0, worker_s=0.0, balancer_s=0.0)

    def chosen(host: Host = host, in_flight: int = default, **how: Any) -> float:
        return float(one(some, engine, MIDDLE, host, in_flight, **how)["efficiency"])

    return {
        "engine": asdict(engine), "in_flight": default,
        "lengths": quantiles([n for group in groups for pivot in group for n in pivot[4]]),
        "weak": {str(n): one(batch(groups, PROMPTS_A_REPLICA * n), engine, n, host, default) for n in sizes},
        "strong": {str(n): one(batch(groups, PROMPTS), engine, n, host, default) for n in sizes},
        "weak_where_ray_takes_no_time": {
            str(n): one(batch(groups, PROMPTS_A_REPLICA * n), engine, n, free, default) for n in sizes[-1:]
        },
        f"efficiency_at_{MIDDLE}": {
            "default": chosen(),
            **{f"in_flight={times:g}*slots": chosen(in_flight=int(times * engine.slots)) for times in OTHER_TIMES},
            "as asked, not longest first": chosen(scheduler=Arrival),
            "one name a response": chosen(route=by_response),
            "one worker": chosen(replace(host, workers=1)),
            "a worker a replica": chosen(replace(host, workers=MIDDLE)),
        },
        f"efficiency_at_{MIDDLE}_with_slots": {
            str(n): with_slots(some, replace(engine, slots=n), host)
            for n in (engine.slots // 2, engine.slots, 2 * engine.slots, 4 * engine.slots)
            if n <= engine.steps[-1][0]
        },
    }  # fmt: skip


def with_slots(states: list[State], engine: Engine, host: Host) -> dict[str, float]:
    ideal = max(bounds(states, engine, MIDDLE).values())
    return {
        "default": one(states, engine, MIDDLE, host, TIMES * engine.slots)["efficiency"],
        "lengths known": round(ideal / known(states, engine, MIDDLE), 3),
    }


def quantiles(values: Sequence[int]) -> dict[str, float]:
    ranked = sorted(values)
    return {
        "mean": round(mean(ranked), 1),
        **{f"p{q}": ranked[min(len(ranked) - 1, q * len(ranked) // 100)] for q in (10, 50, 90, 99)},
        "longest": ranked[-1], "continuations": len(ranked),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(SETS), help=", ".join(SETS))
    parser.add_argument("--measured", action="store_true", help="simulate with the figures in the JSON")
    parser.add_argument("--ray", action="store_true", help="only measure Ray")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of replicas")
    parser.add_argument("-o", "--output", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = options.output if options.output.exists() else HERE
    found: dict[str, Any] = json.loads(source.read_text()) if source.exists() else {"measured": {}}
    figures = found["measured"]
    if options.ray:
        figures["ray"] = measure_ray()
    elif not options.measured:
        figures["embedded"] = {"engine": curve_of("embedded"), "groups": embedded_groups()}
        figures["smollm2"] = {"engine": curve_of("smollm2", 3), "groups": smol_groups()}
    if not options.ray:
        spent = figures["ray"]
        host = Host(WORKERS, spent["driver_s_a_piece"], CALLS * spent["caller_s_a_call"], spent["actor_s_a_call"])
        for name in options.sets:
            groups = figures["embedded" if name == "embedded" else "smollm2"]["groups"]
            engine = None if name == "qwen3-4b" else figures[name]["engine"]
            if engine is None:
                engine, groups = roofline(groups)
            found[name] = study(groups, Engine(**engine), host, [int(n) for n in options.sizes.split(",")])
            print(name, json.dumps(found[name], indent=2), flush=True)
    found = {"command": "python benchmarks/cluster_schedule.py", **{k: v for k, v in found.items() if k != "command"}}
    options.output.write_text(compact(found) + "\n", encoding="utf-8")


def compact(found: dict[str, Any]) -> str:
    """Indented, but the measured groups and curves on a line each."""
    text = json.dumps(found, indent=2)
    return re.sub(r"\[[\d\s.,e\[\]-]*\]", lambda m: re.sub(r"\s+", " ", m[0]), text)


if __name__ == "__main__":
    main()
