"""Fused attention against the specification: outputs and every gradient, in every dtype, and its other promises."""

import random
import subprocess
import sys

import pytest
import torch
from tiny_models import random_model, tiny_config
from tolerances import EXACT
from transformers import LlamaConfig, LlamaForCausalLM

from hkt_hf import HKTForSequenceClassification, fused_multiscale_attention
from hkt_hf.attention_hkt import concatenated_multiscale_attention, level_length, reference_multiscale_attention
from hkt_hf.kernels import cpu_attention, tiling


def random_inputs(
    num_tokens, num_levels=3, stride=2, batch=2, heads=3, head_size=4, weights="token", dtype=torch.float64
):
    """Query levels, key levels, value and level weights, laid out as a layer makes them: [B, T, H, d], transposed."""

    def randn(num_positions):
        return torch.randn(batch, num_positions, heads, head_size, dtype=torch.float64).to(dtype).transpose(1, 2)

    lengths = [level_length(num_tokens, stride, level) for level in range(num_levels)]
    shape = {
        "token": (batch, heads, num_tokens, num_levels),
        "row": (batch, 1, num_tokens, num_levels),
        "head": (heads, 1, num_levels),
        "one": (num_levels,),
    }[weights]
    level_weights = torch.randn(shape, dtype=torch.float64).softmax(-1).to(dtype)
    return [randn(t) for t in lengths], [randn(t) for t in lengths], randn(num_tokens), level_weights


def pair_mask(padding_mask, num_tokens, is_causal):
    """What the specification wants to know of padding and causality: a mask of pairs."""
    mask = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool)
    if is_causal:
        mask = mask.tril()
    return mask if padding_mask is None else mask & padding_mask[:, None, None]


def random_padding(kind, batch, num_tokens):
    if kind == "none":
        return None
    if kind == "holes":
        return torch.rand(batch, num_tokens) < 0.6
    # From no token at all to all of them.
    lengths = torch.randint(0, num_tokens + 1, (batch, 1))
    right = torch.arange(num_tokens) < lengths
    return right if kind == "right" else right.flip(1)


def flat(inputs):
    query_levels, key_levels, value, level_weights = inputs
    return [*query_levels, *key_levels, value, level_weights]


def output_and_gradients(function, inputs, *args, grad_output=None, **kwargs):
    query_levels, key_levels, value, level_weights = (
        [tensor.detach().requires_grad_() for tensor in part]
        if isinstance(part, list)
        else part.detach().requires_grad_()
        for part in inputs
    )
    output = function(query_levels, key_levels, value, level_weights, *args, **kwargs)
    if grad_output is None:
        grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = flat((query_levels, key_levels, value, level_weights))
    gradients = torch.autograd.grad(output, leaves, grad_output.to(output.dtype))
    return [output.detach(), *gradients]


def assert_matches_the_specification(inputs, padding_mask, stride, is_causal, tolerance):
    head_size, num_tokens = inputs[2].shape[3], inputs[2].shape[2]
    options = {"stride": stride, "scaling": head_size**-0.5}
    mask = pair_mask(padding_mask, num_tokens, is_causal)
    expected = output_and_gradients(reference_multiscale_attention, inputs, mask, **options)
    actual = output_and_gradients(fused_multiscale_attention, inputs, padding_mask, is_causal=is_causal, **options)
    for result, reference, given in zip(actual, expected, [inputs[2], *flat(inputs)], strict=True):
        assert result.dtype == given.dtype
        torch.testing.assert_close(result, reference, **tolerance)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of a few tokens, so that short sequences take all the ways that long ones take."""

    def set_tiles(query_tile, key_tile, scores_per_thread):
        monkeypatch.setattr(tiling, "QUERY_TILE", query_tile)
        monkeypatch.setattr(tiling, "KEY_TILE", key_tile)
        monkeypatch.setattr(tiling, "CAUSAL_TILE", query_tile)
        monkeypatch.setattr(cpu_attention, "SCORES_PER_THREAD", scores_per_thread)

    return set_tiles


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes_match_the_specification(seed, small_tiles):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    small_tiles(draw.choice([4, 16, 32, 256]), draw.choice([8, 32, 64, 1088]), draw.choice([1, 2**12, 2**19]))
    batch, stride = draw.choice([1, 2, 3]), draw.choice([2, 3, 4])
    num_tokens = draw.choice([1, 2, 3, 5, 8, 17, 31, 64, 65, 100, 129])
    inputs = random_inputs(
        num_tokens,
        draw.choice([1, 2, 3, 4]),
        stride,
        batch,
        draw.choice([1, 2, 3, 4]),
        draw.choice([1, 3, 8]),
        draw.choice(["token", "row", "head", "one"]),
    )
    padding_mask = random_padding(draw.choice(["none", "holes", "right", "left"]), batch, num_tokens)
    assert_matches_the_specification(inputs, padding_mask, stride, draw.random() < 0.5, EXACT[torch.float64])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("weights", ["token", "head"])
@pytest.mark.parametrize(
    ("num_tokens", "num_levels", "stride"),
    [
        (1, 3, 2),
        (2, 5, 2),
        (5, 3, 4),
        (7, 2, 8),
        (30, 2, 29),
        (64, 6, 2),
        (27, 4, 3),
        (33, 1, 2),
        (9, 3, 1),
        (256, 3, 2),
    ],
)
def test_hard_shapes_match_the_specification(num_tokens, num_levels, stride, weights, is_causal):
    """One token, levels of one position, blocks as long as the sequence, many levels, one level, no compression."""
    torch.manual_seed(0)
    inputs = random_inputs(num_tokens, num_levels, stride, weights=weights)
    padding_mask = torch.arange(num_tokens) < torch.tensor([[num_tokens], [max(1, num_tokens - 2)]])
    for mask in (None, padding_mask, padding_mask.flip(1)):
        assert_matches_the_specification(inputs, mask, stride, is_causal, EXACT[torch.float64])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("weights", ["token", "head"])
def test_the_tiles_of_long_sequences_in_float32(weights, is_causal):
    torch.manual_seed(0)
    num_tokens = 1501
    inputs = random_inputs(num_tokens, batch=1, heads=2, head_size=16, weights=weights, dtype=torch.float32)
    assert tiling.choose_tiling(num_tokens, 2, 3, is_causal).num_key_runs > 1
    assert_matches_the_specification(inputs, None, 2, is_causal, EXACT[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["token", "head"])
def test_half_precision_is_as_good_as_plain_pytorch(weights, dtype):
    torch.manual_seed(0)
    inputs = random_inputs(200, head_size=16, weights=weights, dtype=dtype)
    exact_inputs = [[t.double() for t in part] if isinstance(part, list) else part.double() for part in inputs]
    options = {"stride": 2, "scaling": 0.25}
    exact = output_and_gradients(reference_multiscale_attention, exact_inputs, **options)
    plain = output_and_gradients(concatenated_multiscale_attention, inputs, **options)
    fused = output_and_gradients(fused_multiscale_attention, inputs, **options)
    for result, plain_result, expected in zip(fused, plain, exact, strict=True):
        assert result.dtype == dtype
        error, plain_error = (result - expected).abs().max(), (plain_result - expected).abs().max()
        assert error <= 2 * plain_error


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("weights", ["token", "head"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradcheck(weights, is_causal, dropout, small_tiles):
    torch.manual_seed(0)
    small_tiles(4, 8, 1)
    leaves = [leaf.requires_grad_() for leaf in flat(random_inputs(11, batch=2, heads=1, head_size=2, weights=weights))]
    padding_mask = torch.arange(11) < torch.tensor([[11], [6]])

    def function(*leaves):
        # The same probabilities are left out whenever gradcheck calls.
        torch.manual_seed(0)
        return fused_multiscale_attention(
            leaves[:3],
            leaves[3:6],
            *leaves[6:],
            padding_mask,
            stride=2,
            scaling=0.7,
            is_causal=is_causal,
            dropout=dropout,
        )

    assert torch.autograd.gradcheck(function, leaves)


def test_dropout_follows_the_seed_and_keeps_the_mean(small_tiles):
    torch.manual_seed(0)
    small_tiles(16, 32, 1)
    inputs = random_inputs(100)

    def attend(seed, dropout=0.2):
        torch.manual_seed(seed)
        return fused_multiscale_attention(*inputs, stride=2, scaling=0.5, dropout=dropout)

    assert torch.equal(attend(1), attend(1))
    assert not torch.equal(attend(1), attend(2))
    mean = torch.stack([attend(seed) for seed in range(400)]).mean(0)
    # Of 400 draws with p = 0.2 the mean is off by a few hundredths.
    torch.testing.assert_close(mean, attend(0, dropout=0.0), atol=0.2, rtol=0)
    assert (mean - attend(0, dropout=0.0)).abs().mean() < 0.02


@pytest.mark.parametrize("weights", ["token", "head"])
@pytest.mark.parametrize("num_tokens", [37, 100])
def test_unwritten_memory_is_never_read(num_tokens, weights, small_tiles, monkeypatch):
    torch.manual_seed(0)
    small_tiles(16, 64, 2**12)
    inputs = random_inputs(num_tokens, weights=weights)
    padding_mask = torch.rand(2, num_tokens) < 0.7
    options = {"stride": 2, "scaling": 0.5}
    clean = output_and_gradients(fused_multiscale_attention, inputs, padding_mask, **options)

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    assert torch.empty(3).isnan().all()
    for result, expected in zip(
        output_and_gradients(fused_multiscale_attention, inputs, padding_mask, **options), clean, strict=True
    ):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_same_inputs_give_the_same_bits(is_causal):
    torch.manual_seed(0)
    inputs = random_inputs(300, dtype=torch.float32)
    options = {"stride": 2, "scaling": 0.5, "is_causal": is_causal}
    first = output_and_gradients(fused_multiscale_attention, inputs, **options)
    for _ in range(3):
        again = output_and_gradients(fused_multiscale_attention, inputs, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["query", "key", "value", "weights"])
def test_what_is_no_number_stays_in_its_row_of_the_batch(part, bad, small_tiles):
    torch.manual_seed(0)
    # All pairs in one group: rows share every buffer.
    small_tiles(16, 32, 2**19)
    inputs = random_inputs(50)
    options = {"stride": 2, "scaling": 0.5}
    clean = output_and_gradients(fused_multiscale_attention, inputs, **options)
    target = {"query": inputs[0][1], "key": inputs[1][2], "value": inputs[2], "weights": inputs[3]}[part]
    target[1, :, 3] = bad
    spoilt = output_and_gradients(fused_multiscale_attention, inputs, **options)
    assert not spoilt[0][1].isfinite().all()
    for result, expected in zip(spoilt, clean, strict=True):
        assert torch.equal(result[0], expected[0])


def test_what_is_no_number_stays_out_of_sight(small_tiles):
    """A bad query spoils its own output alone, a bad key no earlier causal output, and a bad pad nothing."""
    torch.manual_seed(0)
    small_tiles(16, 32, 2**19)
    inputs = random_inputs(50)
    options = {"stride": 2, "scaling": 0.5}
    clean = fused_multiscale_attention(*inputs, **options, is_causal=True)

    inputs[0][0][:, :, 20] = float("nan")
    others = torch.arange(50) != 20
    output = fused_multiscale_attention(*inputs, **options, is_causal=True)
    assert torch.equal(output[:, :, others], clean[:, :, others])

    torch.manual_seed(0)
    inputs = random_inputs(50)
    inputs[1][0][:, :, 20] = float("nan")
    inputs[1][1][:, :, 10] = float("nan")
    output = fused_multiscale_attention(*inputs, **options, is_causal=True)
    assert torch.equal(output[:, :, :20], clean[:, :, :20])
    assert output[:, :, 20:].isnan().all()

    torch.manual_seed(0)
    inputs = random_inputs(50)
    padding_mask = (torch.arange(50) < 32).expand(2, -1)
    clean = output_and_gradients(fused_multiscale_attention, inputs, padding_mask, **options)
    for level, key in enumerate(inputs[1]):
        key[:, :, 32 // 2**level :] = float("nan")
    inputs[2][:, :, 32:] = float("inf")
    output = output_and_gradients(fused_multiscale_attention, inputs, padding_mask, **options)
    assert all(torch.equal(result, expected) for result, expected in zip(output, clean, strict=True))


def test_two_uses_in_one_graph():
    torch.manual_seed(0)
    query_levels, key_levels, value, level_weights = random_inputs(20)
    value.requires_grad_()

    def attend(states):
        return fused_multiscale_attention(query_levels, key_levels, states, level_weights, stride=2, scaling=0.5)

    (once,) = torch.autograd.grad(attend(value).sum(), value)
    (twice,) = torch.autograd.grad((attend(value) + attend(value)).sum(), value)
    torch.testing.assert_close(twice, 2 * once, **EXACT[torch.float64])


def test_without_gradients_nothing_is_saved():
    query_levels, key_levels, value, level_weights = random_inputs(20)
    value.requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, torch.autograd.graph.saved_tensors_hooks(lambda _: pytest.fail("saved"), lambda tensor: tensor):
            output = fused_multiscale_attention(query_levels, key_levels, value, level_weights, stride=2, scaling=0.5)
        assert not output.requires_grad


MEMORY = """
import torch
from hkt_hf import fused_multiscale_attention
torch.set_num_threads(1)

def step(T):
    levels = [torch.randn(1, 2, T // 2**level, 64, requires_grad=True) for level in range(3)]
    value, weights = torch.randn(1, 2, T, 64, requires_grad=True), torch.ones(3, requires_grad=True)
    fused_multiscale_attention(levels, levels, value, weights, stride=2, scaling=0.1, is_causal=CAUSAL).sum().backward()

def peak():
    # Not ru_maxrss: a process inherits that of its parent.
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

step(64)
start = peak()
step(4096)
middle = peak()
step(8192)
print((peak() - start) / (middle - start))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory of a process from /proc")
@pytest.mark.parametrize("is_causal", [False, True])
def test_memory_is_linear_in_the_number_of_tokens(is_causal):
    """Twice the tokens take less than 2.3 times the memory; T x T scores would take 4 times."""
    code = MEMORY.replace("CAUSAL", str(is_causal))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 2.3


@pytest.mark.parametrize("weights", ["token", "head"])
def test_pytorch_accepts_the_operators(weights):
    torch.manual_seed(0)
    query_levels, key_levels, value, level_weights = random_inputs(20, dtype=torch.float32)
    for states in (*query_levels, *key_levels, value, level_weights):
        states.requires_grad_()
    arguments = (query_levels, key_levels, value, level_weights, None, None, 2, 0.5, False, 0.0)
    torch.library.opcheck(torch.ops.hkt_hf.fused_attention.default, arguments)


@pytest.mark.parametrize(
    "changes", [{}, {"is_causal": False}, {"level_fusion": "static"}, {"num_levels": 1}, {"level_stride": 1}]
)
def test_models_train_alike_with_every_implementation(changes):
    model = random_model(**changes).train()
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(5, 23, (3, 19), generator=generator)
    attention_mask = torch.ones(3, 19, dtype=torch.long)
    attention_mask[1, :6] = 0
    attention_mask[2, 8:] = 0
    results = []
    for implementation in ("eager", "hkt_fused"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        hidden = model(input_ids, attention_mask=attention_mask).last_hidden_state * attention_mask[..., None]
        hidden.square().sum().backward()
        results.append([hidden.detach(), *[parameter.grad for parameter in model.parameters()]])
    for fused, eager in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(fused, eager, **EXACT[torch.float64])


def test_a_compiled_model_is_one_graph():
    torch.manual_seed(0)
    model = HKTForSequenceClassification(tiny_config()).eval()
    model.set_attn_implementation("hkt_fused")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    input_ids = torch.randint(5, 23, (2, 19))
    expected = model(input_ids, labels=torch.tensor([0, 1]))
    actual = compiled(input_ids, labels=torch.tensor([0, 1]))
    torch.testing.assert_close(actual.logits, expected.logits, **EXACT[torch.float32])
    actual.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_autocast_reaches_the_kernel_in_its_own_precision():
    torch.manual_seed(0)
    model = HKTForSequenceClassification(tiny_config())
    model.set_attn_implementation("hkt_fused")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randint(5, 23, (2, 19)), labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_what_it_cannot_serve():
    query_levels, key_levels, value, level_weights = random_inputs(8)
    inputs = (query_levels, key_levels, value, level_weights)
    options = {"stride": 2, "scaling": 0.5}
    with pytest.raises(ValueError, match=r"Level 1 of the key has shape .* need"):
        fused_multiscale_attention(
            query_levels, key_levels[:1] + key_levels[:1] + key_levels[2:], *inputs[2:], **options
        )
    with pytest.raises(ValueError, match=r"boolean of shape \(2, 8\).*concatenated_multiscale_attention"):
        fused_multiscale_attention(*inputs, torch.ones(2, 8), **options)
    with pytest.raises(ValueError, match=r"boolean of shape \(2, 8\)"):
        fused_multiscale_attention(*inputs, torch.ones(2, 1, 8, 8, dtype=torch.bool), **options)
    with pytest.raises(ValueError, match=r"`dropout` is 1.5: it must be a probability"):
        fused_multiscale_attention(*inputs, dropout=1.5, **options)

    model = random_model()
    model.set_attn_implementation("hkt_fused")
    with pytest.raises(ValueError, match=r'cannot return them .* `attn_implementation="eager"`'):
        model(torch.tensor([[5, 6]]), output_attentions=True)

    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="hkt_fused"))
    with pytest.raises(ValueError, match=r'LlamaAttention asks for another one. Use "sdpa"'):
        llama(torch.tensor([[5, 6]]))
