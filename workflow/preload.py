"""Servers that start the workflow's programs with their imports loaded already.

    preload.start({"numpy": "numpy,netCDF4"})       in the Snakefile, once for a run; launch.py says how they are used
    HEAD_INFLUENCE_SERVER= snakemake ...            a run without them

Importing numpy, netCDF4 or torch costs a small job several times its arithmetic. A server imports its modules at its
first program and forks for each; one that has torch in it forks ten times slower, so that the programs which need none
have one of their own. Nothing survives: a server ends when the process that started it does (the variable names that
and the sockets' folder), kills the jobs that run then, kills a job whose launcher has gone, and removes its socket.
"""

import ctypes
import gc
import marshal
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from launch import KILLED, VARIABLE

LONGEST_ADDRESS = 100  # bytes of a socket's path that every system takes


def start(servers):
    """Start this process's servers, which end with it, and name them in the environment.

    Where that is impossible, or the variable is there already, every job starts as an ordinary program.

    Parameters
    ----------
    servers : dict
        Name to the modules that its programs import, separated by commas.
    """
    import atexit
    import subprocess
    import tempfile

    if VARIABLE in os.environ:
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="head-influence-"))
    except OSError:
        return
    addresses = [str(folder / name) for name in servers]
    if max(len(os.fsencode(address)) for address in addresses) > LONGEST_ADDRESS:
        folder.rmdir()
        return
    processes = []
    for address, modules in zip(addresses, servers.values(), strict=True):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(256)
            file = listener.fileno()
            command = [sys.executable, "-s", __file__, address, str(file), modules]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[file]))
    os.environ[VARIABLE] = f"{os.getpid()}:{folder}"

    @atexit.register
    def stop():
        for server in processes:
            server.stdin.close()  # what it ends by, however this process ends
        for server in processes:
            server.wait()


class Server:
    """Forks a job for every request; single-threaded, so that forking is safe."""

    def __init__(self, listener, modules):
        self.listener, self.modules = listener, modules
        self.connections = {}  # job's process id -> connection of its launcher

    def serve(self):
        """Serve until the process that holds the other end of standard input is gone."""
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler decides what an interrupt ends
        poll = select.poll()
        for file in (0, self.listener.fileno(), wake.fileno()):
            poll.register(file, select.POLLIN)
        try:
            while True:
                for file, _ in poll.poll():
                    if file == 0:
                        if not os.read(0, 1):
                            return
                    elif file == self.listener.fileno():
                        self._accept(poll)
                    elif file == wake.fileno():
                        wake.recv(4096)
                        self._reap(poll)
                    else:
                        self._abandoned(file)
        finally:
            signal.set_wakeup_fd(-1)
            for job, connection in self.connections.items():
                os.kill(job, signal.SIGKILL)
                answer(connection, KILLED)

    def _accept(self, poll):
        connection, _ = self.listener.accept()
        connection.settimeout(10)
        files = []
        try:
            head, files, _, _ = socket.recv_fds(connection, 8, 3)
            size, data = int.from_bytes(head, "little"), b""
            while len(data) < size:
                part = connection.recv(size - len(data))
                if not part:
                    raise OSError("the request ended early")
                data += part
            arguments, folder, environment = marshal.loads(data)
            self._load()
            job = os.fork()
        except Exception:  # whatever it is, an ordinary start shows it better
            connection.close()
        else:
            if job == 0:
                self._become(connection, files, arguments, folder, environment)
            connection.settimeout(None)
            self.connections[job] = connection
            poll.register(connection.fileno(), 1)  # readable
        finally:
            for file in files:
                os.close(file)

    def _load(self):
        """Import the modules, once; the collector has nothing to find in them, neither now nor in a job."""
        while self.modules:
            __import__(self.modules[0])
            del self.modules[0]
            gc.freeze()

    def _become(self, connection, files, arguments, folder, environment):
        """In the forked process: run the program as an ordinary start would."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            gc.enable()
            die_with_parent()
            for other in (self.listener, connection, *self.connections.values()):
                other.close()
            for target, file in enumerate(files):
                os.dup2(file, target)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = arguments
            sys.path[0] = str(Path(arguments[0]).absolute().parent)
            runpy.run_path(arguments[0], run_name="__main__")
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:
                    status = status or 1
            os._exit(status)

    def _reap(self, poll):
        while True:
            try:
                job, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if job == 0:
                return
            connection = self.connections.pop(job, None)
            if connection is not None:
                poll.unregister(connection.fileno())
                code = os.waitstatus_to_exitcode(status)
                answer(connection, code if code >= 0 else 128 - code)

    def _abandoned(self, file):
        """A launcher sends nothing more: readable means that it has gone, and its job goes too."""
        for job, connection in self.connections.items():
            if connection.fileno() == file:
                os.kill(job, signal.SIGKILL)


def answer(connection, status):
    """Tell a launcher, which may have gone, how its program ended."""
    try:
        connection.sendall(bytes([status]))
    except OSError:
        pass
    connection.close()


def die_with_parent():
    """Ask the kernel to kill this process when its parent dies, where it can (Linux)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        pass


def serve(address, file, modules):
    """Serve on a listening socket (its file number) until standard input ends; then remove it."""
    gc.disable()
    try:
        Server(socket.socket(fileno=file), modules).serve()
    finally:
        with suppress(OSError):  # somebody has tidied up already, or another server has its socket there
            Path(address).unlink()
            Path(address).parent.rmdir()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","))
    os._exit(0)  # taking torch's modules down would keep the run waiting
