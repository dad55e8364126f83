"""`attn_implementation="hkt_fused"`: fused multi-scale attention as an attention implementation of transformers."""

from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from .fused import fused_multiscale_attention

NAME = "hkt_fused"


def fused_attention_forward(
    module: nn.Module,
    query: list[Tensor],
    key: list[Tensor],
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    level_weights: Tensor | None = None,
    level_stride: int | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """
    An attention function of transformers, but for queries and keys per level, as lists, and their weights and stride.

    Args and errors: see `fused_multiscale_attention`; the mask is its padding mask, `module.is_causal` says the rest.

    Returns:
        [B, T, H, d], and None in place of attention maps, which are never in memory.
    """
    if not isinstance(query, (list, tuple)):
        raise ValueError(
            f'`attn_implementation="{NAME}"` computes the multi-scale attention of HKT models, and '
            f'{type(module).__name__} asks for another one. Use "sdpa" for it.'
        )
    if kwargs.get("output_attentions"):
        raise ValueError(
            f'`attn_implementation="{NAME}"` never has the attention maps in memory, so it cannot return them '
            '(`output_attentions=True`). Load the model with `attn_implementation="eager"` or call '
            '`model.set_attn_implementation("eager")`.'
        )
    if level_weights is None:
        level_weights = value.new_ones(1)
    output = fused_multiscale_attention(
        query,
        key,
        value,
        level_weights,
        attention_mask,
        stride=level_stride,
        scaling=scaling,
        is_causal=module.is_causal,
        dropout=dropout,
    )
    return output.transpose(1, 2), None


# What `HKTAttention` asks: whether to hand over the levels as they are, or concatenated for a standard function.
fused_attention_forward.takes_levels = True


def padding_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs
) -> Tensor | None:
    """The mask function of transformers that goes with it: the padding mask [B, T] itself, None if it hides nothing."""
    return attention_mask


AttentionInterface.register(NAME, fused_attention_forward)
AttentionMaskInterface.register(NAME, padding_mask)
