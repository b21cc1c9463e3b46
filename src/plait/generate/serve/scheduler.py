"""The request queue, and the thread that runs the model with continuous batching.

If the model's decoder supports adding rows to a running batch, a request joins the batch between two tokens; otherwise
it waits until the batch is empty. A request with several answers (`n`) is one row per answer; all join at the same
time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from plait.errors import GenerateError
from plait.generate.batch import ContinuousBatch, GenerationRow, Token
from plait.generate.conversation import AnswerText, Conversation, refuse_no_numbers

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """The Prometheus metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("plait_requests", "Requests answered.", ["path", "status"], registry=registry)
        self.prompt_tokens = Counter("plait_prompt_tokens", "Tokens of prompts read.", registry=registry)
        self.generation_tokens = Counter("plait_generation_tokens", "Tokens written.", registry=registry)
        self.waiting = Gauge("plait_requests_waiting", "Requests that wait for a place.", registry=registry)
        self.running = Gauge("plait_batch_rows", "Rows in the batch.", registry=registry)
        self.batch_size = Histogram(
            "plait_batch_size", "Rows that a step wrote one token for.", buckets=_ROWS, registry=registry
        )
        self.latency = Histogram(
            "plait_request_seconds",
            "From a request's header to the end of its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "plait_time_to_first_token_seconds",
            "From a request's place in line to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


IMPOSSIBLE = -9999.0


class QueueFullError(Exception):
    """The queue is full."""


class StoppingError(Exception):
    """The server is being stopped."""


class LikelyToken(NamedTuple):
    """A token with its log-probability."""

    text: str
    logprob: float


class TokenLogprobs(NamedTuple):
    """A token of an answer, as the API reports it with `logprobs`."""

    text: str
    logprob: float
    top: list[LikelyToken]
    offset: int
    """Its position in the answer, in characters."""


class AnswerUpdate(NamedTuple):
    """New text of one of a request's answers; if it is not streamed, a single update has all of its text."""

    number: int
    text: str
    tokens: list[TokenLogprobs]
    """Empty if log-probabilities were not requested."""
    finish_reason: Literal["stop", "length"] | None


class JobDone(NamedTuple):
    """The last event of a request: all its answers have ended."""

    completion_tokens: int


Event = AnswerUpdate | JobDone | Exception


@dataclass(eq=False)
class ServeRequest:
    """A request in the scheduler."""

    rows: Sequence[GenerationRow]
    """One per answer."""
    texts: Sequence[AnswerText]
    deliver: Callable[[Event], None]
    """A function that receives the events of this request; it is called in the model's thread."""
    stream: bool
    logprobs: bool
    since: float
    """The time at which it was queued (`time.monotonic`)."""
    cancelled: bool = False
    """Whether the client has disconnected or timed out."""
    completion_tokens: int = 0
    open_answers: int = 0


class _Answer:
    """One row of the batch and its answer so far."""

    def __init__(self, job: ServeRequest, index: int) -> None:
        self.job, self.index = job, index
        self.row, self.text = job.rows[index], job.texts[index]
        self.count = 0
        self.over = False
        self._texts_pending: list[str] = []
        self._written: list[TokenLogprobs] = []

    def take(self, token: Token, decode: Callable[[Sequence[int]], str]) -> None:
        """Add a token, and deliver the text that is final now: at once if streaming, else at the end of the answer."""
        offset = self.text.length
        new = self.text.push(token.id)
        self.count += 1
        self.job.completion_tokens += 1
        self.over = self.text.stopped or self.count >= self.row.max_new_tokens
        if self.over:
            new += self.text.finish()
        if new:
            self._texts_pending.append(new)
        if self.job.logprobs and token.id not in self.row.sampling.stop_tokens:
            top = [LikelyToken(decode([token_id]), _finite(logprob)) for token_id, logprob in token.top]
            self._written.append(TokenLogprobs(decode([token.id]), _finite(token.logprob), top, offset))
        if self.over or (self.job.stream and new):
            self._deliver()

    def _deliver(self) -> None:
        # Tokens are delivered together with their text: if that is held back, later; if it is after a stop text, never.
        final = self.text.length - self.text.held
        complete = self.over and not self.text.is_cut
        ready = [token for token in self._written if complete or token.offset < final]
        self._written = self._written[len(ready) :]
        reason: Literal["stop", "length"] | None = None
        if self.over:
            reason = "stop" if self.text.stopped else "length"
        self.job.deliver(AnswerUpdate(self.index, "".join(self._texts_pending), ready, reason))
        self._texts_pending = []


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent: -9999 for minus infinity, as in OpenAI's API."""
    return logprob if logprob > IMPOSSIBLE else IMPOSSIBLE


class RequestScheduler:
    """The request queue and the thread that runs the model. Call `start` once, and `close` at the end."""

    def __init__(
        self,
        conversation: Conversation,
        *,
        max_batch: int,
        waiting: int,
        metrics: ServerMetrics,
        log: Callable[[str], None],
    ) -> None:
        """`max_batch`: the maximum of rows in the batch; `waiting`: the maximum of queued requests."""
        self.max_batch, self.most_waiting = max_batch, waiting
        self._conversation, self._metrics, self._log = conversation, metrics, log
        self._changed = threading.Condition()
        self._queue: deque[ServeRequest] = deque()
        self._reserved = 0
        self._answers: list[_Answer] = []
        self._stopping = self._closed = False
        self._thread = threading.Thread(target=self._run, name="plait-model", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of queued requests, including those that have reserved a place and are being encoded."""
        return len(self._queue) + self._reserved

    @property
    def running(self) -> int:
        """The number of rows in the batch."""
        return len(self._answers)

    def reserve(self) -> None:
        """Reserve a place in the queue before a request is encoded; `submit` or `unreserve` releases it.

        Raise a `QueueFullError` if there is none, and a `StoppingError` if the server is being stopped.
        """
        with self._changed:
            if self._stopping:
                raise StoppingError
            # Requests for which the batch has free rows will not wait, so they are not limited.
            free = max(self.max_batch - len(self._answers), 0)
            if self.waiting >= self.most_waiting + free:
                raise QueueFullError
            self._reserved += 1
            self._metrics.waiting.set(self.waiting)

    def unreserve(self) -> None:
        """Release a reserved place."""
        with self._changed:
            self._reserved -= 1
            self._metrics.waiting.set(self.waiting)

    def submit(self, job: ServeRequest) -> None:
        """Queue a request in its reserved place; raise a `StoppingError` if the server is being stopped."""
        with self._changed:
            self._reserved -= 1
            if self._stopping:
                raise StoppingError
            self._queue.append(job)
            self._changed.notify()

    def cancel(self, job: ServeRequest) -> None:
        """Cancel a request whose client has disconnected or timed out: remove it from the queue or the batch."""
        with self._changed:
            job.cancelled = True
            if job in self._queue:
                self._queue.remove(job)
                self._metrics.waiting.set(self.waiting)
            self._changed.notify()

    def stop(self) -> None:
        """Refuse queued and new requests with a `StoppingError`; answers in progress continue."""
        with self._changed:
            self._stopping = True
            queue, self._queue = list(self._queue), deque()
            self._metrics.waiting.set(self.waiting)
        for job in queue:
            job.deliver(StoppingError())

    def end(self) -> None:
        """Cancel the answers in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def close(self) -> None:
        """Cancel all requests, and end the thread."""
        self.stop()
        self.end()
        self._thread.join()

    def _run(self) -> None:
        with self._conversation.generator.continuous() as batch:
            while True:
                with self._changed:
                    while not (self._closed or self._queue or self._answers):
                        self._changed.wait()
                    if self._closed:
                        break
                try:
                    self._step(batch)
                except Exception as error:
                    self._log(f"the model failed: {type(error).__name__}: {error}")
                    batch.close()
                    self._fail(error)
            self._fail(StoppingError())

    def _step(self, batch: ContinuousBatch) -> None:
        """Remove finished rows, add new ones, and generate one token per row."""
        self._drop(batch)
        if joining := self._take_from_queue(batch):
            # Added before the prefill, so that these requests too receive an error that it raises.
            new = [_Answer(job, index) for job in joining for index in range(len(job.rows))]
            self._answers += new
            tokens = batch.add([answer.row for answer in new])
            for job in joining:
                self._metrics.prompt_tokens.inc(len(job.rows[0].prompt))
                self._metrics.first_token.observe(time.monotonic() - job.since)
            self._take(new, tokens)
            self._drop(batch)
        if self._answers:
            self._metrics.batch_size.observe(len(self._answers))
            self._take(self._answers, batch.step())
            self._drop(batch)

    def _take_from_queue(self, batch: ContinuousBatch) -> list[ServeRequest]:
        """Remove as many requests from the queue as fit into the batch, and return them."""
        joining: list[ServeRequest] = []
        rows: list[GenerationRow] = []
        with self._changed:
            while self._queue and not self._closed:
                joined_rows = [*rows, *self._queue[0].rows]
                if len(self._answers) + len(joined_rows) > self.max_batch or not batch.takes(joined_rows):
                    break
                job, rows = self._queue.popleft(), joined_rows
                job.open_answers = len(job.rows)
                joining.append(job)
            self._metrics.waiting.set(self.waiting)
        return joining

    def _take(self, answers: Sequence[_Answer], tokens: Sequence[Token]) -> None:
        self._metrics.generation_tokens.inc(len(tokens))
        for answer, token in zip(answers, tokens, strict=True):
            if answer.job.cancelled:
                continue
            try:
                refuse_no_numbers([token.logprob])
            except GenerateError as error:
                answer.job.deliver(error)
                answer.job.cancelled = True
                continue
            answer.take(token, self._conversation.tokenizer.decode)
            if answer.over:
                answer.job.open_answers -= 1
                if not answer.job.open_answers:
                    answer.job.deliver(JobDone(answer.job.completion_tokens))

    def _drop(self, batch: ContinuousBatch) -> None:
        """Remove rows whose answers have ended, or whose clients have disconnected."""
        kept = [number for number, answer in enumerate(self._answers) if not (answer.over or answer.job.cancelled)]
        batch.keep(kept)
        self._answers = [self._answers[number] for number in kept]
        self._metrics.running.set(len(kept))

    def _fail(self, error: Exception) -> None:
        for job in {answer.job: None for answer in self._answers}:
            if job.open_answers:
                job.deliver(error)
        self._answers = []
        self._metrics.running.set(0)
