"""The Triton kernels give the attention of the specification and all its gradients, in Triton's interpreter on CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tolerances import EXACT
from torch.nn import functional as F

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

# Triton reads the variable when it is imported, which transformers does. In a run of the whole suite that is before
# this module is; its tests then run in a process of their own.
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
RUNS_HERE = HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
runs_here = pytest.mark.skipif(not RUNS_HERE, reason="runs in a process of its own, where Triton is interpreted")
DEVICE = "cuda" if HAS_GPU else "cpu"

if RUNS_HERE:
    from hkt_hf.attention_hkt import level_length, reference_multiscale_attention
    from hkt_hf.kernels import triton_attention


def random_inputs(num_tokens, num_levels, stride, head_size, batch=2, heads=1, is_static=False, is_token_major=True):
    generator = torch.Generator().manual_seed(num_tokens * 100 + num_levels * 10 + stride)

    def states(length):
        if is_token_major:
            tensor = torch.randn(batch, length, heads, head_size, generator=generator).transpose(1, 2)
        else:
            tensor = torch.randn(batch, heads, length, 2 * head_size, generator=generator)[..., ::2]
        return tensor.to(DEVICE)

    lengths = [level_length(num_tokens, stride, level) for level in range(num_levels)]
    query_levels = [states(length) for length in lengths]
    key_levels = [states(length) for length in lengths]
    shape = (1, heads, 1, num_levels) if is_static else (batch, heads, num_tokens, num_levels)
    level_weights = torch.randn(shape, generator=generator).softmax(dim=-1).to(DEVICE)
    return query_levels, key_levels, states(num_tokens), level_weights


def random_padding(kind, num_tokens):
    """Two rows: the first without padding, the second with some, or with nothing else."""
    if kind == "none":
        return None
    padding_mask = torch.ones(2, num_tokens, dtype=torch.bool, device=DEVICE)
    num_pads = num_tokens // 3 + 1
    if kind == "right":
        padding_mask[1, num_tokens - num_pads :] = False
    elif kind == "left":
        padding_mask[1, :num_pads] = False
    else:
        padding_mask[1] = False
    return padding_mask


def attention_mask(padding_mask, is_causal, num_tokens):
    mask = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool, device=DEVICE)
    if is_causal:
        mask = mask.tril()
    return mask if padding_mask is None else mask & padding_mask[:, None, None]


def run_kernels(inputs, padding_mask=None, *, stride, is_causal=False, dropout=0.0, seed=0, grad_output=None):
    """The output, its log-sum-exp, and the gradients of all query levels, key levels, the value and the weights."""
    query_levels, key_levels, value, level_weights = inputs
    options = {"stride": stride, "scaling": 0.3, "is_causal": is_causal, "dropout": dropout, "seed": seed}
    output, lse = triton_attention.forward(*inputs, padding_mask, **options)
    if grad_output is None:
        grad_output = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
    grad_queries, grad_keys, grad_value, grad_weights = triton_attention.backward(
        grad_output, *inputs, padding_mask, output, lse, **options
    )
    return output, lse, [*grad_queries, *grad_keys, grad_value, grad_weights.sum_to_size(level_weights.shape)]


def run_reference(inputs, mask, *, stride, grad_output=None, dtype=torch.float64, function=None):
    """The same but for the log-sum-exp, by autograd."""
    num_levels = len(inputs[0])
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (*inputs[0], *inputs[1], *inputs[2:])]
    function = function or reference_multiscale_attention
    value, level_weights = leaves[-2:]
    output = function(
        leaves[:num_levels], leaves[num_levels:-2], value, level_weights, mask, stride=stride, scaling=0.3
    )
    if grad_output is None:
        grad_output = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(inputs[2])
    return output, torch.autograd.grad(output, leaves, grad_output.to(dtype))


def assert_equal(actual, expected):
    output, _, gradients = actual
    for ours, theirs in zip((output, *gradients), (expected[0], *expected[1]), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, **EXACT[torch.float32])


@pytest.fixture
def set_tiles(monkeypatch):
    """Small sequences in several tiles, and steps that the default tiles have for long ones only."""

    def set_tiles(queries, keys):
        tiles = triton_attention.Tiles(queries, keys, num_warps=4, num_stages=1)
        monkeypatch.setattr(triton_attention, "choose_tiles", lambda *_: tiles)

    return set_tiles


@runs_here
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_levels", "stride", "head_size", "tiles", "padding", "is_static", "is_token_major"),
    [
        (1, 3, 2, 16, (16, 16), "none", False, True),
        (3, 3, 2, 8, (16, 16), "right", False, True),  # shorter than s^2, so that the last level has one position
        (45, 1, 2, 16, (16, 32), "left", False, False),
        (37, 2, 2, 24, (32, 32), "row", True, True),
        (67, 3, 2, 16, (64, 64), "left", True, False),  # steps of whole blocks
        (69, 3, 2, 8, (64, 32), "none", False, True),  # steps shorter than the blocks of the last level
        (69, 3, 2, 8, (32, 64), "right", False, True),
        (35, 3, 2, 16, (16, 16), "none", True, True),  # steps of one token
        (67, 3, 4, 16, (64, 64), "row", False, True),
        (29, 3, 3, 8, (16, 16), "right", True, True),  # blocks that do not fit into tiles
        (33, 5, 2, 8, (32, 32), "none", False, True),  # more levels than a launch has accumulators
    ],
)
def test_output_and_gradients_are_those_of_the_specification(
    num_tokens, num_levels, stride, head_size, tiles, padding, is_static, is_token_major, is_causal, set_tiles
):
    set_tiles(*tiles)
    inputs = random_inputs(
        num_tokens, num_levels, stride, head_size, is_static=is_static, is_token_major=is_token_major
    )
    padding_mask = random_padding(padding, num_tokens)
    mask = attention_mask(padding_mask, is_causal, num_tokens)
    actual = run_kernels(inputs, padding_mask, stride=stride, is_causal=is_causal)
    assert_equal(actual, run_reference(inputs, mask, stride=stride))


@runs_here
def test_default_tiles_and_several_heads():
    inputs = random_inputs(40, 3, 2, 16, heads=2)
    actual = run_kernels(inputs, stride=2)
    assert_equal(actual, run_reference(inputs, None, stride=2))
    assert actual[0].transpose(1, 2).is_contiguous()


@runs_here
def test_levels_of_one_position_have_gradients_of_zero():
    inputs = random_inputs(4, 4, 2, 16)
    *_, gradients = run_kernels(inputs, stride=2)
    for level in (2, 3):
        assert inputs[0][level].shape[2] == 1
        assert not gradients[level].any()
        assert not gradients[4 + level].any()
        assert not gradients[-1][..., level].any()
    assert gradients[-1][..., 1].any()


@runs_here
def test_results_share_no_memory():
    """PyTorch refuses an operator whose results do."""
    inputs = random_inputs(9, 4, 2, 16)
    output, lse, gradients = run_kernels(inputs, stride=2)
    results = [output, lse, *gradients, *inputs[0], *inputs[1], *inputs[2:]]
    assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)


@runs_here
@pytest.mark.parametrize("is_causal", [False, True])
def test_log_sum_exp_is_natural_and_minus_infinity_without_keys(is_causal):
    query_levels, key_levels, value, level_weights = random_inputs(20, 1, 2, 16)
    padding_mask = random_padding("left", 20)
    _, lse, gradients = run_kernels(
        (query_levels, key_levels, value, level_weights), padding_mask, stride=2, is_causal=is_causal
    )
    scores = level_weights * 0.3 * query_levels[0] @ key_levels[0].transpose(-1, -2)
    scores = scores.masked_fill(~attention_mask(padding_mask, is_causal, 20), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(dim=-1), **EXACT[torch.float32])
    assert all(gradient.isfinite().all() for gradient in gradients)


@runs_here
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("place", ["query", "key", "value", "level_weights"])
def test_what_is_not_finite_stays_in_its_batch_row(place, set_tiles):
    set_tiles(32, 32)
    inputs = random_inputs(20, 3, 2, 16)
    expected_output, _, expected_gradients = run_kernels(inputs, stride=2, is_causal=True)
    target = {"query": inputs[0][1], "key": inputs[1][1], "value": inputs[2], "level_weights": inputs[3]}[place]
    for bad in (float("nan"), float("inf")):
        target[0] = bad
        output, _, gradients = run_kernels(inputs, stride=2, is_causal=True)
        assert not output[0].isfinite().all()
        for actual, expected in zip((output, *gradients), (expected_output, *expected_gradients), strict=True):
            assert actual[1].equal(expected[1])


@runs_here
def test_padding_may_hold_infinite_values():
    inputs = random_inputs(20, 3, 2, 16)
    padding_mask = random_padding("right", 20)
    expected_output, _, expected_gradients = run_kernels(inputs, padding_mask, stride=2)
    inputs[2].masked_fill_(~padding_mask[:, None, :, None], float("inf"))
    output, _, gradients = run_kernels(inputs, padding_mask, stride=2)
    for actual, expected in zip((output, *gradients), (expected_output, *expected_gradients), strict=True):
        assert actual.equal(expected)


def kept_pairs(num_tokens, dropout, seed, batch=2, heads=2):
    """What dropout keeps, read off an attention with equal scores and the identity for a value: [B, H, T, T]."""
    zeros = torch.zeros(batch, heads, num_tokens, num_tokens, device=DEVICE)
    value = torch.eye(num_tokens, device=DEVICE).expand_as(zeros).contiguous()
    weights = torch.ones(1, 1, 1, 1, device=DEVICE)
    output, _ = triton_attention.forward(
        [zeros], [zeros], value, weights, None, stride=2, scaling=1.0, is_causal=False, dropout=dropout, seed=seed
    )
    kept = output * num_tokens * (1 - dropout)
    torch.testing.assert_close(kept, kept.round(), **EXACT[torch.float32])
    return kept.round().bool()


@runs_here
def test_dropout_is_a_function_of_the_seed_and_the_element_and_preserves_the_mean(set_tiles):
    set_tiles(16, 32)
    kept = kept_pairs(24, 0.3, seed=5)
    # Four standard deviations of the mean of 2304 draws.
    assert abs(kept.double().mean() - 0.7) < 0.04
    assert not kept[0, 0].equal(kept[0, 1])
    assert not kept[0, 0].equal(kept[1, 0])
    assert not kept.equal(kept_pairs(24, 0.3, seed=6))
    assert not kept.equal(kept_pairs(24, 0.3, seed=5 + 2**40))
    set_tiles(32, 16)
    assert kept.equal(kept_pairs(24, 0.3, seed=5))


@runs_here
@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_and_its_gradients_are_those_of_an_explicit_mask(is_causal, set_tiles):
    set_tiles(32, 32)
    num_tokens, dropout = 37, 0.4
    inputs = random_inputs(num_tokens, 3, 2, 16, heads=2)
    kept = kept_pairs(num_tokens, dropout, seed=3)

    def function(query_levels, key_levels, value, level_weights, mask, **options):
        identity = torch.eye(num_tokens, dtype=value.dtype, device=DEVICE).expand(*value.shape[:2], -1, -1)
        # The specification refuses a value of another head size than the queries; padded, that is no matter.
        padded = [F.pad(states, (0, num_tokens - states.shape[-1])) for states in query_levels]
        padded_keys = [F.pad(states, (0, num_tokens - states.shape[-1])) for states in key_levels]
        probabilities = reference_multiscale_attention(padded, padded_keys, identity, level_weights, mask, **options)
        return (probabilities * kept / (1 - dropout)) @ value

    actual = run_kernels(inputs, stride=2, is_causal=is_causal, dropout=dropout, seed=3)
    mask = attention_mask(None, is_causal, num_tokens)
    assert_equal(actual, run_reference(inputs, mask, stride=2, function=function))


@runs_here
def test_unsupported_inputs_are_refused_with_the_remedy():
    for dtype, head_size in ((torch.float64, 16), (torch.float32, 136), (torch.float16, 264)):
        states = torch.zeros(1, 1, 2, head_size, dtype=dtype, device=DEVICE)
        with pytest.raises(ValueError, match=f"{dtype} with a head size of {head_size}.*sdpa"):
            run_kernels(([states], [states], states, states[:, :, :1, :1]), stride=2)


@pytest.mark.skipif(RUNS_HERE, reason="the tests run in this process")
def test_in_a_process_of_its_own():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not process", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hkt_hf.kernels import triton_attention as ours

FLOAT32 = {"dropout", "kept_scale", "scaling"}
INTEGERS = {"seed": "i64", "num_tokens": "i32", "num_heads": "i32", "padding_ptr": "*u8"}
INTEGERS |= {name + "_ptr": "*fp32" for name in ("weight", "lse", "delta", "grad_weight", "grad_coarse")}

for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
    for kernel in (ours.FORWARD, ours.OF_QUERIES, ours.OF_KEYS):
        tiles = ours.choose_tiles(kernel, 4096, 64, dtype)
        constants = {
            "STRIDE": 2, "NUM_LEVELS": 3, "COARSEST": ours._coarsest_step(tiles, 2), "HEAD_SIZE": 64, "BLOCK_D": 64,
            "BLOCK_M": tiles.queries, "BLOCK_N": tiles.keys, "PRECISION": "ieee", "IS_CAUSAL": True,
            "HAS_PADDING": True, "HAS_DROPOUT": True,
        }
        function = ours.forward_kernel
        if kernel != ours.FORWARD:
            function = ours.backward_kernel
            constants |= {"FIRST": 0, "OF_KEYS": kernel == ours.OF_KEYS}
        signature = {
            argument: "constexpr" if argument in constants
            else "fp32" if argument in FLOAT32
            else INTEGERS.get(argument, "*" + name)
            for argument in function.arg_names
        }
        compiled = triton.compile(
            ASTSource(fn=function, signature=signature, constexprs=constants),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        )
        print("compiled", name, kernel, compiled.metadata.shared)
"""


@pytest.mark.slow
def test_kernels_compile_without_a_gpu_in_a_process_of_its_own(tmp_path):
    """The interpreter takes more than the compiler does."""
    (tmp_path / "compile.py").write_text(COMPILE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, tmp_path / "compile.py"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.count("compiled") == 6, run.stdout + run.stderr
    for line in run.stdout.splitlines():
        assert int(line.split()[-1]) <= 99 * 1024, line


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_levels", "stride"), [(1, 2), (3, 2), (3, 3), (2, 4), (6, 2)])
def test_half_precision_errs_at_most_twice_as_much_as_pytorch(num_levels, stride, is_causal, head_size, dtype):
    num_tokens = 515
    inputs = random_inputs(num_tokens, num_levels, stride, head_size, heads=2)
    inputs = [[t.to(dtype) for t in part] if isinstance(part, list) else part.to(dtype) for part in inputs]
    padding_mask = random_padding("left", num_tokens)
    mask = attention_mask(padding_mask, is_causal, num_tokens)
    output, _, gradients = run_kernels(inputs, padding_mask, stride=stride, is_causal=is_causal)
    exact = run_reference(inputs, mask, stride=stride, dtype=torch.float32)
    plain = run_reference(inputs, mask, stride=stride, dtype=dtype)
    for ours, theirs, truth in zip((output, *gradients), (plain[0], *plain[1]), (exact[0], *exact[1]), strict=True):
        error, allowed = (ours.float() - truth).abs().max(), 2 * (theirs.float() - truth).abs().max()
        assert error <= allowed + 1e-5


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [16, 24, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 127, 515])
def test_float32_on_gpu_with_default_tiles(num_tokens, head_size):
    inputs = random_inputs(num_tokens, 3, 2, head_size, heads=2)
    padding_mask = random_padding("right", num_tokens)
    mask = attention_mask(padding_mask, True, num_tokens)
    actual = run_kernels(inputs, padding_mask, stride=2, is_causal=True)
    assert_equal(actual, run_reference(inputs, mask, stride=2))
    again = run_kernels(inputs, padding_mask, stride=2, is_causal=True)
    assert all(first.equal(second) for first, second in zip(actual[2], again[2], strict=True))
