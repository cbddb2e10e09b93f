"""The environment that NCCL, gloo and CUDA's allocator get, by what joins the nodes.

    one node                nothing beyond CUDA's: NCCL finds NVLink and PCIe, gloo has loopback
    nodes of one site       the interface, where the user names it
    several sites           sockets only, several streams of them, and buffers of the system to suit

A variable is set where its default is known to be wrong; NCCL's search does the rest.
(docs.nvidia.com, NCCL, "Environment Variables"; NCCL_SOCKET_NTHREADS * NCCL_NSOCKS_PERTHREAD may be
64 at most.)
"""

from __future__ import annotations

import math

from autopipe.export.job import Launch

STREAMS = 4
"""Threads, and sockets of each, that NCCL sends over to another site: one TCP stream seldom fills a
line of many milliseconds."""


def settings(job: Launch) -> dict[str, str]:
    """Variables for the ranks of a job."""
    found: dict[str, str] = {}
    if job.gpu:
        # Blocks that grow instead of fragments: it costs nothing, and margins are counted with it.
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        found["NCCL_DEBUG"] = "WARN"
    if job.nodes > 1 and job.words.interface is not None:
        found["GLOO_SOCKET_IFNAME"] = job.words.interface
        if job.gpu:
            found["NCCL_SOCKET_IFNAME"] = f"={job.words.interface}"  # `=`: this one, no prefix
    if job.sites > 1 and job.gpu:
        found["NCCL_IB_DISABLE"] = "1"  # no fabric reaches from one site to another
        found["NCCL_SOCKET_NTHREADS"] = str(STREAMS)
        found["NCCL_NSOCKS_PERTHREAD"] = str(STREAMS)
    return found


def advice(job: Launch) -> list[str]:
    """Lines of advice for setting up the nodes; empty if nothing has to be set up."""
    across = job.plan.cluster.across
    if job.sites < 2 or across is None:
        return []
    # A stream has at most a window of bytes under way: the rate times the way there and back.
    window = math.ceil(2 * across.latency * across.bandwidth)
    most = max(2 * window, 2**20)
    return [
        f"Between sites: {across}. A stream fills that with {window:,} bytes under way; on each",
        f"node, as root: sysctl -w net.core.rmem_max={most} net.core.wmem_max={most} \\",
        f"    net.ipv4.tcp_rmem='4096 131072 {most}' net.ipv4.tcp_wmem='4096 65536 {most}'",
    ]
