"""What results say about answers: accuracies, intervals and tests have the values that they should have."""

import numpy as np
import pytest
from datasets import Dataset

from hkt_hf.training.evaluation import (
    across_seeds,
    bootstrap_interval,
    compare_answers,
    evaluate_answers,
    length_groups,
)
from hkt_hf.training.tasks import TASKS


def test_accuracy_per_class_and_per_group():
    labels, answers = [0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 0, 0]
    groups = {"length": ["1-10", "1-10", "11-", "11-", "11-", "1-10"]}
    result = evaluate_answers(labels, answers, ["a", "b", "c"], groups)
    assert result["accuracy"] == 0.5 and result["num_examples"] == 6
    assert result["per_class"]["a"] == {
        "precision": 0.5,
        "recall": pytest.approx(2 / 3),
        "f1": pytest.approx(4 / 7),
        "support": 3,
    }
    # Never answered: no precision, and no warning either.
    assert result["per_class"]["c"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1}
    assert list(result["by_length"]) == ["1-10", "11-"]
    assert result["by_length"]["11-"] == {"accuracy": pytest.approx(1 / 3), "support": 3}


def test_a_class_that_the_test_set_lacks_is_in_the_table():
    assert evaluate_answers([0, 0], [0, 1], ["a", "b"], {})["per_class"]["b"]["support"] == 0


def test_groups_are_in_the_order_of_their_numbers():
    groups = {"depth": ["10", "9", "2"]}
    assert list(evaluate_answers([0, 0, 0], [0, 0, 0], ["a"], groups)["by_depth"]) == ["2", "9", "10"]


def test_bootstrap_interval_is_that_of_a_proportion():
    right = np.arange(4000) < 2400
    low, high = bootstrap_interval(right)
    # The normal interval: 0.6 +- 1.96 sqrt(0.24 / 4000)
    assert low == pytest.approx(0.5848, abs=0.001) and high == pytest.approx(0.6152, abs=0.001)
    assert bootstrap_interval(right) == [low, high]
    assert bootstrap_interval([1, 1, 1]) == [1.0, 1.0]


def test_paired_comparison():
    labels = np.zeros(100, dtype=int)
    answers, baseline_answers = labels.copy(), labels.copy()
    baseline_answers[:9] = 1
    answers[9:10] = 1
    comparison = compare_answers(labels, answers, baseline_answers)
    assert comparison["difference"] == pytest.approx(0.08)
    # 9 to 1 of fair coins, both tails: 2 (10 + 1) / 2^10
    assert comparison["p_value"] == pytest.approx(22 / 1024)
    assert comparison["interval"][0] < 0.08 < comparison["interval"][1]


def test_equal_answers_differ_by_nothing():
    labels = [0, 1, 1]
    assert compare_answers(labels, [0, 0, 1], [0, 0, 1]) == {"difference": 0.0, "interval": [0.0, 0.0], "p_value": 1.0}


def test_answers_to_other_rows_are_refused():
    with pytest.raises(ValueError, match="3 labels, 3 and 2 answers"):
        compare_answers([0, 1, 1], [0, 0, 1], [0, 0])


def test_across_seeds():
    result = across_seeds([0.5, 0.6, 0.7])
    assert result["mean"] == pytest.approx(0.6) and result["std"] == pytest.approx(0.1) and result["seeds"] == 3
    # Student's t with 2 degrees of freedom: 4.303
    assert result["interval"] == pytest.approx([0.6 - 0.24841, 0.6 + 0.24841], abs=1e-4)
    assert across_seeds([0.5]) == {"mean": 0.5, "std": None, "interval": None, "seeds": 1}


def test_length_groups():
    assert length_groups([1, 10, 11, 20, 21], [10, 20]) == ["1-10", "1-10", "11-20", "11-20", "21-"]


def test_groups_of_the_tasks():
    listops = Dataset.from_dict({"depth": [3, 12], "length": [32, 33]})
    assert TASKS["listops"].groups(listops) == {"depth": ["3", "12"], "length": ["1-32", "33-64"]}
    imdb = Dataset.from_dict({"text": ["é" * 256, "é" * 257]})
    assert TASKS["imdb"].groups(imdb) == {"length": ["1-512", "513-1024"]}
    assert TASKS["cifar10"].groups(imdb) == {}
