"""A small model hub on this machine, with what its real client asks for: revisions, file lists, files in parts."""

import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

LARGE = ".safetensors"  # stored by sha256, as a hub stores large files


class Hub(ThreadingHTTPServer):
    """The hub's content and its faults, which a test may change while it runs.

    Attributes
    ----------
    repositories : dict
        Name to {revision: {file name: bytes}}; a revision of 40 hexadecimal digits is a commit, another one names a
        commit.
    gated, private, lost : set
        Names of gated and of private repositories; files that are listed but not there.
    token : str
        What opens gated and private repositories.
    cut : dict
        File name to the number of times that its transfer still breaks off half-way.
    status : int
        If set, the answer to everything.
    requests : list
        Of (method, path, range).
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.gated, self.private, self.lost, self.cut = {}, set(), set(), set(), {}
        self.token, self.status, self.requests, self.damaged = "hf_secret", 0, [], set()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def gets(self, ending=""):
        return [(path, part) for method, path, part in self.requests if method == "GET" and path.endswith(ending)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def fail(self, status, code=None):
        headers = {"X-Error-Code": code} if code else {}
        self.reply(status, b'{"error": "no"}', headers, self.command == "GET")

    def reply(self, status, content, headers, body=True, sent=None):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content if sent is None else content[:sent])
            if sent is not None:
                self.wfile.flush()
                self.close_connection = True

    def answer(self, body):
        hub, path = self.server, unquote(self.path.partition("?")[0])
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.status:
            return self.fail(hub.status)
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        if api:
            parts = parts[2:]
        name, opened = "/".join(parts[:2]), f"Bearer {hub.token}" == self.headers.get("Authorization")
        repository = hub.repositories.get(name)
        if repository is None or (name in hub.private and not opened):
            return self.fail(401 if not opened else 404, "RepoNotFound" if opened else None)
        revision = parts[3] if len(parts) > 3 else "main"
        commit = repository.get(revision)
        if isinstance(commit, str):
            revision, commit = commit, repository[commit]
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        if api:
            siblings = [{"rfilename": file} for file in [*commit, *hub.lost]]
            content = json.dumps({"id": name, "sha": revision, "siblings": siblings}).encode()
            return self.reply(200, content, {"Content-Type": "application/json"}, body)
        if name in hub.gated and not opened:
            return self.fail(403 if "Authorization" in self.headers else 401, "GatedRepo")
        file = "/".join(parts[4:])
        if file not in commit:
            return self.fail(404, "EntryNotFound")
        return self.send_file(file, commit[file], revision, body)

    def send_file(self, file, content, commit, body):
        hub = self.server
        etag = hashlib.sha256(content).hexdigest() if file.endswith(LARGE) else hashlib.sha1(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if file in hub.damaged:
            content = bytes(len(content))
        status, whole = 200, len(content)
        if (part := self.headers.get("Range")) and body:
            first = int(part.removeprefix("bytes=").partition("-")[0])
            content, status = content[first:], 206
            headers["Content-Range"] = f"bytes {first}-{whole - 1}/{whole}"
        sent = None
        if body and hub.cut.get(file):
            hub.cut[file] -= 1
            sent = len(content) // 2
        self.reply(status, content, headers, body, sent)
        return None


@contextmanager
def serving():
    """Run a hub in a thread for a while."""
    hub = Hub()
    thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
