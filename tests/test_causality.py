"""No level and no branch shows a token anything after it."""

import itertools

import pytest
import torch
from tiny_models import random_model

from hkt_hf.attention_hkt import level_length

NUM_TOKENS = 19


def changed_outputs(model, position):
    """Which positions of the output change when the embedding of one token does."""
    torch.manual_seed(1)
    embeds = torch.randn(1, NUM_TOKENS, model.config.hidden_size, dtype=torch.float64)
    changed = embeds.clone()
    changed[:, position] += torch.randn(model.config.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        difference = model(inputs_embeds=changed).last_hidden_state - model(inputs_embeds=embeds).last_hidden_state
    return difference[0].abs().amax(dim=-1) > 1e-12


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hkt_fused"])
@pytest.mark.parametrize(
    ("num_levels", "stride", "fusion", "hybrid", "positions"),
    [
        *itertools.product([1, 2, 3, 4], [2], ["input"], [True], ["learned"]),
        *itertools.product([3], [1, 3], ["static"], [False], ["rotary"]),
        (3, 2, "static", True, "none"),
        (3, 2, "input", True, "rotary"),
    ],
)
def test_a_token_changes_nothing_before_it(num_levels, stride, fusion, hybrid, positions, implementation):
    model = random_model(
        num_levels=num_levels,
        level_stride=stride,
        level_fusion=fusion,
        hybrid=hybrid,
        position_embedding_type=positions,
    )
    model.set_attn_implementation(implementation)
    for position in range(NUM_TOKENS):
        changed = changed_outputs(model, position)
        assert not changed[:position].any()
        # The test could not fail if nothing ever changed: what comes after does.
        assert changed[position:].all()


def test_a_bidirectional_model_does_see_what_comes_after():
    changed = changed_outputs(random_model(is_causal=False), NUM_TOKENS - 1)
    assert changed.all()


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_level_l_sees_tokens_up_to_the_first_of_its_block(stride):
    """Position b of level l is a function of tokens 0..s^l * b, and does depend on token s^l * b."""
    attention = random_model(num_levels=4, level_stride=stride).layers[0].attention
    torch.manual_seed(1)
    hidden = torch.randn(1, NUM_TOKENS, 16, dtype=torch.float64, requires_grad=True)
    level_states = hidden
    for level, downsample in enumerate(attention.downsample, start=1):
        level_states = downsample(level_states)
        assert level_states.shape[1] == level_length(NUM_TOKENS, stride, level)
        for block in range(level_states.shape[1]):
            (gradient,) = torch.autograd.grad(level_states[0, block].sum(), hidden, retain_graph=True)
            seen = gradient[0].abs().amax(dim=-1) > 0
            first = stride**level * block
            assert seen[first]
            assert not seen[first + 1 :].any()


def test_the_convolution_branch_alone_is_causal():
    """With the gate at 0 a layer is its convolution of the values: it sees its kernel's tokens and no other."""
    model = random_model(hybrid_kernel_size=4, num_hidden_layers=1)
    with torch.no_grad():
        model.layers[0].attention.beta.fill_(float("-inf"))
    changed = changed_outputs(model, 7)
    assert changed.nonzero().flatten().tolist() == [7, 8, 9, 10]
