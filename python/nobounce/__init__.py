"""Move GPU and host memory between processes and machines by RDMA, with or without an RDMA NIC.

    agent = nobounce.Agent("decode", listen="0.0.0.0:9000")
    agent.export("kv", cache)                       # a torch, cupy, jax or numpy array; never copied

    agent = nobounce.Agent("prefill")
    peer = agent.connect("10.0.0.7:9000")
    pages = peer.write_pages(cache, [3, 4, 9], peer.region("kv"), [0, 7, 8], page_bytes, tag=b"request 1")
    pages.wait(timeout=5)                           # or: await pages
"""

from . import errors
from ._agent import Agent, Announcement, Memory, Notification, Peer, Remote, Transfer
from ._nobounce import VERSION as __version__
from .errors import Cancelled, ConnectError, Error, ListError, NotDirect, PeerGone, RemoteAccessError, Timeout

__all__ = [
    "Agent", "Announcement", "Cancelled", "ConnectError", "Error", "ListError", "Memory", "NotDirect", "Notification", "Peer", "PeerGone",
    "Remote", "RemoteAccessError", "Timeout", "Transfer", "__version__", "errors",
]
