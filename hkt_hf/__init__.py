"""Hierarchical Kernel Transformer (HKT, arXiv 2604.08829) for Hugging Face transformers."""

import transformers
from transformers import AutoConfig

from .configuration_hkt import HKTConfig
from .kernels import fused_multiscale_attention
from .modeling_hkt import (
    MODELS,
    HKTForCausalLM,
    HKTForMaskedLM,
    HKTForQuestionAnswering,
    HKTForSequenceClassification,
    HKTForTokenClassification,
    HKTModel,
    HKTPreTrainedModel,
)

AutoConfig.register(HKTConfig.model_type, HKTConfig)
for model_class in MODELS:
    getattr(transformers, model_class._auto_class).register(HKTConfig, model_class)

__version__ = "0.1.0"

__all__ = [
    "HKTConfig",
    "HKTForCausalLM",
    "HKTForMaskedLM",
    "HKTForQuestionAnswering",
    "HKTForSequenceClassification",
    "HKTForTokenClassification",
    "HKTModel",
    "HKTPreTrainedModel",
    "fused_multiscale_attention",
]
