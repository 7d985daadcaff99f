"""Media checks: what is refused, and that nothing else than a typed error comes out."""

import contextlib
import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shared.errors import BadAudio, BadImage, BadMessage, MediaFull
from shared.protocol import Input
from tests.fakes.session import eventually
from worker.sessions import media
from worker.sessions.media import MediaAccount, MediaBudget, MediaDecoder, decode_voice

AUDIO = np.zeros(4, "<f4").tobytes()


def account() -> MediaAccount:
    return MediaAccount(MediaBudget(1))


def decode_image(data: bytes, **options) -> np.ndarray:
    return media.decode_image(data, account(), **options)


def decode_chunk(message: Input):
    return media.decode_chunk(message, account())


def file(kind: str = "JPEG", size: tuple[int, int] = (4, 2), mode: str = "RGB", **fields) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size).save(out, kind, **fields)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_becomes_rgb_rows(kind):
    assert decode_image(file(kind)).shape == (2, 4, 3)


@pytest.mark.parametrize(
    ("kind", "mode"), [("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "P"), ("PNG", "RGBA"), ("PNG", "1")]
)
def test_every_colour_mode_becomes_rgb(kind, mode):
    assert decode_image(file(kind, mode=mode)).shape == (2, 4, 3)


def test_a_truncated_image_is_refused():
    data = file(size=(64, 64))

    with pytest.raises(BadImage):
        decode_image(data[: len(data) // 2])


@pytest.mark.parametrize("data", [b"", b"not an image", file("GIF"), file("BMP")])
def test_other_files_are_refused(data):
    with pytest.raises(BadImage, match="no readable JPEG or PNG"):
        decode_image(data)


def test_too_many_pixels_are_refused_before_they_are_decoded():
    header_only = file("PNG", size=(3000, 3000), mode="1")[:100]

    with pytest.raises(BadImage, match="3000x3000"):
        decode_image(header_only, max_pixels=1000)


def test_the_frames_of_a_chunk_share_the_pixel_limit(monkeypatch):
    monkeypatch.setattr("worker.sessions.media.MAX_IMAGE_PIXELS", 15)

    with pytest.raises(BadImage, match="at most 7 pixels are left"):
        decode_chunk(Input(0, AUDIO, [file(), file()]))


def test_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6

    assert decode_image(file(exif=exif.tobytes())).shape == (4, 2, 3)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
def test_damaged_exif_does_not_spoil_an_image():
    data = file(exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff garbage")

    assert decode_image(data).shape == (2, 4, 3)


@settings(max_examples=150)
@given(st.sampled_from([file(size=(16, 16)), file("PNG", size=(16, 16))]), st.data())
def test_damage_gives_pixels_or_a_typed_error_and_nothing_else(good, data):
    at = data.draw(st.integers(0, len(good) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=8))
    with contextlib.suppress(BadImage):
        decode_image(good[:at] + junk + good[at + len(junk) :])


def test_a_chunk_carries_its_settings():
    chunk = decode_chunk(Input(3, AUDIO, [file()], force_listen=True, max_slice_nums=2))

    assert (chunk.seq, len(chunk.audio), len(chunk.frames)) == (3, 4, 1)
    assert (chunk.force_listen, chunk.max_slice_nums) == (True, 2)


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        (b"", "empty"),
        (b"12345", "multiple of 4"),
        (np.array([np.nan], "<f4").tobytes(), "not finite"),
        (np.array([1e9], "<f4").tobytes(), "peaks"),
        (bytes(4 * 16_000 * 31), "at most 30 s"),
    ],
)
def test_bad_audio_is_refused(audio, words):
    with pytest.raises(BadAudio, match=words):
        decode_chunk(Input(0, audio))


def test_too_many_frames_are_refused():
    with pytest.raises(BadImage, match="17 frames"):
        decode_chunk(Input(0, AUDIO, [b"x"] * 17))


def test_an_impossible_slice_count_is_refused():
    with pytest.raises(BadMessage, match="max_slice_nums is 0"):
        decode_chunk(Input(0, AUDIO, max_slice_nums=0))


def test_a_long_reference_voice_is_refused():
    with pytest.raises(BadAudio, match="at most 60 s"):
        decode_voice(bytes(4 * 16_000 * 61))


async def test_images_are_decoded_beside_the_loop():
    decoder = MediaDecoder(1)
    session = decoder.session()
    try:
        chunk = await session.chunk(session.admit(Input(0, AUDIO, [file()])))
        voice = await session.voice(b"")
    finally:
        decoder.close()

    assert chunk.frames[0].shape == (2, 4, 3)
    assert len(voice) == 0


def save(image: Image.Image, kind: str, **fields) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **fields)
    return out.getvalue()


def animation() -> bytes:
    first, second = Image.new("RGB", (4, 2)), Image.new("RGB", (4, 2), "red")
    return save(first, "PNG", save_all=True, append_images=[second])


def with_comments(n_bytes: int) -> bytes:
    """A JPEG with as many bytes of comments before its picture."""
    segment = b"\xff\xfe\xff\xff" + bytes(0xFFFF - 2)
    return file()[:2] + segment * (n_bytes // len(segment)) + file()[2:]


@pytest.mark.parametrize(
    "data",
    [
        save(Image.new("I;16", (4, 2)), "PNG"),
        animation(),
        save(Image.new("CMYK", (4, 2)), "JPEG", quality=1),
        save(Image.new("RGB", (4, 2)), "JPEG", progressive=True),
        save(Image.new("LA", (4, 2)), "PNG"),
        with_comments(1_000_000),
        file("PNG") + b"trailing bytes" * 1000,
    ],
    ids=["16-bit", "animated", "cmyk", "progressive", "grey-alpha", "comments", "trailing"],
)
def test_a_picture_of_an_unusual_kind_is_shown_as_it_is(data):
    assert decode_image(data).shape == (2, 4, 3)


def png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its data does not have."""
    good = bytearray(file("PNG", size=(1, 1)))
    good[16:24] = struct.pack(">II", width, height)
    good[29:33] = struct.pack(">I", zlib.crc32(good[12:29]))
    return bytes(good)


@pytest.mark.parametrize(
    "size", [(0, 0), (0, 5), (30_000, 30_000), (2**31 - 1, 1), (2**31 - 1,) * 2]
)
def test_a_picture_of_an_impossible_size_is_refused_unread(size):
    """B68: 30 000 x 30 000 pixels are a few bytes in a file."""
    tracemalloc.start()
    try:
        with pytest.raises(BadImage):
            decode_image(png(*size))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1_000_000


@pytest.mark.parametrize("side", [7_100, 10_000, 14_000, 30_000])
def test_a_picture_beyond_any_limit_is_called_too_large(side):
    """From 179 megapixels on, where Pillow has a limit of its own, it was called unreadable."""
    size = f"(is {side}x{side}|has {side * side} pixels)"
    with pytest.raises(BadImage, match=f"{size}: at most 50000000 pixels are left of"):
        decode_image(png(side, side))


def test_a_text_chunk_that_unpacks_to_gigabytes_is_refused_unread():
    """PNG texts may be compressed: a bomb that no pixel limit sees."""
    bomb = zlib.compress(bytes(100_000_000), 9)
    body = b"zTXt" + b"key\0\0" + bomb
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    good = file("PNG")

    with contextlib.suppress(BadImage):
        assert decode_image(good[:33] + chunk + good[33:]).shape == (2, 4, 3)


def test_a_jpeg_under_the_name_of_a_png_is_read_by_its_bytes():
    assert decode_image(file("JPEG")).shape == decode_image(file("PNG")).shape


async def decoded(session, seq: int, *frames: bytes):
    return await session.chunk(session.admit(Input(seq, AUDIO, list(frames))))


@pytest.fixture
def decoder():
    decoder = MediaDecoder(2, n_threads=1)
    yield decoder
    decoder.close()


PIXELS = 3 * 20 * 20


async def test_pictures_that_wait_are_counted_until_they_are_gone(decoder):
    session = decoder.session()
    chunk = await decoded(session, 0, file(size=(20, 20)), file(size=(20, 20)))

    # The thread that decoded may hold the file for a moment longer.
    await eventually(lambda: decoder.budget.total == 2 * PIXELS)
    assert chunk.frames
    del chunk
    await eventually(lambda: decoder.budget.total == 0)


async def test_beyond_the_budget_a_chunk_is_refused_and_later_ones_are_not(monkeypatch):
    """Eight waiting units of 150 MB each: one client filled a worker's memory."""
    monkeypatch.setattr(media, "MAX_MEDIA_BYTES", 4 * PIXELS)
    decoder = MediaDecoder(4, n_threads=1)
    session = decoder.session()
    picture = file("PNG", size=(20, 20))

    kept = [await decoded(session, seq, picture) for seq in range(3)]
    with pytest.raises(MediaFull):
        await decoded(session, 3, picture, picture)
    del kept
    await eventually(lambda: decoder.budget.total == 0)
    again = await decoded(session, 4, picture, picture)
    decoder.close()

    assert len(again.frames) == 2


async def test_a_session_is_held_to_its_own_part_of_the_budget(decoder, monkeypatch):
    monkeypatch.setattr(media, "MAX_SESSION_MEDIA_BYTES", 2 * PIXELS)
    monkeypatch.setattr(media, "MAX_MEDIA_BYTES", 2 * PIXELS)
    small = MediaDecoder(2, n_threads=1)
    session = small.session()

    kept = await decoded(session, 0, file(size=(20, 20)))
    with pytest.raises(MediaFull, match=r"\d+ bytes of input .* at most \d+ may"):
        await decoded(session, 1, file(size=(20, 20)), file(size=(20, 20)))
    small.close()

    assert kept.frames


async def test_a_neighbour_below_its_share_is_served_while_others_fill_the_budget(monkeypatch):
    monkeypatch.setattr(media, "MAX_MEDIA_BYTES", 4 * PIXELS)
    decoder = MediaDecoder(2, n_threads=1)
    greedy, neighbour = decoder.session(), decoder.session()
    picture = file(size=(20, 20))

    hoard = []
    with contextlib.suppress(MediaFull):
        for seq in range(8):
            hoard.append(await decoded(greedy, seq, picture))
    chunk = await decoded(neighbour, 0, picture)
    decoder.close()

    assert len(hoard) >= 2
    assert chunk.frames


async def test_files_that_wait_to_be_decoded_count_too(monkeypatch):
    monkeypatch.setattr(media, "MAX_MEDIA_BYTES", 2000)
    decoder = MediaDecoder(4, n_threads=1)
    session = decoder.session()

    waiting = [session.admit(Input(seq, AUDIO, [bytes(600)])) for seq in range(4)]
    refused = [pending.error is not None for pending in waiting]
    total = decoder.budget.total
    del waiting
    decoder.close()

    assert refused == [False, False, False, True]
    assert total == 3 * (600 + len(AUDIO))
    assert decoder.budget.total == 0


async def test_what_could_not_be_decoded_holds_nothing(decoder):
    session = decoder.session()
    good = file("PNG", size=(20, 20))

    for _ in range(3):
        with pytest.raises(BadImage):
            await decoded(session, 0, good, good[: len(good) // 2])

    await eventually(lambda: decoder.budget.total == 0)
