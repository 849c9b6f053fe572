"""Exceptions. Each says what happened, the evidence, and what to do."""

import builtins


class Error(Exception):
    """The base of all exceptions of this package."""


class ConnectError(Error, ConnectionError):
    """No agent answers at that address."""


class PeerGone(Error, ConnectionError):
    """The peer closed, died, or was silent for longer than the limit. An agent that is started anew is another peer."""


class Timeout(Error, builtins.TimeoutError):
    """Nothing happened in time. What was waited for goes on."""


class RemoteAccessError(Error, PermissionError):
    """The peer's memory is not there any more, or not for this use."""


class NotDirect(Error):
    """The bytes would bounce through host memory, and the agent requires that they do not."""


class ListError(Error, ValueError):
    """A list of pages or pieces, or memory, that cannot be used."""


class FileError(Error, OSError):
    """A file that is missing, too short, or cannot be read or written."""


class Cancelled(Error):
    """The transfer was cancelled."""
