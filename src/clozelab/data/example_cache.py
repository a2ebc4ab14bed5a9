"""Examples kept on disk: a split is cut once under a format, then mapped into memory by whoever trains on it.

`<store>/examples/<key>/` holds what `data.examples` says. The key is a hash of the format (its class, the file that the
class stands in, its settings), the split, and the version of the code beneath; the store's own path tells the corpus.
Like a store it is written beside its place under a file lock and moved there by one rename. The folder is a
convenience: where it cannot be written, the examples are cut in memory, and are the same.
"""

import contextlib
import dataclasses
import errno
import functools
import inspect
import logging
import os
import shutil
import sys
from pathlib import Path

import filelock

from clozelab.data.corpus import digest
from clozelab.data.cutting import CUT_VERSION
from clozelab.data.examples import Examples, read_examples
from clozelab.data.format import FormatOption
from clozelab.data.store import Store

log = logging.getLogger("clozelab")

# What says that a folder is not for writing, or full. Anything else is a fault, and is raised.
_NO_PLACE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.ENOLCK),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
}


def examples_of(store: Store, format: FormatOption, split: str) -> Examples:
    """The examples of a split under a format: read-only maps of files that are written by the first who asks.

    Raises:
        ValueError: the split gives no example; says why and the way out.
    """
    folder = store.path / "examples" / examples_key(format, split)
    if (found := _found(folder)) is not None:
        return found
    made: Examples | None = None
    try:
        folder.parent.mkdir(exist_ok=True)
        with filelock.FileLock(f"{folder}.lock"):
            if (found := _found(folder)) is not None:
                return found
            made = format.examples(store, split)
            _keep(made, folder)
            return read_examples(folder)
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise
        reason = os.strerror(error.errno)
        log.warning("cannot keep examples in %s (%s): every process cuts them in memory", folder.parent, reason)
    return format.examples(store, split) if made is None else made


def examples_key(format: FormatOption, split: str) -> str:
    """What tells the examples of a store apart: a hash of format, split and the version of the code."""
    cls = type(format)
    settings = sorted(dataclasses.asdict(format).items())
    return digest(CUT_VERSION, cls.__module__, cls.__qualname__, settings, _source(cls.__module__), split)


@functools.cache
def _source(module: str) -> str:
    """Text of a module's file. Who tries out a format of their own must not be given yesterday's examples."""
    with contextlib.suppress(OSError, TypeError):  # what was written at a prompt has no file
        return inspect.getsource(sys.modules[module])
    return ""


def _found(folder: Path) -> Examples | None:
    """The examples in a folder, if they are there and whole."""
    if not (folder / "meta.json").is_file():
        return None
    try:
        return read_examples(folder)
    except ValueError as error:
        log.warning("%s; they are cut again", error)
        return None


def _keep(made: Examples, folder: Path) -> None:
    """Write the examples beside their place and move them there. The lock is ours."""
    for left in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    beside = folder.parent / f".{folder.name}.{os.getpid()}"
    try:
        beside.mkdir()
        made.write(beside)
        if folder.exists():  # what was found there was not whole
            shutil.rmtree(folder)
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
