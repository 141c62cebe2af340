"""A forked rank of the reference engine does not keep the engine's port."""

from __future__ import annotations

import multiprocessing
import os

from weightcast.rollout import launch


def _listen_and_fork(pipe) -> None:
    listener = launch._listen("127.0.0.1", 0)
    number = listener.fileno()
    child = os.fork()
    if not child:
        try:
            os.fstat(number)
        except OSError:
            os._exit(0)  # closed
        os._exit(1)
    pipe.send((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), listener.fileno() == number))


def test_a_forked_rank_does_not_keep_the_port_of_its_engine():
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    engine = context.Process(target=_listen_and_fork, args=(theirs,))
    engine.start()
    assert ours.recv() == (0, True)
    engine.join()
