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
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, is_tracing
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_hkt import (
    apply_rotary,
    causal_depthwise_conv,
    concatenate_levels,
    roll_rows,
    rotary_embedding,
)
from .configuration_hkt import HKTConfig


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

    def forward(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, position_ids_BT: Tensor) -> Tensor:
        if inputs_embeds is None:
            remedy = "Use the tokenizer of this checkpoint, or `model.resize_token_embeddings`."
            check_ids("input_ids", input_ids, self.token.num_embeddings, remedy)
            inputs_embeds = self.token(input_ids)
        if self.position is not None:
            limit = self.position.num_embeddings
            num_tokens = inputs_embeds.shape[1]
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
        attention_mask: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
        shift_B: Tensor | None = None,
        position_embeddings: list[tuple[Tensor, Tensor]] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            hidden_states: [B, T, D], the layer's normalised input.
            attention_mask: what the attention function wants, for aligned rows.
            padding_mask_BT: boolean, True = a real token, of aligned rows. None = no pads.
            shift_B: by how many tokens each row must be rolled to the left to start with its first real token. None =
                all rows are aligned.
            position_embeddings: rotary cosines and sines of each level, for aligned rows. None = not rotary.

        Returns:
            [B, T, D], and the attention probabilities [B, H, T, T] if the attention function gives them, else None.
        """
        if shift_B is not None:
            hidden_states = roll_rows(hidden_states, shift_B)
        if padding_mask_BT is not None:
            hidden_states = hidden_states.masked_fill(~padding_mask_BT[:, :, None], 0.0)

        value_BTD = self.v_proj(hidden_states)
        if padding_mask_BT is not None:
            # The projection's bias would bring the pads back: the convolution must not read them, and a row without any
            # real token must give 0.
            value_BTD = value_BTD.masked_fill(~padding_mask_BT[:, :, None], 0.0)
        query, key, value = self.project_levels(hidden_states, value_BTD, position_embeddings)
        level_weights = None if self.level_weights is None else self.level_weights(hidden_states)

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
        output_BTHd = output_BTHd[..., : self.head_dim]

        if self.config.hybrid:
            gate_H1 = self.beta.sigmoid()[:, None]
            conv_BTHd = causal_depthwise_conv(value_BTD, self.conv_weight).unflatten(-1, (-1, self.head_dim))
            output_BTHd = gate_H1 * output_BTHd + (1 - gate_H1) * conv_BTHd

        output_BTD = self.o_proj(output_BTHd.flatten(2))
        if shift_B is not None:
            output_BTD = roll_rows(output_BTD, -shift_B)
            if probabilities is not None:
                probabilities = roll_rows(roll_rows(probabilities, -shift_B, dim=2), -shift_B, dim=3)
        return output_BTD, probabilities

    def project_levels(
        self, hidden_BTD: Tensor, value_BTD: Tensor, position_embeddings: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Query and key of each level, [B, H, T_l, d], and the value, [B, H, T, d]."""
        query_levels, key_levels = [], []
        level_BtD = hidden_BTD
        for level, (q_proj, k_proj) in enumerate(zip(self.q_proj, self.k_proj, strict=True)):
            if level > 0:
                level_BtD = self.downsample[level - 1](level_BtD)
            query_BHtd = self.split_heads(q_proj(level_BtD))
            key_BHtd = self.split_heads(k_proj(level_BtD))
            if position_embeddings is not None:
                query_BHtd = apply_rotary(query_BHtd, *position_embeddings[level])
                key_BHtd = apply_rotary(key_BHtd, *position_embeddings[level])
            query_levels.append(query_BHtd)
            key_levels.append(key_BHtd)
        return query_levels, key_levels, self.split_heads(value_BTD)

    def split_heads(self, states_BtD: Tensor) -> Tensor:
        """[B, t, D] -> [B, H, t, d]."""
        return states_BtD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


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
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """
        Args:
            input_ids: [B, T], token ids. Exactly one of `input_ids` and `inputs_embeds` must be given.
            attention_mask: [B, T], 1 or True = a real token, 0 or False = a pad. None = all tokens are real. A pad
                between real tokens is hidden too, and takes up a position.
            position_ids: [B, T] or [1, T], the position of each token. By default a row's first real token is 0.
            inputs_embeds: [B, T, D], instead of the token embeddings.
            output_hidden_states, output_attentions: as in every transformers model; attention maps [B, H, T, T] of the
                fused scores need `attn_implementation="eager"`.

        Returns:
            `BaseModelOutput` with `last_hidden_state` [B, T, D]; what it holds at pads has no meaning.

        Raises:
            ValueError: if the inputs are missing, empty, of the wrong shape, outside the vocabulary or too long.
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

        padding_mask_BT, shift_B = align_padding(attention_mask, (batch_size, num_tokens), inputs.device)
        aligned_position_ids = torch.arange(num_tokens, device=inputs.device)[None]
        if position_ids is None:
            position_ids = aligned_position_ids
            if shift_B is not None:
                position_ids = roll_rows(position_ids.expand(batch_size, -1), -shift_B)
        else:
            aligned_position_ids = position_ids
            if shift_B is not None:
                aligned_position_ids = roll_rows(position_ids.expand(batch_size, -1), shift_B)

        hidden_states = self.embeddings(input_ids, inputs_embeds, position_ids)
        layer_kwargs = {
            "attention_mask": self.make_attention_mask(hidden_states, padding_mask_BT),
            "padding_mask_BT": padding_mask_BT,
            "shift_B": shift_B,
            "position_embeddings": self.rotary_levels(aligned_position_ids, hidden_states.dtype),
        }
        for layer in self.layers:
            hidden_states = layer(hidden_states, **layer_kwargs, **kwargs)
        return BaseModelOutput(last_hidden_state=self.final_norm(hidden_states))

    def make_attention_mask(self, hidden_states: Tensor, padding_mask_BT: Tensor | None) -> Tensor | None:
        """What the attention function wants as its mask, for aligned rows; None if there is nothing to mask."""
        arguments = {
            "config": self.config,
            "inputs_embeds": hidden_states,
            "attention_mask": None if padding_mask_BT is None else open_empty_rows(padding_mask_BT),
            "cache": None,
        }
        if self.config.is_causal:
            return create_causal_mask(**arguments)
        mask = create_bidirectional_mask(**arguments)
        if isinstance(mask, Tensor) and mask.dim() == 4:
            # Every query sees the same keys: one row says it all, where PyTorch would make T x T floats in every layer.
            mask = mask[:, :, :1]
        return mask

    def rotary_levels(self, position_ids: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]] | None:
        """Cosines and sines per level; position b of level l stands at its block's first token, s^l * b."""
        if self.config.position_embedding_type != "rotary":
            return None
        head_size = self.config.hidden_size // self.config.num_attention_heads
        return [
            rotary_embedding(
                position_ids[:, :: self.config.level_stride**level], head_size, self.config.rope_theta, dtype
            )
            for level in range(self.config.num_levels)
        ]


def align_padding(
    attention_mask: Tensor | None, shape: tuple[int, int], device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """
    The padding mask of rows that are rolled to start with their first real token, and by how much to roll them.

    Args:
        attention_mask: [B, T] of 0 and 1, any dtype, or None.
        shape: (B, T) of the input.
        device: that of the input.

    Returns:
        Boolean [B, T] or None if there are no pads, and integers [B] or None if no row starts with a pad. A traced
        graph must hold for all inputs, so there neither is None if a mask is given.

    Raises:
        ValueError: if the mask is of another shape or holds other values.
    """
    if attention_mask is None:
        return None, None
    if attention_mask.shape != shape:
        raise ValueError(
            f"`attention_mask` has shape {tuple(attention_mask.shape)}, but the input needs {tuple(shape)}: one entry "
            "per token, 1 for a real token and 0 for a pad. Masks per pair of tokens are not supported: the "
            "convolutions have to know which tokens are pads."
        )
    if attention_mask.dtype != torch.bool:
        # An additive mask (0 and -inf) read as this one would hide exactly the real tokens.
        check_ids(
            "attention_mask", attention_mask, 2, "1 is a real token and 0 a pad; additive masks are not supported."
        )
    padding_mask_BT = attention_mask.to(device=device, dtype=torch.bool)
    shift_B = padding_mask_BT.long().argmax(dim=-1)
    if is_tracing(attention_mask):
        return roll_rows(padding_mask_BT, shift_B), shift_B
    if padding_mask_BT.all():
        return None, None
    if not shift_B.any():
        return padding_mask_BT, None
    return roll_rows(padding_mask_BT, shift_B), shift_B


def open_empty_rows(padding_mask_BT: Tensor) -> Tensor:
    """
    Lets the queries of a row without any real token attend to all of its pads, whose values are 0: the attention is
    then exactly 0 with finite gradients, whatever a backend makes of a softmax over nothing (0 in PyTorch's CPU
    kernels, not a number elsewhere).
    """
    return padding_mask_BT | ~padding_mask_BT.any(dim=-1, keepdim=True)


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
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
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
            remedy = "Set `num_labels` to the number of classes and count them from 0 (-100 = ignore)."
            check_ids("labels", labels.masked_fill(labels == -100, 0), self.num_labels, remedy)
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


# Saving a model puts these files beside its weights, so that `trust_remote_code=True` loads it without the package.
HKTConfig.register_for_auto_class()
HKTModel.register_for_auto_class("AutoModel")
HKTForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
AUTO_MAP = {
    cls._auto_class: f"{cls.__module__.rpartition('.')[-1]}.{cls.__name__}"
    for cls in (HKTConfig, HKTModel, HKTForSequenceClassification)
}

__all__ = ["HKTForSequenceClassification", "HKTModel", "HKTPreTrainedModel"]
