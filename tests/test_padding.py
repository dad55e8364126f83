"""Every sequence is computed as if it stood alone: pads on either side, in any number, change nothing."""

import pytest
import torch
from tiny_models import random_model
from tolerances import EXACT
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hkt_hf import HKTForSequenceClassification
from hkt_hf.modeling_hkt import pool_tokens

LENGTHS = [1, 2, 3, 5, 8, 11]


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 23, (length,), generator=generator) for length in LENGTHS]


def pad(rows, num_left, width):
    """Pads each row with `num_left(row index)` pads on the left and the rest on the right. The pads hold real ids."""
    ids = torch.full((len(rows), width), 7)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        left = num_left(index)
        ids[index, left : left + len(row)] = row
        mask[index, left : left + len(row)] = 1
    return ids, mask


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hkt_fused"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
@pytest.mark.parametrize("fusion", ["input", "static"])
def test_padding_changes_nothing(fusion, positions, is_causal, implementation):
    model = random_model(level_fusion=fusion, position_embedding_type=positions, is_causal=is_causal)
    model.set_attn_implementation(implementation)
    rows = sequences()
    with torch.no_grad():
        alone = [model(row[None]).last_hidden_state[0] for row in rows]
        for width in (11, 12, 14, 20):
            for num_left in (
                lambda _: 0,
                lambda index, width=width: width - LENGTHS[index],
                lambda index, width=width: min(index, width - LENGTHS[index]),
            ):
                ids, mask = pad(rows, num_left, width)
                output = model(ids, attention_mask=mask).last_hidden_state
                for index, expected in enumerate(alone):
                    torch.testing.assert_close(output[index][mask[index].bool()], expected, **EXACT[torch.float64])


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_classification_does_not_depend_on_padding(side, pooling):
    model = HKTForSequenceClassification(random_model(classifier_pooling=pooling, is_causal=False).config)
    model = model.double().eval()
    rows = sequences()
    ids, mask = pad(rows, lambda index: 15 - LENGTHS[index] if side == "left" else 0, 15)
    with torch.no_grad():
        expected = torch.cat([model(row[None]).logits for row in rows])
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected, **EXACT[torch.float64])


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hkt_fused"])
def test_gradients_do_not_depend_on_padding(implementation):
    model = random_model(is_causal=False)
    model.set_attn_implementation(implementation)
    rows = sequences()
    gradients = []
    for side in ("none", "left", "right"):
        model.zero_grad()
        if side == "none":
            for row in rows:
                model(row[None]).last_hidden_state.square().sum().backward()
        else:
            ids, mask = pad(rows, lambda index, side=side: 15 - LENGTHS[index] if side == "left" else 0, 15)
            output = model(ids, attention_mask=mask).last_hidden_state
            output[mask.bool()].square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for alone, left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, alone, **EXACT[torch.float64])
        torch.testing.assert_close(right, alone, **EXACT[torch.float64])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_positions_counted_by_the_user_are_those_counted_here(positions):
    """Generation code counts them from the mask; what it writes at pads has no meaning."""
    model = random_model(position_embedding_type=positions)
    ids, mask = pad(sequences(), lambda index: 15 - LENGTHS[index], 15)
    position_ids = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        actual = model(ids, attention_mask=mask, position_ids=position_ids).last_hidden_state
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **EXACT[torch.float64])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_traced_graph_does_not_depend_on_padding(is_causal, side):
    """Tracing cannot look at the mask, so it takes no shortcut for rows without pads."""
    torch._dynamo.reset()
    model = random_model(is_causal=is_causal)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    rows = sequences()
    ids, mask = pad(rows, lambda index: 15 - LENGTHS[index] if side == "left" else 0, 15)
    with torch.no_grad():
        output = compiled(ids, attention_mask=mask).last_hidden_state
        for index, row in enumerate(rows):
            expected = model(row[None]).last_hidden_state[0]
            torch.testing.assert_close(output[index][mask[index].bool()], expected, **EXACT[torch.float64])


def test_no_query_is_left_without_a_key():
    """Some backends make NaN of a softmax over nothing; the CPU's do not, so look at what they are given."""
    masks = []

    def recording(module, query, key, value, attention_mask, **kwargs):
        masks.append(attention_mask)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("recording_masks", recording)
    AttentionMaskInterface.register("recording_masks", sdpa_mask)
    mask = torch.tensor([[0] * 9, [0] * 4 + [1] * 5, [1] * 9])
    for is_causal in (False, True):
        model = random_model(is_causal=is_causal)
        model.set_attn_implementation("recording_masks")
        model(torch.randint(5, 23, (3, 9)), attention_mask=mask)
    assert len(masks) == 4
    assert all(attention_mask.any(-1).all() for attention_mask in masks)


def test_what_pads_hold_cannot_reach_a_token_even_if_it_is_not_a_number():
    model = random_model(is_causal=False)
    embeds = torch.randn(2, 9, 16, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, 6:] = 0
    poisoned = embeds.masked_fill(mask[:, :, None] == 0, float("nan"))
    with torch.no_grad():
        expected = model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state[mask.bool()]
        actual = model(inputs_embeds=poisoned, attention_mask=mask).last_hidden_state[mask.bool()]
    assert actual.equal(expected)
    for pooling in ("mean", "last", "first"):
        hidden = torch.randn(2, 9, 16).masked_fill(mask[:, :, None] == 0, float("nan"))
        assert pool_tokens(hidden, mask, pooling).isfinite().all()


def test_the_mean_of_a_long_sequence_does_not_overflow_in_half_precision():
    hidden = torch.full((1, 40_000, 1), 3.0, dtype=torch.float16)
    for mask in (None, torch.ones(1, 40_000)):
        assert pool_tokens(hidden, mask, "mean").item() == 3.0


def test_attention_maps_of_left_padded_rows_are_in_the_positions_of_the_input():
    model = random_model(is_causal=False, num_hidden_layers=1)
    model.set_attn_implementation("eager")
    row = sequences()[-1]
    with torch.no_grad():
        alone = model(row[None], output_attentions=True).attentions[0][0]
        ids, mask = pad([row, row], lambda index: [4, 0][index], 15)
        padded = model(ids, attention_mask=mask, output_attentions=True).attentions[0]
    torch.testing.assert_close(padded[0, :, 4:, 4:], alone, **EXACT[torch.float64])
    torch.testing.assert_close(padded[1, :, :11, :11], alone, **EXACT[torch.float64])
    assert (padded[0, :, 4:, :4] == 0).all()


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hkt_fused"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_without_any_token_gives_finite_results_and_disturbs_nobody(is_causal, implementation):
    model = HKTForSequenceClassification(random_model(is_causal=is_causal).config).double().eval()
    model.set_attn_implementation(implementation)
    ids = torch.randint(5, 23, (2, 9))
    mask = torch.tensor([[0] * 9, [1] * 9])
    logits = model(ids, attention_mask=mask).logits
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    torch.testing.assert_close(logits[1:], model(ids[1:]).logits, **EXACT[torch.float64])
    torch.testing.assert_close(logits[0], model.classifier.bias, **EXACT[torch.float64])


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hkt_fused"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_a_fully_masked_row_is_zero(is_causal, implementation):
    """The attention module gives W_O's bias alone: attention and convolution branch are both exactly 0."""
    model = random_model(is_causal=is_causal, num_hidden_layers=1)
    model.set_attn_implementation(implementation)
    attention = model.layers[0].attention
    torch.nn.init.normal_(attention.o_proj.bias)
    torch.nn.init.normal_(attention.v_proj.bias)
    outputs = []
    attention.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    model(torch.randint(5, 23, (2, 9)), attention_mask=torch.tensor([[0] * 9, [1] * 9]))
    torch.testing.assert_close(outputs[0][0], attention.o_proj.bias.expand(9, -1), **EXACT[torch.float64])


def test_holes_in_the_mask_hide_their_tokens():
    model = random_model(is_causal=False)
    embeds = torch.randn(1, 9, 16, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 1, 0]])
    changed = embeds + torch.randn_like(embeds).masked_fill(mask[:, :, None].bool(), 0.0)
    with torch.no_grad():
        expected = model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state[mask.bool()]
        actual = model(inputs_embeds=changed, attention_mask=mask).last_hidden_state[mask.bool()]
    assert actual.equal(expected)
