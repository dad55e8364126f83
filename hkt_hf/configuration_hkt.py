"""Configuration of the Hierarchical Kernel Transformer (HKT, arXiv 2604.08829)."""

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils.type_validators import activation_fn_key


@strict
class HKTConfig(PreTrainedConfig):
    r"""
    Configuration of an HKT model. The defaults are hkt-small: 4 layers of width 128 that read bytes at 3 levels.

    Standard attention is a point of this configuration, not other code: `num_levels=1, hybrid=False` is multi-head
    attention, `num_levels=1, hybrid=True` is multi-head attention with a convolution branch.

    Every invalid value or combination raises a `StrictDataclassError` of huggingface_hub (as in every transformers v5
    configuration) that carries the value, the rule and the remedy.

    Args:
        vocab_size (`int`, defaults to 261):
            Number of token ids. The default is the byte tokenizer's: 256 bytes and 5 special tokens.
        hidden_size (`int`, defaults to 128):
            Width D of the hidden states; a multiple of `num_attention_heads`.
        num_hidden_layers (`int`, defaults to 4):
            Number of transformer layers.
        num_attention_heads (`int`, defaults to 4):
            Number of heads H; each has the head size d = D / H.
        intermediate_size (`int`, defaults to 512):
            Width of the MLP's hidden layer.
        hidden_act (`str`, defaults to `"gelu"`):
            Activation of the MLP, a key of `transformers.activations.ACT2FN`.
        num_levels (`int`, defaults to 3):
            Number L of resolutions, the full one included. 1 means no hierarchy.
        level_stride (`int`, defaults to 2):
            Stride s of the causal convolution that makes level l + 1 of level l. 1 is the control without compression:
            convolved levels with the same parameters at full resolution (ours).
        level_kernel_size (`int`, defaults to 3):
            Kernel size of that convolution, in positions of level l.
        level_fusion (`"input"` or `"static"`, defaults to `"input"`):
            The level weights are a softmax over learned logits per head (`"static"`), to which `"input"` adds a linear
            function of the query token (ours; zero at the start of training).
        hybrid (`bool`, defaults to `True`):
            Whether each head mixes attention with a causal depthwise convolution of its values through a learned gate.
        hybrid_kernel_size (`int`, defaults to 3):
            Kernel size of the convolution branch, in tokens.
        position_embedding_type (`"learned"`, `"rotary"` or `"none"`, defaults to `"learned"`):
            `"learned"` adds an embedding of the position to each token; `"rotary"` rotates the queries and keys of
            level l by the position of the block's first token (ours); `"none"` leaves order to the convolutions.
        rope_theta (`float`, defaults to 10000.0):
            Base of the rotary frequencies. Used only by `"rotary"`.
        max_position_embeddings (`int`, defaults to 1024):
            Number of learned positions, hence the longest input with `"learned"`. The other two have no limit.
        is_causal (`bool`, defaults to `False`):
            Whether a token sees only what is not after it. `False` suits classification. The convolutions are causal
            either way.
        classifier_pooling (`"mean"`, `"last"` or `"first"`, defaults to `"mean"`):
            What the sequence classifier reads: the mean over the real tokens, the last of them or the first.
        hidden_dropout (`float`, defaults to 0.1):
            Dropout of the embeddings and of what attention and MLP add to the residual stream.
        attention_dropout (`float`, defaults to 0.0):
            Dropout of the attention probabilities. Above 0, PyTorch has no memory-efficient attention kernel on CPU.
        classifier_dropout (`float`, defaults to 0.0):
            Dropout of the pooled representation.
        layer_norm_eps (`float`, defaults to 1e-5):
            Epsilon of the layer norms.
        initializer_range (`float`, defaults to 0.08):
            Standard deviation of the initial linear and embedding weights: about `hidden_size ** -0.5`. The usual 0.02
            suits a width of 768 and more; small models, HKT and MHA alike, sit on a plateau with it.
        tie_word_embeddings (`bool`, defaults to `False`):
            Whether the language models' output layer shares the weights of the token embedding.
        use_cache (`bool`, defaults to `True`):
            Whether a causal model returns a cache for the next tokens.

    Example:

    ```python
    >>> from hkt_hf import HKTConfig, HKTModel

    >>> model = HKTModel(HKTConfig())
    ```"""

    model_type = "hkt"
    # Trainer would gather it.
    keys_to_ignore_at_inference = ["cache"]

    vocab_size: int = 261
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    intermediate_size: int = 512
    hidden_act: str = activation_fn_key(default="gelu")
    num_levels: int = 3
    level_stride: int = 2
    level_kernel_size: int = 3
    level_fusion: Literal["input", "static"] = "input"
    hybrid: bool = True
    hybrid_kernel_size: int = 3
    position_embedding_type: Literal["learned", "rotary", "none"] = "learned"
    rope_theta: float | int = 10000.0
    max_position_embeddings: int = 1024
    is_causal: bool = False
    classifier_pooling: Literal["mean", "last", "first"] = "mean"
    hidden_dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    classifier_dropout: float | int = 0.0
    layer_norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.08
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3
    tie_word_embeddings: bool = False
    use_cache: bool = True
    is_decoder: bool = False

    def validate_architecture(self):
        """Part of `@strict` validation: checks ranges and combinations, at construction and before saving."""
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "num_levels",
            "level_stride",
            "level_kernel_size",
            "hybrid_kernel_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"`{name}` is {value!r}: it must be an integer of at least 1.")
        for name in ("hidden_dropout", "attention_dropout", "classifier_dropout"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"`{name}` is {value!r}: it must be a probability p with 0 <= p < 1.")
        for name in ("layer_norm_eps", "initializer_range", "rope_theta"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"`{name}` is {value!r}: it must be positive and finite.")
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size} and `num_attention_heads` is {self.num_attention_heads}: the "
                "heads split the hidden size evenly; choose a hidden size that is a multiple of the number of heads."
            )
        head_size = self.hidden_size // self.num_attention_heads
        if self.position_embedding_type == "rotary" and head_size % 2 != 0:
            raise ValueError(
                f"The head size (`hidden_size` / `num_attention_heads`) is {head_size}: rotary positions rotate pairs "
                "of dimensions; choose an even head size or another `position_embedding_type`."
            )
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"`pad_token_id` is {self.pad_token_id} and `vocab_size` is {self.vocab_size}: the padding token must "
                "be in the vocabulary; choose an id below `vocab_size`, or None."
            )


__all__ = ["HKTConfig"]
