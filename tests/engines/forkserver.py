"""A Python of an engine's environment that has imported the engine, and forks a process for every server asked of it.

Run as ``python -P forkserver.py FD MODULE...`` by ``forked.py``.  A request is JSON of ``argv`` and ``env`` with three
open files: stdout, stderr, and a pipe that gets the exit code.  Knows nothing of engines.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from types import ModuleType


def serve(requests: socket.socket) -> None:
    """Fork for each request until nobody can ask any more; then end whatever still runs."""
    running: dict[int, tuple[int, int]] = {}  # by the number that is readable when it has ended: pid, pipe
    while True:
        ready, _, _ = select.select([requests, *running], [], [])
        for number in ready:
            if number is not requests:
                pid, status = running.pop(number)
                os.close(number)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # nobody is left to hear it
                    os.write(status, str(code).encode())
                os.close(status)
        if requests not in ready:
            continue
        text, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not text:
            for pid, _ in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return
        out, err, status = files
        pid = os.fork()
        if not pid:
            requests.close()
            os.close(status)
            for number, (_, pipe) in running.items():
                os.close(number)
                os.close(pipe)
            become(json.loads(text), os.open(os.devnull, os.O_RDONLY), out, err)
        running[os.pidfd_open(pid)] = pid, status
        os.close(out)
        os.close(err)
        requests.send(str(pid).encode())


def become(asked: dict[str, object], stdin: int, out: int, err: int) -> None:
    """Runs this process as ``python -m MODULE``, ``python -c CODE`` or ``python SCRIPT`` would, to its end."""
    os.setsid()
    for number, standard in ((stdin, 0), (out, 1), (err, 2)):
        os.dup2(number, standard)
        os.close(number)
    os.environ.clear()
    os.environ.update(asked["env"])
    code = 0
    try:
        run(list(asked["argv"]))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  as the interpreter does at the top
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(argv[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
