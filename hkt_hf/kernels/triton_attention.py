"""
Fused multi-scale attention on GPU, in Triton: exact, and linear in memory.

The scheme is that of flash attention (Dao et al., arXiv 2205.14135): a program holds one tile of queries, walks over
the tiles of keys with a running softmax and keeps only the logarithm of its sum, from which the backward pass computes
the probabilities again. That pass runs once over tiles of queries and once over tiles of keys. Each program writes rows
that no other one writes, so there are no atomic operations and equal inputs give equal bits.

What is ours is how the levels meet. A score of level l counts for a block of s^l x s^l token pairs, so a tile of m x n
scores needs (m / s^l) x (n / s^l) of them: one small matrix product, whose result is repeated over the blocks. The
gradient of a coarse score is the sum over its block. Matrix products have at least 16 rows and columns, so the *step*,
the number of tokens that share a row of a tile, is min(s^l, COARSEST). It divides s^l and the size of the tile, because
all three are powers of two; with any other stride the step is 1, which is exact too, at the price of level 0 per level.
Where the step is shorter than the block, the kernels write one gradient per step and PyTorch adds them up.

In memory a level is [B, T_l, H, d], contiguous. Level 0 stays where it is if it has that layout, as projections do; the
coarse levels are packed one behind the other into [B, T_1 + T_2 + ..., H, d]. A level with a single position adds the
same to all scores of a query. The softmax does not see it, so it is left out and its gradients are zero.

Shape legend, beyond that of `attention_hkt`: m = queries and n = keys of a tile, BLOCK_M and BLOCK_N in the kernels;
BLOCK_D = head size d, padded to a power of two. Scores are kept times log2(e), since GPUs compute powers of 2.
"""

import contextlib
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from .triton_kernels import backward_kernel, forward_kernel

# Gradients of one launch are summed in registers, one accumulator per level. Calls with more levels take more launches.
LEVELS_PER_LAUNCH = 4
MAX_HEAD_SIZE = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}


class Tiles(NamedTuple):
    """Queries and keys of a tile, both powers of two of at least 16, and the launch options of Triton."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By the padded head size: tiles of the forward pass, of the gradients of the queries and of those of the keys. They are
# not tuned by measurements. The compiler fits them, with three levels, into the shared memory of compute capabilities
# 8.0, 8.6 (99 KiB) and 9.0, and keeps half precision in registers, or nearly so.
HALF_TILES = {
    64: (Tiles(128, 64, 8, 2), Tiles(32, 64, 4, 2), Tiles(64, 64, 8, 2)),
    128: (Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 1), Tiles(32, 64, 8, 1)),
    256: (Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(16, 16, 8, 1)),
}
FLOAT32_TILES = {
    64: (Tiles(32, 32, 4, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
    128: (Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(16, 32, 8, 1)),
}
FORWARD, OF_QUERIES, OF_KEYS = range(3)


def choose_tiles(kernel: int, num_tokens: int, head_size: int, dtype: torch.dtype) -> Tiles:
    """The tiles for FORWARD, OF_QUERIES or OF_KEYS, no larger than a short sequence needs."""
    table = FLOAT32_TILES if dtype == torch.float32 else HALF_TILES
    tiles = next(tiles[kernel] for size, tiles in table.items() if head_size <= size)
    longest = max(16, triton.next_power_of_2(num_tokens))
    return tiles._replace(queries=min(tiles.queries, longest), keys=min(tiles.keys, longest))


def _token_major(states_BHtd: Tensor) -> Tensor:
    """[B, H, t, d] -> [B, t, H, d], contiguous: a copy only if it is not so already."""
    return states_BHtd.transpose(1, 2).contiguous()


def _pack_levels(levels: list[Tensor], num_levels: int) -> tuple[Tensor, Tensor]:
    """Level 0 and the coarse levels, one behind the other. Without such, a pointer that nobody follows."""
    fine_BTHd = _token_major(levels[0])
    if num_levels < 2:
        return fine_BTHd, fine_BTHd
    return fine_BTHd, torch.cat([states_BHtd.transpose(1, 2) for states_BHtd in levels[1:num_levels]], dim=1)


def _coarsest_step(tiles: Tiles, stride: int) -> int:
    """The most tokens that may share a row of a tile."""
    return min(tiles.queries, tiles.keys) // 16 if stride & (stride - 1) == 0 else 1


def _empty_gradients(value: Tensor, num_levels: int, stride: int, coarsest: int) -> tuple[Tensor, Tensor]:
    """Where a backward kernel writes level 0 and, in float32 and one row per step, the coarse levels."""
    batch_size, num_heads, num_tokens, head_size = value.shape
    num_rows = sum(-(-num_tokens // min(stride**level, coarsest)) for level in range(1, num_levels))
    return (
        value.new_empty(batch_size, num_tokens, num_heads, head_size),
        value.new_empty(batch_size, num_rows, num_heads, head_size, dtype=torch.float32),
    )


def _unpack_gradients(
    fine_BTHd: Tensor, coarse: Tensor, levels: list[Tensor], num_levels: int, stride: int, coarsest: int
) -> list[Tensor]:
    """Gradients in the shapes of the levels. No two share memory: PyTorch forbids that to results of an operator."""
    num_tokens = fine_BTHd.shape[1]
    gradients = [fine_BTHd.transpose(1, 2)] if num_levels > 0 else []
    start = 0
    for level in range(1, num_levels):
        step = min(stride**level, coarsest)
        length, steps_per_block = levels[level].shape[2], stride**level // step
        end = start - (-num_tokens // step)
        padding = length * steps_per_block - (end - start)
        steps = F.pad(coarse[:, start:end], (0, 0, 0, 0, 0, padding)).unflatten(1, (length, steps_per_block))
        gradients.append(steps.sum(dim=2).to(fine_BTHd.dtype).transpose(1, 2))
        start = end
    return gradients + [torch.zeros_like(states_BHtd) for states_BHtd in levels[num_levels:]]


def _kernel_arguments(
    query_levels: list[Tensor],
    key_levels: list[Tensor],
    value: Tensor,
    level_weights: Tensor,
    padding_mask: Tensor | None,
    stride: int,
    scaling: float,
    is_causal: bool,
    dropout: float,
    seed: int,
) -> dict:
    """What the two kernels have in common."""
    batch_size, num_heads, num_tokens, head_size = value.shape
    if head_size > MAX_HEAD_SIZE.get(value.dtype, 0):
        raise ValueError(
            f"The inputs are {value.dtype} with a head size of {head_size}: fused attention on GPU computes bfloat16 "
            "and float16 with head sizes up to 256, and float32 with head sizes up to 128. For others use "
            '`attn_implementation="sdpa"` or "eager".'
        )
    num_levels = sum(query_BHtd.shape[2] > 1 for query_BHtd in query_levels)
    query_BTHd, query_coarse = _pack_levels(query_levels, num_levels)
    key_BTHd, key_coarse = _pack_levels(key_levels, num_levels)
    weight_BHTL = level_weights[..., :num_levels].float().expand(batch_size, num_heads, num_tokens, num_levels)
    return {
        "query_ptr": query_BTHd,
        "query_coarse_ptr": query_coarse,
        "key_ptr": key_BTHd,
        "key_coarse_ptr": key_coarse,
        "value_ptr": _token_major(value),
        "weight_ptr": weight_BHTL.transpose(2, 3).contiguous(),
        "padding_ptr": value if padding_mask is None else padding_mask.contiguous().view(torch.uint8),
        "seed": seed,
        "dropout": float(dropout),
        "kept_scale": 1 / (1 - dropout) if dropout < 1 else 0.0,
        "scaling": float(scaling),
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "STRIDE": stride,
        "NUM_LEVELS": num_levels,
        "HEAD_SIZE": head_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_size)),
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "IS_CAUSAL": is_causal,
        "HAS_PADDING": padding_mask is not None,
        "HAS_DROPOUT": dropout > 0,
    }


def _launch(kernel, value: Tensor, tiles: Tiles, tile: int, arguments: dict) -> None:
    """One program per pair of batch row and head and per `tile` tokens."""
    batch_size, num_heads, num_tokens, _ = value.shape
    grid = (triton.cdiv(num_tokens, tile) * batch_size * num_heads,)
    # Triton launches on the current device, which need not be that of the inputs.
    with torch.cuda.device(value.device) if value.is_cuda else contextlib.nullcontext():
        kernel[grid](
            **arguments,
            COARSEST=_coarsest_step(tiles, arguments["STRIDE"]),
            BLOCK_M=tiles.queries,
            BLOCK_N=tiles.keys,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


def forward(
    query_levels: list[Tensor],
    key_levels: list[Tensor],
    value: Tensor,
    level_weights: Tensor,
    padding_mask: Tensor | None,
    *,
    stride: int,
    scaling: float,
    is_causal: bool,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """
    Equals `reference_multiscale_attention` with the mask that the padding and `is_causal` make, in memory linear in T.

    Args:
        query_levels: L tensors [B, H, T_l, d], float32, bfloat16 or float16, on one GPU.
        key_levels: L tensors [B, H, T_l, d], same dtype.
        value: [B, H, T, d], same dtype.
        level_weights: [B or 1, H or 1, T or 1, L], floating point.
        padding_mask: [B, T], boolean, True = a real token. None = no padding.
        stride: s >= 2.
        scaling: factor of the scores.
        is_causal: whether query i sees keys up to i only.
        dropout: probability with which an attention weight is dropped.
        seed: what is dropped is a function of the seed and the position alone.

    Returns:
        The output [B, H, T, d], in the dtype of the value, and the natural logarithm of the sum of the exponentials of
        the scores of each query [B, H, T], float32. A query that sees no key has an output of 0 and -inf.

    Raises:
        ValueError: if the dtype or the head size is one that the kernels do not do.

    Source: ours.
    """
    arguments = _kernel_arguments(
        query_levels, key_levels, value, level_weights, padding_mask, stride, scaling, is_causal, dropout, seed
    )
    batch_size, num_heads, num_tokens, head_size = value.shape
    output_BTHd = value.new_empty(batch_size, num_tokens, num_heads, head_size)
    lse_BHT = value.new_empty(batch_size, num_heads, num_tokens, dtype=torch.float32)
    tiles = choose_tiles(FORWARD, num_tokens, head_size, value.dtype)
    arguments |= {"output_ptr": output_BTHd, "lse_ptr": lse_BHT}
    _launch(forward_kernel, value, tiles, tiles.queries, arguments)
    return output_BTHd.transpose(1, 2), lse_BHT


def backward(
    grad_output: Tensor,
    query_levels: list[Tensor],
    key_levels: list[Tensor],
    value: Tensor,
    level_weights: Tensor,
    padding_mask: Tensor | None,
    output: Tensor,
    lse: Tensor,
    *,
    stride: int,
    scaling: float,
    is_causal: bool,
    dropout: float,
    seed: int,
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """
    The gradients of `forward`, which has the same arguments and errors.

    Args:
        grad_output: [B, H, T, d].
        output, lse: what `forward` returned.

    Returns:
        The gradients of the query levels, of the key levels and of the value, in their shapes and dtypes, and that of
        the level weights [B, H, T or 1, L], float32, summed over the tokens where they share their weights.

    Source: ours.
    """
    arguments = _kernel_arguments(
        query_levels, key_levels, value, level_weights, padding_mask, stride, scaling, is_causal, dropout, seed
    )
    batch_size, num_heads, num_tokens, head_size = value.shape
    num_levels = arguments["NUM_LEVELS"]
    grad_value_BTHd = value.new_empty(batch_size, num_tokens, num_heads, head_size)
    grad_weight_BHLT = lse.new_empty(batch_size, num_heads, num_levels, num_tokens)
    arguments |= {
        "grad_output_ptr": _token_major(grad_output),
        "lse_ptr": lse.contiguous(),
        # <P, gradient of P> of each query, which is <output, gradient of the output>.
        "delta_ptr": (grad_output.float() * output.float()).sum(dim=-1).contiguous(),
        "grad_value_ptr": grad_value_BTHd,
        "grad_weight_ptr": grad_weight_BHLT,
    }
    gradients = []
    for kernel, levels in ((OF_QUERIES, query_levels), (OF_KEYS, key_levels)):
        tiles = choose_tiles(kernel, num_tokens, head_size, value.dtype)
        layout = num_levels, stride, _coarsest_step(tiles, stride)
        fine, coarse = _empty_gradients(value, *layout)
        arguments |= {"grad_ptr": fine, "grad_coarse_ptr": coarse, "OF_KEYS": kernel == OF_KEYS}
        # Once at least: the values have a gradient even where there are no scores.
        for first in range(0, max(1, num_levels), LEVELS_PER_LAUNCH):
            tile = tiles.keys if kernel == OF_KEYS else tiles.queries
            _launch(backward_kernel, value, tiles, tile, {**arguments, "FIRST": first})
        gradients.append(_unpack_gradients(fine, coarse, levels, *layout))
    if level_weights.shape[2] == 1:
        grad_weight_BHLT = grad_weight_BHLT.sum(dim=-1, keepdim=True)
    grad_weight_BHLT = F.pad(grad_weight_BHLT, (0, 0, 0, len(query_levels) - num_levels))
    return *gradients, grad_value_BTHd.transpose(1, 2), grad_weight_BHLT.transpose(2, 3)
