"""Tokenizers for the three tasks of the paper: bytes (text), ListOps expressions and pixels. Token ids are ours.

The builders return a plain `PreTrainedTokenizerFast`. What `save_pretrained` writes is data only, so `AutoTokenizer`
loads it where this package is not installed, without `trust_remote_code`.

All three have the same five special tokens with the ids 0 to 4, and add none of them to a sequence (nor between the two
texts of a pair). All are built with `split_special_tokens=True`: the text `<mask>` is six characters like any other, so
text from a stranger cannot inject a special token, and the byte tokenizer gives every text back exactly. Write special
tokens as ids (`tokenizer.mask_token_id`), or, where you trust the text and want to write `<mask>` in it, as fill-mask
pipelines do, load the tokenizer with `AutoTokenizer.from_pretrained(name, split_special_tokens=False)`.

The vocabularies are frozen: ids are part of every published checkpoint.
"""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>", "<mask>")
PAD_TOKEN_ID, UNK_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID, MASK_TOKEN_ID = range(5)

# The id of byte 0, of the ListOps digit 0 and of the gray value 0.
NUM_SPECIAL_TOKENS = len(SPECIAL_TOKENS)

LISTOPS_TOKENS = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "[MIN", "[MAX", "[MED", "[SM", "]")

BYTE_VOCAB_SIZE = NUM_SPECIAL_TOKENS + 256
LISTOPS_VOCAB_SIZE = NUM_SPECIAL_TOKENS + len(LISTOPS_TOKENS)
PIXEL_VOCAB_SIZE = NUM_SPECIAL_TOKENS + 256


def build_byte_tokenizer(model_max_length: int = 1024) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, with the id `byte + 5`.

    `decode(encode(text)) == text` for every Unicode text, with and without `skip_special_tokens`. Two limits:

    - A truncated sequence may end within a character; `decode` shows what is left of it as U+FFFD.
    - A lone surrogate ("\\ud800") is not Unicode text and has no UTF-8 bytes. The library raises
      `TypeError: TextEncodeInput must be Union[...]`. Repair such text first, with
      `text.encode("utf-8", errors="replace").decode("utf-8")`.

    A character is at least one byte, so cutting a text to `model_max_length` characters before it is tokenized with
    `truncation=True` changes nothing, and saves time where texts are long.

    Raises:
        ValueError: `model_max_length` is not a positive integer.
    """
    # BPE without merges leaves single bytes. ByteLevel writes bytes as printable characters, in an order of its own
    # that must not leak into the ids: a reader of ids should see the bytes.
    character_of_byte = bytes_to_unicode()
    words = [character_of_byte[byte] for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(words), merges=[]))
    # use_regex would split into words, which only merges need.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer, model_max_length)


def build_listops_tokenizer(model_max_length: int = 512) -> PreTrainedTokenizerFast:
    """One token per digit, operator (with its bracket: `[MAX`) and closing bracket, with the ids 5 to 19.

    Words are separated by white space. Parentheses are dropped, so the notation of Nangia & Bowman,
    `( ( ( [MAX 3 ) 4 ) ] )`, and the short one, `[MAX 3 4 ]`, give the same ids. Any other word is `<unk>`, also the
    `[FIRST` and `[LAST` of some original files, which the Long Range Arena does not have.

    Raises:
        ValueError: `model_max_length` is not a positive integer.
    """
    tokenizer = _word_tokenizer(LISTOPS_TOKENS)
    tokenizer.normalizer = normalizers.Replace(Regex("[()]"), " ")
    return _wrap(tokenizer, model_max_length)


def build_pixel_tokenizer(model_max_length: int = 1024) -> PreTrainedTokenizerFast:
    """One token per gray value: the words `0` to `255`, separated by white space, have the ids `value + 5`.

    Code that holds the values as numbers adds `NUM_SPECIAL_TOKENS` instead of writing them as text. Any other word
    (`256`, `-1`, `007`) is `<unk>`.

    Raises:
        ValueError: `model_max_length` is not a positive integer.
    """
    return _wrap(_word_tokenizer(tuple(str(value) for value in range(256))), model_max_length)


def _vocabulary(words) -> dict[str, int]:
    return {word: index for index, word in enumerate((*SPECIAL_TOKENS, *words))}


def _word_tokenizer(words: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocab=_vocabulary(words), unk_token="<unk>"))
    # The special tokens are words of this vocabulary (their ids come from there), so split_special_tokens alone would
    # let the text "<mask>" through as the token. Splitting at "<" leaves no such word.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("<", behavior="isolated")]
    )
    return tokenizer


def _wrap(tokenizer: Tokenizer, model_max_length: int) -> PreTrainedTokenizerFast:
    if not isinstance(model_max_length, int) or model_max_length < 1:
        raise ValueError(
            f"model_max_length must be a positive integer, got {model_max_length!r}; "
            "use the max_position_embeddings of the model."
        )
    pad, unk, bos, eos, mask = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unk,
        bos_token=bos,
        eos_token=eos,
        mask_token=mask,
        model_max_length=model_max_length,
        padding_side="right",
        truncation_side="right",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
