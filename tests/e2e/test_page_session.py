"""The viewer of a recording in a real browser, over recordings made by hand."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from gateway.recording.finish import finish
from gateway.recording.journal import END, GAVE, TOOK, Journal
from gateway.recording.store import Store
from shared.protocol import Input, Result, encode
from tests.fakes.browser import CHROMIUM, DESKTOP, PHONE, Visit, chromium, microphone_file, visit
from tests.fakes.page_server import Answers, gateway_alone, serving_pages

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

CLIP = Path(__file__).parents[1] / "assets" / "capital_france.wav"
ID = "20260130_093000_omni_k3_Xy12Zw89"
API = f"/api/sessions/{ID}"
RATE_HZ = 16_000

META = {
    "session_id": ID,
    "app_type": "omni_duplex",
    "created_at": "2026-01-30T09:30:00+00:00",
    "ended_at": "2026-01-30T09:30:06+00:00",
    "duration_s": 6.0,
    "worker_id": 0,
    "title": "A talk about France",
    "config": {"system_prompt": "Be brief."},
}


def chunk(index: int, mode: str, **result: Any) -> dict[str, Any]:
    voice = {"ai_audio": f"ai_audio/turn_0_chunk_{index:03d}.wav", "ai_audio_duration_ms": 1000}
    return {
        "index": index,
        "receive_ts_ms": 1000 * index,
        "user_audio": f"user_audio/{index:03d}.wav",
        "user_frame": f"user_frames/{index:03d}.jpg",
        "result": {
            "mode": mode,
            "timing": {"wall_clock_ms": 40 + index},
            **(voice if mode == "SPEAK" else {}),
            **result,
        },
    }


DUPLEX = {
    "session_id": ID,
    "mode": "duplex",
    "worker_id": 0,
    "start_ts": 0,
    "config": {},
    "chunks": [
        chunk(0, "LISTEN"),
        chunk(1, "LISTEN", heard="What is the capital of France?"),
        chunk(2, "SPEAK", text="The capital "),
        chunk(3, "SPEAK", text="is Paris.", end_of_turn=True),
        chunk(4, "LISTEN"),
        chunk(5, "SPEAK", text="Anything else?", end_of_turn=True),
    ],
    "merged_replay": "merged_replay.wav",
    "merged_replay_video": "merged_replay.mp4",
    "end_reason": "stopped",
}

TURNS = {
    "session_id": ID,
    "mode": "chat",
    "turns": [
        {
            "turn_index": 0,
            "request_ts_ms": 10,
            "input": {"text": "What is on it?", "images": ["user_images/img_0.jpg"]},
            "output": {"text": "A cat.", "audio": "ai_audio/turn_0.wav", "audio_duration_ms": 300},
            "timing": {"elapsed_ms": 812.0},
        },
        {
            "turn_index": 1,
            "request_ts_ms": 5000,
            "input": {"audio": "user_audio/001.wav", "duration_ms": 300},
            "output": {"text": "Yes.", "audio": "ai_audio/turn_1.wav", "audio_duration_ms": 300},
            "timing": {"elapsed_ms": 400.0},
        },
    ],
}


def write_wav(path: Path, left: np.ndarray, right: np.ndarray | None = None) -> Path:
    channels = [left] if right is None else [left, right]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes((np.stack(channels, 1) * 32767).astype("<i2").tobytes())
    return path


def write_video(path: Path, seconds: int) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=Fraction(2))
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for i in range(2 * seconds):
            shade = np.full((240, 320, 3), 20 * i, np.uint8)
            frame = av.VideoFrame.from_ndarray(shade, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Asset path -> file: six seconds in which the left side speaks first, then the right."""
    folder = tmp_path_factory.mktemp("recording")
    tone = 0.5 * np.sin(np.arange(6 * RATE_HZ) * 0.2)
    halves = np.arange(6 * RATE_HZ) < 2 * RATE_HZ
    short = write_wav(folder / "short.wav", tone[:4800])
    picture = folder / "picture.jpg"
    with av.open(str(picture), "w", format="image2") as container:
        stream = container.add_stream("mjpeg", rate=1)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((48, 64, 3), 90, np.uint8))))
    files = {
        "merged_replay.wav": write_wav(folder / "replay.wav", tone * halves, tone * ~halves),
        "merged_replay.mp4": write_video(folder / "replay.mp4", 6),
        "user_images/img_0.jpg": picture,
    }
    for i in range(6):
        files[f"user_frames/{i:03d}.jpg"] = picture
        files[f"user_audio/{i:03d}.wav"] = short
        files[f"ai_audio/turn_0_chunk_{i:03d}.wav"] = short
        files[f"ai_audio/turn_{i}.wav"] = short
    return files


@pytest.fixture
def answers(media: dict[str, Path]) -> Answers:
    assets = {f"GET {API}/assets/{path}": file for path, file in media.items()}
    return Answers(
        pages={f"/s/{ID}": "session.html"},
        by_request={
            f"GET {API}": META,
            f"GET {API}/recording": DUPLEX,
            f"GET {API}/comment": {"comment": "Nice."},
            f"POST {API}/comment": {"status": "ok", "len": 5},
            **assets,
        },
    )


@pytest.fixture
def address(answers: Answers) -> Iterator[str]:
    with serving_pages(answers) as url:
        yield f"{url}/s/{ID}?lang=en"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(microphone_file(tmp_path_factory.mktemp("microphone"), CLIP, 1.0)) as opened:
        yield opened


@pytest.fixture
def opened(browser: Browser, address: str) -> Iterator[Visit]:
    with visit(browser, address) as visited:
        visited.wait_for_state("ready")
        yield visited


def pieces(page: Page) -> list[str]:
    return [" ".join(text.split()) for text in page.locator("#pieces li").all_text_contents()]


def clips(answers: Answers) -> list[str]:
    """Names of the sounds in the order in which they were first asked for."""
    paths = [path for path, _ in answers.asked if path.endswith(".wav")]
    return [path.rpartition("/")[2] for path in dict.fromkeys(paths)]


NOTE_CAPTIONS = """() => {
  const caption = document.querySelector("#caption");
  window.captions = [caption.textContent];
  new MutationObserver(() => captions.push(caption.textContent.trim()))
    .observe(caption, { childList: true });
  // A browser that stands still for two seconds plays on as if it had not: slowly, none is missed.
  for (const media of document.querySelectorAll("#media video, #media audio")) {
    media.defaultPlaybackRate = media.playbackRate = 0.25;
  }
}"""


def wait_for_captions(page: Page, *texts: str) -> None:
    """Wait until these have been shown, in this order; each for a moment only."""
    page.wait_for_function("(texts) => texts.every((text) => captions.includes(text))", arg=texts)
    shown = page.evaluate("captions")
    assert [text for text in dict.fromkeys(shown) if text in texts] == list(texts)


def test_a_duplex_recording_is_shown_with_its_replay_and_what_was_said(opened: Visit) -> None:
    page = opened.page

    assert page.inner_text("#title") == "A talk about France"
    assert page.get_attribute("#media video", "src", timeout=1000)
    said = pieces(page)
    assert said[1] == "0:01 Listening heard: What is the capital of France? 41 ms"
    assert said[3] == "0:03 Speaking is Paris. 43 ms"
    assert "Omni duplex" in page.inner_text("#meta")
    assert "stopped by the client" in page.inner_text("#meta")
    assert "Be brief." in (page.text_content("#config") or "")
    download = page.get_attribute("#download", "href") or ""
    assert download.endswith(f"{API}/download")
    assert opened.complaints == []


def test_the_timeline_has_both_sides_frames_and_captions(opened: Visit) -> None:
    page = opened.page

    page.wait_for_selector(".track.assistant canvas")
    assert page.locator(".track.you .block").count() == 1
    assert page.locator(".track.assistant .block").count() == 2
    assert page.locator(".track.frames img").count() >= 3
    captions = page.locator(".track.words span").all_text_contents()
    assert captions == [
        "What is the capital of France?",
        "The capital is Paris.",
        "Anything else?",
    ]
    # The picture of the sound: the left side is loud first, the right one later.
    loud = page.evaluate(
        """() => ["you", "assistant"].map((who) => {
             const { width, height } = document.querySelector(`.track.${who} canvas`);
             const context = document.querySelector(`.track.${who} canvas`).getContext("2d");
             const isInked = (at) => {
               const [x, y] = [Math.floor(at * width), Math.floor(height / 3)];
               return context.getImageData(x, y, 1, 1).data[3] > 0;
             };
             return [isInked(0.15), isInked(0.7)];
           })"""
    )
    assert loud == [[True, False], [False, True]]


def test_a_line_is_played_from_its_moment_with_its_caption(opened: Visit) -> None:
    page = opened.page
    page.evaluate(NOTE_CAPTIONS)
    page.locator("#pieces button").nth(2).focus()

    page.keyboard.press("Enter")

    wait_for_captions(page, "Assistant: The capital", "Assistant: The capital is Paris.")
    assert "You: What is the capital of France?" not in page.evaluate("captions")
    assert page.locator("#pieces button[aria-current]").count() == 1


def test_a_line_keeps_the_focus_when_more_is_known_of_the_replay(opened: Visit) -> None:
    """All lines were made anew, and whoever had tabbed to one was back at the top."""
    line = opened.page.locator("#pieces button").nth(2)
    line.focus()

    opened.page.locator("#media video").dispatch_event("loadedmetadata")

    expect(line).to_be_focused()


def test_pointing_at_the_timeline_jumps(opened: Visit) -> None:
    page = opened.page
    # Drawn anew when the length of the replay and then the looks of its sound are known.
    page.wait_for_function("document.querySelector('#media video').readyState >= 1")
    page.wait_for_selector(".track.assistant canvas")
    page.evaluate(NOTE_CAPTIONS)
    box = page.locator(".track.ticks").bounding_box()
    assert box is not None

    page.mouse.click(box["x"] + box["width"] * 5.2 / 6, box["y"] + 5)

    wait_for_captions(page, "Assistant: Anything else?")
    assert len(page.evaluate("captions.filter(Boolean)")) == 1


def test_captions_of_both_sides_last_as_long_as_the_answers_sound(
    browser: Browser, address: str, answers: Answers
) -> None:
    """The question is known only when the answer begins, and its words come before its sound."""
    answers.by_request[f"GET {API}/recording"] = {
        **DUPLEX,
        "chunks": [
            chunk(0, "LISTEN"),
            chunk(1, "SPEAK", heard="Where is Paris?", text="In France."),
            chunk(2, "SPEAK"),
            chunk(3, "SPEAK", end_of_turn=True),
            chunk(4, "LISTEN"),
        ],
    }
    with visit(browser, address) as opened:
        page = opened.page
        opened.wait_for_state("ready")
        page.wait_for_selector(".track.assistant canvas")
        captions = page.eval_on_selector_all(
            ".track.words span",
            "f => f.map((e) => [e.textContent, e.style.left, e.style.width, e.offsetTop])",
        )
        page.evaluate(NOTE_CAPTIONS)
        page.locator("#pieces button").nth(1).click()

        wait_for_captions(
            page, "You: Where is Paris?\nAssistant: In France.", "Assistant: In France."
        )
    (question, left, _, question_top), (answer, answer_left, width, answer_top) = captions
    assert (question, answer) == ("Where is Paris?", "In France.")
    assert left == answer_left
    assert width == "50%"
    assert answer_top > question_top


def test_longer_chunks_are_where_the_replay_has_them(
    browser: Browser, address: str, answers: Answers
) -> None:
    chunks = [chunk(0, "LISTEN", dropped=True), chunk(1, "SPEAK", text="Yes."), chunk(2, "LISTEN")]
    for entry, at in zip(chunks, (0.0, 2000.0, 4500.0), strict=True):
        entry["replay_ms"] = at
    chunks[2]["error"] = "bad_audio"
    answers.by_request[f"GET {API}/recording"] = {**DUPLEX, "chunks": chunks}
    with visit(browser, address) as opened:
        opened.wait_for_state("ready")

        assert pieces(opened.page) == [
            "0:00 Listening dropped 40 ms",
            "0:02 Speaking Yes. 41 ms",
            "0:04 Listening its sound could not be read 42 ms",
        ]


def test_without_a_replay_the_clips_are_played_one_after_the_other(
    browser: Browser, address: str, answers: Answers
) -> None:
    answers.by_request[f"GET {API}"] = {**META, "app_type": "chat"}
    answers.by_request[f"GET {API}/recording"] = TURNS
    with visit(browser, address) as opened:
        page = opened.page
        opened.wait_for_state("ready")
        assert pieces(page) == [
            "1 You What is on it?",
            "1 Assistant A cat. 812 ms",
            "2 You",
            "2 Assistant Yes. 400 ms",
        ]
        assert page.locator("#pieces img").count() == 1

        page.evaluate(NOTE_CAPTIONS)

        page.locator("#pieces button").nth(1).click()

        wait_for_captions(page, "Assistant: A cat.", "Assistant: Yes.")
        # The caption changes a moment before the browser asks for the clip.
        opened.wait_until(lambda: clips(answers)[-3:] == ["turn_0.wav", "001.wav", "turn_1.wav"])
        assert opened.complaints == []


def test_a_turn_that_failed_and_an_early_end_say_why(
    browser: Browser, address: str, answers: Answers
) -> None:
    failed = {"turn_index": 2, "input": {"text": "And?"}, "output": {}, "error": "worker_lost"}
    newer = {"turn_index": 3, "input": {"text": "Hm?"}, "output": {}, "error": "of_a_later_version"}
    turns = {**TURNS, "turns": [*TURNS["turns"], failed, newer], "end_reason": "worker_lost"}
    answers.by_request[f"GET {API}"] = {**META, "app_type": "chat", "title": "对话 01-30 09:30"}
    answers.by_request[f"GET {API}/recording"] = turns
    with visit(browser, address) as opened:
        opened.wait_for_state("ready")

        assert opened.page.inner_text("#title") == "对话 01-30 09:30"
        assert pieces(opened.page)[5:] == [
            "3 Assistant the worker was lost",
            "4 You Hm?",
            "4 Assistant of_a_later_version",
        ]
        assert "How it ended the worker was lost" in " ".join(
            opened.page.inner_text("#meta").split()
        )
        assert opened.barriers() == []


def test_a_recording_that_is_not_finished_appears_when_it_is(
    browser: Browser, address: str, answers: Answers
) -> None:
    recording = answers.by_request.pop(f"GET {API}/recording")
    answers.by_request[f"GET {API}"] = {**META, "ended_at": None, "duration_s": None}
    with visit(browser, address) as opened:
        page = opened.page
        page.clock.install()
        page.reload()
        opened.wait_for_state("waiting")
        expect(page.locator("#note")).to_contain_text("The session is still running.")
        answers.by_request[f"GET {API}"] = META
        page.clock.run_for(3_100)
        expect(page.locator("#note")).to_contain_text("is being put together")

        # It had given up for good: the recording "cannot be shown: Failed to fetch".
        page.route("**/api/**", lambda route: route.abort())
        page.clock.run_for(3_100)
        expect(page.locator("#note")).to_contain_text("The service does not answer.")
        page.unroute("**/api/**")
        answers.by_request[f"GET {API}/recording"] = recording
        page.clock.run_for(3_100)

        opened.wait_for_state("ready")
        assert page.is_hidden("#note")
        assert "0:06" in page.inner_text("#meta")


def test_a_recording_that_could_not_be_finished_says_why(
    browser: Browser, address: str, answers: Answers
) -> None:
    answers.by_request[f"GET {API}/recording"] = {**DUPLEX, "problem": "the disk was full"}
    with visit(browser, address) as opened:
        opened.wait_for_state("ready")

        assert "the disk was full" in opened.page.inner_text("#note")


def test_the_comment_can_be_changed(opened: Visit, answers: Answers) -> None:
    page = opened.page
    assert page.input_value("#comment") == "Nice."

    page.fill("#comment", "Very nice.")
    page.click("#comment-form button")

    expect(page.locator("#comment-state")).to_have_text("Saved")
    assert (f"POST {API}/comment", {"comment": "Very nice."}) in answers.asked
    del answers.by_request[f"POST {API}/comment"]
    page.click("#comment-form button")
    expect(page.locator("#comment-state")).to_have_text("Not Found")


def test_an_unknown_recording_is_said_to_be_unknown(
    browser: Browser, address: str, answers: Answers
) -> None:
    answers.by_request.clear()
    with visit(browser, address) as opened:
        opened.wait_for_state("failed")

        assert opened.page.inner_text("#problem") == f"There is no recording {ID}."
        assert opened.page.is_hidden("main")


def test_it_fits_names_its_controls_and_speaks_both_languages(opened: Visit) -> None:
    page = opened.page
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, a, textarea, video, audio, img, [tabindex]")]
             .filter((e) => !e.textContent.trim() && !e.getAttribute("aria-label")
               && !e.labels?.length && !e.alt && e.alt !== "")
             .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    for n_switches, title, line in ((0, "What was said", "Speaking"), (1, "对话内容", "说话")):
        if n_switches:
            page.click("[data-language-switch]")
        expect(page.locator("#pieces li").nth(2)).to_contain_text(line)
        assert page.inner_text("#pieces-title") == title
        assert not page.locator("text=/session\\.\\w+/").count()
        for viewport in (DESKTOP, PHONE):
            page.set_viewport_size(viewport)
            assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    expect(page.locator("#title")).to_have_text("A talk about France")
    page.click("details summary")
    assert opened.barriers() == []
    assert opened.complaints == []


def test_a_recording_of_the_gateways_own_making_is_shown(
    browser: Browser, tmp_path: Path, media: dict[str, Path]
) -> None:
    """The recordings above are made by hand; this one is a log that the gateway has finished."""
    folder = Store(tmp_path).create(ID, {**META, "ended_at": None, "duration_s": None})
    log = Journal(folder)
    picture = media["user_images/img_0.jpg"].read_bytes()
    second = np.full(RATE_HZ, 0.25, "<f4").tobytes()
    speech = np.full(24_000, 0.25, "<f4").tobytes()
    answers = [
        Result(0, is_listen=True, unit_index=1, heard="Where is Paris?"),
        Result(1, is_listen=False, unit_index=2, text="In ", audio=speech),
        Result(2, is_listen=False, unit_index=3, text="France.", audio=speech, end_of_turn=True),
    ]
    for at, result in enumerate(answers):
        log.append(TOOK, at, 0.0, encode(Input(at, second, [picture])))
        log.append(GAVE, at + 0.1, 40.0, encode(result))
    log.append(END, 3.0, 0.0, b"stopped")
    log.close()
    finish(folder)
    with (
        gateway_alone(tmp_path) as address,
        visit(browser, f"{address}/s/{ID}?lang=en") as opened,
    ):
        page = opened.page
        opened.wait_for_state("ready")
        page.wait_for_selector(".track.assistant canvas")
        page.evaluate(NOTE_CAPTIONS)

        page.locator("#pieces button").nth(1).click()

        wait_for_captions(page, "Assistant: In", "Assistant: In France.")
        assert page.locator("#media video").count() == 1
        assert pieces(page)[0] == "0:00 Listening heard: Where is Paris? 40 ms"
        assert page.inner_text("#comment") == ""
        page.fill("#comment", "Good.")
        page.click("#comment-form button")
        expect(page.locator("#comment-state")).to_have_text("Saved")
        assert opened.complaints == []
