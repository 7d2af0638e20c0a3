"""The servers that start programs with their imports loaded: they change nothing but the time, and survive nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import launch
import preload
import pytest
from launch import VARIABLE

PRELOAD = Path(preload.__file__)
SERVERS = {"json": "json", "decimal": "json,decimal", "half": "json,no_such_module", "none": "no_such_module"}
SCHEDULER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import preload
preload.start(json.loads(sys.argv[2]))
print(os.environ.get(preload.VARIABLE), flush=True)
sys.stdin.read()
"""


class Scheduler:
    """A process that starts servers, as Snakemake does, in a folder for temporary files."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(PRELOAD.parent)}
        self.environment.pop(VARIABLE, None)
        command = [sys.executable, "-c", SCHEDULER, PRELOAD.parent, json.dumps(SERVERS)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=self.environment, **pipes)
        variable = self.process.stdout.readline().strip()
        self.address = f"{variable.partition(':')[2]}/json"
        self.environment[VARIABLE] = variable

    def program(self, code):
        path = self.folder / f"program{len(list(self.folder.iterdir()))}.py"
        path.write_text(code)
        return path

    def start(self, code, *arguments, server="json", **options):
        """Start the launcher with a program, as a rule's shell command does."""
        command = [sys.executable, "-I", "-S", launch.__file__, server, self.program(code), *arguments]
        options = {"stdin": subprocess.DEVNULL, "cwd": self.folder, "env": self.environment} | options
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)

    def run(self, code, *arguments, **options):
        process = self.start(code, *arguments, **options)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def server(self, name="json"):
        """Process id of a server, as a program that it runs sees it."""
        found = int(self.run("import os; print(os.getppid())", server=name)[1])
        assert found != os.getpid(), "the program was not served"
        return found


@pytest.fixture
def tmp_path():
    """A folder with a name that leaves room for a socket's, which pytest's own may not."""
    with tempfile.TemporaryDirectory(prefix="hi-") as folder:
        yield Path(folder)


@pytest.fixture
def scheduler(tmp_path):
    found = Scheduler(tmp_path)
    yield found
    found.process.kill()
    found.process.wait()


def until(condition, seconds=20):
    """Wait for something that happens soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


WHERE = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["OWN"], sys.path[0], __name__, sys.stdin.read()]))
print("problem", file=sys.stderr)
"""


@pytest.mark.parametrize("served", [True, False])
def test_a_program_finds_what_it_would_find(scheduler, served, tmp_path):
    """Arguments, folder, environment, search path and the three streams are the same with and without the server."""
    (tmp_path / "input").write_text("typed")
    environment = scheduler.environment | {"OWN": "ä\udc80"} | ({} if served else {VARIABLE: ""})
    with (tmp_path / "input").open() as typed:
        status, output, errors = scheduler.run(WHERE, "a b", "--ü", env=environment, stdin=typed)
    assert status == 0
    assert output.strip() == (
        f'[["a b", "--\\u00fc"], "{tmp_path}", "\\u00e4\\udc80", "{tmp_path}", "__main__", "typed"]'
    )
    assert errors == "problem\n"


def test_imports_are_there_already(scheduler):
    loaded = "import sys; print('decimal' in sys.modules)"
    assert scheduler.run(loaded, server="decimal")[1] == "True\n"
    assert scheduler.run(loaded, server="json")[1] == "False\n"
    assert scheduler.run(loaded, server="decimal", env=scheduler.environment | {VARIABLE: ""})[1] == "False\n"


def test_it_is_forked_and_not_started(scheduler):
    servers = [scheduler.server(), scheduler.server("decimal")]
    assert len({*servers, os.getpid()}) == 3
    for server in servers:
        assert PRELOAD.name in Path(f"/proc/{server}/cmdline").read_text()


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('a reason')", 1, "a reason\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, ""),
        ("import os; os._exit(7)", 7, ""),
    ],
)
def test_how_it_ended(scheduler, code, status, said):
    found = scheduler.run(code)
    assert found[0] == status
    assert found[2].endswith(said)
    assert bool(found[2]) == bool(said)


def test_without_a_server_it_starts_by_itself(tmp_path, scheduler):
    for value in ("", f"{os.getpid()}:{tmp_path / 'nothing here'}"):
        environment = scheduler.environment | {VARIABLE: value}
        assert scheduler.run("import os; print(os.getppid())", env=environment)[1] == f"{os.getpid()}\n"


def test_what_cannot_be_imported_is_left_to_the_program(scheduler):
    for server in ("half", "none", "unknown"):
        assert scheduler.run("print('runs')", server=server) == (0, "runs\n", "")
    assert scheduler.run("import no_such_module", server="none")[2].endswith("named 'no_such_module'\n")
    assert scheduler.run("print('still there')") == (0, "still there\n", "")


def test_strange_requests_do_not_end_it(scheduler):
    server = scheduler.server()
    for message in (b"", b"\x05", b"\xff" * 8, (5).to_bytes(8, "little") + b"abcde"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(scheduler.address)
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    assert scheduler.server() == server


SLOW = """
import pathlib, sys, time
path = pathlib.Path(sys.argv[1])
path.write_text(f"{path.read_text() if path.exists() else ''}began ")
while not path.with_suffix(".go").exists():
    time.sleep(0.01)
print("done")
"""


@pytest.fixture
def slow(scheduler, tmp_path):
    """A program that the server runs until the file `mark.go` is there: its launcher, its process and its mark."""
    mark = tmp_path / "mark"
    run = scheduler.start("import os\nopen('pid', 'w').write(str(os.getpid()))\n" + SLOW, str(mark))
    until(mark.exists)
    return run, int((tmp_path / "pid").read_text()), mark


def test_after_the_death_of_the_server_the_program_starts_again(scheduler, slow):
    run, job, mark = slow
    os.kill(scheduler.server(), signal.SIGKILL)
    until(lambda: not alive(job))
    until(lambda: mark.read_text() == "began began ")
    mark.with_suffix(".go").touch()
    assert run.communicate(timeout=20) == ("done\n", "")
    assert run.returncode == 0
    assert scheduler.run("print('others, too')") == (0, "others, too\n", "")


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_program_ends_with_its_launcher(slow, by):
    run, job, _ = slow
    run.send_signal(by)
    until(lambda: not alive(job))
    assert run.communicate(timeout=20) == ("", "")
    assert run.returncode == -by


@pytest.mark.parametrize("how", ["end", "kill"])
def test_nothing_survives_the_scheduler(scheduler, slow, how, tmp_path):
    run, job, _ = slow
    server = scheduler.server()
    assert Path(scheduler.address).exists()
    if how == "end":
        scheduler.process.stdin.close()
    else:
        scheduler.process.kill()
    assert (run.wait(20), run.stderr.read()) == (137, "")
    until(lambda: not any(map(alive, (server, job))))
    scheduler.process.wait()
    assert scheduler.run("print('too late')") == (137, "", "")
    assert not list(tmp_path.glob("head-influence-*"))


def test_an_interrupt_at_the_terminal_does_not_end_the_server(scheduler):
    server = scheduler.server()
    os.kill(server, signal.SIGINT)
    assert scheduler.server() == server


def test_a_temporary_folder_with_a_long_name(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    found = Scheduler(folder)
    assert found.environment[VARIABLE] == "None"
    found.process.communicate("")
    assert not list(folder.iterdir())


def test_a_temporary_folder_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nothing"))
    preload.start(SERVERS)
    assert VARIABLE not in os.environ


def test_many_at_once(scheduler):
    programs = [scheduler.start("import sys; print(sys.argv[1])", str(i)) for i in range(40)]
    assert [p.communicate(timeout=60)[0] for p in programs] == [f"{i}\n" for i in range(40)]
