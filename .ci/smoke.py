"""What must work where only the wheel and its core needs are installed."""

import pathlib
import sys
import tempfile

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hkt_hf
from hkt_hf.tokenization_hkt import build_byte_tokenizer

package = pathlib.Path(hkt_hf.__file__).resolve()
if pathlib.Path(sys.prefix).resolve() not in package.parents:
    sys.exit(f"hkt_hf came from {package}, not from the environment {sys.prefix}")

config = hkt_hf.HKTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
model = hkt_hf.HKTForSequenceClassification(config).eval()
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    reloaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    batch = AutoTokenizer.from_pretrained(folder)(["a film", "another film"], padding=True, return_tensors="pt")
with torch.no_grad():
    torch.testing.assert_close(reloaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)
print(f"hkt-hf {hkt_hf.__version__} works from {package.parent}")
