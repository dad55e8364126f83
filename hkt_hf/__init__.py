"""Hierarchical Kernel Transformer (HKT, arXiv 2604.08829) for Hugging Face transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from .configuration_hkt import HKTConfig
from .kernels import fused_multiscale_attention
from .modeling_hkt import HKTForSequenceClassification, HKTModel, HKTPreTrainedModel

AutoConfig.register(HKTConfig.model_type, HKTConfig)
AutoModel.register(HKTConfig, HKTModel)
AutoModelForSequenceClassification.register(HKTConfig, HKTForSequenceClassification)

__version__ = "0.1.0"

__all__ = [
    "HKTConfig",
    "HKTForSequenceClassification",
    "HKTModel",
    "HKTPreTrainedModel",
    "fused_multiscale_attention",
]
