"""Files that are replaced whole, so that a crash leaves the old one or the new one; full disks."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from fedwan.errors import DiskFull

LEAST_BYTES = 4 << 20
"""Where fewer are free a service does not start: Flower's database alone begins with 2.5 MB."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BROKEN = (errno.EROFS, errno.EIO)
"""What a disk says that takes nothing any more."""
LEAST_FILES = 16
"""Of a file system that counts its files, and has fewer left."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""What file systems without hard links say."""
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What those say that do not synchronise folders; they have their own way with names."""


def disk_full(
    error: BaseException | None, folder: Path | None = None, num_bytes: int = 0
) -> DiskFull | None:
    """What an error tells of a full disk, in a line; None if it tells of anything else.

    A file that may not grow any more is as bad, whatever room there is.
    `folder` is where it was written to, for errors that name no file; `num_bytes` what was to be
    written, 0 where nobody knows.
    """
    if not isinstance(error, OSError) or error.errno not in (*_FULL, *_BROKEN, errno.EFBIG):
        return None
    if folder is None and isinstance(error.filename, str):
        folder = Path(error.filename).parent
    where = f"the disk of {folder}" if folder else "a disk that was written to"
    figures = [os.strerror(error.errno)]
    if error.errno == errno.EFBIG:
        text = (
            f"a file {f'in {folder} ' if folder else ''}may grow no more ({figures[0]}); raise the "
            "limit (ulimit -f), or choose a disk that takes larger ones, and"
        )
    elif error.errno in _BROKEN:
        text = f"{where} takes nothing any more ({figures[0]}); mend or mount it, and"
    else:
        if folder is not None:
            figures.append(f"{_free_bytes(folder) / 1e6:.1f} MB free")
            if _lacks_files(folder):
                figures.append("no more files can be made there, see df -i")
        if num_bytes:
            figures.append(f"{num_bytes / 1e6:.1f} MB needed")
        text = f"{where} is full ({', '.join(figures)}); make room there and"
    return DiskFull(f"{text} start again: a run goes on from its last checkpoint")


def no_room(folder: Path) -> DiskFull | None:
    """That the disk of a folder is all but full, if it is."""
    if _free_bytes(folder) >= LEAST_BYTES and not _lacks_files(folder):
        return None
    return disk_full(OSError(errno.ENOSPC, ""), folder, LEAST_BYTES)


def lack_of_room(folder: Path, num_bytes: int, what: str) -> str:
    """That a disk is going to be full, by what takes so many bytes; nothing where it has them."""
    if (free := _free_bytes(folder)) >= num_bytes:
        return ""
    return (
        f"the disk of {folder} has {free / 1e6:.1f} MB free, and {what} take {num_bytes / 1e6:.1f} "
        "MB or more; make room, or the run ends once it is full"
    )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(_there(folder)).free


def _lacks_files(folder: Path) -> bool:
    found = os.statvfs(_there(folder))
    return 0 < found.f_files and found.f_favail < LEAST_FILES


def _there(folder: Path) -> Path:
    """It, or the next folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


@contextmanager
def on_disk(folder: Path, num_bytes: int = 0) -> Iterator[None]:
    """While the block writes to a folder: a full disk is a `DiskFull`; see `disk_full`."""
    try:
        yield
    except OSError as error:
        if full := disk_full(error, folder, num_bytes):
            raise full from error
        raise


def absolute_path(path: str) -> str:
    """A path from the root, for processes in other folders; of no path none."""
    return path and str(Path(path).absolute())


def stamp_of(folder: Path) -> str:
    """SHA-256 of names, sizes and times of all files below a folder, in hexadecimal.

    Another one once a file is another one, is changed, or is gone; none of them is read.
    """
    found = hashlib.sha256()
    paths = []
    for at, folders, names in os.walk(folder, followlinks=True):
        paths += [Path(at, name) for name in names]
        here = os.path.realpath(at) + os.sep  # what links above itself has no end
        folders[:] = [
            f for f in folders if not here.startswith(os.path.realpath(f"{at}/{f}") + os.sep)
        ]
    for path in sorted(path for path in paths if path.is_file()):
        name, status = str(path.relative_to(folder)), path.stat()
        found.update(f"{name!r} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()


def write_atomically(
    path: Path,
    write: Callable[[BinaryIO], object],
    previous: Path | None = None,
    mode: int = 0o644,
    num_bytes: int = 0,
    check: Callable[[], object] | None = None,
) -> None:
    """Have a file written beside `path`, sync it, and rename it over `path`; makes the folder.

    It has its mode, less the umask, from the moment that it exists, and is on disk under its name
    when this returns. What was there is kept as `previous`, if given; `path` itself is never
    missing meanwhile. A `DiskFull` tells that `num_bytes` are needed, if they are known. `check` is
    called last before the renaming, and may raise to prevent it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with on_disk(path.parent, num_bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        try:
            temporary.touch(mode, exist_ok=False)
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if check is not None:
                check()
            if previous is not None and path.exists():
                _keep(path, previous, mode)
            os.replace(temporary, path)
        except OSError as error:
            if error.filename == str(temporary):  # which means nothing to who reads of it
                error.filename, error.filename2 = str(path), None
            raise
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(folder)


def _keep(path: Path, previous: Path, mode: int) -> None:
    """Have a file under another name as well, whole, and in place of what was there."""
    link = previous.with_name(f".{previous.name}.{os.getpid()}.tmp")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with path.open("rb") as file:
            write_atomically(previous, partial(shutil.copyfileobj, file), mode=mode)
    else:
        os.replace(link, previous)


def replace_bytes(path: Path, data: bytes, mode: int = 0o644) -> None:
    """`write_atomically` of these bytes."""
    write_atomically(path, lambda file: file.write(data), mode=mode)


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` of UTF-8 text."""
    replace_bytes(path, text.encode())


def hash_file(path: Path) -> str:
    """SHA-256, hex, of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
