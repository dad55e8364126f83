"""Fused attention kernels. Importing this package registers `attn_implementation="hkt_fused"`."""

from . import attention_interface
from .fused import fused_multiscale_attention

__all__ = ["attention_interface", "fused_multiscale_attention"]
