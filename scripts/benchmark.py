#!/usr/bin/env python
"""
Time and memory of HKT attention against standard attention: python scripts/benchmark.py --output-dir benchmark

Two parts: the attention core alone (forward, and forward + backward) and a whole training step of hkt-small against its
MHA twin. All implementations of a shape run in turn in one process, so that they meet the same machine; ratios are the
medians of the ratios within one round. Writes results.json, a Markdown table and a plot, and again after every shape.
"""

import argparse
import ctypes
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from hkt_hf import HKTConfig, HKTForSequenceClassification, fused_multiscale_attention
from hkt_hf.attention_hkt import concatenate_levels, level_length, reference_multiscale_attention
from hkt_hf.training.provenance import environment

NUM_LEVELS, STRIDE = 3, 2
# Per model: its changes to hkt-small, and the attention implementation.
MODELS = {
    "MHA": ({"num_levels": 1, "hybrid": False}, "sdpa"),
    "naive": ({}, "eager"),
    "concatenated": ({}, "sdpa"),
    "fused": ({}, "hkt_fused"),
}
# The reference holds several T x T matrices per pair of batch row and head.
NAIVE_LIMIT_BYTES = 4 * 2**30
# After that much time a shape is content with three rounds.
SECONDS_PER_SHAPE = 60


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--model-tokens", type=int, nargs="*", default=[512, 1024, 2048, 16384])
    parser.add_argument("--head-size", type=int, nargs="+", default=[64])
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each implementation and shape")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmark"))
    options = parser.parse_args(arguments)

    shapes = [
        {"num_tokens": num_tokens, "head_size": head_size, "dtype": dtype, "is_causal": is_causal}
        for dtype in options.dtype
        for head_size in options.head_size
        for num_tokens in options.tokens
        for is_causal in (False, True)
    ]
    results = {
        "environment": environment() | {"sdpa_backend": "flash (forced)"},
        "command": " ".join(["python", "scripts/benchmark.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "core": [],
        "training_step": [],
        "profile": {},
    }
    with tqdm(total=len(shapes) + len(options.model_tokens), unit="shape") as progress:
        for shape in shapes:
            progress.set_description(f"core, {shape['num_tokens']} tokens")
            results["core"] += measure_core(**shape, device=options.device, rounds=options.rounds)
            write(results, options.output_dir)
            progress.update()
        for num_tokens in options.model_tokens:
            progress.set_description(f"training step, {num_tokens} tokens")
            results["training_step"] += measure_training(num_tokens, options.device, options.rounds)
            write(results, options.output_dir)
            progress.update()
    if options.model_tokens:
        num_tokens = min(options.model_tokens, key=lambda tokens: abs(tokens - 1024))
        results["profile"] = {"tokens": num_tokens, "operators": profile_training(num_tokens, options.device)}
        write(results, options.output_dir)
    print((options.output_dir / "README.md").read_text())
    return 0


def write(results: dict[str, object], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "README.md").write_text(markdown(results))
    plot(results, folder / "benchmark.png")


def measure_core(
    num_tokens: int, head_size: int, dtype: str, is_causal: bool, device: str, rounds: int
) -> list[dict[str, object]]:
    """Rows of results for every implementation of the attention core at one shape."""
    batch_size, num_heads = (4 if num_tokens <= 4096 else 1), 4
    tensor_options = {"device": device, "dtype": getattr(torch, dtype)}

    def states(length: int) -> torch.Tensor:
        # As a layer makes them: [B, T, H, d], transposed.
        return torch.randn(batch_size, length, num_heads, head_size, **tensor_options).transpose(1, 2).requires_grad_()

    torch.manual_seed(0)
    lengths = [level_length(num_tokens, STRIDE, level) for level in range(NUM_LEVELS)]
    query_levels, key_levels = [states(length) for length in lengths], [states(length) for length in lengths]
    value, grad_output = states(num_tokens), torch.randn_like(states(num_tokens))
    level_weights = torch.randn(num_heads, 1, NUM_LEVELS, **tensor_options).softmax(-1).requires_grad_()
    scaling = head_size**-0.5

    def standard() -> torch.Tensor:
        return scaled_dot_product_attention(query_levels[0], key_levels[0], value, is_causal=is_causal, scale=scaling)

    options = {"stride": STRIDE, "scaling": scaling}
    levels = (query_levels, key_levels, value, level_weights)

    def naive() -> torch.Tensor:
        mask = causal_mask(num_tokens, device) if is_causal else None
        return reference_multiscale_attention(*levels, mask, **options)

    def concatenated() -> torch.Tensor:
        query, key, padded_value = concatenate_levels(*levels, stride=STRIDE)
        output = scaled_dot_product_attention(query, key, padded_value, is_causal=is_causal, scale=scaling)
        return output[..., :head_size]

    def fused() -> torch.Tensor:
        return fused_multiscale_attention(*levels, is_causal=is_causal, **options)

    functions: dict[str, Callable] = {"SDPA": standard, "concatenated": concatenated, "fused": fused}
    if 8 * 4 * batch_size * num_heads * num_tokens**2 <= NAIVE_LIMIT_BYTES:
        functions["naive"] = naive
    leaves = {name: [*query_levels, *key_levels, value, level_weights] for name in functions}
    leaves["SDPA"] = [query_levels[0], key_levels[0], value]

    def forward(name: str) -> None:
        with torch.no_grad():
            functions[name]()

    def forward_backward(name: str) -> None:
        torch.autograd.grad(functions[name](), leaves[name], grad_output)

    rows = []
    for direction, step in (("forward", forward), ("forward + backward", forward_backward)):
        # Multiply-adds count 2. A product of the scores counts once forward and three times with the backward pass
        # (itself again, and two gradients), one of the values once and twice more.
        passes = (1, 1) if direction == "forward" else (4, 3)
        for row in alternate({name: functools.partial(step, name) for name in functions}, "SDPA", device, rounds):
            shares = (
                1 if row["implementation"] == "SDPA" else sum(STRIDE ** (-2 * level) for level in range(NUM_LEVELS))
            )
            pairs = batch_size * num_heads * num_tokens**2 * (0.5 if is_causal else 1)
            work = 2 * head_size * pairs * (passes[0] * shares + passes[1])
            rows.append(
                {
                    "tokens": num_tokens,
                    "batch_size": batch_size,
                    "heads": num_heads,
                    "head_size": head_size,
                    "dtype": dtype,
                    "causal": is_causal,
                    "direction": direction,
                    **row,
                    "tokens_per_second": batch_size * num_tokens / row["median_seconds"],
                    "achieved_gflops": work / row["median_seconds"] / 1e9,
                }
            )
    return rows


@functools.cache
def causal_mask(num_tokens: int, device: str) -> torch.Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()


def measure_training(num_tokens: int, device: str, rounds: int) -> list[dict[str, object]]:
    """Rows of results for a training step (forward, backward, AdamW) of hkt-small and of its MHA twin."""
    batch_size = 8 if num_tokens <= 4096 else 1
    names = [name for name in MODELS if name != "naive" or 12 * 4 * batch_size * 4 * num_tokens**2 <= NAIVE_LIMIT_BYTES]
    steps = {name: training_step(name, num_tokens, batch_size, device) for name in names}
    return [
        {
            "tokens": num_tokens,
            "batch_size": batch_size,
            **row,
            "tokens_per_second": batch_size * num_tokens / row["median_seconds"],
        }
        for row in alternate(steps, "MHA", device, rounds)
    ]


def training_step(name: str, num_tokens: int, batch_size: int, device: str) -> Callable[[], None]:
    changes, implementation = MODELS[name]
    torch.manual_seed(0)
    config = HKTConfig(max_position_embeddings=num_tokens, **changes)
    model = HKTForSequenceClassification(config).to(device).train()
    model.set_attn_implementation(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    input_ids = torch.randint(5, 261, (batch_size, num_tokens), device=device)
    labels = torch.arange(batch_size, device=device) % 2

    def step() -> None:
        model(input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def alternate(steps: dict[str, Callable], baseline: str, device: str, rounds: int) -> list[dict[str, object]]:
    """Runs all steps in turn, so that noise of the machine meets all of them, then measures the memory of each."""

    def run(step: Callable) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        # Forced: a fallback of PyTorch to another kernel is an error.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    start = time.perf_counter()
    for step in steps.values():
        if run(step) < 1:
            run(step)
    seconds = {name: [] for name in steps}
    for index in range(rounds):
        if index >= 3 and time.perf_counter() - start > SECONDS_PER_SHAPE:
            break
        for name, step in steps.items():
            seconds[name].append(run(step))
    rows = []
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[baseline], strict=True)]
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        rows.append(
            {
                "implementation": name,
                "rounds": len(times),
                "median_seconds": statistics.median(times),
                "quartiles_seconds": [quartiles[0], quartiles[2]],
                "ratio": statistics.median(ratios),
                "peak_bytes": peak_bytes(functools.partial(run, steps[name]), device),
            }
        )
    return rows


def peak_bytes(step: Callable, device: str) -> int | None:
    """How much more memory than before one step holds at its peak. On CPU: resident memory, on Linux alone."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    if not sys.platform.startswith("linux"):
        return None
    # Memory that was freed but kept for later would hide what a step needs. Then resets the peak of this process.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    step()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def profile_training(num_tokens: int, device: str) -> dict[str, list[dict[str, object]]]:
    """Where a training step of the fused model and of its MHA twin spends its time, by operator."""
    profiles = {}
    for name in ("MHA", "concatenated", "fused"):
        step = training_step(name, num_tokens, 8, device)
        step()
        with torch.profiler.profile() as profiler:
            step()
        events = sorted(profiler.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
        total = sum(event.self_cpu_time_total for event in events)
        profiles[name] = [
            {"operator": event.key, "calls": event.count, "share": event.self_cpu_time_total / total}
            for event in events[:12]
        ]
    return profiles


def markdown(results: dict[str, object]) -> str:
    """The tables, with what they were measured on."""
    environment = results["environment"]
    versions = ", ".join(f"{name} {environment['versions'][name]}" for name in ("python", "torch", "transformers"))
    lines = [
        "# Time and memory of HKT attention",
        "",
        f"`{results['command']}` on {environment['device']}, {environment['threads']} threads, {versions}, commit "
        f"{environment['commit']}. L = {NUM_LEVELS}, s = {STRIDE}, static level weights. Medians of alternating runs; "
        "the ratio is the median of the ratios within a round. Memory is what a step adds at its peak. GFLOP/s count "
        "coarse scores once per block; concatenation does up to L times that work.",
        "",
        "![Time and memory over the number of tokens](benchmark.png)",
        "",
    ]
    groups: dict[tuple, list[dict]] = {}
    for row in results["core"]:
        key = (row["dtype"], row["head_size"], "causal" if row["causal"] else "not causal", row["direction"])
        groups.setdefault(key, []).append(row)
    for (dtype, head_size, causal, direction), rows in groups.items():
        lines += [f"## Attention core: {direction}, {causal}, {dtype}, d = {head_size}", ""]
        lines += table(rows, "SDPA")
    if results["training_step"]:
        lines += ["## Training step of hkt-small (input-dependent level weights, AdamW) and of its MHA twin", ""]
        lines += table(results["training_step"], "MHA")
    for name, operators in results["profile"].get("operators", {}).items():
        tokens = results["profile"]["tokens"]
        lines += [f"## Where a training step spends its time: {name}, {tokens} tokens, batch 8", ""]
        lines += ["| operator | calls | share |", "|---|---|---|"]
        lines += [f"| {row['operator']} | {row['calls']} | {row['share']:.1%} |" for row in operators] + [""]
    return "\n".join(lines)


def table(rows: list[dict[str, object]], baseline: str) -> list[str]:
    lines = [
        f"| tokens | batch | implementation | ms | quartiles | tokens/s | / {baseline} | GFLOP/s | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = (f"{1e3 * seconds:.1f}" for seconds in row["quartiles_seconds"])
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
        gflops = f"{row['achieved_gflops']:.0f}" if "achieved_gflops" in row else ""
        lines.append(
            f"| {row['tokens']} | {row['batch_size']} | {row['implementation']} | {1e3 * row['median_seconds']:.1f} "
            f"| {low} - {high} | {row['tokens_per_second']:.0f} | {row['ratio']:.2f} | {gflops} | {memory} |"
        )
    return [*lines, ""]


def plot(results: dict[str, object], path: Path) -> None:
    """Time and memory of forward + backward over the number of tokens, log-log."""
    rows = [row for row in results["core"] if row["direction"] == "forward + backward" and not row["causal"]]
    rows = [row for row in rows if (row["dtype"], row["head_size"]) == (rows[0]["dtype"], rows[0]["head_size"])]
    figure, (time_axes, memory_axes) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in dict.fromkeys(row["implementation"] for row in rows):
        of_name = [row for row in rows if row["implementation"] == name]
        tokens = [row["tokens"] for row in of_name]
        # The batch shrinks where the sequences are long.
        time_axes.plot(tokens, [1e3 * row["median_seconds"] / row["batch_size"] for row in of_name], "o-", label=name)
        if all(row["peak_bytes"] for row in of_name):
            memory = [row["peak_bytes"] / 2**20 / row["batch_size"] for row in of_name]
            memory_axes.plot(tokens, memory, "o-", label=name)
    for axes, label in ((time_axes, "ms per sequence"), (memory_axes, "MiB per sequence")):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.set_xticks(sorted({row["tokens"] for row in rows}), labels=sorted({row["tokens"] for row in rows}))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    time_axes.legend()
    figure.suptitle("Attention core, forward + backward, not causal")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
