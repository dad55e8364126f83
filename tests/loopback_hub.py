"""
A Hub on this machine: enough of its HTTP API for the real huggingface_hub and transformers clients.

The tests of pushing and loading must not need the internet, and a mock of the client would only show that the mock was
called. So the real clients talk to this server, which keeps everything in memory:

    with LoopbackHub({"token-of-user": "user"}) as hub:
        subprocess.run([...], env=os.environ | hub.environment(tmp_path, token="token-of-user"))
        hub.files("user/name")

The clients read HF_ENDPOINT when they are imported, hence the subprocess. Only repositories of models are served, and
large files go the way of Git LFS, not of Xet, which has no server of its own that could run here.
"""

import base64
import datetime
import hashlib
import json
import re
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# The Hub decides by .gitattributes and by content; by name is enough here.
LARGE_FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".parquet", ".npz", ".npy", ".zip", ".gz", ".png")
LARGE_FILE_SIZE = 10 * 2**20

REPO = r"(?P<repo_id>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
SHA256 = r"(?P<sha256>[0-9a-f]{64})"


@dataclass(frozen=True)
class Blob:
    """The content of a file, and how Git keeps it: as it is, or as an LFS pointer to it."""

    content: bytes
    is_large: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
        kept = self.pointer if self.is_large else self.content
        return hashlib.sha1(b"blob %d\0" % len(kept) + kept).hexdigest()

    @property
    def etag(self) -> str:
        """By which clients know whether they have the file already."""
        return self.sha256 if self.is_large else self.git_oid

    @property
    def pointer(self) -> bytes:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        return text.encode()


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    date: str
    files: dict[str, Blob]

    def folders(self) -> set[str]:
        return {str(folder) for path in self.files for folder in Path(path).parents} - {"."}


@dataclass
class Repository:
    owner: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def find(self, revision: str) -> Commit | None:
        """The commit that a branch, a tag or an oid names."""
        oid = self.branches.get(revision.removeprefix("refs/heads/"))
        oid = oid or self.tags.get(revision.removeprefix("refs/tags/"))
        return self.commits.get(oid or revision)

    def commit(self, branch: str, title: str, files: dict[str, Blob]) -> Commit:
        parent = self.branches.get(branch)
        listing = [(path, blob.git_oid) for path, blob in sorted(files.items())]
        oid = hashlib.sha1(json.dumps([parent, title, listing]).encode()).hexdigest()
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        self.commits[oid] = Commit(oid, parent, title, date, dict(files))
        self.branches[branch] = oid
        return self.commits[oid]

    def history(self, commit: Commit | None) -> list[Commit]:
        """The commit and those before it, newest first."""
        commits = []
        while commit is not None:
            commits.append(commit)
            commit = self.commits.get(commit.parent)
        return commits


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: Any
    body: bytes

    def json(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")

    def asks_for(self, flag: str) -> bool:
        return self.query.get(flag, [""])[0].lower() in ("true", "1")


@dataclass(frozen=True)
class Answer:
    """JSON unless the body is bytes."""

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class HubError(Exception):
    """
    What the Hub answers to a request that it refuses.

    Clients tell a missing repository, revision and file apart by `code` alone, which travels as X-Error-Code.
    """

    def __init__(self, status: int, message: str, code: str = "", **body: str):
        super().__init__(message)
        self.answer = Answer(
            {"error": message, **body},
            status,
            {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})},
        )


def route(method: str, pattern: str) -> Callable[[Callable], Callable]:
    """Marks the method of LoopbackHub that answers a request; the groups of the pattern are its arguments."""

    def mark(function: Callable) -> Callable:
        function.route = (method, re.compile(pattern))
        return function

    return mark


class LoopbackHub:
    """
    The server, from entering the context to leaving it.

    Args:
        tokens: from a token to the user whose it is.

    Attributes:
        endpoint: what HF_ENDPOINT has to be.
        log: (method, path, status) of every request; status 0 is a connection that was broken.
    """

    def __init__(self, tokens: dict[str, str]):
        self.tokens = tokens
        self.endpoint = ""
        self.log: list[tuple[str, str, int]] = []
        self._repositories: dict[str, Repository] = {}
        self._large_objects: dict[str, bytes] = {}
        # Uploads of large files carry no token: that they were announced, with one, is their permission.
        self._announced: set[str] = set()
        self._uploads_left: int | None = None
        self._lock = threading.RLock()
        self._routes = [(*function.route, function) for function in vars(type(self)).values() if is_route(function)]

    def __enter__(self) -> "LoopbackHub":
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    # What tests ask and do

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """The variables of a client of this server. What a developer has set for the real Hub is overridden."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_MODULES_CACHE": str(home / "modules"),
            "HF_TOKEN_PATH": str(home / "token"),
            # Empty is none.
            "HF_TOKEN": token or "",
            "HUGGING_FACE_HUB_TOKEN": "",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def repositories(self) -> set[str]:
        with self._lock:
            return set(self._repositories)

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """From path to content."""
        with self._lock:
            return {path: blob.content for path, blob in self._repositories[repo_id].find(revision).files.items()}

    def commits(self, repo_id: str, revision: str = "main") -> list[Commit]:
        """Newest first."""
        with self._lock:
            repository = self._repositories[repo_id]
            return repository.history(repository.find(revision))

    def tags(self, repo_id: str) -> dict[str, str]:
        """From the tag to the oid of its commit."""
        with self._lock:
            return dict(self._repositories[repo_id].tags)

    def contents(self) -> set[bytes]:
        """Of every file that any commit has held, and of every large file that was uploaded, committed or not."""
        with self._lock:
            repositories = self._repositories.values()
            commits = [commit for repository in repositories for commit in repository.commits.values()]
            committed = {blob.content for commit in commits for blob in commit.files.values()}
            return committed | set(self._large_objects.values())

    def fail_uploads_after(self, count: int | None) -> None:
        """
        Breaks the connection within the body of every upload after the next `count` ones; None repairs it.

        An upload is a large file or a commit: these are the requests that carry the content of files.
        """
        with self._lock:
            self._uploads_left = count

    # For the handler

    def takes_upload(self, method: str, path: str) -> bool:
        """False if the connection has to break here."""
        is_upload = method == "PUT" or (method == "POST" and "/commit/" in path)
        with self._lock:
            if not is_upload or self._uploads_left is None:
                return True
            self._uploads_left -= 1
            return self._uploads_left >= 0

    def answer(self, request: Request) -> Answer:
        method = "GET" if request.method == "HEAD" else request.method
        for route_method, pattern, function in self._routes:
            if route_method == method and (match := pattern.fullmatch(request.path)):
                # An optional group that is not there leaves its argument at the default.
                arguments = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
                try:
                    with self._lock:
                        return function(self, request, **arguments)
                except HubError as error:
                    return error.answer
                except Exception:
                    # For whoever debugs this file: clients show the body of an error.
                    return Answer({"error": traceback.format_exc()}, 500)
        return HubError(404, f"LoopbackHub has no route {method} {request.path}").answer

    def record(self, method: str, path: str, status: int) -> None:
        with self._lock:
            self.log.append((method, path, status))

    # Who may do what

    def _user(self, request: Request) -> str | None:
        """None without a token."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer":
            return None
        if token not in self.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.tokens[token]

    def _readable(self, request: Request, repo_id: str) -> Repository:
        """Whoever may not read a repository learns no more than if it did not exist."""
        user, repository = self._user(request), self._repositories.get(repo_id)
        if repository is None or (repository.private and repository.owner != user):
            raise HubError(401 if user is None else 404, "Repository not found", "RepoNotFound")
        return repository

    def _writable(self, request: Request, repo_id: str) -> Repository:
        repository, user = self._readable(request, repo_id), self._user(request)
        if user is None:
            raise HubError(401, "Invalid username or password.")
        if repository.owner != user:
            raise HubError(403, f"Forbidden: you do not have write access to {repo_id}")
        return repository

    @staticmethod
    def _commit(repository: Repository, revision: str) -> Commit:
        commit = repository.find(revision)
        if commit is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Accounts and repositories

    @route("GET", "/api/whoami-v2")
    def _whoami(self, request: Request) -> Answer:
        user = self._user(request)
        if user is None:
            raise HubError(401, "Invalid username or password.")
        access = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        return Answer({"type": "user", "id": user, "name": user, "fullname": user, "orgs": [], "auth": access})

    @route("POST", "/api/repos/create")
    def _create(self, request: Request) -> Answer:
        payload, user = request.json(), self._user(request)
        if user is None:
            raise HubError(401, "Invalid username or password.")
        if payload.get("type", "model") != "model":
            raise HubError(400, "LoopbackHub has models only")
        owner = payload.get("organization") or user
        if owner != user:
            raise HubError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        repo_id = f"{owner}/{payload['name']}"
        url = f"{self.endpoint}/{repo_id}"
        if repo_id in self._repositories:
            raise HubError(409, "You already created this model repo", url=url)
        private = payload.get("visibility") == "private" or payload.get("private") is True
        repository = self._repositories[repo_id] = Repository(owner, private)
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LARGE_FILE_SUFFIXES)
        repository.commit("main", "initial commit", {".gitattributes": Blob(attributes.encode())})
        return Answer({"url": url, "name": repo_id, "id": repo_id})

    @route("GET", f"/api/models/{REPO}")
    def _info(self, request: Request, repo_id: str) -> Answer:
        return self._revision_info(request, repo_id, "main")

    @route("GET", f"/api/models/{REPO}/revision/{REVISION}")
    def _revision_info(self, request: Request, repo_id: str, revision: str) -> Answer:
        repository = self._readable(request, repo_id)
        commit = self._commit(repository, revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        if "blobs" in request.query:
            for sibling in siblings:
                blob = commit.files[sibling["rfilename"]]
                sibling |= {"size": len(blob.content), "blobId": blob.git_oid}
                if blob.is_large:
                    sibling["lfs"] = {"sha256": blob.sha256, **_lfs_sizes(blob)}
        return Answer(
            {
                "_id": repo_id,
                "id": repo_id,
                "modelId": repo_id,
                "author": repository.owner,
                "sha": commit.oid,
                "createdAt": repository.history(commit)[-1].date,
                "lastModified": commit.date,
                "private": repository.private,
                "gated": False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": siblings,
            }
        )

    # Branches and tags

    @route("GET", f"/api/models/{REPO}/refs")
    def _refs(self, request: Request, repo_id: str) -> Answer:
        repository = self._readable(request, repo_id)

        def listing(kind: str, references: dict[str, str]) -> list[dict[str, str]]:
            return [
                {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid} for name, oid in references.items()
            ]

        return Answer(
            {
                "branches": listing("heads", repository.branches),
                "tags": listing("tags", repository.tags),
                "converts": [],
                "pullRequests": [],
            }
        )

    @route("POST", f"/api/models/{REPO}/branch/{REVISION}")
    def _create_branch(self, request: Request, repo_id: str, revision: str) -> Answer:
        repository = self._writable(request, repo_id)
        if revision in repository.branches:
            raise HubError(409, f"Reference already exists: {revision}")
        start = request.json().get("startingPoint") or "main"
        repository.branches[revision] = self._commit(repository, start).oid
        return Answer({})

    @route("POST", f"/api/models/{REPO}/tag/{REVISION}")
    def _create_tag(self, request: Request, repo_id: str, revision: str) -> Answer:
        repository, tag = self._writable(request, repo_id), request.json()["tag"]
        if tag in repository.tags:
            raise HubError(409, f"Tag reference exists already: {tag}")
        repository.tags[tag] = self._commit(repository, revision).oid
        return Answer({})

    @route("DELETE", f"/api/models/{REPO}/tag/{REVISION}")
    def _delete_tag(self, request: Request, repo_id: str, revision: str) -> Answer:
        repository = self._writable(request, repo_id)
        if repository.tags.pop(revision, None) is None:
            raise HubError(404, f"Tag not found: {revision}", "RevisionNotFound")
        return Answer({})

    # Upload: which files are large, the large ones, then a commit

    @route("POST", "/api/validate-yaml")
    def _validate_yaml(self, request: Request) -> Answer:
        return Answer({"errors": [], "warnings": []})

    @route("POST", f"/api/models/{REPO}/preupload/{REVISION}")
    def _preupload(self, request: Request, repo_id: str, revision: str) -> Answer:
        """Clients leave out of the commit what has the `oid` of the file in the repository."""
        files, payload = self._commit(self._writable(request, repo_id), revision).files, request.json()
        hosted = files.get(".gitignore", Blob(b"")).content.decode()
        patterns = payload.get("gitIgnore", hosted).split()
        answers = []
        for file in payload["files"]:
            path, large = file["path"], file["size"] > LARGE_FILE_SIZE or file["path"].endswith(LARGE_FILE_SUFFIXES)
            oid = files[path].etag if path in files else None
            mode = "lfs" if large else "regular"
            # Patterns without a slash, which hold in every folder.
            ignored = any(fnmatch(Path(path).name, pattern) for pattern in patterns)
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": ignored, "oid": oid})
        return Answer({"files": answers})

    @route("POST", rf"/{REPO}\.git/info/lfs/objects/batch")
    def _announce_large(self, request: Request, repo_id: str) -> Answer:
        self._writable(request, repo_id)
        objects = []
        for announced in request.json()["objects"]:
            oid = announced["oid"]
            objects.append({"oid": oid, "size": announced["size"]})
            if oid not in self._large_objects:
                self._announced.add(oid)
                objects[-1]["actions"] = {"upload": {"href": f"{self.endpoint}/large-files/{oid}", "header": {}}}
        return Answer({"transfer": "basic", "objects": objects})

    @route("PUT", f"/large-files/{SHA256}")
    def _upload_large(self, request: Request, sha256: str) -> Answer:
        if sha256 not in self._announced:
            raise HubError(403, "this large file was not announced")
        if hashlib.sha256(request.body).hexdigest() != sha256:
            raise HubError(400, "the content is not that of the announced file")
        self._large_objects[sha256] = request.body
        return Answer()

    @route("POST", f"/api/models/{REPO}/commit/{REVISION}")
    def _make_commit(self, request: Request, repo_id: str, revision: str) -> Answer:
        repository = self._writable(request, repo_id)
        if revision not in repository.branches:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files, title = dict(self._commit(repository, revision).files), ""
        for line in request.body.splitlines():
            operation = json.loads(line)
            if operation["key"] == "header":
                title = operation["value"]["summary"]
            else:
                self._change(files, operation["key"], operation["value"])
        # Nothing is kept of a commit of which one operation was refused.
        commit = repository.commit(revision, title, files)
        url = f"{self.endpoint}/{repo_id}/commit/{commit.oid}"
        return Answer({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    def _change(self, files: dict[str, Blob], operation: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if operation == "file":
            files[path] = Blob(base64.b64decode(value["content"]))
        elif operation == "lfsFile":
            if value["oid"] not in self._large_objects:
                raise HubError(400, f"{path} points to a large file that was never uploaded")
            files[path] = Blob(self._large_objects[value["oid"]], is_large=True)
        elif operation == "deletedFile":
            if files.pop(path, None) is None:
                raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
        elif operation == "deletedFolder":
            for name in [name for name in files if name.startswith(f"{path.rstrip('/')}/")]:
                del files[name]
        else:
            raise HubError(400, f"LoopbackHub does not know the operation {operation}")

    # Reading

    @route("GET", f"/api/models/{REPO}/commits/{REVISION}")
    def _list_commits(self, request: Request, repo_id: str, revision: str) -> Answer:
        repository = self._readable(request, repo_id)
        authors = [{"user": repository.owner}]
        return Answer(
            [
                {"id": commit.oid, "title": commit.title, "message": "", "date": commit.date, "authors": authors}
                for commit in repository.history(self._commit(repository, revision))
            ]
        )

    @route("GET", rf"/api/models/{REPO}/tree/{REVISION}(?:/(?P<folder>.+))?")
    def _tree(self, request: Request, repo_id: str, revision: str, folder: str = "") -> Answer:
        commit = self._commit(self._readable(request, repo_id), revision)
        if folder and folder not in commit.folders():
            raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        parent = f"{folder}/" if folder else ""
        paths = [path for path in sorted(commit.folders() | set(commit.files)) if path.startswith(parent)]
        if not request.asks_for("recursive"):
            paths = [path for path in paths if "/" not in path.removeprefix(parent)]
        return Answer([_entry(commit, path, expand=request.asks_for("expand")) for path in paths])

    @route("POST", f"/api/models/{REPO}/paths-info/{REVISION}")
    def _paths_info(self, request: Request, repo_id: str, revision: str) -> Answer:
        commit = self._commit(self._readable(request, repo_id), revision)
        known = commit.folders() | set(commit.files)
        paths = [path.strip("/") for path in parse_qs(request.body.decode()).get("paths", [])]
        return Answer([_entry(commit, path, expand=False) for path in paths if path in known])

    @route("GET", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)")
    def _resolve(self, request: Request, repo_id: str, revision: str, path: str) -> Answer:
        commit = self._commit(self._readable(request, repo_id), revision)
        headers = {"X-Repo-Commit": commit.oid}
        blob = commit.files.get(path)
        if blob is None:
            missing = HubError(404, "Entry not found", "EntryNotFound").answer
            # With the commit, clients remember that it has no such file.
            return Answer(missing.body, missing.status, missing.headers | headers)
        headers |= {"ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if blob.is_large:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if wanted is None:
            return Answer(blob.content, 200, headers)
        start, size = int(wanted[1]), len(blob.content)
        if start >= size:
            return Answer(b"", 416, headers | {"Content-Range": f"bytes */{size}"})
        end = min(int(wanted[2] or size), size - 1)
        return Answer(blob.content[start : end + 1], 206, headers | {"Content-Range": f"bytes {start}-{end}/{size}"})


def is_route(function: Any) -> bool:
    return hasattr(function, "route")


def _lfs_sizes(blob: Blob) -> dict[str, int]:
    return {"size": len(blob.content), "pointerSize": len(blob.pointer)}


def _entry(commit: Commit, path: str, *, expand: bool) -> dict[str, Any]:
    """A file or a folder, as the Hub lists them."""
    if path in commit.files:
        blob = commit.files[path]
        entry = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.git_oid}
        if blob.is_large:
            entry["lfs"] = {"oid": blob.sha256, **_lfs_sizes(blob)}
    else:
        entry = {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}
    if expand:
        entry["lastCommit"] = {"id": commit.oid, "title": commit.title, "date": commit.date}
    return entry


class _Server(ThreadingHTTPServer):
    hub: LoopbackHub


class _Handler(BaseHTTPRequestHandler):
    """HTTP to Request, and Answer to HTTP."""

    # Keeps connections open, as the Hub does and clients expect.
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        if not hub.takes_upload(self.command, url.path):
            hub.record(self.command, url.path, 0)
            self._break_connection()
            return
        request = Request(self.command, url.path, parse_qs(url.query), self.headers, self._read_body())
        answer = hub.answer(request)
        hub.record(self.command, url.path, answer.status)
        self._send(answer)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are in `LoopbackHub.log`, not on stderr."""

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _break_connection(self) -> None:
        """In the middle of the body, so that it is the upload that fails and not the connecting."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, answer: Answer) -> None:
        is_json = not isinstance(answer.body, bytes)
        body = json.dumps(answer.body).encode() if is_json else answer.body
        self.send_response(answer.status)
        headers = {"Content-Type": "application/json" if is_json else "application/octet-stream", **answer.headers}
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
