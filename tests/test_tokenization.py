"""The tokenizers: exact, frozen, safe against injected special tokens, and loadable where hkt_hf is not installed."""

import json
import random
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hkt_hf import tokenization_hkt as tokenization
from hkt_hf.tokenization_hkt import build_byte_tokenizer, build_listops_tokenizer, build_pixel_tokenizer

BUILDERS = {"bytes": build_byte_tokenizer, "listops": build_listops_tokenizer, "pixels": build_pixel_tokenizer}
SPECIAL_TEXT = "".join(tokenization.SPECIAL_TOKENS)
SAMPLES = {
    "bytes": ["A film, <b>not</b> bad.<br />\r\n", "é", "", "  <mask> 漢字 😀\t"],
    "listops": ["[MAX 3 [SM 4 5 ] 9 ]", "7", "", "( ( [MIN 0 ) 1 ) ] )"],
    "pixels": ["0 17 255 34", "128", "", "1 2 3 4 5 6 7"],
}


@pytest.fixture(params=BUILDERS)
def kind(request):
    return request.param


@pytest.fixture
def tokenizer(kind):
    return BUILDERS[kind]()


def random_text(generator: random.Random, length: int) -> str:
    """Code points of every plane, surrogates left out, since they are not Unicode scalar values."""
    tops = [0x80, 0x800, 0xD800, 0x110000]
    points = (generator.randrange(generator.choice(tops)) for _ in range(length))
    return "".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)


ROUND_TRIPS = {
    "empty": "",
    "every latin-1 character": "".join(map(chr, range(256))),
    "every lead and continuation byte": "".join(
        chr(point) for point in (*range(0x80, 0x800), *range(0x800, 0xD800, 0x400), *range(0x10000, 0x110000, 0x10000))
    ),
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 1️⃣",
    "combining, not normalised": "e\u0301 \u00e9 \ufb01 \u212b",
    "NUL": "\0a\0\0",
    "newlines": "a\nb\r\nc\rd\u2028e\x0b\x0c",
    "spaces": "   lead  inner\ttab   trail \t \n",
    "space before punctuation": "do n't , stop . ! ?",
    "special tokens": f"{SPECIAL_TEXT} <mask> <pad><pad>\n<s></s>",
    "parts of special tokens": "<<pad>> <pad <PAD> pad>",
    "byte-level look-alikes": "Ġ Ċ ĉ Ā ł",
    "byte order mark": "\ufeffx",
    "right to left": "שלום \u202eabc",
    **{f"random {seed}": random_text(random.Random(seed), 500) for seed in range(5)},
}


@pytest.mark.parametrize("text", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_bytes_round_trip_exactly(text, skip_special_tokens):
    tokenizer = build_byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == [byte + 5 for byte in text.encode("utf-8")]
    assert tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) == text


def test_the_round_trip_samples_cover_every_byte_of_utf8():
    seen = set("".join(ROUND_TRIPS.values()).encode("utf-8"))
    # 0xC0, 0xC1 and 0xF5 to 0xFF occur in no UTF-8 text; their ids are checked below.
    assert set(range(256)) - seen == {0xC0, 0xC1, *range(0xF5, 0x100)}


def test_special_tokens_around_text_are_skipped_exactly():
    tokenizer = build_byte_tokenizer()
    text = " é<mask> "
    ids = [tokenizer.bos_token_id, *tokenizer(text).input_ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(ids) == f"<bos>{text}<eos><pad>"


def test_special_token_ids_are_frozen(tokenizer):
    ids = [
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.mask_token_id,
    ]
    assert ids == [0, 1, 2, 3, 4] == tokenizer.convert_tokens_to_ids(["<pad>", "<unk>", "<bos>", "<eos>", "<mask>"])
    assert ids == [
        tokenization.PAD_TOKEN_ID,
        tokenization.UNK_TOKEN_ID,
        tokenization.BOS_TOKEN_ID,
        tokenization.EOS_TOKEN_ID,
        tokenization.MASK_TOKEN_ID,
    ]
    assert sorted(tokenizer.all_special_ids) == ids


def test_byte_vocabulary_is_frozen():
    tokenizer = build_byte_tokenizer()
    assert len(tokenizer) == tokenizer.vocab_size == tokenization.BYTE_VOCAB_SIZE == 261
    # The written form is part of tokenizer.json: printable ASCII as itself, the space as in GPT-2, bytes 0 and 255.
    assert tokenizer.convert_ids_to_tokens([5, 15, 37, 70, 260]) == ["Ā", "Ċ", "Ġ", "A", "ÿ"]
    # A byte that occurs in no text decodes to the replacement character, whatever its place.
    assert tokenizer.decode([0xC0 + 5]) == tokenizer.decode([0xFF + 5]) == "\ufffd"


def test_listops_vocabulary_is_frozen():
    tokenizer = build_listops_tokenizer()
    assert len(tokenizer) == tokenization.LISTOPS_VOCAB_SIZE == 20
    words = "0 1 2 3 4 5 6 7 8 9 [MIN [MAX [MED [SM ]"
    assert tuple(words.split()) == tokenization.LISTOPS_TOKENS
    assert tokenizer(words).input_ids == list(range(5, 20))
    assert tokenizer.decode(range(5, 20)) == words


def test_pixel_vocabulary_is_frozen():
    tokenizer = build_pixel_tokenizer()
    assert len(tokenizer) == tokenization.PIXEL_VOCAB_SIZE == 261
    words = " ".join(map(str, range(256)))
    assert tokenizer(words).input_ids == [value + tokenization.NUM_SPECIAL_TOKENS for value in range(256)]
    assert tokenizer.decode(tokenizer(words).input_ids) == words


@pytest.mark.parametrize(
    "expression", ["( ( ( [MAX 3 ) ( ( [SM 4 ) ] ) ) ] )", "((([MAX 3) (([SM 4) ])) ])", "[MAX\t3\n [SM 4  ] ]"]
)
def test_listops_notations_give_the_same_ids(expression):
    tokenizer = build_listops_tokenizer()
    assert tokenizer(expression).input_ids == tokenizer("[MAX 3 [SM 4 ] ]").input_ids == [16, 8, 18, 9, 19, 19]


@pytest.mark.parametrize(
    ("kind", "word"),
    [("listops", word) for word in ("[FIRST", "10", "[max", "MAX", "x")]
    + [("pixels", word) for word in ("256", "-1", "007", "1.0", "x")],
)
def test_unknown_words_are_unk(kind, word):
    tokenizer = BUILDERS[kind]()
    assert tokenizer(f"3 {word} 4").input_ids == [8, tokenization.UNK_TOKEN_ID, 9]


@pytest.mark.parametrize("text", [*tokenization.SPECIAL_TOKENS, SPECIAL_TEXT, "3<pad>4", "3 <mask> 4", "[<eos>"])
def test_text_cannot_inject_special_tokens(tokenizer, kind, text):
    injected = set(tokenizer(text).input_ids) & set(tokenizer.all_special_ids)
    # A word that is in no vocabulary of words is <unk> by definition; bytes are never unknown.
    assert injected <= ({tokenization.UNK_TOKEN_ID} if kind != "bytes" else set())


def test_special_tokens_can_be_written_in_trusted_text(tokenizer):
    ids = tokenizer("3<mask>", split_special_tokens=False).input_ids
    assert ids[-1] == tokenization.MASK_TOKEN_ID and len(ids) == 2
    # and asking once does not unlock it for the next call
    assert tokenization.MASK_TOKEN_ID not in tokenizer("3<mask>").input_ids


def test_no_special_tokens_are_added(tokenizer, kind):
    for text in SAMPLES[kind]:
        assert tokenizer(text).input_ids == tokenizer(text, add_special_tokens=False).input_ids
        assert not set(tokenizer(text).input_ids) & set(tokenizer.all_special_ids)


def test_batch_equals_single(tokenizer, kind):
    assert tokenizer(SAMPLES[kind]).input_ids == [tokenizer(text).input_ids for text in SAMPLES[kind]]


def test_model_inputs(tokenizer, kind):
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]
    assert set(tokenizer(SAMPLES[kind])) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(tokenizer, kind, side):
    assert tokenizer.padding_side == "right"
    batch = tokenizer(SAMPLES[kind], padding=True, padding_side=side)
    longest = max(len(tokenizer(text).input_ids) for text in SAMPLES[kind])
    for text, ids, mask in zip(SAMPLES[kind], batch.input_ids, batch.attention_mask, strict=True):
        content = tokenizer(text).input_ids
        pads = longest - len(content)
        assert ids == (content + [0] * pads if side == "right" else [0] * pads + content)
        assert mask == ([1] * len(content) + [0] * pads if side == "right" else [0] * pads + [1] * len(content))


@pytest.mark.parametrize("side", ["right", "left"])
def test_truncation(kind, side):
    assert BUILDERS[kind]().truncation_side == "right"
    tokenizer = BUILDERS[kind](model_max_length=3)
    tokenizer.truncation_side = side
    text = SAMPLES[kind][0]
    content = tokenizer(text).input_ids
    assert len(content) > 3
    assert tokenizer(text, truncation=True).input_ids == (content[:3] if side == "right" else content[-3:])
    assert len(tokenizer(text, truncation=True, max_length=2).input_ids) == 2


def test_cutting_characters_first_does_not_change_truncated_bytes():
    tokenizer = build_byte_tokenizer(model_max_length=16)
    for text in (random_text(random.Random(seed), 40) for seed in range(20)):
        assert tokenizer(text[:16], truncation=True).input_ids == tokenizer(text, truncation=True).input_ids


def test_a_character_cut_by_truncation_decodes_to_the_replacement_character():
    tokenizer = build_byte_tokenizer()
    assert tokenizer.decode(tokenizer("aé", truncation=True, max_length=2).input_ids) == "a\ufffd"


def test_offsets_point_at_the_characters():
    encoding = build_byte_tokenizer()("a é😀", return_offsets_mapping=True)
    assert encoding.offset_mapping == [(0, 1), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4), (3, 4), (3, 4)]
    encoding = build_listops_tokenizer()("( [MAX 3 ] )", return_offsets_mapping=True)
    assert encoding.offset_mapping == [(2, 6), (7, 8), (9, 10)]


def test_lone_surrogates_are_refused_and_the_documented_repair_works():
    tokenizer = build_byte_tokenizer()
    with pytest.raises(TypeError, match="TextEncodeInput"):
        tokenizer("a\ud800")
    assert tokenizer.decode(tokenizer("a\ud800".encode("utf-8", errors="replace").decode("utf-8")).input_ids) == "a?"


@pytest.mark.parametrize("value", [0, -1, 1.5, None, "1024"])
def test_bad_model_max_length(kind, value):
    with pytest.raises(ValueError, match=r"model_max_length must be a positive integer.*max_position_embeddings"):
        BUILDERS[kind](model_max_length=value)


# Loads a saved folder with hkt_hf out of reach, and prints what it sees as JSON. -I leaves out PYTHONPATH and the
# working directory; the finder stops an editable install.
LOADER = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hkt_hf":
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
from transformers import AutoTokenizer

folder, texts = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
assert "hkt_hf" not in sys.modules
print(json.dumps({
    "class": type(tokenizer).__name__,
    "ids": tokenizer(texts).input_ids,
    "decoded": [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokenizer(texts).input_ids],
    "special_ids": sorted(tokenizer.all_special_ids),
    "model_max_length": tokenizer.model_max_length,
    "padding_side": tokenizer.padding_side,
    "input_names": tokenizer.model_input_names,
    "length": len(tokenizer),
}))
"""


def test_loads_where_hkt_hf_is_not_installed(kind, tmp_path):
    tokenizer = BUILDERS[kind](model_max_length=77)
    tokenizer.save_pretrained(tmp_path / "saved")
    # As in a checkpoint's folder: the model type is unknown there, and must not get in the way.
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": "hkt"}))
    texts = [*SAMPLES[kind], SPECIAL_TEXT, "<mask> <mask>"]
    result = subprocess.run(
        [sys.executable, "-I", "-c", LOADER, str(tmp_path / "saved"), json.dumps(texts)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "class": PreTrainedTokenizerFast.__name__,
        "ids": tokenizer(texts).input_ids,
        "decoded": [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokenizer(texts).input_ids],
        "special_ids": [0, 1, 2, 3, 4],
        "model_max_length": 77,
        "padding_side": "right",
        "input_names": ["input_ids", "attention_mask"],
        "length": len(tokenizer),
    }


def test_saving_twice_writes_the_same_files(kind, tmp_path):
    BUILDERS[kind]().save_pretrained(tmp_path / "first")
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "first")
    # A padded call leaves settings in the library's tokenizer; they must not end up in the saved file.
    reloaded(SAMPLES[kind], truncation=True, padding=True)
    reloaded(SAMPLES[kind])
    reloaded.save_pretrained(tmp_path / "second")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        first, second = (json.loads((tmp_path / folder / name).read_text()) for folder in ("first", "second"))
        second.pop("is_local", None), second.pop("local_files_only", None)
        assert first == second
    assert type(reloaded) is PreTrainedTokenizerFast
