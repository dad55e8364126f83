"""The pure functions of attention_hkt: the specification by hand, and the concatenated form against it."""

import pytest
import torch
from tolerances import EXACT

from hkt_hf.attention_hkt import (
    apply_rotary,
    causal_conv_at,
    causal_depthwise_conv,
    concatenate_levels,
    concatenated_multiscale_attention,
    incremental_multiscale_attention,
    level_length,
    reference_multiscale_attention,
    rotary_embedding,
    take_tokens,
)


def random_inputs(num_tokens, num_levels, stride, dtype=torch.float64, batch=2, heads=3, head_size=4, scale=1.0):
    generator = torch.Generator().manual_seed(num_tokens * 100 + num_levels * 10 + stride)

    def randn(*shape):
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    lengths = [level_length(num_tokens, stride, level) for level in range(num_levels)]
    query_levels = [randn(batch, heads, length, head_size) for length in lengths]
    key_levels = [randn(batch, heads, length, head_size) for length in lengths]
    value = randn(batch, heads, num_tokens, head_size)
    logits = torch.randn(batch, heads, num_tokens, num_levels, generator=generator, dtype=torch.float64)
    level_weights = logits.softmax(-1).to(dtype).requires_grad_()
    return query_levels, key_levels, value, level_weights


def random_mask(kind, num_tokens, batch=2):
    generator = torch.Generator().manual_seed(num_tokens)
    if kind == "none":
        return None
    if kind == "causal":
        return torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    if kind == "padding":
        lengths = torch.tensor([num_tokens, max(1, num_tokens - 2)])
        return (torch.arange(num_tokens) < lengths[:, None])[:, None, None]
    # Any pairs, among them queries that may attend to nothing.
    mask = torch.rand(batch, 1, num_tokens, num_tokens, generator=generator) < 0.5
    mask[0, :, num_tokens // 2] = False
    return mask


def by_hand(query_levels, key_levels, value, level_weights, attention_mask, stride, scaling):
    """The definition with one Python loop per index and no tensor trick."""
    batch, heads, num_tokens, head_size = value.shape
    level_weights = level_weights.expand(batch, heads, num_tokens, len(query_levels))
    if attention_mask is None:
        attention_mask = torch.ones(1, dtype=torch.bool)
    attention_mask = attention_mask.expand(batch, 1, num_tokens, num_tokens)
    output = torch.zeros_like(value)
    for b in range(batch):
        for h in range(heads):
            for i in range(num_tokens):
                keys = [j for j in range(num_tokens) if attention_mask[b, 0, i, j]]
                scores = torch.zeros(len(keys), dtype=value.dtype)
                for position, j in enumerate(keys):
                    for level, (query, key) in enumerate(zip(query_levels, key_levels, strict=True)):
                        block = stride**level
                        product = query[b, h, i // block] @ key[b, h, j // block]
                        scores[position] += level_weights[b, h, i, level] * scaling * product
                weights = scores.exp() / scores.exp().sum()
                for weight, j in zip(weights, keys, strict=True):
                    output[b, h, i] += weight * value[b, h, j]
    return output


@pytest.mark.parametrize("mask_kind", ["none", "causal", "padding", "pairs"])
@pytest.mark.parametrize(
    ("num_tokens", "num_levels", "stride"), [(1, 3, 2), (3, 3, 2), (7, 3, 2), (7, 2, 3), (5, 2, 1)]
)
def test_the_specification_is_the_definition(num_tokens, num_levels, stride, mask_kind):
    inputs = [
        [tensor.detach() for tensor in part] if isinstance(part, list) else part.detach()
        for part in random_inputs(num_tokens, num_levels, stride)
    ]
    mask = random_mask(mask_kind, num_tokens)
    expected = by_hand(*inputs, mask, stride, 0.5)
    torch.testing.assert_close(
        reference_multiscale_attention(*inputs, mask, stride=stride, scaling=0.5), expected, **EXACT[torch.float64]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask_kind", ["none", "causal", "padding", "pairs"])
@pytest.mark.parametrize(
    ("num_tokens", "num_levels", "stride"),
    [
        (1, 1, 2),
        (1, 3, 2),
        (2, 3, 2),
        (3, 4, 2),
        (17, 1, 2),
        (17, 3, 2),
        (16, 3, 2),
        (31, 2, 3),
        (29, 3, 3),
        (13, 3, 1),
    ],
)
def test_concatenated_form_equals_the_specification_and_so_do_its_gradients(
    num_tokens, num_levels, stride, mask_kind, dtype
):
    inputs = random_inputs(num_tokens, num_levels, stride, dtype)
    mask = random_mask(mask_kind, num_tokens)
    leaves = [*inputs[0], *inputs[1], *inputs[2:]]
    cotangent = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    results = []
    for function in (reference_multiscale_attention, concatenated_multiscale_attention):
        output = function(*inputs, mask, stride=stride, scaling=0.5)
        gradients = torch.autograd.grad(output, leaves, cotangent)
        results.append((output, *gradients))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, **EXACT[dtype])


def test_level_weights_broadcast():
    query_levels, key_levels, value, level_weights = random_inputs(9, 3, 2)
    per_head = level_weights[:1, :, :1]
    expanded = per_head.expand_as(level_weights)
    for function in (reference_multiscale_attention, concatenated_multiscale_attention):
        torch.testing.assert_close(
            function(query_levels, key_levels, value, per_head[0], stride=2, scaling=0.5),
            function(query_levels, key_levels, value, expanded, stride=2, scaling=0.5),
            **EXACT[torch.float64],
        )


@pytest.mark.parametrize("function", [reference_multiscale_attention, concatenated_multiscale_attention])
def test_masks_and_weights_broadcast_and_bad_ones_are_named(function):
    query_levels, key_levels, value, level_weights = random_inputs(9, 3, 2)
    inputs = (query_levels, key_levels, value)
    keys = torch.arange(9) < 6
    full = keys.expand(2, 1, 9, 9)
    expected = function(*inputs, level_weights, full, stride=2, scaling=0.5)
    assert function(*inputs, level_weights, keys, stride=2, scaling=0.5).allclose(expected)
    third = torch.tensor(1 / 3, dtype=torch.float64)
    expected = function(*inputs, third.expand(2, 3, 9, 3), stride=2, scaling=0.5)
    for weights in (third, third.expand(1), third.expand(2, 3, 9, 1)):
        assert function(*inputs, weights, stride=2, scaling=0.5).allclose(expected)
    with pytest.raises(ValueError, match=r"dtype torch\.int64: it must be boolean"):
        function(*inputs, level_weights, full.long(), stride=2, scaling=0.5)


@pytest.mark.parametrize("function", [reference_multiscale_attention, concatenated_multiscale_attention])
def test_a_query_without_keys_gives_zero_and_finite_gradients(function):
    inputs = random_inputs(6, 3, 2)
    leaves = [*inputs[0], *inputs[1], *inputs[2:]]
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, :, 2] = False
    mask[1] = False
    output = function(*inputs, mask, stride=2, scaling=0.5)
    assert (output[0, :, 2] == 0).all()
    assert (output[1] == 0).all()
    assert (output[0, :, 0] != 0).all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), leaves))


def test_concatenation_relies_on_no_backend_for_queries_without_keys(monkeypatch):
    """The CPU's kernels give 0 where a plain softmax over nothing gives NaN, as other backends do."""

    def plain_attention(query, key, value, attn_mask, scale):
        scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~attn_mask, float("-inf"))
        return scores.softmax(dim=-1) @ value

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", plain_attention)
    test_a_query_without_keys_gives_zero_and_finite_gradients(concatenated_multiscale_attention)


@pytest.mark.parametrize("function", [reference_multiscale_attention, concatenated_multiscale_attention])
def test_a_level_of_weight_zero_contributes_nothing_even_where_keys_are_masked(function):
    """The mask is applied once, after the fusion: 0 * inf would be NaN."""
    query_levels, key_levels, value, _ = random_inputs(9, 2, 2)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    level_weights = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    output = function(query_levels, key_levels, value, level_weights.view(1, 1, 1, 2), mask, stride=2, scaling=0.5)
    one_level = function(
        query_levels[:1], key_levels[:1], value, torch.ones(1, dtype=torch.float64), mask, stride=2, scaling=0.5
    )
    torch.testing.assert_close(output, one_level, **EXACT[torch.float64])
    output.sum().backward()
    assert level_weights.grad.isfinite().all()


@pytest.mark.parametrize("function", [reference_multiscale_attention, concatenated_multiscale_attention])
def test_large_scores_stay_finite(function):
    inputs = random_inputs(16, 3, 2, torch.float32, scale=1e3)
    output = function(*inputs, random_mask("causal", 16), stride=2, scaling=0.5)
    output.sum().backward()
    assert output.isfinite().all()
    assert all(leaf.grad.isfinite().all() for leaf in [*inputs[0], *inputs[1], *inputs[2:]])


def test_blocks_longer_than_the_sequence_cost_no_memory():
    """Stride 2 and 45 levels: upsampled before they are cut, the last would have 2^44 rows."""
    inputs = random_inputs(5, 45, 2)
    torch.testing.assert_close(
        concatenated_multiscale_attention(*inputs, stride=2, scaling=0.5),
        reference_multiscale_attention(*inputs, stride=2, scaling=0.5),
        **EXACT[torch.float64],
    )


def test_concatenation_gives_one_head_size_to_all_three():
    inputs = random_inputs(9, 3, 2)
    query, key, value = concatenate_levels(*inputs, stride=2)
    assert query.shape == key.shape == value.shape == (2, 3, 9, 12)


@pytest.mark.parametrize("function", [reference_multiscale_attention, concatenated_multiscale_attention])
def test_levels_that_do_not_fit_are_refused(function):
    query_levels, key_levels, value, level_weights = random_inputs(9, 3, 2)
    with pytest.raises(ValueError, match="3 query levels and 2 key levels"):
        function(query_levels, key_levels[:2], value, level_weights, stride=2, scaling=0.5)
    with pytest.raises(ValueError, match=r"Level 1 of the query .* stride of 3"):
        function(query_levels, key_levels, value, level_weights, stride=3, scaling=0.5)
    with pytest.raises(ValueError, match="Level 2 of the key"):
        function(query_levels, [*key_levels[:2], key_levels[1]], value, level_weights, stride=2, scaling=0.5)
    with pytest.raises(ValueError, match="3 levels"):
        function(query_levels, key_levels, value, level_weights[..., :2], stride=2, scaling=0.5)
    with pytest.raises(ValueError, match="`stride` is 0"):
        function(query_levels, key_levels, value, level_weights, stride=0, scaling=0.5)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 12])
def test_causal_depthwise_conv_is_a_sum_over_the_newest_inputs(num_tokens, kernel_size, stride):
    hidden = torch.randn(2, num_tokens, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, kernel_size, dtype=torch.float64, requires_grad=True)
    actual = causal_depthwise_conv(hidden, weight, stride)
    rows = []
    for newest in range(0, num_tokens, stride):
        taps = [(tap, newest - (kernel_size - 1) + tap) for tap in range(kernel_size)]
        rows.append(sum(hidden[:, token] * weight[:, tap] for tap, token in taps if token >= 0))
    expected = torch.stack(rows, dim=1)
    assert actual.shape[1] == level_length(num_tokens, stride, 1)
    cotangent = torch.randn_like(expected)
    for left, right in zip(
        (actual, *torch.autograd.grad(actual, (hidden, weight), cotangent)),
        (expected, *torch.autograd.grad(expected, (hidden, weight), cotangent)),
        strict=True,
    ):
        torch.testing.assert_close(left, right, **EXACT[torch.float64])


def test_take_tokens_lays_out_rows_and_back():
    tokens = torch.randn(2, 3, 5)
    index = torch.tensor([[3, 0], [1, 5], [4, 2]])
    rows = take_tokens(tokens, index)
    assert rows[0, 0].equal(tokens[1, 0]) and rows[1, 1].equal(tokens[1, 2]) and rows[2, 1].equal(tokens[0, 2])
    inverse = torch.tensor([[1, 2, 5], [0, 4, 3]])
    assert take_tokens(rows, inverse).equal(tokens)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_single_outputs_of_a_convolution_are_those_of_the_whole(kernel_size, stride):
    hidden = torch.randn(2, 11, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, kernel_size, dtype=torch.float64, requires_grad=True)
    whole = causal_depthwise_conv(hidden, weight, stride)
    positions = torch.tensor([[0, 2, 1], [3, 0, 3]])
    expected = whole[torch.arange(2)[:, None], positions]
    actual = causal_conv_at(hidden, weight, positions, stride)
    cotangent = torch.randn_like(expected)
    for left, right in zip(
        (actual, *torch.autograd.grad(actual, (hidden, weight), cotangent)),
        (expected, *torch.autograd.grad(expected, (hidden, weight), cotangent)),
        strict=True,
    ):
        torch.testing.assert_close(left, right, **EXACT[torch.float64])
    # Inputs that an output does not see need not be there.
    seen = int(positions[:1].max()) * stride + 1
    part = causal_conv_at(hidden[:, :seen], weight, positions[:1], stride)
    torch.testing.assert_close(part, whole[:, positions[0]], **EXACT[torch.float64])


@pytest.mark.parametrize(("num_levels", "stride"), [(1, 2), (3, 2), (2, 3), (4, 2), (3, 1)])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 12])
def test_incremental_attention_gives_rows_of_the_specification(num_tokens, num_levels, stride):
    query, key, value, weights = random_inputs(num_tokens, num_levels, stride)
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    expected = reference_multiscale_attention(query, key, value, weights, causal, stride=stride, scaling=0.5)
    tokens = torch.tensor([num_tokens - 1, num_tokens // 2])
    actual, maps = incremental_multiscale_attention(
        [level_query[:, :, tokens // stride**level] for level, level_query in enumerate(query)],
        # Levels may be longer than the tokens need.
        [torch.nn.functional.pad(level_key, (0, 0, 0, 2), value=7.0) for level_key in key],
        value,
        weights[:, :, tokens],
        causal[tokens],
        stride=stride,
        scaling=0.5,
    )
    torch.testing.assert_close(actual, expected[:, :, tokens], **EXACT[torch.float64])
    torch.testing.assert_close(maps @ value, actual, **EXACT[torch.float64])
    assert (maps.masked_select(~causal[tokens]) == 0).all()


def test_rotary_scores_depend_on_the_distance_alone():
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(query_position, key_position):
        rotated = [
            apply_rotary(states, *rotary_embedding(torch.tensor([[position]]), 8, 10000.0, torch.float64))
            for states, position in ((query, query_position), (key, key_position))
        ]
        return (rotated[0] * rotated[1]).sum()

    # Angles are computed in float32.
    torch.testing.assert_close(score(7, 3), score(104, 100), **EXACT[torch.float32])
    torch.testing.assert_close(score(5, 5), (query * key).sum(), **EXACT[torch.float32])
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3
