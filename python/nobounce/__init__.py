"""Move GPU and host memory between processes and machines by RDMA, with or without an RDMA NIC.

    agent = nobounce.Agent("decode", listen="0.0.0.0:9000")
    agent.export("kv", cache)                       # a torch, cupy, jax or numpy array; never copied

    agent = nobounce.Agent("prefill")
    peer = agent.connect("10.0.0.7:9000")
    pages = peer.write_pages(cache, [3, 4, 9], peer.region("kv"), [0, 7, 8], page_bytes, tag=b"request 1")
    pages.wait(timeout=5)                           # or: await pages

    tensors = nobounce.load_safetensors("nb://10.0.0.7:9200/model.safetensors", "cuda")
"""

from . import errors
from ._agent import Agent, Announcement, Memory, Notification, Peer, Remote, Transfer
from ._files import FileReport, FileRequest, FileServer, Files, aread_file, awrite_file, file_stats, read_file, write_file
from ._nobounce import VERSION as __version__
from ._safetensors import load_safetensors
from .errors import Cancelled, ConnectError, Error, FileError, ListError, NotDirect, PeerGone, RemoteAccessError, Timeout

__all__ = [
    "Agent", "Announcement", "Cancelled", "ConnectError", "Error", "FileError", "FileReport", "FileRequest", "FileServer", "Files", "ListError", "Memory", "NotDirect", "Notification", "Peer", "PeerGone",
    "Remote", "RemoteAccessError", "Timeout", "Transfer", "__version__", "aread_file", "awrite_file", "errors", "file_stats", "load_safetensors", "read_file", "write_file",
]
