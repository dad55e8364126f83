"""ListOps: what expressions mean, how they are drawn, and that the same parameters give the same data everywhere."""

import hashlib
import random
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from filelock import FileLock

from hkt_hf.data import listops
from hkt_hf.data.listops import LISTOPS_TOKENS, evaluate, listops_baselines, load_listops
from hkt_hf.data.listops_grammar import generate_chunk

LONG = {"min_length": 257, "max_length": 512, "max_depth": 10}


@pytest.fixture(scope="module")
def long_rows():
    """About 5,000 expressions of the task with T = 512."""
    return [row for chunk in range(40) for row in generate_chunk(chunk, seed=3, **LONG)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Parameters of a small dataset, its cache, and the dataset."""
    parameters = {"min_length": 10, "max_length": 60, "num_train": 300, "num_validation": 40, "num_test": 50, "seed": 5}
    cache_dir = tmp_path_factory.mktemp("listops")
    return parameters, cache_dir, load_listops(**parameters, cache_dir=cache_dir, num_proc=1)


def read_tree(text):
    """Nested `(operator, arguments)`; recursive and without checks. Parentheses carry no meaning."""
    tokens = iter(text.replace("(", " ").replace(")", " ").split())

    def read(token):
        if token.isdigit():
            return int(token)
        arguments = []
        while (following := next(tokens)) != "]":
            arguments.append(read(following))
        return token, arguments

    return read(next(tokens))


def slow_value(tree):
    if isinstance(tree, int):
        return tree
    operator, arguments = tree
    values = [slow_value(argument) for argument in arguments]
    if operator == "[MED":
        return int(np.median(values))
    if operator == "[SM":
        return int(np.sum(values)) % 10
    return {"[MIN": min(values), "[MAX": max(values), "[FIRST": values[0], "[LAST": values[-1]}[operator]


def in_pairs(tree):
    """The notation of the original files."""
    if isinstance(tree, int):
        return str(tree)
    operator, arguments = tree
    text = operator
    for argument in arguments:
        text = f"( {text} {in_pairs(argument)} )"
    return f"( {text} ] )"


def slow_depth(tree):
    return 1 if isinstance(tree, int) else 1 + max(slow_depth(argument) for argument in tree[1])


def digest(dataset):
    lines = [
        f"{split}\t{row['text']}\t{row['label']}\t{row['length']}\t{row['depth']}\n"
        for split in ("train", "validation", "test")
        for row in dataset[split]
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("[MIN 4 7 ]", 4),
        ("[MAX 3 4 ]", 4),
        ("[MAX 3 ]", 3),
        ("[MED 9 1 5 ]", 5),
        ("[MED 1 2 ]", 1),
        ("[MED 2 9 3 8 ]", 5),
        ("[MED 0 9 ]", 4),
        ("[SM 5 5 ]", 0),
        ("[SM 9 9 9 ]", 7),
        ("[FIRST 3 9 1 ]", 3),
        ("[LAST 3 9 1 ]", 1),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[SM 1 [MED 4 [MAX 0 8 ] 6 ] [MIN 3 2 ] ]", 9),
        (" \t[MAX\n3\r\n4 ]\u2003", 4),
        ("( ( ( [MAX 3 ) 4 ) ] )", 4),
        ("( ( [MAX 3 ) ] )", 3),
        ("( ( ( ( [MAX 2 ) 9 ) ( ( ( [MIN 4 ) 7 ) ] ) ) ] )", 9),
        ("( ( ( [MIN ( ( ( [SM 6 ) 7 ) ] ) ) 8 ) ] )", 3),
        ("( ( ( [FIRST ( ( ( [LAST 6 ) 2 ) ] ) ) 8 ) ] )", 2),
    ],
)
def test_known_values(expression, value):
    result = evaluate(expression)
    assert result == value
    assert type(result) is int


def test_agrees_with_slow_evaluator_in_both_notations(long_rows):
    for text, label, _, _ in long_rows[:300]:
        tree = read_tree(text)
        assert evaluate(text) == evaluate(in_pairs(tree)) == slow_value(tree) == label


def test_all_operators_agree_with_slow_evaluator():
    rng = random.Random(0)

    def draw(depth):
        if depth == 5 or rng.random() < 0.5:
            return rng.randrange(10)
        operator = rng.choice(["[MIN", "[MAX", "[MED", "[SM", "[FIRST", "[LAST"])
        return operator, [draw(depth + 1) for _ in range(rng.randint(1, 5))]

    for _ in range(500):
        tree = draw(0)
        pairs = in_pairs(tree)
        plain = " ".join(pairs.replace("(", " ").replace(")", " ").split())
        assert evaluate(pairs) == evaluate(plain) == slow_value(tree)


@pytest.mark.parametrize(
    ("expression", "position", "fragment"),
    [
        ("", 0, "end of the text"),
        (" \n ", 0, "end of the text"),
        ("[MAX 3 4", 8, "'[MAX' at position 0 is never closed"),
        ("[MAX 3 [MIN 4 ]", 15, "'[MAX' at position 0 is never closed"),
        ("[MAX 3 [MIN 4", 13, "'[MIN' at position 7 is never closed"),
        ("[MAX 3 4 ] ]", 11, "complete"),
        ("[MAX 3 4 ] 5", 11, "found '5'"),
        ("3 4", 2, "complete"),
        ("]", 0, "none is open"),
        ("[MAX ]", 5, "at least one argument"),
        ("[MAX", 4, "never closed"),
        ("[MAX 3 12 ]", 7, "one digit"),
        ("[MAX 3 -1 ]", 7, "'-1'"),
        ("[MAX 3 ² ]", 7, "'²'"),
        ("[MAX 3 ٣ ]", 7, "'٣'"),
        ("[max 3 4 ]", 0, "capitals"),
        ("[AVG 3 4 ]", 0, "'[AVG'"),
        ("MAX 3 4 ]", 0, "'MAX'"),
        ("[MAX 3 4]", 7, "whitespace"),
        ("4\t[MAX 3 ]", 2, "complete"),
        ("(", 1, "an operator follows"),
        (")", 0, "once for every"),
        ("( 3 )", 2, "followed by another one or by an operator"),
        ("( [MAX 3 4 ] )", 2, "n + 1"),
        ("( [MAX 3 ) ] )", 2, "n + 1"),
        ("( ( [MAX 3 ) 4 ) ] )", 13, "1 arguments"),
        ("( ( ( ( [MAX 3 ) 4 ) ] )", 21, "2 arguments"),
        ("( ( ( [MAX 3 4 ) ] )", 13, "follows an argument"),
        ("( ( ( [MAX 3 ) 4 ) ]", 20, "never closed"),
        ("( ( ( [MAX 3 ) 4 ) ] ) )", 23, "complete"),
        ("( ( ( [MAX 3 ) ) 4 ] )", 15, "once for every"),
        ("( ( ( [MAX ( 3 ) ) 4 ) ] )", 13, "followed by another one or by an operator"),
        ("( ( ( [MAX 3 ) [MIN 4 ] ) ] )", 15, "n + 1"),
        ("[MAX 3 ( ( ( [MIN 4 ) 7 ) ] ) ]", 7, "has none"),
        ("[MAX 3 ) 4 ]", 7, "once for every"),
        ("( ]", 2, "cannot follow"),
        ("( ( ( [MAX 3 ) ( ( ]", 19, "cannot follow"),
        ("( ( ( [MAX 3 ) 4 ) ( ( [MIN 1 ) ] ) ] )", 19, "2 arguments"),
    ],
)
def test_malformed_input_is_refused_with_its_position(expression, position, fragment):
    with pytest.raises(ValueError, match=re.escape(fragment)) as error:
        evaluate(expression)
    assert f"at position {position}:" in str(error.value)


def test_every_deleted_or_repeated_token_is_refused():
    """Whatever is missing or doubled in the original notation, except a digit: no other text has the same shape."""
    expression = "( ( ( ( [MAX 2 ) 9 ) ( ( ( [MIN 4 ) 7 ) ] ) ) ] )"
    tokens = expression.split(" ")
    for index, token in enumerate(tokens):
        for changed in (tokens[:index] + tokens[index + 1 :], [*tokens[:index], token, *tokens[index:]]):
            with pytest.raises(ValueError, match="at position"):
                evaluate(" ".join(changed))


@pytest.mark.parametrize("wrong", [None, 3, b"[MAX 3 4 ]", ["[MAX", "3", "]"]])
def test_wrong_type_is_refused(wrong):
    with pytest.raises(TypeError, match=type(wrong).__name__):
        evaluate(wrong)


def test_any_nesting_depth():
    depth = 100_000
    assert evaluate("[SM 1 " * depth + "7" + " ]" * depth) == 7
    assert evaluate("( ( ( [SM 1 ) " * depth + "7" + " ) ] )" * depth) == 7
    with pytest.raises(ValueError, match=f"at position {6 * depth + 1}:"):
        evaluate("[SM 1 " * depth + "7")


def test_token_order_is_frozen():
    assert " ".join(LISTOPS_TOKENS) == "0 1 2 3 4 5 6 7 8 9 [MIN [MAX [MED [SM ]"


def test_rows_describe_their_text(long_rows):
    for text, label, length, depth in long_rows[:300]:
        assert text == " ".join(text.split())
        assert set(text.split()) <= set(LISTOPS_TOKENS)
        assert 257 <= length <= 512
        assert (label, length, depth) == (evaluate(text), len(text.split()), slow_depth(read_tree(text)))


def test_length_limits_are_inclusive():
    rows = generate_chunk(0, min_length=12, max_length=14, max_depth=10, seed=0)
    assert {length for _, _, length, _ in rows} == {12, 13, 14}


@pytest.mark.parametrize(("max_depth", "depths"), [(1, {1}), (2, {1, 2}), (4, {1, 2, 3, 4})])
def test_max_depth_counts_the_root_as_one(max_depth, depths):
    rows = generate_chunk(0, min_length=1, max_length=2000, max_depth=max_depth, seed=0)
    assert {depth for _, _, _, depth in rows} == depths


def test_lengths_and_labels_of_the_long_task(long_rows):
    percentiles = np.percentile([length for _, _, length, _ in long_rows], [10, 50, 90])
    np.testing.assert_allclose(percentiles, [281, 381, 483], atol=8)
    shares = Counter(label for _, label, _, _ in long_rows)
    for label in range(10):
        # Full rejection sampling gives 16% for 0 and 9 in this window (17% between 500 and 2000), 7.5 to 9.5% else.
        low, high = (0.135, 0.18) if label in (0, 9) else (0.06, 0.11)
        assert low < shares[label] / len(long_rows) < high


def test_same_distribution_as_full_rejection_sampling():
    """Against trees that are built to the end, in the order and with the draws of the Long Range Arena code."""
    low, high, max_depth = 8, 30, 5
    rng = random.Random(11)

    def draw_tree(depth):
        if depth == max_depth or rng.random() > 0.25:
            return rng.randrange(10)
        arguments = [draw_tree(depth + 1) for _ in range(rng.randint(2, 10))]
        return rng.choice(["[MIN", "[MAX", "[MED", "[SM"]), arguments

    def plain(tree):
        return str(tree) if isinstance(tree, int) else f"{tree[0]} {' '.join(map(plain, tree[1]))} ]"

    trees = [draw_tree(1) for _ in range(60_000)]
    naive = [tree for tree in trees if low <= len(plain(tree).split()) <= high]
    chunks = [
        generate_chunk(chunk, min_length=low, max_length=high, max_depth=max_depth, seed=1) for chunk in range(15)
    ]
    ours = [read_tree(text) for chunk in chunks for text, _, _, _ in chunk]
    # 15 chunks are 61,440 trees: the share of accepted ones is compared too.
    assert len(ours) / 61_440 == pytest.approx(len(naive) / 60_000, rel=0.06)

    statistics = {
        "length": lambda tree: len(plain(tree).split()),
        "depth": slow_depth,
        "value": slow_value,
        "operators": lambda tree: plain(tree).count("["),
        "root": lambda tree: (tree[0], len(tree[1])),
        "first argument": lambda tree: tree[1][0] if isinstance(tree[1][0], int) else tree[1][0][0],
        "last argument": lambda tree: tree[1][-1] if isinstance(tree[1][-1], int) else len(tree[1][-1][1]),
    }
    for name, statistic in statistics.items():
        first, second = Counter(map(statistic, ours)), Counter(map(statistic, naive))
        keys = [key for key in first.keys() | second.keys() if first[key] + second[key] >= 10]
        table = np.array([[first[key] for key in keys], [second[key] for key in keys]], dtype=float)
        expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
        chi_square, freedom = ((table - expected) ** 2 / expected).sum(), len(keys) - 1
        # Mean and variance of a chi-square variable are its degrees of freedom and twice that: 4 standard deviations.
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5, name


def test_columns_and_sizes(small):
    parameters, _, dataset = small
    assert list(dataset) == ["train", "validation", "test"]
    for split in dataset:
        features = dataset[split].features
        assert list(features) == ["text", "label", "length", "depth"]
        assert features["label"].names == list("0123456789")
        assert [features[name].dtype for name in ("text", "length", "depth")] == ["string", "int32", "int32"]
        assert len(dataset[split]) == parameters[f"num_{split}"]


def test_bytes_are_frozen(small):
    assert digest(small[2]) == "7a1993d1ed4eed3f8d9fafc93c91e72197f3f15844f1a185d12bcf6b85956740"


def test_same_data_from_any_number_of_processes(small, tmp_path):
    parameters, _, dataset = small
    assert digest(load_listops(**parameters, cache_dir=tmp_path, num_proc=2)) == digest(dataset)


def test_default_depth_and_lengths_are_those_of_the_long_task(tmp_path):
    dataset = load_listops(num_train=20, num_validation=0, num_test=300, cache_dir=tmp_path)
    rows = [row for chunk in range(4) for row in generate_chunk(chunk, seed=0, **LONG)][:300]
    assert dataset["test"]["text"][:] == [text for text, _, _, _ in rows]
    assert len(dataset["validation"]) == 0


def test_seed_changes_everything(small, tmp_path):
    parameters, _, dataset = small
    other = load_listops(**{**parameters, "seed": 6}, cache_dir=tmp_path, num_proc=1)
    assert not set(other["test"]["text"]) & set(dataset["test"]["text"])


def test_no_expression_occurs_twice(tmp_path):
    # 440 expressions have at most 4 tokens: only removing repetitions finds 300 of them.
    dataset = load_listops(
        min_length=1, max_length=4, num_train=200, num_validation=50, num_test=50, cache_dir=tmp_path, num_proc=1
    )
    texts = [text for split in dataset for text in dataset[split]["text"]]
    assert len(texts) == len(set(texts)) == 300


def test_test_split_depends_on_no_other_size(small, tmp_path):
    parameters, _, dataset = small
    other = load_listops(**{**parameters, "num_train": 10, "num_validation": 90}, cache_dir=tmp_path, num_proc=1)
    assert other["test"][:] == dataset["test"][:]
    assert other["validation"][:40] == dataset["validation"][:]


def test_cache_is_used(small, monkeypatch):
    parameters, cache_dir, dataset = small
    monkeypatch.setattr(listops, "generate_chunk", None)
    assert digest(load_listops(**parameters, cache_dir=cache_dir, num_proc=1)) == digest(dataset)


def test_cache_tells_parameters_apart(small, monkeypatch):
    parameters, cache_dir, _ = small

    class Generated(Exception):
        pass

    def generate(*args, **kwargs):
        raise Generated

    monkeypatch.setattr(listops, "generate_chunk", generate)
    parameters = {**parameters, "max_depth": 10}
    for name, value in parameters.items():
        with pytest.raises(Generated):
            load_listops(**{**parameters, name: value + 1}, cache_dir=cache_dir, num_proc=1)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest", "file instead of folder"])
def test_damaged_cache_is_built_again(small, tmp_path, damage):
    parameters, _, dataset = small
    load_listops(**parameters, cache_dir=tmp_path, num_proc=1)
    arrow = next(tmp_path.glob("*/train/*.arrow"))
    content = arrow.read_bytes()
    if damage == "flip":
        middle = content.index(b"[MAX")
        arrow.write_bytes(content[:middle] + b"[MIN" + content[middle + 4 :])
    elif damage == "truncate":
        arrow.write_bytes(content[: len(content) // 2])
    elif damage == "delete":
        arrow.unlink()
    elif damage == "manifest":
        next(tmp_path.glob("*/manifest.json")).write_text('["not", "a manifest"]')
    else:
        folder = arrow.parents[1]
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("")
    assert digest(load_listops(**parameters, cache_dir=tmp_path, num_proc=1)) == digest(dataset)


def test_interrupted_build_leaves_nothing_that_is_taken_for_a_cache(small, tmp_path, monkeypatch):
    parameters, _, dataset = small
    with monkeypatch.context() as patch:
        # After the data and before the manifest, as a kill might.
        patch.setattr(listops, "_digest", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(listops, "_remove", lambda path: None)
        with pytest.raises(KeyboardInterrupt):
            load_listops(**parameters, cache_dir=tmp_path, num_proc=1)
    assert [path.name.rsplit(".", 1)[1] for path in sorted(tmp_path.iterdir())] == ["incomplete", "lock"]
    assert digest(load_listops(**parameters, cache_dir=tmp_path, num_proc=1)) == digest(dataset)
    assert not list(tmp_path.glob("*.incomplete"))


def test_killed_build_leaves_no_processes_and_no_lock(tmp_path):
    script = (
        "from hkt_hf.data.listops import load_listops\n"
        f"load_listops(num_train=1_000_000, num_validation=1, num_test=1, cache_dir={str(tmp_path)!r}, num_proc=2)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        # When the first expressions are counted, the workers are running.
        shown = b""
        while b" 1%" not in shown:
            character = process.stderr.read(1)
            assert character, shown.decode()
            shown += character
        process.kill()
        # The pipe ends when the last worker does; until then this raises TimeoutExpired.
        process.communicate(timeout=10)
    with FileLock(next(tmp_path.glob("*.lock")), timeout=1):
        pass


def test_files_of_later_map_calls_do_not_invalidate_the_cache(small, monkeypatch):
    parameters, cache_dir, _ = small
    dataset = load_listops(**parameters, cache_dir=cache_dir, num_proc=1)
    dataset["train"].map(lambda row: {"words": len(row["text"].split())})
    assert list(cache_dir.glob("*/train/cache-*"))
    monkeypatch.setattr(listops, "generate_chunk", None)
    load_listops(**parameters, cache_dir=cache_dir, num_proc=1)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"num_train": -1}, "num_train must be an integer of at least 0, got -1"),
        ({"num_test": 2.5}, "num_test .* got 2.5"),
        ({"num_validation": True}, "num_validation .* got True"),
        ({"num_train": 0, "num_validation": 0, "num_test": 0}, "all 0"),
        ({"min_length": 61}, "min_length=61 is above max_length=60"),
        ({"min_length": 0}, "min_length must be an integer of at least 1"),
        ({"max_length": "60"}, "max_length .* got '60'"),
        ({"min_length": 2, "max_length": 3}, "the lengths are 1 and 4 to "),
        ({"max_depth": 2}, "the lengths are 1 and 4 to 12"),
        ({"max_depth": 1}, "the lengths are 1$"),
        ({"max_depth": 0}, "max_depth must be"),
        ({"min_length": 2, "max_length": 3, "max_depth": 10**7}, "the lengths are 1 and 4 to "),
        ({"seed": "0"}, "seed must be an integer, got '0'"),
        ({"num_proc": 0}, "num_proc must be"),
    ],
)
def test_bad_parameters_are_refused(changes, fragment, tmp_path):
    parameters = {"min_length": 20, "max_length": 60, "num_train": 5, "num_validation": 5, "num_test": 5, "num_proc": 1}
    with pytest.raises(ValueError, match=fragment):
        load_listops(**{**parameters, **changes}, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_proc", [1, 2])
def test_gives_up_when_there_are_too_few_expressions(tmp_path, monkeypatch, num_proc):
    monkeypatch.setattr(listops, "PATIENCE_CHUNKS", 5)
    sizes = {"num_train": 9, "num_validation": 1, "num_test": 1}
    with pytest.raises(ValueError, match=r"found only 10 of 11 different expressions .* max_length=3"):
        load_listops(min_length=1, max_length=3, **sizes, cache_dir=tmp_path, num_proc=num_proc)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_baselines_by_hand():
    # With SM the value of the direct digits, 3, would mislead: only the digits themselves tell 7 from 9.
    train = {
        "text": ["[MAX 1 2 ]"] * 12
        + ["[MAX 1 3 ]"] * 13
        + ["[MIN 4 5 ]"] * 11
        + ["[SM 1 2 ]"] * 10
        + ["[SM 0 3 ]"] * 11,
        "label": [2] * 12 + [3] * 13 + [4] * 11 + [7] * 10 + [9] * 11,
    }
    answers = {
        "[MAX 2 1 ]": 2,
        "[MAX 3 1 ]": 3,
        "[MAX 1 2 [MIN 9 8 ] ]": 2,
        "[MAX 8 8 ]": 3,
        "( ( ( [MIN 5 ) 4 ) ] )": 4,
        "[MIN 4 [MAX 5 5 ] ]": 4,
        "[SM 2 1 ]": 7,
        "[SM 3 0 ]": 9,
        "[MED 1 2 ]": 3,
        "3": 3,
    }
    test = {"text": list(answers), "label": list(answers.values())}
    assert listops_baselines(train, test) == {
        "majority": pytest.approx(4 / 10),
        "root_operator": pytest.approx(7 / 10),
        "root_operator_and_direct_digits": pytest.approx(1.0),
    }


def test_baselines_of_the_long_task(tmp_path):
    dataset = load_listops(num_train=12_000, num_validation=0, num_test=4_000, cache_dir=tmp_path)
    accuracy = listops_baselines(dataset["train"], dataset["test"])
    # Three standard deviations of 4,000 answers are 2.4 points.
    assert accuracy["majority"] == pytest.approx(0.157, abs=0.018)
    assert accuracy["root_operator"] == pytest.approx(0.339, abs=0.024)
    assert accuracy["root_operator_and_direct_digits"] == pytest.approx(0.505, abs=0.024)


@pytest.mark.parametrize(
    ("train", "fragment"),
    [
        ({"text": [], "label": []}, "train is empty"),
        ({"text": ["3"]}, r"\['label'\] missing"),
        ({"text": ["MAX 3 ]"], "label": [3]}, "begins with an operator or a digit"),
        ({"text": [""], "label": [3]}, "begins with an operator or a digit"),
    ],
)
def test_baselines_refuse_other_data(train, fragment):
    with pytest.raises(ValueError, match=fragment):
        listops_baselines(train, {"text": ["3"], "label": [3]})
