"""
What is pushed to the Hub is whole, safe and loads again; what is not pushed leaves nothing behind.

The real clients talk to `LoopbackHub`. They run in processes of their own, because they read HF_ENDPOINT when they are
imported: one that has the package and one that has not, each for all tests, because importing takes seconds.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from loopback_hub import LoopbackHub
from tiny_models import tiny_config
from transformers import TrainerControl, TrainerState, TrainingArguments

from hkt_hf import HKTForSequenceClassification, __version__
from hkt_hf.tokenization_hkt import build_byte_tokenizer, build_listops_tokenizer, build_pixel_tokenizer
from hkt_hf.training import NoPicklesCallback, summary
from hkt_hf.training.cards import TASKS, write_card

ROOT = Path(__file__).resolve().parent.parent
USER, OTHER = "token-of-user", "token-of-other"
TAG = f"v{__version__}"
TEXTS = ["It was the best of times,", "é", "it was the worst of times. " * 3]

CODE = {"attention_hkt.py", "cache_hkt.py", "configuration_hkt.py", "layout_hkt.py", "modeling_hkt.py"}
MODEL = {"config.json", "model.safetensors"} | CODE
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
PUBLISHED = {".gitattributes", "README.md", "results.json"} | MODEL | TOKENIZER

# As run_recipe writes them.
RESULTS = {
    "name": "imdb_tiny",
    "recipe": {
        "task": "imdb",
        "seed": 3,
        "data": {"protocol": "held_out"},
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_levels": 3,
            "level_stride": 2,
            "hybrid": True,
        },
        "training": {"per_device_train_batch_size": 8, "learning_rate": 0.003},
    },
    "overrides": ["seed=3"],
    "seed": 3,
    "parameters": 12345,
    "environment": {"device": "a small processor", "threads": 1},
    "data": {
        "train": {"rows": 33},
        "validation": {"rows": 8},
        "test": {"rows": 1234},
        "dropped_from_train": {"in_test": 1, "contradictory": 0, "duplicate": 2},
    },
    "steps": 32,
    "best_step": 30,
    "train_seconds": 120.0,
    "seconds_per_step": 0.25,
    "memory": {"peak_rss_bytes": 2**30, "peak_gpu_bytes": None},
    "validation": {"accuracy": 0.75},
    "test": {
        "accuracy": 0.613452,
        "interval": [0.58, 0.64],
        "per_class": {
            "neg": {"precision": 0.6, "recall": 0.7, "f1": 0.65, "support": 617},
            "pos": {"precision": 0.7, "recall": 0.6, "f1": 0.64, "support": 617},
        },
        "by_length": {"1-512": {"accuracy": 0.5, "support": 4}, "513-": {"accuracy": 0.6, "support": 1230}},
    },
    "baselines": {"majority": 0.5},
}

# Calls functions, whose source it gets, until its input ends.
WORKER = """
import contextlib, io, json, os, sys, traceback

if sys.argv[1] == "without the package":
    sys.modules["hkt_hf"] = None
import torch, transformers

answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
for line in sys.stdin:
    call, printed = json.loads(line), io.StringIO()
    os.environ["HF_TOKEN"] = call["token"]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            names = {}
            exec(call["source"], names)
            answer = {"value": names[call["name"]](*call["arguments"])}
        except BaseException:
            answer = {"error": traceback.format_exc()}
    print(json.dumps(answer | {"printed": printed.getvalue()}), file=answers, flush=True)
"""


class ClientError(Exception):
    """The traceback of what a function raised in the process of a client."""


class Client:
    """A process that talks to the hub; `printed` is what the last call wrote to stdout and stderr."""

    def __init__(self, hub, home, package):
        self.printed = ""
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, package],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(hub, home),
            cwd=home,
            text=True,
        )

    def call(self, function, *arguments, token=USER):
        """What the function returns there. It sees its arguments and nothing else of this file."""
        call = {
            "source": inspect.getsource(function),
            "name": function.__name__,
            "arguments": arguments,
            "token": token or "",
        }
        # So that a client which waits forever fails a test and does not stop them all.
        timer = threading.Timer(120, self._process.kill)
        timer.start()
        try:
            print(json.dumps(call, default=str), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise ClientError("the process ended or was too slow")
        answer = json.loads(line)
        self.printed = answer["printed"]
        if "error" in answer:
            raise ClientError(answer["error"])
        return answer["value"]

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def environment(hub, home, token=None):
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **hub.environment(home, token)}


@pytest.fixture(scope="module")
def hub():
    with LoopbackHub({USER: "user", OTHER: "other"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def clients(hub, tmp_path_factory):
    """Started together, so that they import together."""
    packages = ["with the package", "without the package"]
    clients = [Client(hub, tmp_path_factory.mktemp("home"), package) for package in packages]
    yield clients
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def client(clients):
    return clients[0]


@pytest.fixture(scope="module")
def bare_client(clients):
    return clients[1]


@pytest.fixture(scope="module")
def published(clients, hub, tmp_path_factory):
    """What the command printed, and the model that it pushed to user/tiny."""
    folder, home = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("home")
    model = make_run(folder)
    command = [sys.executable, str(ROOT / "scripts" / "push_to_hub.py"), str(folder), "--repo-id", "user/tiny"]
    process = subprocess.run(
        command, cwd=home, env=environment(hub, home, USER), capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return process.stdout, model


@pytest.fixture
def run(tmp_path):
    make_run(tmp_path / "run")
    return tmp_path / "run"


def make_run(folder, seed=0):
    """A folder such as run_recipe leaves, with everything in it that must not be pushed; returns the model."""
    torch.manual_seed(seed)
    labels = {"id2label": {0: "neg", 1: "pos"}, "label2id": {"neg": 0, "pos": 1}}
    config = tiny_config(vocab_size=261, max_position_embeddings=128, is_causal=False, **labels)
    model = HKTForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    build_byte_tokenizer(128).save_pretrained(folder)
    (folder / "results.json").write_text(json.dumps(RESULTS))
    (folder / "run.json").write_text("{}")
    (folder / "predictions.parquet").write_bytes(b"PAR1")
    checkpoint = folder / "checkpoint-5"
    checkpoint.mkdir(exist_ok=True)
    shutil.copy(folder / "model.safetensors", checkpoint)
    (checkpoint / "trainer_state.json").write_text("{}")
    for name in ("training_args.bin", "optimizer.pt", "pytorch_model.bin", "code.pkl"):
        torch.save({"pickle": name}, folder / name)
        torch.save({"pickle": name}, checkpoint / name)
    return model


def assert_no_pickles(hub, repo_id):
    paths = {path for commit in hub.commits(repo_id) for path in commit.files}
    assert not [path for path in paths if path.endswith((".bin", ".pt", ".pth", ".pkl"))]
    # torch.save writes zip archives. Not even an upload that no commit refers to may hold one.
    assert not [content for content in hub.contents() if b"data.pkl" in content]


def expected_logits(model):
    batch = build_byte_tokenizer(128)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits.tolist()


# What clients do, each in a process of its own. A float of JSON is the same bits there and here.


def load(repo_id, revision, texts, has_package):
    """The module of the model's class, and its logits."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if has_package:
        import hkt_hf  # noqa: F401
    model, info = AutoModelForSequenceClassification.from_pretrained(
        repo_id, revision=revision, trust_remote_code=not has_package, output_loading_info=True
    )
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(repo_id, revision=revision, trust_remote_code=False)
    with torch.no_grad():
        logits = model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    return type(model).__module__, logits.tolist()


def push(folder, repo_id, *options):
    """The exit code of the command."""
    from unittest.mock import patch

    from script_loader import load_script

    # Between attempts the client waits half a minute in all.
    with patch("time.sleep"):
        return load_script("push_to_hub").main([folder, "--repo-id", repo_id, *options])


def push_folder(folder, repo_id):
    from hkt_hf.training.publish import push_folder

    push_folder(folder, repo_id)


def push_plainly(folder, repo_id):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    import hkt_hf  # noqa: F401

    AutoModelForSequenceClassification.from_pretrained(folder).push_to_hub(repo_id)
    AutoTokenizer.from_pretrained(folder).push_to_hub(repo_id)


def train_and_push(folder, repo_id, output_dir, texts):
    """The logits of the trained model."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    from hkt_hf.training import NoPicklesCallback

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir,
            max_steps=2,
            save_steps=1,
            learning_rate=0.1,
            push_to_hub=True,
            hub_model_id=repo_id,
            hub_strategy="every_save",
            hub_always_push=True,
        ),
        callbacks=[NoPicklesCallback()],
        train_dataset=[{**tokenizer(text), "label": index % 2} for index, text in enumerate(texts)],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.push_to_hub()
    with torch.no_grad():
        return model.eval()(**tokenizer(texts, padding=True, return_tensors="pt")).logits.tolist()


def parameter_count(repo_id):
    """As the Hub's page of a model shows it: from the head of the weights alone."""
    from huggingface_hub import HfApi

    return sum(HfApi().get_safetensors_metadata(repo_id).parameter_count.values())


def post(repo_id, requests):
    """The status of the answer to each (path, body)."""
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.utils import build_hf_headers, get_session

    url, headers = f"{ENDPOINT}/api/models/{repo_id}", build_hf_headers()
    return [get_session().post(f"{url}/{path}", content=body, headers=headers).status_code for path, body in requests]


def execute(code):
    exec(code, {})


# Pushing


def test_the_command_pushes_exactly_what_a_repository_holds_in_one_commit(published, hub):
    printed, _ = published
    assert set(hub.files("user/tiny")) == PUBLISHED
    commit, initial = hub.commits("user/tiny")
    assert set(initial.files) == {".gitattributes"}
    assert printed.strip() == f"{hub.endpoint}/user/tiny/commit/{commit.oid}"
    assert hub.tags("user/tiny") == {TAG: commit.oid}
    for name in CODE:
        assert hub.files("user/tiny")[name].decode() == (ROOT / "hkt_hf" / name).read_text()


def test_no_pickle_is_ever_uploaded(published, hub):
    assert_no_pickles(hub, "user/tiny")


def test_the_card_has_the_results_and_metadata_that_the_hub_reads(published, hub):
    card = ModelCard(hub.files("user/tiny")["README.md"].decode())
    assert (card.data.license, card.data.library_name, card.data.language) == ("apache-2.0", "transformers", "en")
    assert (card.data.pipeline_tag, card.data.datasets) == ("text-classification", ["stanfordnlp/imdb"])
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("accuracy", 0.6135, "test")
    assert result.dataset_type == "stanfordnlp/imdb"
    for text in (
        "\n# tiny\n",
        "**61.35**",
        "58.00 to 64.00",
        "12,345 parameters",
        "seed 3",
        "1,234 test",
        "2 (duplicate)",
    ):
        assert text in card.text
    assert "{{" not in card.content
    assert json.loads(hub.files("user/tiny")["results.json"]) == RESULTS


def test_the_examples_on_the_card_run(published, hub, client, bare_client):
    with_package, without = re.findall(r"```python\n(.*?)```", hub.files("user/tiny")["README.md"].decode(), re.DOTALL)
    client.call(execute, with_package)
    bare_client.call(execute, f"from transformers import AutoModelForSequenceClassification, AutoTokenizer\n{without}")


@pytest.mark.parametrize("task", TASKS)
def test_the_example_on_the_card_of_every_task_runs(task, tmp_path):
    recipe = RESULTS["recipe"] | {"task": task, "data": {}}
    (tmp_path / "results.json").write_text(json.dumps(RESULTS | {"recipe": recipe}))
    card = write_card(tmp_path, "user/tiny", ROOT / "model_cards" / "template.md").text
    example = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    texts = []
    # In place of the pipeline, which would load from the Hub.
    example = re.sub(r"classify = .*", "classify = texts.append", example)
    exec(example, {"texts": texts})
    tokenizer = {"listops": build_listops_tokenizer, "imdb": build_byte_tokenizer, "cifar10": build_pixel_tokenizer}
    assert tokenizer[task]().unk_token_id not in tokenizer[task]()(texts[0])["input_ids"]


def test_a_checkpoint_that_was_selected_on_test_says_so(tmp_path):
    template = ROOT / "model_cards" / "template.md"
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    held_out = write_card(tmp_path, "user/tiny", template).text
    assert "best on validation" in held_out and "| this model, validation | 75.00 |" in held_out
    assert "(validation 0.7500;" in summary(RESULTS)
    results = RESULTS | {"recipe": RESULTS["recipe"] | {"data": {"protocol": "long_range_arena"}}, "note": "A note."}
    (tmp_path / "results.json").write_text(json.dumps(results))
    card = write_card(tmp_path, "user/tiny", template).text
    assert "best on test, as in the Long Range Arena's code: its accuracy there is too high" in card
    assert "this model, validation" not in card and "A note." in card
    assert "(selected on test itself 0.7500;" in summary(results)


def test_it_loads_bit_for_bit_with_the_package(published, client):
    _, model = published
    module, logits = client.call(load, "user/tiny", TAG, TEXTS, True, token=None)
    assert module == "hkt_hf.modeling_hkt"
    assert logits == expected_logits(model)


def test_it_loads_bit_for_bit_without_the_package(published, bare_client):
    _, model = published
    module, logits = bare_client.call(load, "user/tiny", TAG, TEXTS, False, token=None)
    assert module.startswith("transformers_modules.")
    assert logits == expected_logits(model)


def test_the_hub_can_read_how_large_the_model_is(published, client):
    _, model = published
    assert client.call(parameter_count, "user/tiny") == sum(tensor.numel() for tensor in model.state_dict().values())


def test_the_package_is_really_missing_there(bare_client):
    with pytest.raises(ClientError, match="ModuleNotFoundError"):
        bare_client.call(execute, "import hkt_hf")


def test_pushing_again_is_a_new_commit_with_a_tag_of_its_own(run, hub, client):
    old = make_run(run)
    assert client.call(push, run, "user/again") == 0
    # The same once more is no commit.
    assert client.call(push, run, "user/again") == 0
    first, *_ = hub.commits("user/again")
    assert hub.tags("user/again") == {TAG: first.oid}

    model = make_run(run, seed=1)
    assert client.call(push, run, "user/again") == 2
    assert f"user/again has the tag {TAG} already, of other files" in client.printed
    assert hub.commits("user/again")[0] == first
    assert client.call(push, run, "user/again", "--tag", "v9") == 0
    second, *earlier = hub.commits("user/again")
    assert earlier[0] == first
    assert hub.tags("user/again") == {TAG: first.oid, "v9": second.oid}
    assert 'revision="v9"' in hub.files("user/again")["README.md"].decode()
    assert client.call(load, "user/again", "v9", TEXTS, True)[1] == expected_logits(model)
    assert client.call(load, "user/again", TAG, TEXTS, True)[1] == expected_logits(old)


def test_a_private_repository_loads_for_its_owner_alone(run, hub, client):
    assert client.call(push, run, "user/secret", "--private") == 0
    for token in (None, OTHER):
        with pytest.raises(ClientError, match=r"(?s)user/secret is not .* private repo.*token"):
            client.call(load, "user/secret", TAG, TEXTS, True, token=token)
    assert client.call(load, "user/secret", TAG, TEXTS, True, token=USER)


@pytest.mark.parametrize("stop", [0, 1], ids=["large file", "commit"])
def test_a_broken_upload_changes_nothing_and_the_same_command_completes_it(stop, run, hub, client):
    repo_id = f"user/broken-{stop}"
    assert client.call(push, run, repo_id) == 0
    before = hub.commits(repo_id), hub.tags(repo_id)

    # Weights that this hub has not seen: it would not ask for them again.
    model = make_run(run, seed=10 + stop)
    hub.fail_uploads_after(stop)
    try:
        assert client.call(push, run, repo_id, "--tag", "v9") == 2
    finally:
        hub.fail_uploads_after(None)
    assert re.fullmatch(r"error: .+\n", error_line(client))
    assert (hub.commits(repo_id), hub.tags(repo_id)) == before

    assert client.call(push, run, repo_id, "--tag", "v9") == 0
    assert set(hub.files(repo_id)) == PUBLISHED
    assert client.call(load, repo_id, "v9", TEXTS, True)[1] == expected_logits(model)


def test_a_broken_first_upload_leaves_no_partial_files(run, hub, client):
    make_run(run, seed=12)
    hub.fail_uploads_after(1)
    try:
        assert client.call(push, run, "user/first") == 2
    finally:
        hub.fail_uploads_after(None)
    assert set(hub.files("user/first")) == {".gitattributes"}
    assert hub.tags("user/first") == {}
    assert client.call(push, run, "user/first") == 0
    assert set(hub.files("user/first")) == PUBLISHED


# What cannot be pushed


def error_line(client):
    """The last thing printed, after transformers' progress bars."""
    return client.printed.rpartition("error: ")[1] + client.printed.rpartition("error: ")[2]


def test_without_a_token_nothing_is_created_and_the_error_names_the_remedy(run, hub, client):
    assert client.call(push, run, "user/tokenless", token=None) == 2
    assert re.fullmatch(r"error: .*`hf auth login`.*HF_TOKEN.*\n", client.printed)
    assert "user/tokenless" not in hub.repositories()


@pytest.mark.parametrize(
    ("repo_id", "token", "message"),
    [
        ("user/refused", "token-of-nobody", "error: .*401.*Invalid credentials"),
        ("other/refused", USER, "error: .*403.*don't have the rights .* namespace"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(repo_id, token, message, run, hub, client):
    assert client.call(push, run, repo_id, token=token) == 2
    assert re.fullmatch(f"{message}.*\n", error_line(client))
    assert repo_id not in hub.repositories()


@pytest.mark.parametrize("repo_id", ["tiny", "user/tiny/twice", "user/", "/tiny", "user/a b", "user/tiny.git"])
def test_a_malformed_repository_is_named_before_anything_is_written(repo_id, run, hub, client):
    before = hub.repositories(), len(hub.log)
    assert client.call(push, run, repo_id) == 2
    assert re.fullmatch(f"error: .*{re.escape(repo_id)}.*\n", client.printed)
    with pytest.raises(
        ClientError, match=f"ValidationError: .*{re.escape(repo_id)}|ValueError: .*{re.escape(repo_id)}"
    ):
        client.call(push_folder, run, repo_id)
    assert (hub.repositories(), len(hub.log)) == before
    assert not (run / "README.md").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md", "results.json"])
def test_a_missing_file_is_named_and_nothing_is_created(name, run, hub, client):
    (run / "README.md").write_text("# Tiny")
    (run / name).unlink()
    with pytest.raises(ClientError, match=f"ValueError: .* has no {name}"):
        client.call(push_folder, run, "user/missing")
    assert "user/missing" not in hub.repositories()


def test_a_folder_without_results_has_no_card(run, client):
    (run / "results.json").unlink()
    assert client.call(push, run, "user/missing") == 2
    assert re.fullmatch(r"error: .*results\.json.*\n", client.printed)


# What transformers itself pushes


def test_push_to_hub_of_the_model_and_of_the_tokenizer(published, run, hub, client, bare_client):
    _, model = published
    client.call(push_plainly, run, "user/plain")
    assert set(hub.files("user/plain")) == {".gitattributes", "README.md"} | MODEL | TOKENIZER
    assert client.call(load, "user/plain", "main", TEXTS, True)[1] == expected_logits(model)
    assert bare_client.call(load, "user/plain", "main", TEXTS, False)[1] == expected_logits(model)


def test_trainer_pushes_what_it_trained(run, tmp_path, hub, client, bare_client):
    logits = client.call(train_and_push, run, "user/trained", tmp_path / "output", TEXTS)
    files = set(hub.files("user/trained"))
    assert files > MODEL | TOKENIZER
    assert len(hub.commits("user/trained")) > 2
    assert (tmp_path / "output" / "training_args.bin").is_file()
    assert_no_pickles(hub, "user/trained")
    assert client.call(load, "user/trained", "main", TEXTS, True)[1] == logits
    assert bare_client.call(load, "user/trained", "main", TEXTS, False)[1] == logits


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_strategies_that_push_the_optimiser_are_refused(strategy, tmp_path):
    # Offline this Trainer could not make its repository: the callback's event comes after that.
    args = TrainingArguments(str(tmp_path), push_to_hub=True, hub_strategy=strategy, use_cpu=True)
    with pytest.raises(ValueError, match=f"hub_strategy='{strategy}' .*'every_save'"):
        NoPicklesCallback().on_init_end(args, TrainerState(), TrainerControl())


# The server of these tests


def test_the_loopback_hub_refuses_what_the_hub_refuses(published, hub, client):
    never_uploaded = {"path": "model.safetensors", "algo": "sha256", "oid": "0" * 64, "size": 1}
    lines = [{"key": "header", "value": {"summary": "no"}}, {"key": "lfsFile", "value": never_uploaded}]
    requests = [("commit/main", "\n".join(map(json.dumps, lines))), ("tag/main", '{"tag": "mine"}')]
    before = hub.commits("user/tiny")
    assert client.call(post, "user/tiny", requests, token=None) == [401, 401]
    assert client.call(post, "user/tiny", requests, token=OTHER) == [403, 403]
    assert client.call(post, "user/tiny", requests[:1], token=USER) == [400]
    assert client.call(post, "user/nowhere", requests, token=None) == [401, 401]
    assert client.call(post, "user/nowhere", requests, token=USER) == [404, 404]
    assert hub.commits("user/tiny") == before
    assert "mine" not in hub.tags("user/tiny")
