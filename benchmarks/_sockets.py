"""Bytes that TCP sockets have sent, as the kernel counts them: payload only, and of this process only."""

import os
import socket
import stat
import struct

# `struct tcp_info` of <linux/tcp.h>; what a kernel does not know it leaves out at the end.
_TCP_INFO_NBYTES = 256
_BYTES_SENT_OFFSET = 200
_LOOPBACK_COUNTERS = "/proc/net/dev"


def sent_nbytes() -> int | None:
    """Payload bytes that all TCP sockets of this process have sent so far; None where the kernel does not tell."""
    total = 0
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
        except OSError:  # closed meanwhile
            continue
        if len(info) < _BYTES_SENT_OFFSET + 8:
            return None
        total += struct.unpack_from("Q", info, _BYTES_SENT_OFFSET)[0]
    return total or None


def loopback_nbytes() -> int | None:
    """Bytes that everything on this machine has sent over loopback so far, headers included; None without Linux."""
    try:
        with open(_LOOPBACK_COUNTERS, encoding="ascii") as counters:
            fields = next(line for line in counters if line.strip().startswith("lo:")).split(":")[1].split()
    except (OSError, StopIteration):
        return None
    return int(fields[8])
