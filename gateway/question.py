"""One chat request that is answered as a whole: queue, worker, answer, without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gateway.admission import admit
from gateway.context import Gateway
from gateway.dialects.g0_chat import Course
from gateway.faults import WorkerFailure, fault_of
from gateway.link import WorkerLink
from gateway.metrics import SessionWatch
from gateway.race import first_to_end
from gateway.tape import Tape
from gateway.tickets import Place, Ticket
from shared.errors import OmniError, ServerShutdown, SessionTimeout, WorkerLost
from shared.protocol import Answered, Ask, Closed, Failure, Open

log = logging.getLogger(__name__)

WORKER_SLACK_S = 15.0
"""Beyond `service.request_timeout`, which the worker itself keeps, for a worker that does not."""


@dataclass(frozen=True, slots=True)
class Answer:
    answered: Answered
    course: Course


class Question:
    """Asks once. Cancelled, it gives its place back, or has the worker stop at once.

    Args:
        ask: dropped here as soon as the worker has it, for it may hold 100 MiB.
        on_sent: called then.
    """

    def __init__(
        self, gateway: Gateway, opening: Open, ask: Ask, on_sent: Callable[[], None]
    ) -> None:
        self._gateway = gateway
        self._opening = opening
        self._ask: Ask | None = ask
        self._on_sent = on_sent
        self._clock = gateway.clock
        self._tape = Tape(gateway.recorder, opening)
        self._watch = SessionWatch(
            gateway.metrics, gateway.config.audio.playback_delay_ms / 1000.0, opening.mode
        )
        self._estimated_wait_s: float | None = None
        self._answer: Answer | None = None

    async def answer(self) -> Answer:
        """Return the answer.

        Raises:
            OmniError: there is no worker to be had, it was lost, or it has refused or failed.
        """
        ending = "client_gone"
        log.info("session opened request_type=%s", self._opening.request_type)
        try:
            await first_to_end(self._serve(), self._shutdown())
            ending = "stopped"
        except OmniError as error:
            ending = fault_of(error).slug
            raise
        except Exception:
            ending = "internal"
            raise
        finally:
            self._tape.end(ending)
            self._gateway.metrics.session_ended(ending)
            log.info("session ended ending=%s", ending)
        assert self._answer is not None
        return self._answer

    async def _shutdown(self) -> None:
        await self._gateway.closing.wait()
        raise ServerShutdown("The service is going down")

    async def _serve(self) -> None:
        arrived_at = self._clock.monotonic()
        link = await admit(self._gateway, self._opening, self._note_place)
        try:
            await first_to_end(self._talk(link, arrived_at), link.watch())
        finally:
            link.retire("client_gone")

    def _note_place(self, _: Ticket, place: Place) -> None:
        if self._estimated_wait_s is None:
            self._estimated_wait_s = place.estimated_wait_s

    async def _talk(self, link: WorkerLink, arrived_at: float) -> None:
        asked_at = self._clock.monotonic()
        self._watch.asked(asked_at)
        timeout_s = self._gateway.config.service.request_timeout + WORKER_SLACK_S
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(link, arrived_at)
                answered = await self._hear(link)
        except TimeoutError as error:
            raise SessionTimeout(f"The worker has not answered ({timeout_s:.1f}s)") from error
        now = self._clock.monotonic()
        course = Course(
            recording_id=self._tape.recording_id,
            duration_ms=(now - asked_at) * 1000.0,
            waited_ms=(asked_at - arrived_at) * 1000.0,
            estimated_wait_s=self._estimated_wait_s or 0.0,
        )
        self._answer = Answer(answered, course)

    async def _send(self, link: WorkerLink, arrived_at: float) -> None:
        ask, self._ask = self._ask, None
        assert ask is not None
        self._tape.took(ask, arrived_at, link.worker_index)
        await link.send(ask)
        self._on_sent()

    async def _hear(self, link: WorkerLink) -> Answered:
        while True:
            event = await link.receive()
            now = self._clock.monotonic()
            match event:
                case Answered():
                    self._watch.answer_done(now)
                    self._tape.gave(event, 0.0, now)
                    return event
                case Failure():
                    self._tape.gave(event, 0.0, now)
                    raise WorkerFailure(event.slug, event.message, event.close_code or 1000)
                case Closed():
                    raise WorkerLost(f"The worker ended the session: {event.reason}")
                case _:
                    self._tape.gave(event, 0.0, now)
