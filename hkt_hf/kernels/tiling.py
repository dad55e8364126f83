"""
How the fused attention on CPU cuts and orders the tokens of a call.

Tokens are reordered phase-major: a *block* is the P = s^(L-1) tokens of one position of the coarsest level, a *run* is
r blocks, and inside a run the first tokens of all blocks come first, then the second ones, and so on:

    run [P, r]     level l of the same run [P / s^l, r]     phase p of level l repeats as phases s*p, ..., s*p + s-1

To repeat a coarse score over its block of s^l x s^l token pairs is then a broadcast over whole phases with a
contiguous axis of r behind it, and the gradient of a coarse score, the sum over its block, is a plain sum over that
axis. A softmax does not care about the order of its keys. A tile of queries or keys is one run.

Source: ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens of a query and of a key tile, and of both in a causal call. Measured on two cores with 1 MiB of second-level
# cache each: smaller tiles lose to the cost per call and to narrow matrix products, larger ones to the cache.
QUERY_TILE, KEY_TILE, CAUSAL_TILE = 256, 1088, 256
# Scores that each thread works on at a time, if the batch has as many.
SCORES_PER_THREAD = 2**19


@dataclass(frozen=True)
class Tiling:
    """How the tokens of a call are cut into blocks, runs and tiles."""

    stride: int
    num_levels: int
    query_run: int
    num_query_runs: int
    key_run: int
    num_key_runs: int

    def phases(self, level: int) -> int:
        """Positions of a level in a block, s^(L-1-l)."""
        return self.stride ** (self.num_levels - 1 - level)


def choose_tiling(num_tokens: int, stride: int, num_levels: int, is_causal: bool) -> Tiling:
    """The tiles for a shape. In a causal call keys are cut like queries, so that hardly a score is computed in vain."""
    while num_levels > 1 and stride ** (num_levels - 1) >= num_tokens:
        # A level of one position adds the same to all scores of a query: a softmax does not see it.
        num_levels -= 1
    block = stride ** (num_levels - 1)
    num_blocks = -(-num_tokens // block)

    def blocks_per_run(tokens: int) -> int:
        num_runs = -(-num_blocks // max(1, tokens // block))
        return -(-num_blocks // num_runs)

    if is_causal:
        query_run = key_run = avoid_aliasing(blocks_per_run(CAUSAL_TILE), block)
    else:
        query_run, key_run = blocks_per_run(QUERY_TILE), avoid_aliasing(blocks_per_run(KEY_TILE), block)
    return Tiling(stride, num_levels, query_run, -(-num_blocks // query_run), key_run, -(-num_blocks // key_run))


def avoid_aliasing(run: int, block: int) -> int:
    """
    Lengthens a run a little if rows of scores would lie a multiple of 1 KiB apart, on the same few sets of the cache:
    matrix products that read the scores by column take up to 1.5 times as long then.
    """
    return run + -(-16 // block) if run * block % 256 == 0 else run


def pairs_at_a_time(batch_size: int, num_heads: int, limit: int) -> tuple[int, int]:
    """Batch rows and heads of a group: heads of one row, or whole rows; at most `limit` pairs, all groups alike."""
    if limit < num_heads:
        return 1, max(heads for heads in range(1, limit + 1) if num_heads % heads == 0)
    rows = min(batch_size, limit // num_heads)
    return max(r for r in range(1, rows + 1) if batch_size % r == 0), num_heads


def paired_views(states_BHtd: Tensor, runs_NGprd: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same positions in the order of the tokens and in runs [N, G, phases, r, d], to copy either way."""
    batch_size, num_heads, num_positions, _ = states_BHtd.shape
    _, _, phases, run, _ = runs_NGprd.shape
    runs = runs_NGprd.transpose(0, 1).unflatten(0, (batch_size, num_heads))
    full_runs, rest = divmod(num_positions, run * phases)
    if full_runs:
        whole = states_BHtd[:, :, : full_runs * run * phases]
        yield whole.unflatten(2, (full_runs, run, phases)).transpose(3, 4), runs[:, :, :full_runs]
    full_blocks, rest = divmod(rest, phases)
    start = full_runs * run * phases
    if full_blocks:
        part = states_BHtd[:, :, start : start + full_blocks * phases]
        yield part.unflatten(2, (full_blocks, phases)).transpose(2, 3), runs[:, :, full_runs, :, :full_blocks]
    if rest:
        yield states_BHtd[:, :, num_positions - rest :], runs[:, :, full_runs, :rest, full_blocks]


def to_runs(states_BHtd: Tensor, runs: Tensor, factor: Tensor | None = None) -> None:
    """Copies into run order, times a factor [B, H, t or 1, 1]. Positions after the last token are left as they are."""
    if factor is None:
        for source, target in paired_views(states_BHtd, runs):
            target.copy_(source)
    elif factor.shape[2] == 1:
        for source, target in paired_views(states_BHtd, runs):
            torch.mul(source, factor.view(*factor.shape[:2], *[1] * (source.dim() - 2)), out=target)
    else:
        factors = paired_views(factor, runs.new_empty(1).expand(*runs.shape[:-1], 1))
        for (source, target), (source_factor, _) in zip(paired_views(states_BHtd, runs), factors, strict=True):
            torch.mul(source, source_factor, out=target)


def from_runs(runs: Tensor, states_BHtd: Tensor) -> None:
    """Copies back into the order of the tokens."""
    for target, source in paired_views(states_BHtd, runs):
        target.copy_(source)
