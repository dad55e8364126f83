"""The benchmark measures every implementation, and what it measures is the same attention."""

import json

import pytest
import torch
from script_loader import load_script


def test_a_small_benchmark(tmp_path, capsys):
    benchmark = load_script("benchmark")
    arguments = ["--tokens", "32", "--model-tokens", "16", "--rounds", "2", "--device", "cpu"]
    assert benchmark.main([*arguments, "--output-dir", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    core = {(row["implementation"], row["direction"], row["causal"]) for row in results["core"]}
    implementations, directions = ("SDPA", "naive", "concatenated", "fused"), ("forward", "forward + backward")
    assert core == {(name, way, causal) for name in implementations for way in directions for causal in (False, True)}
    assert [row["implementation"] for row in results["training_step"]] == ["MHA", "naive", "concatenated", "fused"]
    for row in results["core"] + results["training_step"]:
        assert row["quartiles_seconds"][0] <= row["median_seconds"] <= row["quartiles_seconds"][1]
        assert row["implementation"] not in ("SDPA", "MHA") or row["ratio"] == 1
    assert results["profile"]["operators"]["fused"][0]["share"] > 0
    report = (tmp_path / "README.md").read_text()
    assert "| 32 | 4 | fused |" in report and capsys.readouterr().out.strip() == report.strip()
    assert (tmp_path / "benchmark.png").stat().st_size > 10_000
    assert results["environment"]["versions"]["torch"] == torch.__version__


def test_a_fallback_of_sdpa_is_an_error():
    benchmark = load_script("benchmark")
    states = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="No available kernel"):
        # The flash kernel wants one head size for all three.
        step = lambda: torch.nn.functional.scaled_dot_product_attention(states, states, states[..., :4])  # noqa: E731
        benchmark.alternate({"SDPA": step}, "SDPA", "cpu", 1)
