"""What must be seen when a request is wrong: a pattern for each, by requester (nb: our NIC asks the kernel, rxe: the kernel asks us).

The pattern says what the standard asks for. Where one of the kernels does something else, a second entry with the kernel's name says what,
and docs/reference/interop.md shows it with its packets.
"""

ACCESS = r"^REM_ACCESS_ERR, state ERR, .*completion none, state ERR; events: local access violation work queue error; in time"
# Linux 6.1 tells nobody on its own side.
ACCESS_SILENT = r"^REM_ACCESS_ERR, state ERR, .*completion none, state ERR; events: none; in time"
INVALID = r"^REM_INV_REQ_ERR, state ERR, .*completion none, state ERR; events: invalid request local work queue error; in time"
INVALID_SILENT = r"^REM_INV_REQ_ERR, state ERR, .*completion none, state ERR; events: none; in time"
NOBODY = r"^RETRY_EXC_ERR, state ERR, events: none; the other side: completion none, state RTS; events: none; in time"
# A receive that is too short: the standard has an invalid request NAK and a length error; rxe says remote operational error.
TOO_LONG = r"^REM_INV_REQ_ERR, state ERR, .*completion LOC_LEN_ERR, state ERR; events: invalid request local work queue error; in time"
# Its queue pair may still be on its way to the error state when its completion is there.
TOO_LONG_RXE = r"^REM_OP_ERR, state ERR, .*completion LOC_QP_OP_ERR, state (?:ERR|RTS); events: none; in time"

PATTERNS = {
    ("any", "SEND that never finds a receive"): r"^RNR_RETRY_EXC_ERR, state ERR, .*completion none, state RTS; events: none; in time",
    ("any", "WRITE to a queue pair that does not exist"): NOBODY,
    ("nb", "WRITE to a GID that nobody has"): NOBODY,
    # The kernel asks the network for the neighbour before it connects.
    ("rxe", "WRITE to a GID that nobody has"): r"^refused when the queue pair is connected, Connection timed out",
    ("nb", "atomic on an odd address"): INVALID_SILENT,
    ("rxe", "atomic on an odd address"): r"^posting is refused, Invalid argument",
    ("nb", "SEND longer than the receive"): TOO_LONG_RXE,
    ("rxe", "SEND longer than the receive"): TOO_LONG,
    ("nb", "SEND of one packet longer than the receive"): TOO_LONG_RXE,
    ("rxe", "SEND of one packet longer than the receive"): TOO_LONG,
    # The kernel drops it: its ICRC covers the headers of a FLUSH twice.
    ("nb", "FLUSH"): r"^RETRY_EXC_ERR",
    # Flags: with invalidate, and a GRH; then the key.
    ("nb", "SEND of 500 bytes with invalidate"): r"SUCCESS 128 500 [5d] [0-9a-f]+$",
    ("nb", "SEND of 2500 bytes with invalidate"): r"SUCCESS 128 2500 [5d] [0-9a-f]+$",
    ("nb", "WRITE through the window after that"): ACCESS,
    ("nb", "WRITE through the window after that", "oldest"): ACCESS_SILENT,
    ("rxe", "SEND of 500 bytes with invalidate"): r"SUCCESS 128 500 8 [0-9a-f]+$",
    ("rxe", "SEND of 2500 bytes with invalidate"): r"SUCCESS 128 2500 8 [0-9a-f]+$",
    ("rxe", "WRITE through the window after that"): ACCESS,
    ("any", "WRITE through a window that its owner took back"): ACCESS,
    ("nb", "WRITE through a window that its owner took back", "oldest"): ACCESS_SILENT,
    # The kernel acknowledges it, and fails on its own side alone.
    ("nb", "SEND that invalidates an ordinary region"): r"^SUCCESS, state RTS, .*completion REM_INV_REQ_ERR, state ERR; .*in time",
    ("rxe", "SEND that invalidates an ordinary region"): r"^REM_ACCESS_ERR, state ERR, .*completion LOC_ACCESS_ERR, state ERR; .*in time",
    ("nb", "WRITE in packets of 4096 to a side told 1024"): INVALID_SILENT,
    ("nb", "WRITE in packets of 1024 to a side told 4096"): INVALID_SILENT,
    ("rxe", "WRITE in packets of 4096 to a side told 1024"): INVALID,
    ("rxe", "WRITE in packets of 1024 to a side told 4096"): INVALID,
    ("nb", "READ answered in packets of 1024 where 4096 are expected"): NOBODY,
    ("nb", "READ answered in packets of 4096 where 1024 are expected"): NOBODY,
    ("rxe", "READ answered in packets of 1024 where 4096 are expected"): NOBODY,
    # The kernel takes answers of any length, as long as they add up.
    ("rxe", "READ answered in packets of 4096 where 1024 are expected"): r"^SUCCESS",
    ("nb", "rdma link del"): r"^ends the traffic$",
    ("nb", "rdma link del", "oldest"): r"^waits for the users of the device$",
    ("nb", "link-del, the stream end"): r"^(RETRY_EXC_ERR|REM_ACCESS_ERR|REM_OP_ERR) after \d+ messages, in time, state ERR",
    ("rxe", "host-killed, the stream end"): r"^RETRY_EXC_ERR after \d+ messages, in time, state ERR",
    ("nb", "guest-killed, the stream end"): r"^RETRY_EXC_ERR after \d+ messages, in time, state ERR",
}
for _operation in ("WRITE", "READ"):
    for _mistake in ("with a wrong key", "one byte beyond the region", "without the right"):
        PATTERNS["any", f"{_operation} {_mistake}"] = ACCESS
        PATTERNS["nb", f"{_operation} {_mistake}", "oldest"] = ACCESS_SILENT
PATTERNS["any", "atomic without the right"] = ACCESS
PATTERNS["nb", "atomic without the right", "oldest"] = ACCESS_SILENT


def of(requester, what, kernel):
    """The pattern for one thing seen, or None if there is none."""
    for key in ((requester, what, kernel), (requester, what), ("any", what)):
        if key in PATTERNS:
            # The kernel's queue pair may still be on its way to the error state when its completion is there.
            return PATTERNS[key].replace("_ERR, state ERR,", "_ERR, state (?:ERR|RTS),", 1) if requester == "rxe" else PATTERNS[key]
    return None
