"""How the command-line programs of the workflow report what went wrong."""

import argparse
import resource
import sys
import time
import traceback
from pathlib import Path

from head_influence import StudyError


def parser(description):
    """Return an argument parser with the options that every program has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--log", type=Path, help="file that progress and errors go to as well; what the run used goes to .tsv beside it")
    return result


def run(main, arguments):
    """Run `main(arguments)`; a `StudyError` is one line and exit status 1, anything else a traceback in the log."""
    log, start = arguments.log, time.perf_counter()
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")
    try:
        main(arguments)
    except StudyError as error:
        line, detail = str(error), ""
    except MemoryError:
        line, detail = "not enough memory for this job", traceback.format_exc()
    except Exception as error:
        line = f"{type(error).__name__}: {error}" + (f" (traceback in {log})" if log else "")
        detail = traceback.format_exc()
    else:
        if log:
            _write_usage(log.with_suffix(".tsv"), time.perf_counter() - start)
        return
    print(f"head-influence: {line}", file=sys.stderr, flush=True)
    if log:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n{detail}")
    elif detail:
        print(detail, file=sys.stderr)
    raise SystemExit(1)


def _write_usage(path, seconds):
    """Write what this process used: exact for jobs of any length, however they were started."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    row = f"{seconds:.4f}\t{used.ru_utime + used.ru_stime:.4f}\t{used.ru_maxrss / 1024:.1f}"
    path.write_text(f"s\tcpu_time\tmax_rss\n{row}\n", encoding="utf-8")


def progress(log, message):
    """Append a line to a program's log."""
    if log:
        with log.open("a", encoding="utf-8") as file:
            file.write(message + "\n")
