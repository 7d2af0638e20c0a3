"""Start a program through one of the servers of preload.py, or by itself.

    python -I -S launch.py SERVER PROGRAM ...       what a rule's shell command calls

Without a server (on a cluster, after a crash), and with HEAD_INFLUENCE_SERVER set to nothing, this becomes the program
by an ordinary start; so it does when the server is killed while the program runs, for a program writes its file whole
or not at all. Where the workflow that wanted the program has ended, nothing is started.
"""

# A start is counted in milliseconds: `socket` and `signal` need more of them than the rest of Python; pathlib, too.
import _signal
import _socket
import marshal
import os
import sys

VARIABLE = "HEAD_INFLUENCE_SERVER"
KILLED = 128 + _signal.SIGKILL
STREAMS = b"".join(file.to_bytes(4, sys.byteorder) for file in range(3))


def run(server, arguments):
    """Have a server run a program and return its exit status, or become the program."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # an interrupt ends this quietly, and with it the job
    scheduler, _, folder = os.environ.get(VARIABLE, "").partition(":")
    if folder:
        try:
            connection = _socket.socket(_socket.AF_UNIX)
            connection.connect(f"{folder}/{server}")
            request = marshal.dumps((arguments, os.getcwd(), dict(os.environ)))  # noqa: PTH109
            size = len(request).to_bytes(8, "little")
            connection.sendmsg([size], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, STREAMS)])
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


if __name__ == "__main__":
    os._exit(run(sys.argv[1], sys.argv[2:]))
