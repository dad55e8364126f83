"""Cached decoding gives what reading everything again gives, for every length, batch and rearrangement."""

import pytest
import torch
from tiny_models import tiny_config
from tolerances import EXACT
from transformers import DynamicCache, StaticCache

from hkt_hf import HKTConfig, HKTForCausalLM, HKTModel
from hkt_hf.cache_hkt import HKTCacheLayer

VARIANTS = {
    "learned": {},
    "rotary": {"position_embedding_type": "rotary"},
    "static": {"level_fusion": "static", "position_embedding_type": "none"},
    "stride 3": {"level_stride": 3, "level_kernel_size": 4, "hybrid_kernel_size": 5},
    "stride 1": {"level_stride": 1},
    "four levels": {"num_levels": 4},
    "MHA": {"num_levels": 1, "hybrid": False},
    "MHA + convolution": {"num_levels": 1},
    "no convolution": {"hybrid": False, "level_kernel_size": 1},
}


def language_model(dtype=torch.float64, **changes):
    torch.manual_seed(0)
    model = HKTForCausalLM(tiny_config(**changes)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("logits", "logits.weight", "beta")):
                parameter.normal_()
    return model


def random_ids(*shape, seed=0):
    return torch.randint(5, 23, shape, generator=torch.Generator().manual_seed(seed))


def read(model, ids, cache, mask=None, chunk=1):
    """The logits of `ids`, read `chunk` tokens at a time behind what the cache holds."""
    logits = []
    for part in ids.split(chunk, dim=1):
        seen = cache.get_seq_length() + part.shape[1]
        output = model(part, attention_mask=None if mask is None else mask[:, :seen], cache=cache, use_cache=True)
        assert output.cache is cache
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_cached_logits_equal_uncached_ones_for_every_prompt_length(variant):
    model = language_model(**VARIANTS[variant])
    ids = random_ids(2, 46)
    for length in range(1, 41):
        expected = model(ids[:, : length + 6]).logits
        cache = DynamicCache()
        prompt = model(ids[:, :length], cache=cache, use_cache=True).logits
        torch.testing.assert_close(prompt, expected[:, :length], **EXACT[torch.float64])
        steps = read(model, ids[:, length : length + 6], cache)
        torch.testing.assert_close(steps, expected[:, length:], **EXACT[torch.float64])


@torch.no_grad()
def test_cached_logits_in_single_precision():
    model = language_model(torch.float32)
    ids = random_ids(2, 46)
    expected = model(ids).logits
    for length in range(1, 41):
        cache = DynamicCache(config=model.config)
        prompt = model(ids[:, :length], cache=cache, use_cache=True).logits
        actual = torch.cat([prompt, read(model, ids[:, length:], cache)], dim=1)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("side", ["left", "right", "both"])
@torch.no_grad()
def test_a_padded_batch_decodes_as_if_each_row_stood_alone(side, variant):
    """Right pads of a prompt come before the generated tokens, and are no tokens."""
    model = language_model(**VARIANTS[variant])
    lengths, width, more = [1, 2, 3, 4, 7, 8, 11], 11, 9
    ids = random_ids(len(lengths), width + more)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        num_left = {"left": width - length, "right": 0, "both": (width - length) // 2}[side]
        mask[row, :width] = 0
        mask[row, num_left : num_left + length] = 1
    together = model(ids, attention_mask=mask).logits
    for chunk in (1, 2, 5):
        cache = DynamicCache()
        prompt = model(ids[:, :width], attention_mask=mask[:, :width], cache=cache, use_cache=True).logits
        logits = torch.cat([prompt, read(model, ids[:, width:], cache, mask, chunk)], dim=1)
        for row in range(len(lengths)):
            is_token = mask[row].bool()
            alone = model(ids[row : row + 1, is_token]).logits[0]
            torch.testing.assert_close(logits[row, is_token], alone, **EXACT[torch.float64])
            torch.testing.assert_close(together[row, is_token], alone, **EXACT[torch.float64])


@torch.no_grad()
def test_pads_among_the_generated_tokens_are_no_tokens():
    """A finished row of a batch goes on with pads, and a second prompt may follow the first answer."""
    model = language_model()
    ids, mask = random_ids(3, 24), torch.ones(3, 24, dtype=torch.long)
    mask[0, 5:9] = mask[1, 7:15] = mask[2, :2] = mask[2, 20:] = 0
    cache = DynamicCache()
    logits = torch.cat([read(model, ids[:, :4], cache, mask, 4), read(model, ids[:, 4:], cache, mask, 3)], dim=1)
    for row in range(3):
        is_token = mask[row].bool()
        alone = model(ids[row : row + 1, is_token]).logits[0]
        torch.testing.assert_close(logits[row, is_token], alone, **EXACT[torch.float64])


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_reorder_crop_repeat_and_select(padded):
    model = language_model()
    ids, mask = random_ids(3, 40), torch.ones(3, 40, dtype=torch.long)
    if padded:
        mask[0, :5] = mask[1, 9:13] = 0
    cache = DynamicCache()
    read(model, ids[:, :17], cache, mask, 17)

    def check(ids, mask):
        """Goes on reading, and compares with a fresh read of all."""
        start = cache.get_seq_length()
        actual = read(model, ids[:, start : start + 4], cache, mask)
        for row in range(len(ids)):
            is_token = mask[row, : start + 4].bool()
            expected = model(ids[row : row + 1, : start + 4][:, is_token]).logits[0]
            new = is_token[start:]
            torch.testing.assert_close(
                actual[row, new], expected[len(expected) - int(new.sum()) :], **EXACT[torch.float64]
            )

    check(ids, mask)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    ids, mask = ids[order], mask[order]
    check(ids, mask)
    cache.crop(-7)
    assert cache.get_seq_length() == 18
    # Other tokens than those that were taken back.
    ids = torch.cat([ids[:, :18], random_ids(3, 22, seed=1)], dim=1)
    check(ids, mask)
    cache.crop(-1)
    check(ids, mask)
    cache.batch_repeat_interleave(2)
    ids, mask = ids.repeat_interleave(2, dim=0), mask.repeat_interleave(2, dim=0)
    check(ids, mask)
    kept = torch.tensor([5, 1])
    cache.batch_select_indices(kept)
    ids, mask = ids[kept], mask[kept]
    check(ids, mask)
    cache.reset()
    assert cache.get_seq_length() == 0
    read(model, ids[:, :3], cache, mask, 3)
    check(ids, mask)


@torch.no_grad()
def test_many_crops_do_not_make_the_cache_grow():
    model = language_model()
    ids, mask = random_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, 0] = 0
    cache = DynamicCache()
    read(model, ids[:, :10], cache, mask, 10)
    for _ in range(20):
        read(model, ids[:, 10:14], cache, mask, 4)
        cache.crop(-4)
    sizes = {key: states.shape[1] for key, states in cache.layers[0].states.items()}
    assert max(sizes.values()) <= 14 and sizes["key", 2] <= 5


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "hkt_fused"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 10, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True},
    ],
    ids=str,
)
def test_generate_with_and_without_a_cache(arguments, implementation):
    model = language_model(max_position_embeddings=64)
    model.set_attn_implementation(implementation)
    ids, mask = random_ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[1, :8] = 0
    results = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        results.append(model.generate(ids, attention_mask=mask, max_new_tokens=25, use_cache=use_cache, **arguments))
    assert results[0].equal(results[1])
    assert results[0].shape[1] > 15


def test_generate_from_embeddings_and_in_a_second_turn():
    model = language_model()
    ids = random_ids(2, 7)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **settings)
    embeds = model.get_input_embeddings()(ids)
    assert model.generate(inputs_embeds=embeds, **settings).equal(expected[:, 7:])

    cache = DynamicCache()
    first = model.generate(ids, cache=cache, **settings)
    longer = torch.cat([first, random_ids(2, 5, seed=2)], dim=1)
    assert model.generate(longer, cache=cache, **settings).equal(model.generate(longer, **settings))


def test_assisted_decoding_gives_what_greedy_decoding_gives():
    model, assistant = language_model(), language_model(num_hidden_layers=1)
    ids = random_ids(1, 6)
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **settings)
    assert model.generate(ids, assistant_model=assistant, **settings).equal(expected)
    assert model.generate(ids, prompt_lookup_num_tokens=3, **settings).equal(expected)


def test_a_cached_step_gives_attention_maps_and_gradients():
    model = language_model()
    model.set_attn_implementation("eager")
    ids = random_ids(1, 9)
    cache = DynamicCache()
    model(ids[:, :6], cache=cache, use_cache=True)
    step = model(ids[:, 6:], cache=cache, use_cache=True, output_attentions=True)
    whole = model(ids, output_attentions=True)
    for actual, expected in zip(step.attentions, whole.attentions, strict=True):
        torch.testing.assert_close(actual, expected[:, :, 6:], **EXACT[torch.float64])
    gradients = []
    for logits in (step.logits, whole.logits[:, 6:]):
        gradients.append(torch.autograd.grad(logits.square().sum(), list(model.parameters())))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, **EXACT[torch.float64])


def test_what_cannot_be_cached_is_refused():
    model = language_model()
    ids = random_ids(1, 9)
    with pytest.raises(ValueError, match=r"StaticLayer.*static and quantized caches.*not supported"):
        model(ids, cache=StaticCache(config=model.config, max_cache_len=20))
    with pytest.raises(ValueError, match=r"StaticLayer.*static and quantized caches.*not supported"):
        model.generate(ids, max_new_tokens=3, cache_implementation="static")
    with pytest.raises(ValueError, match=r"`cache` is a tuple"):
        model(ids, cache=((torch.zeros(1), torch.zeros(1)),))
    cache = DynamicCache()
    language_model(num_hidden_layers=1)(ids, cache=cache)
    with pytest.raises(ValueError, match=r"1 layers.*needs 2"):
        model(ids, cache=cache)
    with pytest.raises(ValueError, match=r"`attention_mask` has shape \(1, 3\).*\(1, 9\).*cached ones included"):
        cache = DynamicCache()
        model(ids[:, :6], cache=cache)
        model(ids[:, 6:], cache=cache, attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"several sequences.*cannot be cached"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]), cache=DynamicCache())
    with pytest.raises(ValueError, match="`crop` takes minus the number"):
        cache.crop(3)
    encoder = HKTModel(tiny_config(is_causal=False))
    with pytest.raises(ValueError, match=r"is_causal=False.*would be wrong"):
        encoder(ids, cache=DynamicCache())
    assert encoder(ids, use_cache=True).cache is None
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="trains with gradient checkpointing"):
        model.train()(ids, cache=DynamicCache())
    assert model(ids).cache is None
    with pytest.raises(ValueError, match="HKTForCausalLM needs `is_causal=True`"):
        HKTForCausalLM(HKTConfig())


def test_a_position_beyond_the_learned_ones_is_refused_in_decoding_too():
    model = language_model(max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"9 tokens.*positions for 8"):
        model.generate(random_ids(1, 6), max_new_tokens=4, eos_token_id=None)


def test_dynamic_caches_of_every_origin_become_those_of_hkt():
    model = language_model()
    for cache in (DynamicCache(), DynamicCache(config=model.config), None):
        output = model(random_ids(1, 5), cache=cache, use_cache=True)
        assert [type(layer) for layer in output.cache.layers] == [HKTCacheLayer] * 2
        assert output.cache.get_seq_length() == 5 and output.cache.is_croppable
    assert model(random_ids(1, 5), use_cache=False).cache is None
