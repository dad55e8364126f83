"""Pushes the folder of a model to the Hub, as one commit and a tag, with the code that loads it and without pickles."""

import filecmp
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from .. import __version__
from .run import RESULTS_FILE

# What goes to the Hub besides what `save_pretrained` writes.
EXTRA_FILES = ("README.md", RESULTS_FILE)
# Nothing else does: weights are safetensors, and a pickle would run code where it is loaded.
ALLOWED = ("*.json", "*.safetensors", "*.py", "README.md")


def check_repo_id(repo_id: str) -> None:
    """
    Raises:
        ValueError: `repo_id` is not `user/name`, or has characters that the Hub refuses.
    """
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"repo_id {repo_id!r} must name its owner: user/{repo_id}")


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    tag: str | None = f"v{__version__}",
    token: str | None = None,
) -> CommitInfo:
    """
    Pushes a model that was saved in `folder`, with its tokenizer, its card and its results.

    All files are one commit: an upload that is interrupted leaves the repository as it was, and the same call again
    completes it.

    Args:
        folder: config, safetensors, tokenizer, README.md and results.json.
        repo_id: `user/name`; created if it is not there.
        private: of a repository that is created.
        tag: of the commit. One that is there already is not moved. None = no tag.
        token: of the Hub; by default that of `hf auth login` or HF_TOKEN.

    Raises:
        ValueError: a file is missing, `repo_id` is malformed, there is no token, or the tag is there already, of other
            files.
        HfHubHTTPError: from huggingface_hub: the token is not valid, or its owner may not write there.
        ConnectionError: the Hub did not answer.
    """
    check_repo_id(repo_id)
    if token is None and get_token() is None:
        raise ValueError("there is no token of the Hub: use `hf auth login`, or set HF_TOKEN.")
    folder = Path(folder)
    missing = [name for name in ("config.json", "model.safetensors", *EXTRA_FILES) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing)}: a repository has them all.")
    try:
        return _push(folder, repo_id, HfApi(token=token), private, tag)
    except Exception as error:
        # huggingface_hub wraps the errors of large files, lets those of its HTTP client through, and its version
        # decides which client that is.
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        if type(cause).__module__.partition(".")[0] in ("httpx", "httpx2"):
            raise ConnectionError(
                f"the connection to the Hub broke ({cause}): no file was changed; try again"
            ) from error
        if isinstance(cause, HfHubHTTPError):
            raise cause from None
        raise


def _push(folder: Path, repo_id: str, api: HfApi, private: bool, tag: str | None) -> CommitInfo:
    with tempfile.TemporaryDirectory() as temporary:
        # Saved again: the model's code is not kept in every folder, but every repository holds it.
        AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(temporary)
        AutoTokenizer.from_pretrained(folder).save_pretrained(temporary)
        for name in EXTRA_FILES:
            shutil.copyfile(folder / name, Path(temporary) / name)
        api.create_repo(repo_id, private=private, exist_ok=True)
        has_tag = tag is not None and tag in [reference.name for reference in api.list_repo_refs(repo_id).tags]
        if has_tag and not _same_files(temporary, repo_id, tag, api):
            raise ValueError(
                f"{repo_id} has the tag {tag} already, of other files, and a tag is not moved, since others load it: "
                "choose another one (--tag)."
            )
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=temporary,
            allow_patterns=list(ALLOWED),
            commit_message=f"Upload {repo_id.rpartition('/')[2]} {tag or ''}".rstrip(),
        )
    if tag is not None and not has_tag:
        api.create_tag(repo_id, tag=tag, revision=commit.oid)
    return commit


def _same_files(folder: str, repo_id: str, revision: str, api: HfApi) -> bool:
    names = [path.name for path in Path(folder).iterdir()]
    with tempfile.TemporaryDirectory() as cache:
        published = api.snapshot_download(repo_id, revision=revision, cache_dir=cache)
        return filecmp.cmpfiles(folder, published, names, shallow=False)[0] == names
