"""The models as a transformers user drives them, and the baseline that they contain."""

import copy
import math

import pytest
import torch
from tiny_models import random_model, tiny_config
from tolerances import EXACT
from torch import nn
from torch.nn import functional as F
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hkt_hf import HKTConfig, HKTForSequenceClassification, HKTModel
from hkt_hf.attention_hkt import reference_multiscale_attention
from hkt_hf.layout_hkt import TokenLayout


def random_classifier(**changes):
    torch.manual_seed(0)
    return HKTForSequenceClassification(tiny_config(is_causal=False, num_labels=3, **changes)).eval()


def random_batch(batch_size=4, num_tokens=13):
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(5, 23, (batch_size, num_tokens), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, -4:] = 0
    attention_mask[1, :2] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


class PlainTransformer(nn.Module):
    """A pre-norm transformer encoder of PyTorch's own layers, which knows nothing of HKT."""

    def __init__(self, model: HKTModel):
        super().__init__()
        config = model.config
        self.embeddings = copy.deepcopy(model.embeddings)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.hidden_size,
                config.num_attention_heads,
                config.intermediate_size,
                dropout=0.0,
                activation="gelu",
                layer_norm_eps=config.layer_norm_eps,
                batch_first=True,
                norm_first=True,
            )
            for _ in model.layers
        )
        self.final_norm = copy.deepcopy(model.final_norm)
        for plain, layer in zip(self.layers, model.layers, strict=True):
            attention = layer.attention
            projections = [attention.q_proj[0], attention.k_proj[0], attention.v_proj]
            plain.self_attn.load_state_dict(
                {
                    "in_proj_weight": torch.cat([projection.weight for projection in projections]),
                    "in_proj_bias": torch.cat([projection.bias for projection in projections]),
                    "out_proj.weight": attention.o_proj.weight,
                    "out_proj.bias": attention.o_proj.bias,
                }
            )
            plain.norm1.load_state_dict(layer.attention_norm.state_dict())
            plain.norm2.load_state_dict(layer.mlp_norm.state_dict())
            plain.linear1.load_state_dict(layer.mlp.up_proj.state_dict())
            plain.linear2.load_state_dict(layer.mlp.down_proj.state_dict())

    def forward(self, input_ids, attention_mask, is_causal):
        hidden = self.embeddings(input_ids, None, torch.arange(input_ids.shape[1])[None])
        causal = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).triu(1) if is_causal else None
        for layer in self.layers:
            hidden = layer(hidden, src_mask=causal, src_key_padding_mask=attention_mask == 0)
        return self.final_norm(hidden)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hkt_fused"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_level_without_convolution_is_standard_multi_head_attention(is_causal, implementation):
    model = random_model(num_levels=1, hybrid=False, is_causal=is_causal)
    model.set_attn_implementation(implementation)
    plain = PlainTransformer(model).double()
    # Two extra parameters anywhere would be more than standard attention.
    assert model.num_parameters() == sum(parameter.numel() for parameter in plain.parameters())
    input_ids = random_batch()["input_ids"]
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, -4:] = 0
    expected = plain(input_ids, attention_mask, is_causal)
    actual = model(input_ids, attention_mask=attention_mask).last_hidden_state
    kept = attention_mask.bool()
    torch.testing.assert_close(actual[kept], expected[kept], **EXACT[torch.float64])

    expected[kept].square().sum().backward()
    actual[kept].square().sum().backward()
    torch.testing.assert_close(
        model.layers[0].attention.q_proj[0].weight.grad,
        plain.layers[0].self_attn.in_proj_weight.grad[:16],
        **EXACT[torch.float64],
    )


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("fusion", ["input", "static"])
@pytest.mark.parametrize(("num_levels", "stride"), [(3, 2), (2, 3), (3, 1)])
def test_the_attention_layer_is_the_specification(num_levels, stride, fusion, positions):
    """Levels, projections, rotation, fusion, gate and output projection, written out beside the specification."""
    model = random_model(
        num_levels=num_levels,
        level_stride=stride,
        level_fusion=fusion,
        level_kernel_size=4,
        hybrid_kernel_size=2,
        position_embedding_type=positions,
        rope_theta=100.0,
    )
    attention = model.layers[0].attention
    hidden = torch.randn(2, 11, 16, dtype=torch.float64)
    layout = TokenLayout(torch.arange(11)[None])
    rotary = model.rotary_levels(layout, layout.positions_Rt, torch.float64)
    actual, _ = attention(hidden, layout, position_embeddings=rotary)

    def heads(states):
        return states.view(2, -1, 2, 8).transpose(1, 2)

    queries, keys, level_states = [], [], hidden
    for level in range(num_levels):
        if level > 0:
            layer = attention.downsample[level - 1]
            convolved = F.conv1d(
                F.pad(level_states.transpose(1, 2), (3, 0)), layer.depthwise_weight[:, None], stride=stride, groups=16
            )
            level_states = layer.pointwise(convolved.transpose(1, 2))
        pair = []
        for projection in (attention.q_proj[level], attention.k_proj[level]):
            states = heads(projection(level_states))
            if positions == "rotary":
                # By complex numbers: a rotation by the position of the block's first token.
                angle = torch.arange(states.shape[2]) * stride**level
                frequency = 100.0 ** -(torch.arange(4) / 4)
                turn = torch.polar(torch.ones(()), angle[:, None].float() * frequency).to(torch.complex128)
                turned = torch.complex(states[..., :4], states[..., 4:]) * turn
                states = torch.cat([turned.real, turned.imag], dim=-1)
            pair.append(states)
        queries.append(pair[0])
        keys.append(pair[1])
    logits = attention.level_weights.logits[None, :, None]
    if fusion == "input":
        query_logits = hidden @ attention.level_weights.query_logits.weight.T
        logits = logits + query_logits.view(2, 11, 2, num_levels).transpose(1, 2)
    value = attention.v_proj(hidden)
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    attended = reference_multiscale_attention(
        queries, keys, heads(value), logits.softmax(-1), causal, stride=stride, scaling=8**-0.5
    )
    convolved = F.conv1d(F.pad(value.transpose(1, 2), (1, 0)), attention.conv_weight[:, None], groups=16)
    gate = attention.beta.sigmoid()[None, :, None, None]
    mixed = gate * attended + (1 - gate) * heads(convolved.transpose(1, 2))
    expected = attention.o_proj(mixed.transpose(1, 2).reshape(2, 11, 16))
    tolerance = EXACT[torch.float32 if positions == "rotary" else torch.float64]
    torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("changes", [{}, {"num_levels": 1}, {"position_embedding_type": "rotary"}, {"is_causal": True}])
def test_eager_and_sdpa_agree(changes, dtype):
    model = random_model(**{"is_causal": False, **changes}).to(dtype)
    batch = random_batch()
    results = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        output = model(**batch).last_hidden_state[batch["attention_mask"].bool()]
        output.square().mean().backward()
        results.append((output, *(parameter.grad.clone() for parameter in model.parameters())))
    for eager, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(sdpa, eager, **EXACT[dtype])


def test_any_registered_attention_function_is_used():
    """The attention interface of transformers: a user's own function gets query, key, value, mask and the scaling."""
    calls = []

    def recording(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        calls.append((query.shape, value.shape, scaling, kwargs.get("marker")))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, dropout, scaling)

    ALL_ATTENTION_FUNCTIONS.register("recording", recording)
    AttentionMaskInterface.register("recording", sdpa_mask)
    model = random_model(is_causal=False)
    expected = model(**random_batch()).last_hidden_state
    model.set_attn_implementation("recording")
    assert model(**random_batch(), marker="passed on").last_hidden_state.equal(expected)
    assert calls == [((4, 2, 13, 24), (4, 2, 13, 24), 8**-0.5, "passed on")] * 2


def test_outputs_on_request():
    model = random_classifier()
    model.set_attn_implementation("eager")
    batch = random_batch()
    output = model(**batch, output_hidden_states=True, output_attentions=True)
    assert [tuple(hidden.shape) for hidden in output.hidden_states] == [(4, 13, 16)] * 3
    assert [tuple(attention.shape) for attention in output.attentions] == [(4, 2, 13, 13)] * 2
    torch.testing.assert_close(output.hidden_states[-1], model.model(**batch).last_hidden_state)
    for attention in output.attentions:
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(attention.sum(-1), torch.ones(4, 2, 13))
        assert (attention.transpose(1, 3)[~real] == 0).all()
    model.config.return_dict = False
    assert isinstance(model(**batch), tuple)
    model.config.return_dict = True
    as_tuple = model(**batch, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert as_tuple[0].equal(model(**batch).logits)
    assert model(**batch).hidden_states is None


def test_inputs_embeds_replace_the_token_embedding():
    model = random_classifier()
    batch = random_batch()
    embeds = model.get_input_embeddings()(batch["input_ids"])
    expected = model(**batch).logits
    assert model(inputs_embeds=embeds, attention_mask=batch["attention_mask"]).logits.equal(expected)


def test_position_ids_are_used():
    model = random_model(is_causal=False)
    batch = random_batch()
    expected = model(**batch).last_hidden_state[2:]
    positions = torch.arange(13)[None]
    assert model(**batch, position_ids=positions).last_hidden_state[2:].equal(expected)
    assert not model(**batch, position_ids=positions + 1).last_hidden_state[2:].allclose(expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing_but_the_memory(use_reentrant):
    model = random_classifier().train()
    batch = {**random_batch(), "labels": torch.tensor([0, 1, 2, 0])}
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            calls = count_calls(model.model.layers[0].attention)
        model.zero_grad()
        model(**batch).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert len(calls) == 2, "the layer must run again in the backward pass"
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)


def count_calls(module):
    calls = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(
    ("problem_type", "num_labels", "labels", "expected_loss"),
    [
        (None, 3, torch.tensor([0, 2, 1, -100]), lambda x, y: F.cross_entropy(x, y)),
        ("single_label_classification", 3, torch.tensor([0, 2, 1, 1]), lambda x, y: F.cross_entropy(x, y)),
        (None, 1, torch.tensor([0.5, -1.0, 2.0, 0.0]), lambda x, y: F.mse_loss(x[:, 0], y)),
        ("regression", 1, torch.tensor([1, 2, 3, 4]), lambda x, y: F.mse_loss(x[:, 0], y.float())),
        ("regression", 3, torch.randn(4, 3), lambda x, y: F.mse_loss(x, y)),
        (None, 3, torch.eye(4, 3), lambda x, y: F.binary_cross_entropy_with_logits(x, y)),
        (
            "multi_label_classification",
            3,
            torch.eye(4, 3).long(),
            lambda x, y: F.binary_cross_entropy_with_logits(x, y.float()),
        ),
    ],
)
def test_every_problem_type_has_its_loss(problem_type, num_labels, labels, expected_loss):
    torch.manual_seed(0)
    config = tiny_config(num_labels=num_labels, problem_type=problem_type)
    model = HKTForSequenceClassification(config).eval()
    output = model(**random_batch(), labels=labels)
    torch.testing.assert_close(output.loss, expected_loss(output.logits, labels))
    output.loss.backward()
    assert model.classifier.weight.grad.abs().sum() > 0

    # Trainer passes the label count of all accumulated batches and adds the losses up.
    count = labels.ne(-100).sum()
    halves = [
        model(
            **{name: tensor[half] for name, tensor in random_batch().items()},
            labels=labels[half],
            num_items_in_batch=count,
        ).loss
        for half in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(sum(halves), output.loss)


def test_hidden_dropout_acts_on_the_embeddings_and_on_both_branches_of_a_layer():
    """Where all is dropped, the embeddings are 0 and a layer is its residual stream."""
    all_but_1 = 1 - 2**-40
    model = random_classifier(hidden_dropout=all_but_1).train()
    hidden = torch.randn(2, 5, 16)
    assert (model.model.embeddings(torch.full((2, 5), 7), None, torch.arange(5)[None]) == 0).all()
    assert model.model.layers[0](hidden).equal(hidden)
    model.eval()
    assert not model.model.layers[0](hidden).allclose(hidden)


def test_classifier_dropout_acts_on_what_the_classifier_reads():
    model = random_classifier(classifier_dropout=1 - 2**-40).train()
    assert model(**random_batch()).logits.equal(model.classifier.bias.expand(4, 3))
    model.eval()
    assert not model(**random_batch()).logits.allclose(model.classifier.bias)


def test_the_mlp_and_the_norms_follow_the_configuration():
    model = random_classifier(hidden_act="relu", layer_norm_eps=0.125)
    mlp, hidden = model.model.layers[0].mlp, torch.randn(2, 5, 16)
    torch.testing.assert_close(mlp(hidden), mlp.down_proj(mlp.up_proj(hidden).clamp(min=0)))
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert [norm.eps for norm in norms] == [0.125] * (2 * 2 + 1)


def test_token_embeddings_resize():
    model = random_classifier()
    assert model.get_input_embeddings().padding_idx == 0
    batch = random_batch()
    expected = model(**batch).logits
    model.resize_token_embeddings(30)
    assert model.config.vocab_size == 30
    assert model(**batch).logits.equal(expected)
    assert model(torch.full((1, 3), 29)).logits.isfinite().all()


def test_dropout_is_active_in_training_alone():
    model = random_classifier(attention_dropout=0.2).train()
    batch = random_batch()
    assert not model(**batch).logits.equal(model(**batch).logits)
    model.eval()
    assert model(**batch).logits.equal(model(**batch).logits)


def test_initial_values():
    torch.manual_seed(0)
    model = HKTModel(HKTConfig())
    attention = model.layers[0].attention
    assert (attention.level_weights(torch.randn(1, 5, 128)) == 1 / 3).all()
    assert (attention.beta.sigmoid() == 0.5).all()
    assert model.embeddings.token.weight.std().item() == pytest.approx(0.08, rel=0.05)
    assert attention.q_proj[0].weight.std().item() == pytest.approx(0.08, rel=0.05)
    # Every level has the scale of the layer's input.
    level_states = torch.randn(8, 256, 128)
    for downsample in attention.downsample:
        level_states = downsample(level_states)
        assert level_states.std().item() == pytest.approx(1.0, rel=0.15)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name


def test_the_number_of_parameters_is_that_of_the_description():
    config = HKTConfig()
    width, levels, heads = config.hidden_size, config.num_levels, config.num_attention_heads
    linear = width * width + width
    attention = (
        2 * levels * linear  # queries and keys per level
        + 2 * linear  # values, output
        + (levels - 1) * (linear + 3 * width)  # downsampling
        + heads * levels * (width + 1)  # level weights
        + 3 * width
        + heads  # convolution branch and gate
    )
    mlp = 2 * width * config.intermediate_size + config.intermediate_size + width
    layer = attention + mlp + 4 * width
    embeddings = (config.vocab_size + config.max_position_embeddings) * width
    assert HKTModel(config).num_parameters() == embeddings + 4 * layer + 2 * width
    # Stride 1 is a control with the same parameters.
    assert HKTModel(HKTConfig(level_stride=1)).num_parameters() == HKTModel(config).num_parameters()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 31, 64])
@pytest.mark.parametrize("num_levels", [1, 3, 5])
def test_any_length_works(num_tokens, num_levels):
    model = random_classifier(num_levels=num_levels)
    output = model(torch.randint(5, 23, (2, num_tokens)), labels=torch.tensor([0, 1]))
    output.loss.backward()
    assert output.logits.shape == (2, 3)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hkt_fused"])
def test_large_logits_stay_finite(implementation):
    model = random_classifier()
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        for projection in [*model.model.layers[0].attention.q_proj, *model.model.layers[0].attention.k_proj]:
            projection.weight.mul_(1e4)
    output = model(**random_batch(), labels=torch.tensor([0, 1, 2, 0]))
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_bad_input_is_named():
    model = random_classifier(max_position_embeddings=16)
    ids = random_batch()["input_ids"]
    with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`"):
        model()
    with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="0 tokens"):
        model(ids[:, :0])
    with pytest.raises(ValueError, match=r"17 tokens.*positions for 16.*truncation=True"):
        model(torch.full((1, 17), 5))
    with pytest.raises(ValueError, match=r"`input_ids` contains 23: it must be in 0\.\.22"):
        model(torch.tensor([[5, 23]]))
    with pytest.raises(ValueError, match="`input_ids` contains -1"):
        model(torch.tensor([[5, -1]]))
    with pytest.raises(ValueError, match=r"`position_ids` has shape \(4, 1\): it must be \(4, 13\) or \(1, 13\)"):
        model(ids, position_ids=torch.zeros(4, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="`inputs_embeds` has width 15: it must be `hidden_size`, 16"):
        model(inputs_embeds=torch.randn(4, 13, 15))
    with pytest.raises(ValueError, match="`position_ids` contains 16"):
        model(ids, position_ids=torch.arange(4, 17)[None])
    with pytest.raises(ValueError, match=r"`labels` contains 3: it must be in 0\.\.2"):
        model(ids, labels=torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match=r"`attention_mask` has shape \(4, 12\), but the input needs \(4, 13\)"):
        model(ids, attention_mask=torch.ones(4, 12))
    with pytest.raises(ValueError, match="`attention_mask` contains -inf: .* additive masks are not supported"):
        model(ids, attention_mask=torch.zeros(4, 13).index_fill(1, torch.tensor([12]), float("-inf")))
    with pytest.raises(ValueError, match=r"`input_ids` has shape \(13,\): it must be a batch of sequences"):
        model(ids[0])
    with pytest.raises(ValueError, match=r"`inputs_embeds` has shape \(13, 16\): it must be a batch of sequences"):
        model(inputs_embeds=torch.randn(13, 16))
    with pytest.raises(ValueError, match="Masks per pair of tokens are not supported"):
        model(ids, attention_mask=torch.ones(4, 1, 13, 13, dtype=torch.bool))


def test_only_learned_positions_limit_the_length():
    for positions in ("rotary", "none"):
        model = random_classifier(max_position_embeddings=16, position_embedding_type=positions)
        assert model(torch.full((1, 40), 5)).logits.isfinite().all()


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hkt_fused"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_close_to_float32_as_a_standard_transformer_is(dtype, positions, implementation):
    """The rule of flash attention: at most twice the error of plain PyTorch in the same dtype."""
    batch = random_batch()
    errors = []
    for changes in ({}, {"num_levels": 1, "hybrid": False}):
        torch.manual_seed(0)
        config = tiny_config(is_causal=False, initializer_range=0.1, position_embedding_type=positions, **changes)
        model = HKTModel(config).eval()
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            expected = model(**batch).last_hidden_state
            actual = model.to(dtype)(**batch).last_hidden_state
        assert actual.dtype == dtype
        errors.append((actual.float() - expected).abs().max().item())
    assert math.isfinite(errors[0])
    assert errors[0] <= 2 * errors[1]
