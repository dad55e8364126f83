"""A saved folder is all that anybody needs: with the package, and without it through `trust_remote_code`."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import tiny_config
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from hkt_hf import HKTConfig, HKTForSequenceClassification, HKTModel
from hkt_hf.tokenization_hkt import build_byte_tokenizer

TEXTS = ["It was the best of times,", "é", "it was the worst of times. " * 3]


def build_classifier(**changes):
    torch.manual_seed(0)
    labels = {"id2label": {0: "neg", 1: "pos"}, "label2id": {"neg": 0, "pos": 1}}
    config = tiny_config(vocab_size=261, max_position_embeddings=128, is_causal=False, **labels, **changes)
    return HKTForSequenceClassification(config).eval()


def logits_of(model, tokenizer):
    with torch.no_grad():
        return model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A classifier, its tokenizer, its logits on three texts, and the folder that holds it."""
    folder = tmp_path_factory.mktemp("saved") / "hkt"
    model, tokenizer = build_classifier(), build_byte_tokenizer(128)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, logits_of(model, tokenizer)


def test_the_folder_holds_safetensors_and_the_code(saved):
    folder, _, _ = saved
    assert {path.name for path in folder.iterdir()} == {
        "attention_hkt.py",
        "cache_hkt.py",
        "config.json",
        "configuration_hkt.py",
        "layout_hkt.py",
        "model.safetensors",
        "modeling_hkt.py",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((folder / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_hkt.HKTConfig",
        "AutoModel": "modeling_hkt.HKTModel",
        "AutoModelForCausalLM": "modeling_hkt.HKTForCausalLM",
        "AutoModelForMaskedLM": "modeling_hkt.HKTForMaskedLM",
        "AutoModelForQuestionAnswering": "modeling_hkt.HKTForQuestionAnswering",
        "AutoModelForSequenceClassification": "modeling_hkt.HKTForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hkt.HKTForTokenClassification",
    }


def test_auto_classes_load_it_bit_for_bit(saved):
    folder, model, logits = saved
    assert type(AutoConfig.from_pretrained(folder)) is HKTConfig
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer) is PreTrainedTokenizerFast
    loaded, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is HKTForSequenceClassification
    assert not any(info.values())
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys() == load_file(folder / "model.safetensors").keys()
    assert all(tensor.equal(expected[name]) for name, tensor in loaded.state_dict().items())
    assert logits_of(loaded.eval(), tokenizer).equal(logits)


def test_the_base_model_loads_from_a_classifier_and_back(saved, tmp_path):
    folder, model, _ = saved
    base, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert type(base) is HKTModel
    assert not info["missing_keys"]
    assert set(info["unexpected_keys"]) == {"classifier.weight", "classifier.bias"}
    assert all(tensor.equal(model.model.state_dict()[name]) for name, tensor in base.state_dict().items())

    base.save_pretrained(tmp_path)
    again, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    # The new head is random, and transformers says so.
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert all(tensor.equal(base.state_dict()[name]) for name, tensor in again.model.state_dict().items())
    assert again.classifier.weight.isfinite().all()


@pytest.mark.parametrize("changes", [{"num_levels": 1, "hybrid": False}, {"level_fusion": "static"}, {"num_levels": 4}])
def test_every_architecture_reloads(changes, tmp_path):
    model = build_classifier(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert all(tensor.equal(model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_the_saved_dtype_is_what_loads(tmp_path):
    build_classifier().to(torch.bfloat16).save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert AutoModel.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_a_different_number_of_labels_needs_consent(saved):
    folder, model, _ = saved
    with pytest.raises(RuntimeError, match="size mismatch|ignore_mismatched_sizes"):
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5, ignore_mismatched_sizes=True)
    assert loaded.classifier.weight.shape == (5, 16)
    assert loaded.model.layers[0].attention.beta.equal(model.model.layers[0].attention.beta)


def test_pipeline(saved):
    folder, _, logits = saved
    classify = pipeline("text-classification", model=str(folder))
    results = classify(TEXTS, batch_size=2)
    for result, row in zip(results, logits, strict=True):
        assert result["label"] == ["neg", "pos"][row.argmax()]
        assert result["score"] == pytest.approx(row.softmax(-1).max().item(), abs=1e-5)
    with pytest.raises(ValueError, match="truncation=True"):
        classify("x" * 129)
    assert classify("x" * 129, truncation=True)[0]["label"] in ("neg", "pos")
    with pytest.raises(ValueError, match="0 tokens"):
        classify("")


def test_a_truncated_checkpoint_is_refused(saved, tmp_path):
    folder, _, _ = saved
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(Exception, match="(?i)incomplete|invalid|header|corrupt"):
        AutoModel.from_pretrained(tmp_path)
    with pytest.raises(Exception, match="(?i)incomplete|invalid|header|corrupt"), safe_open(weights, "pt"):
        pass


def run_without_the_package(code, tmp_path, *arguments):
    """Runs Python code in a fresh process in which `import hkt_hf` fails."""
    program = "import sys\nsys.modules['hkt_hf'] = None\n" + textwrap.dedent(code)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


REMOTE_CODE = """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

    folder, again, expected = sys.argv[1:]
    expected = torch.load(expected, weights_only=True)
    trust = {"trust_remote_code": True}
    config = AutoConfig.from_pretrained(folder, **trust)
    assert config.model_type == "hkt" and config.num_levels == 3
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(expected["texts"], padding=True, return_tensors="pt")

    def check(path):
        model, info = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True, **trust)
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        assert not any(info.values()), info
        for name, tensor in model.state_dict().items():
            assert tensor.equal(expected["state"][name]), name
        with torch.no_grad():
            assert model.eval()(**batch).logits.equal(expected["logits"])
        return model

    model = check(folder)
    base = AutoModel.from_pretrained(folder, **trust)
    assert base.layers[0].attention.beta.equal(expected["state"]["model.layers.0.attention.beta"])
    classify = pipeline("text-classification", model=folder, **trust)
    assert len(classify(expected["texts"])) == len(expected["texts"])

    # What was loaded as remote code saves itself whole again.
    model.save_pretrained(again)
    check(again)
    AutoModel.from_pretrained(again, **trust)
    for task in ("CausalLM", "MaskedLM", "QuestionAnswering", "TokenClassification"):
        model_class = getattr(transformers, f"AutoModelFor{task}")
        assert type(model_class.from_pretrained(again, is_causal=True, **trust)).__name__ == f"HKTFor{task}"
    writer = transformers.AutoModelForCausalLM.from_pretrained(again, is_causal=True, **trust)
    written = writer.generate(**batch, max_new_tokens=5, do_sample=False)
    assert written.equal(writer.generate(**batch, max_new_tokens=5, do_sample=False, use_cache=False))
    print("all good")
"""


def test_it_loads_from_the_folder_alone_where_the_package_is_missing(saved, tmp_path):
    folder, model, logits = saved
    expected = tmp_path / "expected.pt"
    torch.save({"state": model.state_dict(), "logits": logits, "texts": TEXTS}, expected)
    result = run_without_the_package(REMOTE_CODE, tmp_path, folder, tmp_path / "again", expected)
    assert result.returncode == 0, result.stderr
    assert "all good" in result.stdout


def test_the_package_is_really_missing_there(saved, tmp_path):
    folder, _, _ = saved
    assert run_without_the_package("import hkt_hf", tmp_path).returncode != 0
    code = "from transformers import AutoModel\nAutoModel.from_pretrained(sys.argv[1], trust_remote_code=False)"
    result = run_without_the_package(code, tmp_path, folder)
    assert result.returncode != 0
    assert "trust_remote_code=True" in result.stderr
