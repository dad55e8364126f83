"""
The mathematics of HKT attention (arXiv 2604.08829) as pure functions: no module, no configuration, no state.

Shape legend, used as suffixes of tensor names:

    B  batch                            D  hidden size, D = H * d
    T  tokens                           d  head size
    H  heads                            K  kernel size of a convolution
    L  levels (resolutions)             t  positions of level l, T_l = ceil(T / s^l), where s is the stride

Position b of level l stands for the block of tokens s^l * b, ..., s^l * (b + 1) - 1. It is computed from tokens up to
s^l * b only, the first of its block, so that no level shows token i anything after i.

Lists of tensors run over the levels, the full resolution first.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def level_length(num_tokens: int, stride: int, level: int) -> int:
    """Number of positions of a level, T_l = ceil(T / s^l)."""
    return -(-num_tokens // stride**level)


def causal_depthwise_conv(hidden_BTD: Tensor, weight_DK: Tensor, stride: int = 1) -> Tensor:
    """
    Convolves every channel with its own kernel: output b sees inputs s*b - (K-1), ..., s*b, zeros before the start.

    Args:
        hidden_BTD: [B, T, D], floating point.
        weight_DK: [D, K], same dtype; the last column meets the newest input.
        stride: s >= 1.

    Returns:
        [B, ceil(T / s), D].
    """
    num_channels, kernel_size = weight_DK.shape
    padded_BDT = F.pad(hidden_BTD.transpose(1, 2), (kernel_size - 1, 0))
    return F.conv1d(padded_BDT, weight_DK[:, None], stride=stride, groups=num_channels).transpose(1, 2)


def causal_conv_at(hidden_BTD: Tensor, weight_DK: Tensor, positions_Bt: Tensor, stride: int = 1) -> Tensor:
    """
    Outputs `positions_Bt` of `causal_depthwise_conv`, from inputs of which only those that they see need be there.

    Args:
        hidden_BTD: [B, T, D].
        weight_DK: [D, K].
        positions_Bt: [B, t] or [1, t], integers >= 0; the result of one whose inputs are beyond T has no meaning.
        stride: s >= 1.

    Returns:
        [B, t, D].

    Source: ours.
    """
    batch_size, num_tokens, _ = hidden_BTD.shape
    kernel_size = weight_DK.shape[1]
    inputs_BtK = stride * positions_Bt[:, :, None] + torch.arange(1 - kernel_size, 1, device=positions_Bt.device)
    rows_B11 = torch.arange(batch_size, device=positions_Bt.device)[:, None, None]
    windows_BtKD = hidden_BTD[rows_B11, inputs_BtK.clamp(0, num_tokens - 1)]
    windows_BtKD = windows_BtKD.masked_fill((inputs_BtK < 0)[..., None], 0.0)
    return (windows_BtKD * weight_DK.T).sum(dim=2)


def upsample_level(level_BHtd: Tensor, stride: int, level: int, num_tokens: int) -> Tensor:
    """Repeats every position of a level for the tokens of its block: [B, H, T_l, d] -> [B, H, T, d]."""
    if stride**level == 1:
        return level_BHtd
    # A block longer than the sequence holds all of it: without the bound, memory would follow s^l.
    return level_BHtd.repeat_interleave(min(stride**level, num_tokens), dim=2)[:, :, :num_tokens]


def reference_multiscale_attention(
    query_levels: list[Tensor],
    key_levels: list[Tensor],
    value: Tensor,
    level_weights: Tensor,
    attention_mask: Tensor | None = None,
    *,
    stride: int,
    scaling: float,
) -> Tensor:
    """
    The specification of HKT attention: slow, obviously right, T x T scores in memory. Faster forms are tested with it.

        S_ij = sum_l lambda_l(i) * scaling * <q^l[i // s^l], k^l[j // s^l]>,    output = softmax(mask(S)) v

    The mask is applied once, after the fusion, so that a level weight of 0 never meets an infinite mask. A query that
    may attend to nothing gives 0, with finite gradients.

    Args:
        query_levels: L tensors [B, H, T_l, d], floating point.
        key_levels: L tensors [B, H, T_l, d].
        value: [B, H, T, d].
        level_weights: [B, H, T, L] or broadcastable to it; the weight of each level for each query token.
        attention_mask: boolean, broadcastable to [B, 1, T, T]; True = attend. None = attend to everything.
        stride: s >= 1.
        scaling: factor of the scores, 1 / sqrt(d) in the paper.

    Returns:
        [B, H, T, d], in the dtype of the inputs.

    Raises:
        ValueError: if the levels do not fit each other, the value or the level weights, or the mask is not boolean.

    Source: fusion of level scores, paper (abstract); input-dependent weights per query token, ours.
    """
    level_weights, attention_mask = check_inputs(query_levels, key_levels, value, level_weights, attention_mask, stride)
    num_tokens = value.shape[2]
    scores_BHTT = 0.0
    for level, (query_BHtd, key_BHtd) in enumerate(zip(query_levels, key_levels, strict=True)):
        level_scores_BHtt = query_BHtd @ key_BHtd.transpose(-1, -2) * scaling
        block_T = torch.arange(num_tokens, device=value.device) // stride**level
        upsampled_BHTT = level_scores_BHtt[:, :, block_T][:, :, :, block_T]
        scores_BHTT = scores_BHTT + level_weights[..., level, None] * upsampled_BHTT
    if attention_mask is None:
        return scores_BHTT.softmax(dim=-1) @ value
    has_key = attention_mask.any(dim=-1, keepdim=True)
    scores_BHTT = scores_BHTT.masked_fill(~attention_mask & has_key, float("-inf"))
    return (scores_BHTT.softmax(dim=-1) @ value).masked_fill(~has_key, 0.0)


def concatenate_levels(
    query_levels: list[Tensor],
    key_levels: list[Tensor],
    value: Tensor,
    level_weights: Tensor,
    *,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Writes HKT attention as standard attention, exactly: the fused score is one inner product,

        S_ij = scaling * <Q_i, K_j>,    Q_i = concat_l lambda_l(i) q^l[i // s^l],    K_j = concat_l k^l[j // s^l],

    so any attention function that is given Q, K and v computes it, with memory linear in T if it is a flash kernel.
    The `scaling` of the original head size must be passed to it explicitly.

    Args: as in `reference_multiscale_attention`.

    Returns:
        Query and key [B, H, T, L*d], and the value padded with zeros to [B, H, T, L*d]: kernels want one head size for
        all three (CPU SDPA falls back to materialised scores otherwise, and flash attention refuses). The first d
        columns of the attention output are the result.

    Raises:
        ValueError: if the levels do not fit each other, the value or the level weights.

    Source: ours.
    """
    level_weights, _ = check_inputs(query_levels, key_levels, value, level_weights, None, stride)
    num_tokens, head_size = value.shape[-2:]
    query = torch.cat(
        [
            upsample_level(query_BHtd, stride, level, num_tokens) * level_weights[..., level, None]
            for level, query_BHtd in enumerate(query_levels)
        ],
        dim=-1,
    )
    key = torch.cat(
        [upsample_level(key_BHtd, stride, level, num_tokens) for level, key_BHtd in enumerate(key_levels)], dim=-1
    )
    return query, key, F.pad(value, (0, head_size * (len(key_levels) - 1)))


def concatenated_multiscale_attention(
    query_levels: list[Tensor],
    key_levels: list[Tensor],
    value: Tensor,
    level_weights: Tensor,
    attention_mask: Tensor | None = None,
    *,
    stride: int,
    scaling: float,
) -> Tensor:
    """
    Equals `reference_multiscale_attention` (same arguments, result and errors), computed by one call of PyTorch's
    `scaled_dot_product_attention` on concatenated levels. Source: ours.
    """
    level_weights, attention_mask = check_inputs(query_levels, key_levels, value, level_weights, attention_mask, stride)
    query, key, padded_value = concatenate_levels(query_levels, key_levels, value, level_weights, stride=stride)
    has_key = None
    if attention_mask is not None:
        # A softmax over nothing is NaN: let such a query attend to everything and drop what it found.
        has_key = attention_mask.any(dim=-1, keepdim=True)
        attention_mask = attention_mask | ~has_key
    output = F.scaled_dot_product_attention(query, key, padded_value, attn_mask=attention_mask, scale=scaling)
    output = output[..., : value.shape[-1]]
    return output if has_key is None else output.masked_fill(~has_key, 0.0)


def incremental_multiscale_attention(
    query_levels: list[Tensor],
    key_levels: list[Tensor],
    value: Tensor,
    level_weights: Tensor,
    attention_mask: Tensor,
    *,
    stride: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """
    Rows of `reference_multiscale_attention`, for t query tokens whose keys and values are already there.

    Every coarse score is computed once per key position: a token costs O(T).

    Args:
        query_levels: L tensors [B, H, t, d]: for each query token, the query of its block at that level.
        key_levels: L tensors [B, H, T_l, d], where T_l >= ceil(T / s^l).
        value: [B, H, T, d].
        level_weights: [B, H, t, L] or broadcastable to it.
        attention_mask: boolean, broadcastable to [B, 1, t, T]; True = attend. Every query has a key.
        stride: s >= 1.
        scaling: factor of the scores.

    Returns:
        [B, H, t, d], and the attention probabilities [B, H, t, T].

    Source: ours.
    """
    num_tokens = value.shape[2]
    scores_BHtT = 0.0
    for level, (query_BHtd, key_BHTd) in enumerate(zip(query_levels, key_levels, strict=True)):
        block_scores = query_BHtd @ key_BHTd.transpose(-1, -2)
        if stride**level > 1:
            block_scores = block_scores.repeat_interleave(min(stride**level, num_tokens), dim=-1)
        scores_BHtT = scores_BHtT + level_weights[..., level, None] * block_scores[..., :num_tokens]
    scores_BHtT = (scores_BHtT * scaling).masked_fill(~attention_mask, float("-inf"))
    accurate = torch.promote_types(torch.float32, value.dtype)
    probabilities = scores_BHtT.softmax(dim=-1, dtype=accurate).to(value.dtype)
    return probabilities @ value, probabilities


def rotary_embedding(position_ids: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """
    Cosines and sines of rotary positions (Su et al., arXiv 2104.09864), computed in float32.

    Args:
        position_ids: [B, t] or [1, t], integers: the token position that each position of a level stands for.
        head_size: d, even.
        theta: base of the frequencies.
        dtype: dtype of the result.

    Returns:
        Two tensors [B, 1, t, d].
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=position_ids.device) / head_size
    angles = position_ids[:, None, :, None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(states_BHtd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (i, i + d/2) of the head dimensions by its angle."""
    first, second = states_BHtd.chunk(2, dim=-1)
    return states_BHtd * cos + torch.cat([-second, first], dim=-1) * sin


def take_tokens(states: Tensor, index: Tensor) -> Tensor:
    """
    Lays the tokens of a batch out anew.

    Strided convolutions count from the start of a row: pads before or between the tokens would shift their phase, and
    so would another sequence in the same row. Laid out so that every sequence has a row of its own that starts with its
    first token, a batch is computed as if each sequence stood alone.

    Args:
        states: [B, T, ...], any dtype.
        index: [R, t], integers: the token that each place of the result takes, counted through the batch (b * T + t).

    Returns:
        [R, t, ...]. The inverse index [B, T] undoes it.
    """
    return states.flatten(0, 1)[index]


def check_inputs(
    query_levels: list[Tensor],
    key_levels: list[Tensor],
    value: Tensor,
    level_weights: Tensor,
    attention_mask: Tensor | None,
    stride: int,
) -> tuple[Tensor, Tensor | None]:
    """Refuses what does not fit; gives the level weights all their levels and the mask its two axes of tokens."""
    num_levels = len(query_levels)
    if num_levels < 1 or len(key_levels) != num_levels:
        raise ValueError(
            f"Got {num_levels} query levels and {len(key_levels)} key levels: both need the same number, at least 1."
        )
    if stride < 1:
        raise ValueError(f"`stride` is {stride}: it must be an integer of at least 1.")
    batch_size, num_heads, num_tokens, head_size = value.shape
    for name, levels in (("query", query_levels), ("key", key_levels)):
        for level, states_BHtd in enumerate(levels):
            expected = (batch_size, num_heads, level_length(num_tokens, stride, level), head_size)
            if states_BHtd.shape != expected:
                raise ValueError(
                    f"Level {level} of the {name} has shape {tuple(states_BHtd.shape)}, but a value of shape "
                    f"{tuple(value.shape)} and a stride of {stride} need {expected}."
                )
    level_weights = torch.atleast_1d(level_weights)
    if level_weights.shape[-1] not in (1, num_levels):
        raise ValueError(
            f"The level weights have shape {tuple(level_weights.shape)}: the last axis must be the {num_levels} levels."
        )
    level_weights = level_weights.expand(*level_weights.shape[:-1], num_levels)
    if attention_mask is None:
        return level_weights, None
    if attention_mask.dtype != torch.bool:
        raise ValueError(f"The attention mask has dtype {attention_mask.dtype}: it must be boolean, True = attend.")
    return level_weights, torch.atleast_2d(attention_mask)
