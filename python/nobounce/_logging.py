"""Log lines of the NIC and of agents, for Python's logging."""

import atexit
import logging

from . import _nobounce


def flush() -> None:
    """Hands the lines that have come since the last call to the loggers `nobounce.*`."""
    for level, target, text in _nobounce.take_log():
        name = target if target.startswith("nobounce") else f"nobounce.{target}"
        logging.getLogger(name.replace("nobounce_", "nobounce.")).log(level, "%s", text)


atexit.register(flush)
