"""Folders that belong to one process: closed to other users, and removed later if that process is killed.

The owner holds a lock on a file in the folder.  The kernel releases the lock when the process ends, even if it is
killed, so a later process can tell an abandoned folder from one in use.  A pid could not tell: containers have pid
namespaces of their own.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from weightcast.comm.ipc import host_id

_OWNER = ".owner"


class OwnedFolder:
    """A new folder."""

    def __init__(self, path: Path) -> None:
        """Makes the folder, for this user only; raises OSError if it exists already or cannot be made."""
        path.mkdir(mode=0o700)
        self.path = path
        try:
            self._lock = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # on a file system without locks only this process removes the folder
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(self._lock, host_id().encode())  # other hosts may not see the lock
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def rename(self, path: Path) -> None:
        """Renames the folder within its file system; raises OSError if it cannot have that name."""
        self.path = self.path.rename(path)

    def remove(self) -> None:
        """Removes the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(root: Path, name: re.Pattern[str]) -> None:
    """Removes the folders in ``root``, of names like ``name``, of this user's processes killed on this host."""
    for folder in root.iterdir():
        with suppress(OSError):
            if name.fullmatch(folder.name) and folder.lstat().st_uid == os.geteuid() and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Returns True if the owner has ended; takes the lock for a moment to find out."""
    owner = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.read(owner, 4096) != host_id().encode():
            return False
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(owner)
