"""
Fused multi-scale attention: what `reference_multiscale_attention` defines, exactly, in memory linear in T.

Two operators are registered with PyTorch, so that autograd, `torch.compile` and `torch.export` see one node where the
computation is a loop over tiles. Each has a CPU kernel (see `cpu_attention`) and a CUDA kernel in Triton (see
`triton_attention`, imported when it first runs).

Source: ours.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention_hkt import check_inputs, concatenate_levels
from . import cpu_attention


def fused_multiscale_attention(
    query_levels: Sequence[Tensor],
    key_levels: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    padding_mask: Tensor | None = None,
    *,
    stride: int,
    scaling: float,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """
    HKT attention with every coarse score computed once and no T x T matrix in memory, in either pass.

        S_ij = sum_l lambda_l(i) * scaling * <q^l[i // s^l], k^l[j // s^l]>,    output = softmax(mask(S)) v

    A query that may attend to nothing gives 0, with gradients of 0. Half precision is computed in float32 on CPU, and
    summed up in float32 on GPU, which has no float64. Gradients of gradients are not available.

    Args:
        query_levels: L tensors [B, H, T_l, d] with T_l = ceil(T / s^l), floating point, the full resolution first.
        key_levels: L tensors [B, H, T_l, d].
        value: [B, H, T, d].
        level_weights: [B, H, T, L] or broadcastable to it; the weight of each level for each query token.
        padding_mask: boolean [B, T], True = a real token, wherever the pads are. None = all tokens are real.
        stride: s >= 1. With a stride of 1 nothing is repeated, and the levels are concatenated instead.
        scaling: factor of the scores, 1 / sqrt(d) in the paper.
        is_causal: whether a token attends to itself and to earlier tokens alone.
        dropout: probability of leaving out an attention probability, drawn from PyTorch's global generator.

    Returns:
        [B, H, T, d], in the dtype of the value, in the memory layout [B, T, H, d].

    Raises:
        ValueError: if the levels do not fit each other, the value or the level weights; if the mask is not a boolean
            [B, T]; if `dropout` is no probability below 1; or if the inputs lie on a device without such a kernel.
    """
    level_weights, _ = check_inputs(query_levels, key_levels, value, level_weights, None, stride)
    batch_size, num_heads, num_tokens, head_size = value.shape
    if padding_mask is not None and (
        padding_mask.dtype != torch.bool or padding_mask.shape != (batch_size, num_tokens)
    ):
        raise ValueError(
            f"`padding_mask` is {padding_mask.dtype} of shape {tuple(padding_mask.shape)}: it must be boolean of shape "
            f"{(batch_size, num_tokens)}, True = a real token. Masks per pair of tokens need "
            "`reference_multiscale_attention` or `concatenated_multiscale_attention`."
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` is {dropout}: it must be a probability p with 0 <= p < 1.")
    if value.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(
            f"The inputs are on {value.device}, but fused attention runs on CPU and, through Triton, on CUDA devices. "
            'Elsewhere use `attn_implementation="sdpa"`, or `concatenated_multiscale_attention`.'
        )
    if stride == 1:
        query, key, value = concatenate_levels(query_levels, key_levels, value, level_weights, stride=stride)
        query_levels, key_levels, level_weights = [query], [key], value.new_ones(1)
        stride = 2  # of one level: of no effect

    level_weights = level_weights.reshape((1,) * (4 - level_weights.dim()) + level_weights.shape)
    has_key = None
    if padding_mask is not None:
        has_key = padding_mask.cumsum(dim=1) > 0 if is_causal else padding_mask.any(dim=1, keepdim=True)
        has_key = has_key[:, None, :, None]
    seed = None
    if dropout > 0:
        seed = torch.randint(2**31, (), device=value.device)
    output, _ = _attention(
        list(query_levels),
        list(key_levels),
        value,
        level_weights,
        padding_mask,
        seed,
        stride,
        scaling,
        is_causal,
        dropout,
    )
    if has_key is not None:
        # Such a query attends to all the pads alike: the softmax has nothing else.
        output = output.masked_fill(~has_key, 0.0)
    return output[..., :head_size]


@torch.library.custom_op("hkt_hf::fused_attention", mutates_args=(), device_types="cpu")
def _attention(
    query_levels: list[Tensor],
    key_levels: list[Tensor],
    value: Tensor,
    level_weights: Tensor,
    padding_mask: Tensor | None,
    seed: Tensor | None,
    stride: int,
    scaling: float,
    is_causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, d] and the log-sum-exp of the scores [B, H, T], or zeros if the backward pass needs none."""
    with torch.autocast("cpu", enabled=False):
        return cpu_attention.FusedAttention(
            query_levels,
            key_levels,
            value,
            level_weights,
            padding_mask,
            seed,
            stride=stride,
            scaling=scaling,
            is_causal=is_causal,
            dropout=dropout,
        ).forward()


@torch.library.custom_op("hkt_hf::fused_attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad_output: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    query_levels: list[Tensor],
    key_levels: list[Tensor],
    value: Tensor,
    level_weights: Tensor,
    padding_mask: Tensor | None,
    seed: Tensor | None,
    stride: int,
    scaling: float,
    is_causal: bool,
    dropout: float,
) -> list[Tensor]:
    """The gradients of the query levels, the key levels, the value and, [B, H, T or 1, L], the level weights."""
    with torch.autocast("cpu", enabled=False):
        grad_queries, grad_keys, grad_value, grad_level_weights = cpu_attention.FusedAttention(
            query_levels,
            key_levels,
            value,
            level_weights,
            padding_mask,
            seed,
            stride=stride,
            scaling=scaling,
            is_causal=is_causal,
            dropout=dropout,
        ).backward(grad_output, output, log_sum_exp)
    return [*grad_queries, *grad_keys, grad_value, grad_level_weights]


@_attention.register_kernel("cuda")
def _(query_levels, key_levels, value, level_weights, padding_mask, seed, stride, scaling, is_causal, dropout):
    from . import triton_attention

    return triton_attention.forward(
        query_levels,
        key_levels,
        value,
        level_weights,
        padding_mask,
        stride=stride,
        scaling=scaling,
        is_causal=is_causal,
        dropout=dropout,
        seed=0 if seed is None else seed.item(),
    )


@_attention_backward.register_kernel("cuda")
def _(
    grad_output,
    output,
    log_sum_exp,
    query_levels,
    key_levels,
    value,
    level_weights,
    padding_mask,
    seed,
    stride,
    scaling,
    is_causal,
    dropout,
):
    from . import triton_attention

    grad_queries, grad_keys, grad_value, grad_level_weights = triton_attention.backward(
        grad_output,
        query_levels,
        key_levels,
        value,
        level_weights,
        padding_mask,
        output,
        log_sum_exp,
        stride=stride,
        scaling=scaling,
        is_causal=is_causal,
        dropout=dropout,
        seed=0 if seed is None else seed.item(),
    )
    return [*grad_queries, *grad_keys, grad_value, grad_level_weights]


@_attention.register_fake
def _(query_levels, key_levels, value, level_weights, padding_mask, seed, stride, scaling, is_causal, dropout):
    statistics_dtype = torch.promote_types(torch.float32, value.dtype)
    return cpu_attention.new_states(value), value.new_empty(value.shape[:3], dtype=statistics_dtype)


@_attention_backward.register_fake
def _(grad_output, output, log_sum_exp, query_levels, key_levels, value, level_weights, *others):
    states = [cpu_attention.new_states(tensor) for tensor in (*query_levels, *key_levels, value)]
    weights_shape = (*value.shape[:2], *level_weights.shape[2:])
    return [*states, value.new_empty(weights_shape, dtype=log_sum_exp.dtype)]


def _save_for_backward(ctx, inputs, output):
    query_levels, key_levels, value, level_weights, padding_mask, seed, *ctx.options = inputs
    ctx.num_levels = len(query_levels)
    ctx.save_for_backward(*query_levels, *key_levels, value, level_weights, padding_mask, seed, *output)


def _backward(ctx, grad_output, _):
    levels, rest = ctx.saved_tensors[: 2 * ctx.num_levels], ctx.saved_tensors[2 * ctx.num_levels :]
    value, level_weights, padding_mask, seed, output, log_sum_exp = rest
    *grad_levels, grad_value, grad_level_weights = _attention_backward(
        grad_output,
        output,
        log_sum_exp,
        list(levels[: ctx.num_levels]),
        list(levels[ctx.num_levels :]),
        value,
        level_weights,
        padding_mask,
        seed,
        *ctx.options,
    )
    grad_level_weights = grad_level_weights.sum_to_size(level_weights.shape).to(level_weights.dtype)
    return (
        grad_levels[: ctx.num_levels],
        grad_levels[ctx.num_levels :],
        grad_value,
        grad_level_weights,
        *[None] * (2 + len(ctx.options)),
    )


_attention.register_autograd(_backward, setup_context=_save_for_backward)
