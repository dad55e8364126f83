"""HKTConfig: the promised defaults, every rule it enforces, and its round trip."""

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from hkt_hf import HKTConfig, HKTModel

HKT_SMALL = {
    "vocab_size": 261,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "hidden_act": "gelu",
    "num_levels": 3,
    "level_stride": 2,
    "level_kernel_size": 3,
    "level_fusion": "input",
    "hybrid": True,
    "hybrid_kernel_size": 3,
    "position_embedding_type": "learned",
    "max_position_embeddings": 1024,
    "is_causal": False,
    "classifier_pooling": "mean",
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def test_the_defaults_are_hkt_small():
    config = HKTConfig()
    assert {name: getattr(config, name) for name in HKT_SMALL} == HKT_SMALL
    assert config.model_type == "hkt"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"hidden_size": 130}, "multiple of the number of heads"),
        ({"hidden_size": 12, "position_embedding_type": "rotary"}, "even head size"),
        ({"num_levels": 0}, "`num_levels` is 0: it must be an integer of at least 1"),
        ({"level_stride": 0}, "`level_stride` is 0"),
        ({"level_stride": -2}, "`level_stride` is -2"),
        ({"level_kernel_size": 0}, "`level_kernel_size` is 0"),
        ({"hybrid_kernel_size": 0}, "`hybrid_kernel_size` is 0"),
        ({"num_attention_heads": 0}, "`num_attention_heads` is 0"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"intermediate_size": 0}, "`intermediate_size` is 0"),
        ({"max_position_embeddings": 0}, "`max_position_embeddings` is 0"),
        ({"vocab_size": 0}, "`vocab_size` is 0"),
        ({"level_fusion": "mean"}, "expected one of"),
        ({"position_embedding_type": "alibi"}, "expected one of"),
        ({"classifier_pooling": "cls"}, "expected one of"),
        ({"hidden_act": "gelul"}, "activation"),
        ({"num_levels": 2.0}, "expected int, got float"),
        ({"num_levels": "3"}, "expected int, got str"),
        ({"num_levels": True}, "expected int, got bool"),
        ({"num_levels": None}, "expected int"),
        ({"hybrid": 1}, "expected bool, got int"),
        ({"is_causal": "no"}, "expected bool, got str"),
        ({"hidden_dropout": 1.0}, "probability"),
        ({"attention_dropout": -0.1}, "probability"),
        ({"classifier_dropout": float("nan")}, "probability"),
        ({"layer_norm_eps": 0.0}, "positive"),
        ({"initializer_range": float("inf")}, "finite"),
        ({"rope_theta": 0}, "positive"),
        ({"pad_token_id": 261}, "in the vocabulary"),
        ({"pad_token_id": -1}, "in the vocabulary"),
    ],
)
def test_an_invalid_value_raises_with_the_rule(change, rule):
    with pytest.raises(StrictDataclassError, match=rule):
        HKTConfig(**change)


@pytest.mark.parametrize(
    "change", [{"level_stride": 1}, {"num_levels": 1}, {"level_kernel_size": 1}, {"pad_token_id": None}]
)
def test_the_controls_are_valid(change):
    config = HKTConfig(**change)
    assert all(getattr(config, name) == value for name, value in change.items())


def test_a_configuration_made_invalid_is_not_saved(tmp_path):
    config = HKTConfig()
    config.num_attention_heads = 7
    with pytest.raises(StrictDataclassError, match="multiple of the number of heads"):
        config.save_pretrained(tmp_path)


def test_a_value_that_is_set_later_is_checked_by_the_model(tmp_path):
    HKTConfig().save_pretrained(tmp_path)
    changed = AutoConfig.from_pretrained(tmp_path, num_levels=0)
    with pytest.raises(StrictDataclassError, match="`num_levels` is 0"):
        HKTModel(changed)
    config = HKTConfig()
    config.layer_norm_eps = -1.0
    with pytest.raises(StrictDataclassError, match="`layer_norm_eps` is -1"):
        HKTModel(config)


def test_round_trip(tmp_path):
    config = HKTConfig(num_levels=2, level_fusion="static", position_embedding_type="rotary", num_labels=5)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is HKTConfig
    assert loaded.num_labels == 5
    assert {**loaded.to_dict(), "_name_or_path": None} == {**config.to_dict(), "_name_or_path": None}
