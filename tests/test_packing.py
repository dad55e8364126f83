"""Several sequences in one row, told by their positions, are computed as if each stood alone."""

import pytest
import torch
from tiny_models import random_model, tiny_config
from tolerances import EXACT
from transformers import DataCollatorWithFlattening

from hkt_hf import HKTForCausalLM, HKTForSequenceClassification

LENGTHS = [3, 1, 6, 2, 5]


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 23, (length,), generator=generator) for length in LENGTHS]


def pack(rows):
    return torch.cat(rows)[None], torch.cat([torch.arange(len(row)) for row in rows])[None]


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hkt_fused"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
def test_packed_sequences_equal_separate_ones_with_gradients(positions, is_causal, implementation):
    model = random_model(position_embedding_type=positions, is_causal=is_causal)
    model.set_attn_implementation(implementation)
    rows = sequences()
    ids, position_ids = pack(rows)
    # Two rows of several sequences, of which the second begins at another place.
    other_ids, other_positions = pack(rows[::-1])
    results = []
    for outputs in (
        model(torch.cat([ids, other_ids]), position_ids=torch.cat([position_ids, other_positions])).last_hidden_state,
        torch.stack(
            [
                torch.cat([model(row[None]).last_hidden_state[0] for row in rows]),
                torch.cat([model(row[None]).last_hidden_state[0] for row in rows[::-1]]),
            ]
        ),
    ):
        results.append((outputs, *torch.autograd.grad(outputs.square().sum(), list(model.parameters()))))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, **EXACT[torch.float64])


def test_packed_rows_may_be_longer_than_the_learned_positions():
    model = random_model(max_position_embeddings=8)
    ids, position_ids = pack(sequences())
    assert ids.shape[1] > 8
    assert model(ids, position_ids=position_ids).last_hidden_state.shape == (1, 17, 16)
    with pytest.raises(ValueError, match=r"17 tokens.*positions for 8"):
        model(ids)


def test_positions_that_start_elsewhere_are_no_boundary():
    model = random_model(position_embedding_type="rotary")
    ids = sequences()[2][None]
    # Rotary scores depend on distances alone.
    torch.testing.assert_close(
        model(ids, position_ids=torch.arange(7, 13)[None]).last_hidden_state,
        model(ids).last_hidden_state,
        **EXACT[torch.float32],
    )


def test_attention_maps_of_packed_sequences_are_blocks():
    model = random_model(is_causal=False)
    model.set_attn_implementation("eager")
    rows = sequences()
    ids, position_ids = pack(rows)
    maps = model(ids, position_ids=position_ids, output_attentions=True).attentions
    start = 0
    outside = torch.ones(17, 17, dtype=torch.bool)
    for row in rows:
        block = slice(start, start + len(row))
        alone = model(row[None], output_attentions=True).attentions
        for layer in range(2):
            torch.testing.assert_close(maps[layer][0, :, block, block], alone[layer][0], **EXACT[torch.float64])
        outside[block, block] = False
        start += len(row)
    assert all((layer[0][:, outside] == 0).all() for layer in maps)


def test_the_flattening_collator_gives_the_loss_of_separate_sequences():
    torch.manual_seed(0)
    model = HKTForCausalLM(tiny_config()).double().eval()
    features = [{"input_ids": row.tolist()} for row in sequences()]
    batch = DataCollatorWithFlattening(return_tensors="pt")(features)
    assert batch["input_ids"].shape == (1, 17)
    rows = [row[None] for row in sequences() if len(row) > 1]
    losses = [model(row, labels=row).loss * (row.shape[1] - 1) for row in rows]
    expected = sum(losses) / sum(row.shape[1] - 1 for row in rows)
    torch.testing.assert_close(model(**batch).loss, expected, **EXACT[torch.float64])


def test_a_classifier_refuses_several_sequences_in_a_row():
    model = HKTForSequenceClassification(tiny_config(is_causal=False))
    ids, position_ids = pack(sequences())
    with pytest.raises(ValueError, match=r"several sequences.*a row has one label.*DataCollatorWithPadding"):
        model(ids, position_ids=position_ids)
