"""Processes that encode pieces of a corpus, beside the one that reads the source and writes the store.

Each is a new Python that knows only this module, started as a program is: nothing of the parent is forked (it may have
threads, of torch or of the `tokenizers` library), and its main module is not imported again. Requests and answers are
pickles on two pipes. A worker ends at once when its pipe does, whatever became of the parent; a parent that waits for a
worker sees the end of its pipe. So neither can be left behind, nor wait for ever.
"""

import concurrent.futures
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, Any, NoReturn

from clozelab.data.pieces import Encoded, Encoder, Piece
from clozelab.machine import cores

VARIABLE = "CLOZELAB_PROCESSES"
MOST = 16
"""Processes by default at most: one reader can hardly feed more, and each takes about 100 MB."""

_COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from clozelab.data.workers import serve; serve()"


class WorkerLost(ValueError):
    """A worker ended before its answer: killed, mostly for want of memory."""


def processes() -> int:
    """How many processes encode a large corpus: $CLOZELAB_PROCESSES, or the CPUs that may be used, at most 16.

    Raises:
        ValueError: the variable is no whole number from 1.
    """
    given = os.environ.get(VARIABLE, "").strip()
    if given:
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"{VARIABLE} is {given!r}; give the number of processes, 1 or more, or leave it unset")
        return int(given)
    return min(cores(), MOST)


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, encoder: Encoder) -> None:
        # One thread each: the processes share the CPUs already, and the library then never has threads to warn about.
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | threads | {"TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is for the parent, which then ends the workers
        )
        self._encoder = encoder
        self._ready = False

    def __call__(self, texts: list[bytes]) -> Encoded:
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            if not self._ready:
                pickle.dump(self._encoder, requests, protocol=5)
                self._ready = True
            pickle.dump(texts, requests, protocol=5)
            texts.clear()
            requests.flush()
            answer = pickle.load(answers)
        except (EOFError, OSError, pickle.UnpicklingError):
            self.kill()
            raise WorkerLost(_loss(self._process.returncode)) from None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Encoded)
        return answer

    def kill(self) -> None:
        """End the process; a thread that waits for its answer is told so by the end of the pipe."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes of an ended process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # of a request that was on its way
                pipe.close()


def _loss(code: int) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return (
        f"a process that encodes the corpus {how}, perhaps for want of memory; start again with a smaller "
        f"{VARIABLE} (1 needs the least), and the build goes on where it was"
    )


class Workers:
    """`count` processes that encode pieces, started when the first pieces come. To be used in a `with` block."""

    def __init__(self, encoder: Encoder, count: int) -> None:
        self._encoder, self._count = encoder, count
        self._started: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="clozelab-worker")

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self._started:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._started:
            worker.close()

    def encode(self, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, int, Encoded]]:
        """(the piece, now without texts; its number of documents; what came of it), in the order of the pieces.

        At most `count` + 2 pieces are in memory, read, worked on, or waiting for one before them.

        Raises:
            WorkerLost: a process was killed.
            Exception: what encoding the piece raised, as if it had been encoded here.
        """
        waiting: deque[tuple[Piece, int, concurrent.futures.Future[Encoded]]] = deque()
        for piece in pieces:
            waiting.append((piece, len(piece.texts), self._submit(piece)))
            if len(waiting) >= self._count + 2:
                piece, count, future = waiting.popleft()
                yield piece, count, future.result()
        while waiting:
            piece, count, future = waiting.popleft()
            yield piece, count, future.result()

    def _submit(self, piece: Piece) -> concurrent.futures.Future[Encoded]:
        if len(self._started) < self._count:
            # Here, not in the thread: what is in the list when the block is left is what must be ended.
            self._started.append(_Worker(self._encoder))
            self._idle.put(self._started[-1])
        return self._threads.submit(self._run, piece.texts)

    def _run(self, texts: list[bytes]) -> Encoded:
        worker = self._idle.get()
        try:
            return worker(texts)
        finally:
            self._idle.put(worker)


def serve() -> NoReturn:
    """The life of a worker: an encoder comes first, then pieces; each is answered by what came of it, or its error."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the answers
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, waiting), daemon=True).start()
    encoder: Callable[[list[bytes]], Encoded] = waiting.get()
    while True:
        answer: Encoded | Exception
        try:
            answer = encoder(waiting.get())
        except Exception as error:
            answer = _portable(error)
        try:
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
        except BrokenPipeError:
            os._exit(1)  # the parent is gone; there is nobody to tell
        del answer


def _receive(requests: IO[bytes], waiting: "queue.SimpleQueue[Any]") -> None:
    # In a thread of its own, so that the end of the pipe ends the process in the middle of a piece too.
    try:
        while True:
            waiting.put(pickle.load(requests))
    except (EOFError, pickle.UnpicklingError):
        os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error itself if it can be sent, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does when it is pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
