"""The small models that the tests of the architecture share."""

import torch

from hkt_hf import HKTConfig, HKTModel


def tiny_config(**changes):
    return HKTConfig(
        **{
            "vocab_size": 23,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "hidden_dropout": 0.0,
            # Far larger than in training: every path must matter, or a leak would be invisible.
            "initializer_range": 0.3,
            "is_causal": True,
            **changes,
        }
    )


def random_model(**changes):
    torch.manual_seed(0)
    model = HKTModel(tiny_config(**changes)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("logits", "logits.weight", "beta")):
                parameter.normal_()
    return model
