"""Whatever a chat client does, and whenever: its question has one end, and nothing is left.

Every op of the model is held until the script lets it pass. What always holds, beside what
`test_any_turns_client.py` says of every session:

- The first `Ask` that is taken gets one end: `Answered`, or a `Failure` of the right kind with
  close code 1000. The session ends with it, and by itself.
- Each other command, a second `Ask` among them, gets one `Failure`, in order, and disturbs nothing.
- `Prefilled` comes once, the `Delta`s behind it, numbered from 0; they make up the answer's text.
  An answer that does not stream has none, and holds the sound.
- Who leaves, stops or is sent away before that gets no end.
"""

from __future__ import annotations

import asyncio
import io
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from shared.protocol import (
    Answered,
    Ask,
    AudioPart,
    ChatMessage,
    Closed,
    Command,
    Failure,
    ImagePart,
    Input,
    Interrupt,
    Open,
    Part,
    Pause,
    Prepare,
    PrepareTurns,
    Resume,
    TextPart,
)
from tests.fakes.model import FakeDuplexModel
from tests.fakes.puppet import ENDINGS, WHOLE, Go, Puppet, puppet_on, weighted
from tests.fakes.session import LOUD, chunk
from worker.sessions.chat import ChatSession


def ask(*parts: Part, **fields: Any) -> Ask:
    return Ask([ChatMessage("user", list(parts))], **fields)


def gif() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (30, 20)).save(out, "GIF")
    return out.getvalue()


HELLO = TextPart("hello")
QUESTIONS: list[tuple[Ask, str | None]] = [
    (ask(HELLO), None),
    (ask(HELLO, ImagePart(gif()), AudioPart(bytes(400)), speaks=True), None),
    (ask(HELLO, is_streaming=False, speaks=True), None),
    (ask(TextPart("fail")), "model_fault"),
    (ask(TextPart("too long"), ImagePart(gif())), "bad_message"),
    (ask(ImagePart(b"junk")), "bad_image"),
    (ask(AudioPart(b"abc")), "bad_audio"),
    (ask(HELLO, voice=b"abc"), "bad_audio"),
    (ask(HELLO, max_slice_nums=0), "bad_message"),
    (ask(), "bad_message"),
    (Ask([]), "bad_message"),
]
"""Questions, and the slug of those that have no answer."""

NO_QUESTION = st.sampled_from(
    [PrepareTurns([]), Prepare("x"), chunk(7, LOUD), Interrupt(), Pause(), Resume()]
    + [Open("x", "chat", "chat")]
)
QUESTION = st.sampled_from(QUESTIONS[:3] * 2 + QUESTIONS)
ASKED = weighted([QUESTION] * 6 + [st.none()])
GO = st.sampled_from([1, 1, 2, 3, 5]).map(Go)
STEP = weighted([GO] * 3 + [NO_QUESTION, QUESTION.map(lambda pair: pair[0])])


async def consult(
    puppet: Puppet,
    before: list[Command],
    question: tuple[Ask, str | None] | None,
    after: list[Command | Go],
    ending: str,
    is_done: bool,
) -> None:
    told, refusals = puppet.told, list[tuple[str, int | None]]()
    asked, slug = question or (None, None)
    told.is_streaming = asked is None or asked.is_streaming
    for index, step in enumerate([*before, *([] if asked is None else [asked]), *after]):
        if puppet.client.task.done():
            break
        if isinstance(step, Go):
            await puppet.go(step.n_ops)
            continue
        if asked is None or index != len(before):
            refusals.append(("bad_message", step.seq if isinstance(step, Input) else None))
        await puppet.send(step)
    assert told.refusals == refusals
    if is_done and asked is not None:
        await puppet.release()
        assert puppet.client.task.done()
    if not puppet.client.task.done():
        await puppet.end(ending)
        assert told.n(Answered) == 0
        return
    end, closed = told.events[-2:]
    if slug is None:
        assert isinstance(end, Answered)
        assert end.text == WHOLE
        assert bool(end.audio) == (asked.speaks and not asked.is_streaming)
    else:
        assert isinstance(end, Failure)
        assert (end.slug, end.close_code) == (slug, 1000)
    assert closed == Closed("done" if slug is None else "failed")
    assert await puppet.client.code() == 1000


async def play(*args: Any) -> None:
    async with puppet_on(FakeDuplexModel(), ChatSession) as puppet:
        await consult(puppet, *args)


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    st.lists(NO_QUESTION, max_size=2),
    ASKED,
    st.lists(STEP, max_size=8),
    st.sampled_from(ENDINGS),
    st.booleans(),
)
@example([], QUESTIONS[0], [Go(1)], "stop too late", False)
def test_whatever_a_chat_client_does_its_question_has_one_end(
    before, question, after, ending, is_done
):
    if question is None:
        after = [step for step in after if not isinstance(step, Ask)]
    asyncio.run(play(before, question, after, ending, is_done))
