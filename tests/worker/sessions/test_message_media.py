"""The media of requests: formats, shared limits, what is counted."""

from __future__ import annotations

import asyncio
import io
import os
import threading

import numpy as np
import pytest
from PIL import Image

from shared.errors import BadAudio, BadImage, BadMessage, OmniError
from shared.protocol import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from tests.fakes.patience import PATIENCE_S
from tests.fakes.session import eventually
from worker.models.contract import Clip, Picture, TurnMessage, Video
from worker.sessions import message_media
from worker.sessions.media import MediaDecoder
from worker.sessions.message_media import read_messages, read_system


@pytest.fixture
def decoder():
    decoder = MediaDecoder(1)
    yield decoder
    decoder.close()


def image(kind: str = "PNG", size: tuple[int, int] = (4, 2), mode: str = "RGB", **fields) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size).save(out, kind, **fields)
    return out.getvalue()


def message(*parts, role: str = "user") -> ChatMessage:
    return ChatMessage(role, list(parts))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP"])
async def test_pictures_of_four_formats_are_read(decoder, kind):
    ((picture,),) = [m.parts for m in await read_messages(
        decoder.session(), [message(ImagePart(image(kind)))]
    )]  # fmt: skip

    assert isinstance(picture, Picture)
    assert picture.pixels.shape == (2, 4, 3)


async def test_an_animation_is_its_first_picture(decoder):
    second = Image.new("RGB", (4, 2), "white")
    data = image("GIF", save_all=True, append_images=[second])
    (only,) = await read_messages(decoder.session(), [message(ImagePart(data))])

    assert only.parts[0].pixels.max() == 0


async def test_messages_keep_their_order_and_roles(decoder):
    sound = np.full(8, 0.25, "<f4").tobytes()
    found = await read_messages(
        decoder.session(),
        [
            message(TextPart("be brief"), role="system"),
            message(TextPart("what"), AudioPart(sound), ImagePart(image()), TextPart("?")),
            message(TextPart("a stripe"), role="assistant"),
        ],
    )

    assert [m.role for m in found] == ["system", "user", "assistant"]
    assert [type(part) for part in found[1].parts] == [str, Clip, Picture, str]
    assert found[2] == TurnMessage("assistant", ("a stripe",))


async def test_a_film_becomes_a_video(decoder, monkeypatch):
    asked = []

    def decode(data, stack_frames, account, max_pixels):
        asked.append((data, stack_frames, max_pixels))
        return Video(((np.zeros((2, 3, 3), np.uint8),), ()), np.zeros(0, np.float32))

    monkeypatch.setattr(message_media, "decode_video", decode)
    monkeypatch.setattr(message_media, "MAX_IMAGE_PIXELS", 20)
    parts = [ImagePart(image()), VideoPart(b"film", 2), VideoPart(b"film")]
    await read_messages(decoder.session(), [message(*parts)])

    assert asked == [(b"film", 2, 12), (b"film", 1, 6)]


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ([ImagePart(b"junk")], BadImage, "no readable"),
        ([ImagePart(image("BMP"))], BadImage, "no readable"),
        ([ImagePart(image()[:40])], BadImage, "no readable"),
        ([AudioPart(b"")], BadAudio, "empty"),
        ([AudioPart(b"123")], BadAudio, "multiple of 4"),
        ([AudioPart(np.array([np.nan], "<f4").tobytes())], BadAudio, "not finite"),
        ([AudioPart(bytes(4 * 16_000 * 301))], BadAudio, "at most 300 s"),
        ([VideoPart(b"junk")], BadImage, "video is damaged"),
        ([VideoPart(b"junk", 0)], BadMessage, "stack_frames is 0"),
        ([TextPart("x" * 200_001)], BadMessage, "200001 characters, at most 200000"),
        ([TextPart("")] * 2049, BadMessage, "2049 parts, at most 2048"),
        ([], BadMessage, "a message is empty"),
    ],
)
async def test_what_cannot_be_used_is_refused_and_holds_nothing(decoder, parts, error, words):
    with pytest.raises(error, match=words):
        await read_messages(decoder.session(), [message(*parts)])

    await eventually(lambda: decoder.budget.total == 0)


async def test_a_request_without_messages_is_refused(decoder):
    with pytest.raises(BadMessage, match="messages is empty"):
        await read_messages(decoder.session(), [])


async def test_the_pictures_of_a_request_share_the_pixel_limit(decoder, monkeypatch):
    monkeypatch.setattr(message_media, "MAX_IMAGE_PIXELS", 15)

    with pytest.raises(BadImage, match="at most 7 pixels are left"):
        await read_messages(
            decoder.session(), [message(ImagePart(image())), message(ImagePart(image()))]
        )


async def test_what_is_decoded_is_counted_while_it_lives(decoder):
    sound = bytes(4 * 100)
    found = await read_messages(decoder.session(), [message(ImagePart(image()), AudioPart(sound))])

    # The files are not counted any more.
    await eventually(lambda: decoder.budget.total == 3 * 8 + 400)
    assert found
    del found
    await eventually(lambda: decoder.budget.total == 0)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([TextPart("x" * 16_001)], "at most 16000"),
        ([AudioPart(bytes(4 * 16_000 * 61))], "at most 60 s"),
        ([TextPart("")] * 2049, "at most 2048"),
    ],
)
async def test_a_system_message_has_limits_of_its_own(decoder, parts, words):
    with pytest.raises(OmniError, match=words):
        await read_system(decoder.session(), parts)


async def test_an_empty_system_message_is_allowed(decoder):
    assert await read_system(decoder.session(), []) == ()


async def test_no_thread_that_decodes_has_less_priority_than_the_others(decoder):
    """One with less got no processor while others were busy, and held the interpreter's lock: the
    whole worker stood still for seconds."""

    def niceness(_account):
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    media = decoder.session()
    found = [await media.request(1, niceness, takes_long=long) for long in (True, False)]

    assert found == [os.getpriority(os.PRIO_PROCESS, 0)] * 2


async def test_pictures_of_a_live_session_do_not_wait_for_a_film(decoder, monkeypatch):

    gate = threading.Event()

    def decode(*_):
        gate.wait(PATIENCE_S)
        return Video((), np.zeros(0, np.float32))

    monkeypatch.setattr(message_media, "decode_video", decode)
    films = [
        asyncio.create_task(read_messages(decoder.session(), [message(VideoPart(b"film"))]))
        for _ in range(4)
    ]
    found = await asyncio.wait_for(
        read_messages(decoder.session(), [message(ImagePart(image()))]), 5
    )
    assert not any(film.done() for film in films)
    gate.set()
    await asyncio.gather(*films)

    assert found
