"""Start the workflow's programs from a process that has their imports loaded already.

    python -I -S preload.py serve SOCKET FILE       started by the Snakefile, once for a run
    python -I -S preload.py run MODULES PROGRAM ... what a rule's shell command calls
    HEAD_INFLUENCE_SERVER= snakemake ...            a run without it

Importing numpy, netCDF4 or torch costs a small job several times its arithmetic. `run` hands the program to the server
named by HEAD_INFLUENCE_SERVER, which imports MODULES (comma-separated) once and forks. Without that variable, or when
the server does not answer (on a cluster, after a crash), `run` becomes the program by an ordinary start; so it does
when the server is killed while the program runs, for a program writes its file whole or not at all. Nothing survives:
the server ends when the process that started it does (the variable names both), kills the jobs that run then, kills a
job whose `run` has gone, and removes its socket.
"""

# A start is counted in milliseconds: nothing is imported that is not needed, pathlib neither.
# ruff: noqa: PTH100, PTH106, PTH108, PTH109, PTH118, PTH120
import marshal
import os
import signal
import socket
import sys

VARIABLE = "HEAD_INFLUENCE_SERVER"
LONGEST_ADDRESS = 100  # bytes of a socket's path that every system takes
KILLED = 128 + signal.SIGKILL


def start():
    """Start the server of this process, which ends with it, and name it in the environment.

    Where that is impossible, or the variable is there already, every job starts as an ordinary program.
    """
    import atexit
    import subprocess
    import tempfile

    if VARIABLE in os.environ:
        return
    try:
        folder = tempfile.mkdtemp(prefix="head-influence-")
    except OSError:
        return
    address = os.path.join(folder, "socket")
    if len(os.fsencode(address)) > LONGEST_ADDRESS:
        os.rmdir(folder)
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(256)
        file = listener.fileno()
        command = [sys.executable, "-I", "-S", __file__, "serve", address, str(file)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[file])
    os.environ[VARIABLE] = f"{os.getpid()}:{address}"

    @atexit.register
    def stop():
        server.stdin.close()  # what it ends by, however this process ends
        server.wait()


def run(modules, arguments):
    """Run a program through the server, or become it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt ends this quietly, and with it the job
    scheduler, _, path = os.environ.get(VARIABLE, "").partition(":")
    if path:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                request = marshal.dumps((modules, arguments, os.getcwd(), dict(os.environ)))
                socket.send_fds(connection, [len(request).to_bytes(8, "little")], [0, 1, 2])
                connection.sendall(request)
                if status := connection.recv(1):  # none: the server is no more
                    return status[0]
        except OSError:
            pass
        try:
            os.kill(int(scheduler), 0)
        except (ProcessLookupError, ValueError):
            return KILLED  # what wanted this program is no more, either
    os.execv(sys.executable, [sys.executable, "-s", *arguments])


class Server:
    """Forks a job for every request; single-threaded, so that forking is safe."""

    def __init__(self, listener):
        self.listener = listener
        self.connections = {}  # job's process id -> connection of its `run`

    def serve(self):
        """Serve until the process that holds the other end of standard input is gone."""
        import select

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
            modules, arguments, folder, environment = marshal.loads(data)
            for name in modules.split(","):
                __import__(name)
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

    def _become(self, connection, files, arguments, folder, environment):
        """In the forked process: run the program as an ordinary start would."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            die_with_parent()
            for other in (self.listener, connection, *self.connections.values()):
                other.close()
            for target, file in enumerate(files):
                os.dup2(file, target)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = arguments
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            import runpy

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
        """A `run` sends nothing more: readable means that it has gone, and its job goes too."""
        for job, connection in self.connections.items():
            if connection.fileno() == file:
                os.kill(job, signal.SIGKILL)


def answer(connection, status):
    """Tell a `run`, which may have gone, how its program ended."""
    try:
        connection.sendall(bytes([status]))
    except OSError:
        pass
    connection.close()


def die_with_parent():
    """Ask the kernel to kill this process when its parent dies, where it can (Linux)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError, ImportError):
        pass


def serve(address, file):
    """Serve on a listening socket (its file number) until standard input ends; then remove its folder."""
    import site

    try:
        site.main()  # started with -S like `run`: packages are wanted here
        sys.path[:0] = ["", os.environ["PYTHONPATH"]]  # the first is the place of a program's own folder
        Server(socket.socket(fileno=file)).serve()
    finally:
        try:
            os.unlink(address)
            os.rmdir(os.path.dirname(address))
        except FileNotFoundError:  # somebody has tidied up already
            pass


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(run(sys.argv[2], sys.argv[3:]))
