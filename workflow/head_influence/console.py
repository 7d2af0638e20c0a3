"""How the command-line programs of the workflow report what went wrong."""

import argparse
import resource
import shlex
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from head_influence import StudyError


def parser(description):
    """Return an argument parser with the options that every program has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument(
        "--log", type=Path, help="file that progress and errors go to; what the run used goes to .tsv beside it"
    )
    return result


def run(main, arguments):
    """Run `main(arguments)`; a `StudyError` is one line and exit status 1, anything else a traceback in the log."""
    log, start = arguments.log, time.perf_counter()
    detail = ""
    try:
        _begin(log)
        main(arguments)
    except StudyError as error:
        line = str(error)
    except KeyboardInterrupt:
        line = "interrupted"
    except MemoryError:
        line, detail = "not enough memory for this job", traceback.format_exc()
    except Exception as error:
        line = f"{type(error).__name__}: {error}" + (f" (traceback in {log})" if log else "")
        detail = traceback.format_exc()
    else:
        _end(log, time.perf_counter() - start)
        return
    print(f"head-influence: {line}", file=sys.stderr, flush=True)
    progress(log, f"{line}\n{detail}".rstrip())
    if detail and not log:
        print(detail, file=sys.stderr)
    raise SystemExit(1)


def progress(log, message):
    """Append a line to a program's log; one that cannot be written stops nothing."""
    if log:
        with suppress(OSError), log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(message + "\n")


def _begin(log):
    """Start the log with the command, by which the program can be run alone."""
    if log:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("", encoding="utf-8")
        except OSError as error:
            raise StudyError(f"{log}: the log cannot be written ({error.strerror})") from None
        progress(log, shlex.join(sys.argv))


def _end(log, seconds):
    """Close the log; beside it goes what this process used: exact for jobs of any length, however they started."""
    if log:
        progress(log, f"finished after {seconds:.2f} s")
        used = resource.getrusage(resource.RUSAGE_SELF)
        row = f"{seconds:.4f}\t{used.ru_utime + used.ru_stime:.4f}\t{used.ru_maxrss / 1024:.1f}"
        with suppress(OSError):
            log.with_suffix(".tsv").write_text(f"s\tcpu_time\tmax_rss\n{row}\n", encoding="utf-8")
