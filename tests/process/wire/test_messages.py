"""Decoders in a new process, several at once."""

from __future__ import annotations

import subprocess
import sys


def test_decoders_inspect_all_classes_at_import():
    # msgspec crashes the process when two threads do so at once, and many engines are asked at once.
    code = """
import msgspec._utils as inside
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.codec import decode, decode_ack, decode_info, decode_rank_ack, encode
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.messages import Readback
inside.__dict__["_eval_type"] = None
decode(encode(Readback()))
decode_ack(encode(Ack(ok=True)))
decode_rank_ack(encode(RankAck(rank=0)))
info = EngineInfo(protocol=1, engine="e", model="m", state="serving", version=None, digest=None, tp_size=1, host_id="h",
                  ranks=(RankInfo(rank=0, pid=1, device="cpu"),), staging="host", transports=(), specs=())
assert decode_info(encode(info)) == info
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
