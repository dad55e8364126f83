"""
HKT models for transformers: embeddings -> (levels -> fused attention -> convolution branch -> MLP) per layer -> heads.

The mathematics lives in `attention_hkt.py`, whose shape legend holds here too. With `num_levels=1, hybrid=False` every
line below reduces to a standard pre-norm transformer encoder.

Source: levels, fusion and gated convolution branch, paper (arXiv 2604.08829). Ours, where the paper's text is not
public: one set of levels per layer, made from the layer's normalised input; the fusion weights' dependence on the query
token; the encoder around the attention; all initialisations.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, is_tracing
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_hkt import (
    apply_rotary,
    causal_conv_at,
    causal_depthwise_conv,
    concatenate_levels,
    incremental_multiscale_attention,
    rotary_embedding,
)
from .cache_hkt import HKTCacheLayer, adopt_cache
from .configuration_hkt import HKTConfig
from .layout_hkt import TokenLayout, holds_several, make_layout, open_empty_rows


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Attention with the scores in memory: the implementation that can return its attention maps."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(torch.float32, query.dtype))
    probabilities = nn.functional.dropout(probabilities.to(query.dtype), p=dropout, training=module.training)
    output = torch.matmul(probabilities, value).transpose(1, 2).contiguous()
    return output, probabilities


def check_ids(name: str, ids: Tensor, limit: int, remedy: str) -> None:
    """Names a bad index before the embedding does. Only on CPU, and not in a traced graph: elsewhere it would stall."""
    if ids.device.type != "cpu" or is_tracing(ids) or ids.numel() == 0:
        return
    lowest, highest = ids.min().item(), ids.max().item()
    if lowest < 0 or highest >= limit:
        bad = lowest if lowest < 0 else highest
        raise ValueError(f"`{name}` contains {bad}: it must be in 0..{limit - 1}. {remedy}")


def check_labels(labels: Tensor, num_classes: int) -> None:
    remedy = "Count classes from 0, as many as the model has (`num_labels` or `vocab_size`); -100 = ignore."
    check_ids("labels", labels.masked_fill(labels == -100, 0), num_classes, remedy)


class HKTEmbeddings(nn.Module):
    """Token embedding, plus the embedding of its position if positions are learned."""

    def __init__(self, config: HKTConfig):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position = None
        if config.position_embedding_type == "learned":
            self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, position_ids_BT: Tensor, num_cached: int = 0
    ) -> Tensor:
        if inputs_embeds is None:
            remedy = "Use the tokenizer of this checkpoint, or `model.resize_token_embeddings`."
            check_ids("input_ids", input_ids, self.token.num_embeddings, remedy)
            inputs_embeds = self.token(input_ids)
        if self.position is not None:
            limit = self.position.num_embeddings
            # Pads may take up more places than there are positions, and so may several sequences in a row.
            num_tokens = num_cached + inputs_embeds.shape[1]
            if num_tokens > limit and not is_tracing(position_ids_BT):
                num_tokens = position_ids_BT.max().item() + 1
            if num_tokens > limit:
                raise ValueError(
                    f"The input has {num_tokens} tokens, but this model has learned positions for {limit} "
                    "(`max_position_embeddings`). Truncate it (`tokenizer(..., truncation=True, max_length="
                    f"{limit})`), or train with `position_embedding_type='rotary'` or a larger limit."
                )
            check_ids("position_ids", position_ids_BT, limit, "Positions count the tokens of a row from 0.")
            inputs_embeds = inputs_embeds + self.position(position_ids_BT)
        return self.dropout(inputs_embeds)


class HKTDownsample(nn.Module):
    """
    Makes level l + 1 of level l: a causal depthwise convolution with a stride, then a linear map of the channels.

    [B, T_l, D] -> [B, T_{l+1}, D]. Position b sees positions s*b - (K-1), ..., s*b of level l.
    """

    def __init__(self, config: HKTConfig):
        super().__init__()
        self.stride = config.level_stride
        self.depthwise_weight = nn.Parameter(torch.empty(config.hidden_size, config.level_kernel_size))
        self.pointwise = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, level_BtD: Tensor) -> Tensor:
        return self.pointwise(causal_depthwise_conv(level_BtD, self.depthwise_weight, self.stride))

    def at(self, level_BtD: Tensor, positions_Bt: Tensor) -> Tensor:
        """Only these positions of level l + 1."""
        return self.pointwise(causal_conv_at(level_BtD, self.depthwise_weight, positions_Bt, self.stride))


class HKTLevelWeights(nn.Module):
    """
    The fusion weights lambda: a softmax over the levels, per head, of learned logits. With input-dependent fusion a
    linear function of the query token is added to the logits (ours); it depends on that token alone, so it is causal.

    [B, T, D] -> [B, H, T, L], or [H, 1, L] with static fusion.
    """

    def __init__(self, config: HKTConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_levels = config.num_levels
        self.logits = nn.Parameter(torch.empty(self.num_heads, self.num_levels))
        self.query_logits = None
        if config.level_fusion == "input":
            self.query_logits = nn.Linear(config.hidden_size, self.num_heads * self.num_levels, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        logits = self.logits[:, None, :]
        if self.query_logits is not None:
            query_logits = self.query_logits(hidden_BTD).unflatten(-1, (self.num_heads, self.num_levels))
            logits = logits + query_logits.transpose(1, 2)
        return logits.softmax(dim=-1).to(hidden_BTD.dtype)


class HKTAttention(nn.Module):
    """Multi-scale attention, gated with a causal convolution of the values. [B, T, D] -> [B, T, D]."""

    def __init__(self, config: HKTConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        # Attention functions of transformers read this attribute.
        self.is_causal = config.is_causal

        width, num_levels = config.hidden_size, config.num_levels
        self.downsample = nn.ModuleList(HKTDownsample(config) for _ in range(num_levels - 1))
        self.q_proj = nn.ModuleList(nn.Linear(width, width) for _ in range(num_levels))
        self.k_proj = nn.ModuleList(nn.Linear(width, width) for _ in range(num_levels))
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)
        self.level_weights = HKTLevelWeights(config) if num_levels > 1 else None
        if config.hybrid:
            self.conv_weight = nn.Parameter(torch.empty(width, config.hybrid_kernel_size))
            # g = sigmoid(beta), one per head: 1 is all attention, 0 all convolution.
            self.beta = nn.Parameter(torch.empty(config.num_attention_heads))

    def forward(
        self,
        hidden_states: Tensor,
        layout: TokenLayout | None = None,
        attention_mask: Tensor | None = None,
        position_embeddings: list[tuple[Tensor, Tensor]] | None = None,
        cache_layer: HKTCacheLayer | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            hidden_states: [B, T, D], the layer's normalised input.
            layout: where the sequences lie in it. None = one in each row, without pads.
            attention_mask: for the rows of the layout, what the attention function wants; or, if tokens are cached,
                boolean [R, 1, T, cached and new tokens].
            position_embeddings: rotary cosines and sines of each level, for these rows. None = not rotary.
            cache_layer: gets the states of these tokens, which come after those that it has.

        Returns:
            [B, T, D], and the attention probabilities [B, H, T, T] if the attention function gives them, else None.
        """
        if layout is None:
            layout = TokenLayout(torch.arange(hidden_states.shape[1], device=hidden_states.device)[None])
        rows_BTD = layout.rows(hidden_states)
        # Pads come after the tokens, where causal convolutions do not see them. But what they hold may not even be a
        # number, and the values of a row without any real token must be 0.
        rows_BTD = zero_pads(rows_BTD, layout)
        value_BTD = zero_pads(self.v_proj(rows_BTD), layout)
        query, key = self.project_levels(rows_BTD, layout, position_embeddings, cache_layer)
        level_weights = None if self.level_weights is None else self.level_weights(rows_BTD)
        if cache_layer is not None:
            all_values_BTD = cache_layer.update("value", 0, value_BTD, layout.start)
            cache_layer.num_tokens += hidden_states.shape[1]

        if layout.num_cached > 0:
            output_BHTd, probabilities = incremental_multiscale_attention(
                query,
                key,
                self.split_heads(all_values_BTD),
                value_BTD.new_ones(1) if level_weights is None else level_weights,
                attention_mask,
                stride=self.config.level_stride,
                scaling=self.scaling,
            )
            output_BTHd = output_BHTd.transpose(1, 2)
        else:
            output_BTHd, probabilities = self.attend(
                query, key, self.split_heads(value_BTD), level_weights, attention_mask, **kwargs
            )

        if self.config.hybrid:
            gate_H1 = self.beta.sigmoid()[:, None]
            if layout.num_cached > 0:
                conv_BTD = causal_conv_at(all_values_BTD, self.conv_weight, layout.positions_Rt)
            else:
                conv_BTD = causal_depthwise_conv(value_BTD, self.conv_weight)
            output_BTHd = gate_H1 * output_BTHd + (1 - gate_H1) * conv_BTD.unflatten(-1, (-1, self.head_dim))

        output_BTD = layout.tokens(self.o_proj(output_BTHd.flatten(2)))
        return output_BTD, None if probabilities is None else layout.attention_maps(probabilities)

    def attend(
        self,
        query: list[Tensor],
        key: list[Tensor],
        value: Tensor,
        level_weights: Tensor | None,
        attention_mask: Tensor | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of all tokens by the attention function of the configuration: [B, T, H, d], and maps or None."""
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        if getattr(attention_interface, "takes_levels", False):
            kwargs |= {"level_weights": level_weights, "level_stride": self.config.level_stride}
        elif level_weights is None:
            query, key = query[0], key[0]
        else:
            query, key, value = concatenate_levels(query, key, value, level_weights, stride=self.config.level_stride)
        output_BTHd, probabilities = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return output_BTHd[..., : self.head_dim], probabilities

    def project_levels(
        self,
        rows_BTD: Tensor,
        layout: TokenLayout,
        position_embeddings: list[tuple[Tensor, Tensor]] | None,
        cache_layer: HKTCacheLayer | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """
        Query and key of each level, [B, H, T_l, d]. If tokens are cached, the keys are theirs too, and the queries
        those of the new tokens' blocks, [B, H, T, d].
        """
        stride = self.config.level_stride
        query_levels, key_levels = [], []
        level_BtD = rows_BTD
        for level, (q_proj, k_proj) in enumerate(zip(self.q_proj, self.k_proj, strict=True)):
            if level > 0 and layout.num_cached == 0:
                level_BtD = self.downsample[level - 1](level_BtD)
            elif level > 0:
                inputs_BtD = cache_layer.states["input", level - 1]
                level_BtD = self.downsample[level - 1].at(inputs_BtD, layout.level_positions(stride, level))
            query_BHtd = self.split_heads(q_proj(level_BtD))
            key_BHtd = self.split_heads(k_proj(level_BtD))
            if position_embeddings is not None:
                query_BHtd = apply_rotary(query_BHtd, *position_embeddings[level])
                key_BHtd = apply_rotary(key_BHtd, *position_embeddings[level])
            if cache_layer is not None:
                start = layout.level_start(stride, level)
                keys_BtD = cache_layer.update("key", level, self.merge_heads(key_BHtd), start)
                if level + 1 < self.config.num_levels:
                    cache_layer.update("input", level, level_BtD, start)
                if level > 0:
                    queries_BtD = cache_layer.update("query", level, self.merge_heads(query_BHtd), start)
                if layout.num_cached > 0:
                    key_BHtd = self.split_heads(keys_BtD)
                    if level > 0:
                        query_BHtd = self.split_heads(take_blocks(queries_BtD, layout.positions_Rt // stride**level))
            query_levels.append(query_BHtd)
            key_levels.append(key_BHtd)
        return query_levels, key_levels

    def split_heads(self, states_BtD: Tensor) -> Tensor:
        """[B, t, D] -> [B, H, t, d]."""
        return states_BtD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def merge_heads(self, states_BHtd: Tensor) -> Tensor:
        """[B, H, t, d] -> [B, t, D]."""
        return states_BHtd.transpose(1, 2).flatten(2)


def zero_pads(rows_BTD: Tensor, layout: TokenLayout) -> Tensor:
    return rows_BTD if layout.is_token_Rt is None else rows_BTD.masked_fill(~layout.is_token_Rt[:, :, None], 0.0)


def take_blocks(level_BtD: Tensor, index_BT: Tensor) -> Tensor:
    """[B, t, D], [B, T] or [1, T] -> [B, T, D]: the position of a level that each token takes."""
    return level_BtD[torch.arange(len(level_BtD), device=level_BtD.device)[:, None], index_BT]


class HKTMLP(nn.Module):
    """Two linear maps with an activation between them. [B, T, D] -> [B, T, D]."""

    def __init__(self, config: HKTConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(hidden_states)))


class HKTLayer(GradientCheckpointingLayer):
    """Pre-norm transformer layer: norm, attention, residual; norm, MLP, residual."""

    def __init__(self, config: HKTConfig, layer_idx: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = HKTAttention(config, layer_idx)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HKTMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: Tensor, **kwargs: Unpack[TransformersKwargs]) -> Tensor:
        attention_output, _ = self.attention(self.attention_norm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.dropout(attention_output)
        return hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states)))


class HKTPreTrainedModel(PreTrainedModel):
    """What the HKT models share: initial weights, saving, and what they support."""

    config: HKTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HKTEmbeddings", "HKTLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": HKTLayer, "attentions": HKTAttention}

    def __init__(self, config: HKTConfig):
        # A value that was set after the configuration was made, by hand or by `from_pretrained(..., num_levels=0)`, has
        # been checked for its type alone.
        config.validate()
        super().__init__(config)

    def save_pretrained(self, *args, **kwargs):
        # Every class must load from the saved folder alone; transformers itself lists only the class that is saved, and
        # keeps pointing at the repository that the others were once loaded from.
        self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        # Convolutions keep the variance of their input: with `initializer_range` each level would start several times
        # smaller than the one before (8 times in hkt-small), and the coarse scores near zero.
        if isinstance(module, HKTDownsample):
            init.normal_(module.depthwise_weight, std=module.depthwise_weight.shape[-1] ** -0.5)
            init.normal_(module.pointwise.weight, std=module.pointwise.in_features**-0.5)
        elif isinstance(module, HKTLevelWeights):
            # All levels count alike at first, for every token.
            init.zeros_(module.logits)
            if module.query_logits is not None:
                init.zeros_(module.query_logits.weight)
        elif isinstance(module, HKTAttention) and self.config.hybrid:
            init.normal_(module.conv_weight, std=module.conv_weight.shape[-1] ** -0.5)
            init.zeros_(module.beta)


class HKTModel(HKTPreTrainedModel):
    """
    The HKT encoder without a head.

    Every sequence is computed as if it stood alone: the result for its tokens does not depend on the side or the amount
    of padding, whatever the attention implementation.
    """

    def __init__(self, config: HKTConfig):
        super().__init__(config)
        self.embeddings = HKTEmbeddings(config)
        self.layers = nn.ModuleList(HKTLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.token

    def set_input_embeddings(self, value: nn.Embedding):
        self.embeddings.token = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: [B, T], token ids. Exactly one of `input_ids` and `inputs_embeds` must be given.
            attention_mask: [B, T], 1 or True = a real token, 0 or False = a pad, wherever it is. None = all tokens are
                real. With cached tokens, [B, cached + T].
            position_ids: [B, T] or [1, T], the position of each token. By default they count the real tokens of a row.
                Without an attention mask, a 0 after the first token of a row begins another sequence, computed as if it
                stood alone.
            inputs_embeds: [B, T, D], instead of the token embeddings.
            cache: the tokens that came before, of a causal model: what it returned, or an empty `DynamicCache`, which
                it fills. Attention dropout does not apply to tokens that come after cached ones.
            use_cache: whether to return a cache; by default, what the configuration says. No effect without
                `is_causal`, with several sequences in a row, or in training with gradient checkpointing.
            output_hidden_states, output_attentions: as in every transformers model; attention maps [B, H, T, T] of the
                fused scores need `attn_implementation="eager"`.

        Returns:
            `BaseModelOutputWithPast` with `last_hidden_state` [B, T, D], in which what is at pads has no meaning, and
            `cache`.

        Raises:
            ValueError: if the inputs are missing, empty, of the wrong shape, outside the vocabulary or too long, or if
                the cache cannot be used.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs.dim() != (2 if inputs_embeds is None else 3):
            name, axes = ("input_ids", "[B, T]") if inputs_embeds is None else ("inputs_embeds", "[B, T, D]")
            raise ValueError(f"`{name}` has shape {tuple(inputs.shape)}: it must be a batch of sequences, {axes}.")
        batch_size, num_tokens = inputs.shape[:2]
        if num_tokens == 0:
            raise ValueError("The input has 0 tokens: HKT needs at least 1. Leave out empty texts.")
        if input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)

        if position_ids is not None and position_ids.shape not in ((1, num_tokens), (batch_size, num_tokens)):
            raise ValueError(
                f"`position_ids` has shape {tuple(position_ids.shape)}: it must be {(batch_size, num_tokens)} or "
                f"{(1, num_tokens)}, one position per token."
            )
        if inputs_embeds is not None and inputs_embeds.shape[2] != self.config.hidden_size:
            raise ValueError(
                f"`inputs_embeds` has width {inputs_embeds.shape[2]}: it must be `hidden_size`, "
                f"{self.config.hidden_size}."
            )

        if cache is not None:
            self.check_cache(cache)
        num_cached = 0 if cache is None else cache.get_seq_length()
        is_token = check_attention_mask(attention_mask, (batch_size, num_cached + num_tokens), inputs.device)
        layout = make_layout(is_token, position_ids, (batch_size, num_tokens), num_cached, inputs.device)
        if layout.is_packed and cache is not None:
            raise ValueError(
                "`position_ids` starts at 0 again within a row, so that the row holds several sequences: these cannot "
                "be cached. Leave `cache` out, or give each sequence a row and an attention mask."
            )
        # Gradient checkpointing computes every layer twice: a cache would get its tokens twice.
        can_cache = (
            self.config.is_causal and not layout.is_packed and not (self.gradient_checkpointing and self.training)
        )
        if cache is None and use_cache and can_cache:
            cache = self.check_cache(DynamicCache())
        if position_ids is None and is_token is None:
            position_ids = layout.positions_Rt
        elif position_ids is None:
            position_ids = (is_token.cumsum(dim=1) - 1).masked_fill(~is_token, 0)[:, num_cached:]

        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids, num_cached)
        layer_kwargs = {
            "layout": layout,
            "attention_mask": self.make_attention_mask(hidden_states, layout),
            "position_embeddings": self.rotary_levels(layout, position_ids, hidden_states.dtype),
        }
        for index, layer in enumerate(self.layers):
            cache_layer = None if cache is None else cache.layers[index]
            hidden_states = layer(hidden_states, cache_layer=cache_layer, **layer_kwargs, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.final_norm(hidden_states), cache=cache)

    def check_cache(self, cache: Cache) -> Cache:
        """The cache, made one of HKT if it is empty; ValueError if it cannot be used."""
        if not self.config.is_causal:
            raise ValueError(
                "A cache was passed to a model whose tokens see those after them (`is_causal=False`): what it keeps "
                "would be wrong for the next token. Leave `cache` out, or train with `is_causal=True`."
            )
        if self.gradient_checkpointing and self.training:
            raise ValueError(
                "A cache was passed to a model that trains with gradient checkpointing, which computes every layer "
                "twice: leave `cache` out."
            )
        return adopt_cache(cache, len(self.layers), self.config.level_stride)

    def make_attention_mask(self, hidden_states: Tensor, layout: TokenLayout) -> Tensor | None:
        """What `HKTAttention` takes as its mask, for the rows of the layout; None if there is nothing to mask."""
        if layout.num_cached > 0:
            num_keys = layout.num_cached + hidden_states.shape[1]
            key_T = torch.arange(num_keys, device=hidden_states.device)
            return key_T <= layout.positions_Rt[:, None, :, None]
        is_token = layout.is_token_Rt
        arguments = {
            "config": self.config,
            # Of this, only the shape, the dtype and the device matter.
            "inputs_embeds": hidden_states if is_token is None else hidden_states.new_empty((*is_token.shape, 0)),
            "attention_mask": None if is_token is None else open_empty_rows(is_token),
            "cache": None,
        }
        if self.config.is_causal:
            return create_causal_mask(**arguments)
        mask = create_bidirectional_mask(**arguments)
        if isinstance(mask, Tensor) and mask.dim() == 4:
            # Every query sees the same keys: one row says it all, where PyTorch would make T x T floats in every layer.
            mask = mask[:, :, :1]
        return mask

    def rotary_levels(
        self, layout: TokenLayout, position_ids: Tensor, dtype: torch.dtype
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Cosines and sines per level; position b of level l stands at its block's first token, s^l * b."""
        if self.config.position_embedding_type != "rotary":
            return None
        if layout.inverse_BT is not None:
            position_ids = layout.rows(position_ids.expand(len(layout.inverse_BT), -1))
        head_size = self.config.hidden_size // self.config.num_attention_heads
        stride = self.config.level_stride
        return [
            rotary_embedding(layout.of_level(position_ids, stride, level), head_size, self.config.rope_theta, dtype)
            for level in range(self.config.num_levels)
        ]


def check_attention_mask(attention_mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    """
    The attention mask as boolean, True = a real token; None if there is none.

    Raises:
        ValueError: if the mask is of another shape or holds other values than 0 and 1.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != shape:
        raise ValueError(
            f"`attention_mask` has shape {tuple(attention_mask.shape)}, but the input needs {tuple(shape)}: one entry "
            "per token (cached ones included), 1 for a real token and 0 for a pad. Masks per pair of tokens are not "
            "supported: the convolutions have to know which tokens are pads."
        )
    if attention_mask.dtype != torch.bool:
        # An additive mask (0 and -inf) read as this one would hide exactly the real tokens.
        check_ids(
            "attention_mask", attention_mask, 2, "1 is a real token and 0 a pad; additive masks are not supported."
        )
    return attention_mask.to(device=device, dtype=torch.bool)


class HKTForSequenceClassification(HKTPreTrainedModel):
    """HKT with a linear classifier (or regressor) on the pooled hidden states."""

    def __init__(self, config: HKTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = HKTModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """
        Args:
            labels: [B] class indices (-100 = ignore), [B, num_labels] of 0 and 1 for multi-label classification, or [B]
                or [B, num_labels] numbers for regression. `config.problem_type` says which; if it is None, one label
                means regression, integer labels classification, and other labels multi-label classification.
            others: as in `HKTModel`.

        Returns:
            `SequenceClassifierOutput` with `logits` [B, num_labels] and, if labels are given, the scalar `loss`.

        Raises:
            ValueError: as in `HKTModel`, and for class indices outside of 0..num_labels-1.
        """
        if attention_mask is None and position_ids is not None and holds_several(position_ids):
            raise ValueError(
                "`position_ids` starts at 0 again within a row, so that the row holds several sequences, but a row has "
                "one label: give each sequence a row and an attention mask (`DataCollatorWithPadding`)."
            )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **(kwargs | {"use_cache": False}),
        )
        pooled_BD = pool_tokens(outputs.last_hidden_state, attention_mask, self.config.classifier_pooling)
        logits = self.classifier(self.dropout(pooled_BD))
        loss = None if labels is None else self.sequence_loss(logits, labels, **kwargs)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def sequence_loss(
        self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, **kwargs
    ) -> Tensor:
        """
        The loss of transformers, made to honour `num_items_in_batch` (the label count of all accumulated batches, which
        Trainer divides by) for every problem type: its MSE and BCE average over the one batch whatever it says.
        """
        if self.config.problem_type is None and self.num_labels > 1 and not labels.is_floating_point():
            self.config.problem_type = "single_label_classification"
        if self.config.problem_type == "single_label_classification":
            check_labels(labels, self.num_labels)
            return self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, num_items_in_batch=num_items_in_batch, **kwargs
            )
        loss = self.loss_function(labels=labels.to(logits.dtype), pooled_logits=logits, config=self.config)
        return loss if num_items_in_batch is None else loss * labels.numel() / num_items_in_batch


def pool_tokens(hidden_BTD: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    """The mean over the real tokens, the last of them or the first: [B, T, D] -> [B, D]. No real token gives 0."""
    if attention_mask is None:
        if pooling == "mean":
            return hidden_BTD.mean(dim=1)
        return hidden_BTD[:, -1 if pooling == "last" else 0]
    is_token_BT = attention_mask.to(device=hidden_BTD.device, dtype=torch.bool)
    hidden_BTD = hidden_BTD.masked_fill(~is_token_BT[:, :, None], 0.0)
    if pooling == "mean":
        # In float32 at least: half precision overflows over long sequences.
        sum_BD = hidden_BTD.sum(dim=1, dtype=torch.promote_types(torch.float32, hidden_BTD.dtype))
        return (sum_BD / is_token_BT.sum(dim=1, keepdim=True).clamp(min=1)).to(hidden_BTD.dtype)
    # argmax gives the first of equals: the first real token, or the last if read backwards.
    if pooling == "first":
        index_B = is_token_BT.long().argmax(dim=1)
    else:
        index_B = is_token_BT.shape[1] - 1 - is_token_BT.flip(1).long().argmax(dim=1)
    return hidden_BTD[torch.arange(hidden_BTD.shape[0], device=hidden_BTD.device), index_B]


class HKTForCausalLM(HKTPreTrainedModel, GenerationMixin):
    """A causal HKT (`is_causal=True`) that predicts the next token; generates with `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.token.weight"}

    def __init__(self, config: HKTConfig):
        if not config.is_causal:
            raise ValueError(
                "HKTForCausalLM needs `is_causal=True`, or a token would see the one that it has to predict. Pass it: "
                "`HKTConfig(is_causal=True)`, or `from_pretrained(..., is_causal=True)` of a model trained so."
            )
        super().__init__(config)
        self.model = HKTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """
        Args:
            labels: [B, T], token ids (-100 = ignore), in the places of `input_ids`: they are shifted here.
            logits_to_keep: how many of the last tokens get logits (0 = all), or their indices.
            others: as in `HKTModel`.

        Returns:
            `CausalLMOutputWithPast` with `logits` [B, T, vocab_size] and, if labels are given, the scalar `loss`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            check_labels(labels, self.config.vocab_size)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class HKTForMaskedLM(HKTPreTrainedModel):
    """HKT that predicts tokens which were masked."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.token.weight"}

    def __init__(self, config: HKTConfig):
        super().__init__(config)
        self.model = HKTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """
        Args:
            labels: [B, T], token ids of the masked tokens, -100 elsewhere.
            others: as in `HKTModel`.

        Returns:
            `MaskedLMOutput` with `logits` [B, T, vocab_size] and, if labels are given, the scalar `loss`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **(kwargs | {"use_cache": False}),
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            check_labels(labels, self.config.vocab_size)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class HKTForTokenClassification(HKTPreTrainedModel):
    """HKT with a linear classifier of every token."""

    def __init__(self, config: HKTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = HKTModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """
        Args:
            labels: [B, T], class indices, -100 = ignore.
            others: as in `HKTModel`.

        Returns:
            `TokenClassifierOutput` with `logits` [B, T, num_labels] and, if labels are given, the scalar `loss`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **(kwargs | {"use_cache": False}),
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            check_labels(labels, self.num_labels)
            loss = self.loss_function(logits=logits, labels=labels, config=self.config, **kwargs)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class HKTForQuestionAnswering(HKTPreTrainedModel):
    """HKT that points at the first and the last token of the answer to a question about a text."""

    def __init__(self, config: HKTConfig):
        super().__init__(config)
        self.model = HKTModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """
        Args:
            start_positions, end_positions: [B], places of the answer's first and last token; T or more = ignore.
            others: as in `HKTModel`.

        Returns:
            `QuestionAnsweringModelOutput` with `start_logits` and `end_logits` [B, T] and, if both positions are given,
            the scalar `loss`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **(kwargs | {"use_cache": False}),
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# Saving a model puts these files beside its weights, so that `trust_remote_code=True` loads it without the package.
HKTConfig.register_for_auto_class()
HKTModel.register_for_auto_class("AutoModel")
HKTForCausalLM.register_for_auto_class("AutoModelForCausalLM")
HKTForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
HKTForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")
HKTForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
HKTForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
MODELS = (
    HKTModel,
    HKTForCausalLM,
    HKTForMaskedLM,
    HKTForQuestionAnswering,
    HKTForSequenceClassification,
    HKTForTokenClassification,
)
AUTO_MAP = {cls._auto_class: f"{cls.__module__.rpartition('.')[-1]}.{cls.__name__}" for cls in (HKTConfig, *MODELS)}

__all__ = ["HKTPreTrainedModel", *(model.__name__ for model in MODELS)]
