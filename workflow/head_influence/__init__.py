"""How unequal the influence of attention heads is: measurement, statistics, files and figures of one study."""

__version__ = "0.1.0"
PROTOCOL = "1"  # version of the measurement's definition; it is written to every file


class StudyError(Exception):
    """A problem that one line explains: it names the file or setting at fault and what was expected."""
