"""Language models, token classification and question answering: their classes, losses and weights."""

import pytest
import torch
import transformers
from tiny_models import tiny_config
from tolerances import EXACT
from torch.nn import functional as F

import hkt_hf
from hkt_hf import HKTForCausalLM, HKTForMaskedLM, HKTForQuestionAnswering, HKTForTokenClassification
from hkt_hf.modeling_hkt import MODELS


# transformers computes these losses in float32, whatever the dtype of the logits.
def assert_loss(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), **EXACT[torch.float32])


TASKS = ["CausalLM", "MaskedLM", "QuestionAnswering", "SequenceClassification", "TokenClassification"]


def build(model_class, **changes):
    torch.manual_seed(0)
    return model_class(tiny_config(**changes)).double().eval()


def random_ids(*shape):
    return torch.randint(5, 23, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("task", TASKS)
def test_auto_classes_make_save_and_load_every_head(task, tmp_path):
    auto_class, model_class = getattr(transformers, f"AutoModelFor{task}"), getattr(hkt_hf, f"HKTFor{task}")
    model = auto_class.from_config(tiny_config()).eval()
    assert type(model) is model_class
    model.save_pretrained(tmp_path)
    loaded, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class and not any(info.values())
    ids = random_ids(2, 7)
    for actual, expected in zip(loaded(ids, use_cache=False)[:], model(ids, use_cache=False)[:], strict=True):
        assert actual.equal(expected)


def test_every_model_is_exported():
    assert {model.__name__ for model in MODELS} <= set(hkt_hf.__all__)


@pytest.mark.parametrize("model_class", [HKTForCausalLM, HKTForMaskedLM])
def test_tied_embeddings_are_one_tensor_also_after_a_reload(model_class, tmp_path):
    model = model_class(tiny_config(tie_word_embeddings=True)).eval()
    assert model.lm_head.weight is model.model.embeddings.token.weight
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embeddings.token.weight
    assert loaded.num_parameters() == model.num_parameters() == model_class(tiny_config()).num_parameters() - 23 * 16
    loaded.resize_token_embeddings(29)
    assert loaded.lm_head.weight is loaded.model.embeddings.token.weight
    assert loaded(random_ids(1, 5)).logits.shape == (1, 5, 29)
    untied = model_class(tiny_config())
    untied.resize_token_embeddings(29)
    assert untied(random_ids(1, 5)).logits.shape == (1, 5, 29)


def test_the_causal_loss_is_that_of_the_next_token():
    model = build(HKTForCausalLM)
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    labels = ids.clone()
    labels[0, :4] = -100
    mask[0, :3] = 0
    output = model(ids, attention_mask=mask, labels=labels)
    log_probabilities = output.logits.log_softmax(-1)
    terms = [
        -log_probabilities[row, place, labels[row, place + 1]]
        for row in range(2)
        for place in range(8)
        if labels[row, place + 1] != -100
    ]
    assert len(terms) == 13
    assert_loss(output.loss, sum(terms) / 13)
    halved = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=26).loss
    assert_loss(halved, output.loss / 2)


def test_logits_to_keep_are_the_last_ones():
    model = build(HKTForCausalLM)
    ids = random_ids(2, 9)
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:], **EXACT[torch.float64])
    chosen = torch.tensor([0, 5])
    torch.testing.assert_close(model(ids, logits_to_keep=chosen).logits, logits[:, chosen], **EXACT[torch.float64])


def test_the_masked_loss_counts_masked_tokens_alone():
    model = build(HKTForMaskedLM, is_causal=False)
    ids = random_ids(2, 9)
    labels = torch.full_like(ids, -100)
    labels[0, 2], labels[1, 5], labels[1, 6] = 7, 8, 9
    output = model(ids, labels=labels)
    logits = torch.stack([output.logits[0, 2], output.logits[1, 5], output.logits[1, 6]])
    expected = F.cross_entropy(logits, torch.tensor([7, 8, 9]))
    assert_loss(output.loss, expected)
    halved = model(ids, labels=labels, num_items_in_batch=6).loss
    assert_loss(halved, expected / 2)


def test_token_classification_loss():
    model = build(HKTForTokenClassification, num_labels=4, is_causal=False)
    ids, labels = random_ids(2, 9), torch.randint(4, (2, 9))
    labels[0, 3:] = -100
    output = model(ids, labels=labels)
    assert output.logits.shape == (2, 9, 4)
    expected = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    assert_loss(output.loss, expected)
    halved = model(ids, labels=labels, num_items_in_batch=24).loss
    assert_loss(halved, expected / 2)


def test_question_answering_loss():
    model = build(HKTForQuestionAnswering, is_causal=False)
    ids, start, end = random_ids(3, 9), torch.tensor([1, 0, 9]), torch.tensor([4, 0, 9])
    output = model(ids, start_positions=start, end_positions=end)
    assert output.start_logits.shape == output.end_logits.shape == (3, 9)
    # The answer of the third text was cut off: it does not count.
    expected = F.cross_entropy(output.start_logits[:2], start[:2]) + F.cross_entropy(output.end_logits[:2], end[:2])
    assert_loss(output.loss, expected / 2)
    assert model(ids).loss is None


@pytest.mark.parametrize(
    ("model_class", "changes"),
    [(HKTForCausalLM, {}), (HKTForMaskedLM, {}), (HKTForTokenClassification, {"num_labels": 23})],
)
def test_labels_outside_of_the_classes_are_named(model_class, changes):
    model = build(model_class, **changes)
    with pytest.raises(ValueError, match=r"`labels` contains 23: it must be in 0\.\.22"):
        model(random_ids(1, 4), labels=torch.tensor([[1, -100, 23, 2]]))
