"""One chat request: one question with its whole history, one answer, then the session ends.

Its program is closed at once when the client stops or vanishes, or the time is over: nothing is
computed for an answer that nobody waits for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import msgspec

from shared.audio import samples_to_f32
from shared.errors import BadMessage, EngineFault, OmniError
from shared.protocol import Answered, Ask, Command, Delta, Event, Prefilled, RequestType
from shared.states import SessionState
from worker.models.contract import ChatQuestion, Piece, Taken, WholeAnswer
from worker.sessions.failures import CLOSE_NORMAL, program_failure
from worker.sessions.host import SessionHost
from worker.sessions.message_media import read_messages
from worker.sessions.session import Session

log = logging.getLogger(__name__)


class ChatSession(Session):
    """`Ask` in; `Prefilled`, `Delta`s where it streams, `Answered` out; then `Closed("done")`.

    A question that fails ends the session as well: `Failure` with close code 1000.
    """

    def __init__(
        self,
        host: SessionHost,
        session_id: str,
        request_type: RequestType,
        send: Callable[[Event], None],
    ) -> None:
        super().__init__(host, session_id, request_type, send, host.model.chat_state)
        self._ask: Ask | None = None
        self._asked_at = math.inf
        self._n_pieces = 0

    def _due(self) -> Iterable[tuple[float, str]]:
        if math.isinf(self._asked_at):
            yield self._idle_limit()
        else:
            longest_s = self._host.limits.ask_timeout_s
            yield self._asked_at + longest_s, f"Request timeout ({longest_s:.1f}s)"

    def _forget_input(self) -> None:
        self._ask = None

    async def _handle(self, command: Command) -> None:
        match command:
            case Ask():
                if self.state is not SessionState.OPENED:
                    raise BadMessage("this session has its question: open another one")
                self._ask, self._asked_at = command, self._clock()
                self._to(SessionState.PREPARING, "asked")
                self._work_there.set()
            case _:
                raise self._unknown(command)

    async def _run_next(self) -> bool:
        if self._ask is None:
            return False
        try:
            await self._answer()
        except EngineFault:
            raise  # it is no fault of the question
        except OmniError as error:
            self._host.metrics.answer_failed()
            # The session keeps it, and with it what it refers to: pictures, files.
            error.__cause__ = error.__context__ = None
            self._end("failed", error.with_traceback(None), CLOSE_NORMAL)
        return False

    async def _answer(self) -> None:
        """Raises OmniError: there is none."""
        # Held by the program alone, which drops the pictures when it has seen them.
        program = self._host.model.chat(self._state, await self._question())
        task = await self._run(program, "chat", self._on_emit)
        if self._is_ending(task):
            return
        if task.error is not None:
            raise program_failure(task.error, "chat")
        answer: WholeAnswer = task.value
        took_s = self._clock() - self._asked_at
        self._host.metrics.answer_done("chat", took_s)
        self._send(
            Answered(
                answer.text,
                answer.n_input_tokens,
                answer.n_generated_tokens,
                samples_to_f32(answer.audio),
                answer.was_cut,
                list(answer.ignored),
                answer.prompt,
                msgspec.structs.replace(answer.timings, total_ms=1000.0 * took_s),
            )
        )
        self._end("done")

    async def _question(self) -> ChatQuestion:
        """Take what was asked, decoded. Raises BadMessage, BadAudio, BadImage, MediaFull."""
        ask, self._ask = self._ask, None
        assert ask is not None
        if ask.max_slice_nums is not None and ask.max_slice_nums < 1:
            raise BadMessage(f"max_slice_nums is {ask.max_slice_nums}, must be at least 1")
        return ChatQuestion(
            messages=await read_messages(self._media, ask.messages),
            generation=ask.generation,
            is_streaming=ask.is_streaming,
            speaks=ask.speaks,
            voice=await self._media.voice(ask.voice),
            max_slice_nums=ask.max_slice_nums,
            use_image_id=ask.use_image_id,
            is_omni=ask.is_omni,
            enable_thinking=ask.enable_thinking,
            use_tts_template=ask.use_tts_template,
        )

    # ---- called on compute threads

    def _on_emit(self, emitted: Taken | Piece) -> None:
        self._loop.call_soon_threadsafe(self._tell, emitted, context=self._context)

    def _tell(self, emitted: Taken | Piece) -> None:
        if self._ended.done():
            return
        match emitted:
            case Taken():
                self._to(SessionState.LIVE, "prefilled")
                self.kv_tokens = emitted.n_input_tokens
                self._send(Prefilled(emitted.n_input_tokens))
            case Piece():
                if not self._n_pieces:
                    self._host.metrics.first_piece_seconds.observe(self._clock() - self._asked_at)
                self._send(Delta(self._n_pieces, emitted.text, samples_to_f32(emitted.audio)))
                self._n_pieces += 1
