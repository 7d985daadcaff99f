"""The administration page in a real browser, against scripted answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.fakes.browser import CHROMIUM, DESKTOP, PHONE, Visit, chromium, microphone_file, visit
from tests.fakes.page_server import Answers, gateway_alone, serving_pages

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

CLIP = Path(__file__).parents[1] / "assets" / "capital_france.wav"
BOUNDS = ("0.05", "0.1", "0.2", "1.0", "+Inf")
REFUSED = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"


def metrics(*counts: int) -> str:
    """The gateway's histogram of unit times with these cumulative counts."""
    name = "omni_gateway_result_seconds_bucket"
    lines = [f'{name}{{le="{le}"}} {n}.0' for le, n in zip(BOUNDS, counts, strict=True)]
    return "# TYPE omni_gateway_result_seconds histogram\n" + "\n".join(lines) + "\n"


def worker(index: int, status: str, **changes: Any) -> dict[str, Any]:
    return {
        "worker_id": f"worker_{index}",
        "host": "127.0.0.1",
        "port": 22400 + index,
        "gpu_id": index,
        "status": status,
        "current_session_id": None,
        "total_requests": 1234,
        "avg_inference_time_ms": 88.4,
        "last_heartbeat": "2026-01-31T12:00:00",
        "slots_total": 8,
        "slots_free": 7,
        "stage": None,
        "stage_progress": 0.0,
        "stage_elapsed_s": 0.0,
        "eta_s": None,
    } | changes


def recording(session_id: str, title: str, **changes: Any) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "title": title,
        "app_type": "omni_duplex",
        "created_at": "2026-01-30T09:30:00+00:00",
        "duration_s": 125.0,
        "n_bytes": 12_400_000,
        "is_live": False,
    } | changes


APPS = [
    {"app_id": "turnbased", "name": "Turn-based Chat", "route": "/turnbased", "enabled": True},
    {"app_id": "omni", "name": "Omni Full-Duplex", "route": "/omni", "enabled": False},
]
ETA = {
    "config": {
        "eta_chat_s": 15.0,
        "eta_half_duplex_s": 180.0,
        "eta_audio_duplex_s": 120.0,
        "eta_omni_duplex_s": 90.0,
        "ema_alpha": 0.3,
    },
    "ema_alpha": 0.3,
    **{f"ema_{kind}_s": None for kind in ("chat", "half_duplex", "audio_duplex")},
    **{f"ema_{kind}_samples": 0 for kind in ("chat", "half_duplex", "audio_duplex")},
    "ema_omni_duplex_s": 71.4,
    "ema_omni_duplex_samples": 5,
}
STATUS = {
    "gateway_healthy": True,
    "total_workers": 3,
    "idle_workers": 1,
    "busy_workers": 0,
    "loading_workers": 1,
    "error_workers": 0,
    "offline_workers": 1,
    "queue_length": 1,
    "max_queue_size": 1000,
    "slots_total": 24,
    "slots_free": 15,
    "sessions": 2,
}
TICKET = {
    "ticket_id": "q_1",
    "request_type": "omni_duplex",
    "session_id": "omni_waiting",
    "position": 1,
    "estimated_wait_s": 75.2,
    "enqueued_at": "2026-01-31T12:00:00",
    "wait_elapsed_s": 12.0,
}
COMPILED = {"state": "warm", "degraded": False, "graphs": 31, "captures": 74, "reason": ""}


@pytest.fixture
def answers() -> Answers:
    loading = worker(1, "loading", stage="warmup_compile", stage_progress=0.4, eta_s=31.0)
    return Answers(
        pages={"/admin": "admin.html", "/": "index.html"},
        by_request={
            "GET /status": STATUS,
            "GET /workers": {
                "total": 3,
                "workers": [worker(0, "idle"), loading, worker(2, "offline")],
            },
            "GET /api/compile": {
                "workers": [
                    {"worker_id": "worker_0", "recompiles_after_idle": 0, **COMPILED},
                    {"worker_id": "worker_1", "state": None},
                    {"worker_id": "worker_2", "error": "no answer"},
                ]
            },
            "GET /api/queue": {"queue_length": 1, "max_queue_size": 1000, "items": [TICKET]},
            "DELETE /api/queue/q_1": {"success": True},
            "GET /sessions": {
                "total": 1,
                "sessions": [
                    {
                        "session_id": "omni_live",
                        "worker_id": "worker_0",
                        "messages_hash": "",
                        "last_active": "2026-01-31T12:00:00",
                    }
                ],
            },
            "GET /metrics": metrics(0, 0, 0, 0, 0),
            "GET /api/admin/apps": {"apps": APPS},
            "PUT /api/admin/apps/omni": {"success": True, "app": {**APPS[1], "enabled": True}},
            "GET /api/config/eta": ETA,
            "PUT /api/config/eta": ETA,
            "GET /api/recordings": [
                recording("20260130_omni_a", "A talk"),
                recording("20260130_omni_b", "Another", is_live=True, duration_s=None),
            ],
            "DELETE /api/recordings/20260130_omni_a": {"success": True},
        },
    )


@pytest.fixture
def address(answers: Answers) -> Iterator[str]:
    with serving_pages(answers) as url:
        yield f"{url}/admin?lang=en"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(microphone_file(tmp_path_factory.mktemp("microphone"), CLIP, 1.0)) as opened:
        yield opened


@pytest.fixture
def opened(browser: Browser, address: str) -> Iterator[Visit]:
    with visit(browser, address) as visited:
        visited.wait_for_state("ready")
        yield visited


def refresh(page: Page) -> None:
    """What the page does after some seconds, now: it looks when it becomes visible."""
    with page.expect_response("**/metrics"):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def row(page: Page, box: str, text: str) -> str:
    return page.locator(f"#{box} tbody tr", has_text=text).inner_text()


def test_everything_the_service_says_is_shown(opened: Visit) -> None:
    page = opened.page

    assert "1 / 3" in page.inner_text("#service [data-name=idle_workers]")
    assert "bad" in (page.get_attribute("#service [data-name=offline_workers]", "class") or "")
    idle, loading = row(page, "workers", "worker_0"), row(page, "workers", "worker_1")
    assert "7 / 8" in idle
    assert "cache warm, 31 graphs, 74 captured" in idle
    assert "warmup_compile, 31 s left" in loading
    assert page.locator("#workers progress").get_attribute("value") == "0.4"
    assert "offline" in row(page, "workers", "worker_2")
    assert "1 min 15 s" in row(page, "queue", "omni_waiting")
    assert "worker_0" in row(page, "sessions", "omni_live")
    assert "12.4 MB" in row(page, "recordings", "A talk")
    # What is still being recorded cannot be deleted.
    assert "live" in row(page, "recordings", "Another")
    assert page.locator("#recordings tr", has_text="Another").locator("button").count() == 0
    link = page.locator("#recordings a", has_text="A talk").get_attribute("href")
    assert link == "s/20260130_omni_a"
    assert page.is_checked("#app-turnbased")
    assert not page.is_checked("#app-omni")
    assert page.inner_text("#eta-eta_omni_duplex_s-learned") == "learned: 71 s from 5 sessions"
    assert opened.complaints == []


def test_latency_is_that_of_the_newest_interval(opened: Visit, answers: Answers) -> None:
    page = opened.page
    assert page.inner_text("#latency-now") == "No units in the last interval"

    # Of 100 units 60 took 50 to 100 ms and the others 100 to 200 ms.
    answers.by_request["GET /metrics"] = metrics(0, 60, 100, 100, 100)
    refresh(page)
    expect(page.locator("#latency-now")).to_contain_text("within 92 ms, 95 % within 188 ms")
    answers.by_request["GET /metrics"] = metrics(0, 60, 100, 120, 120)
    refresh(page)

    expect(page.locator("#latency-now")).to_contain_text("95 % within 960 ms")
    assert page.locator("#latency path.p95").get_attribute("d")
    assert "within 960 ms" in (page.get_attribute("#latency", "aria-label") or "")


def test_a_gateway_that_was_started_anew_gives_no_figures(opened: Visit, answers: Answers) -> None:
    answers.by_request["GET /metrics"] = metrics(5, 5, 5, 5, 5)
    refresh(opened.page)
    expect(opened.page.locator("#latency-now")).to_contain_text("ms")

    answers.by_request["GET /metrics"] = metrics(1, 2, 2, 2, 2)
    refresh(opened.page)

    expect(opened.page.locator("#latency-now")).to_have_text("No units in the last interval")


def test_what_the_operator_changes_is_sent(opened: Visit, answers: Answers) -> None:
    page = opened.page
    page.on("dialog", lambda dialog: dialog.accept())

    with page.expect_response("**/api/queue/q_1"):
        page.click("text=Cancel")
    answers.by_request["GET /api/queue"] |= {"items": []}
    with page.expect_response("**/api/admin/apps/omni"):
        page.click("#app-omni")
    page.fill("#eta-eta_chat_s", "20")
    page.click("#eta button")
    expect(page.locator("#eta-saved")).to_have_text("Saved")
    expect(page.locator("#queue")).to_have_text("Nobody is waiting.")
    with page.expect_response("**/api/recordings/20260130_omni_a"):
        page.click("text=Delete")

    sent = {name: body for name, body in answers.asked if not name.startswith("GET")}
    assert sent == {
        "DELETE /api/queue/q_1": None,
        "PUT /api/admin/apps/omni": {"enabled": True},
        "PUT /api/config/eta": {**ETA["config"], "eta_chat_s": 20},  # type: ignore[dict-item]
        "DELETE /api/recordings/20260130_omni_a": None,
    }
    assert opened.complaints == []


def test_a_refused_switch_goes_back(opened: Visit, answers: Answers) -> None:
    del answers.by_request["PUT /api/admin/apps/omni"]

    opened.page.click("#app-omni")

    expect(opened.page.locator("#problem")).to_have_text("Not Found")
    assert not opened.page.is_checked("#app-omni")


def test_a_refresh_keeps_the_focus_and_what_is_being_typed(opened: Visit, answers: Answers) -> None:
    page = opened.page
    page.fill("#eta-eta_chat_s", "33")
    page.focus("#queue button")
    waiting = {**TICKET, "ticket_id": "q_0", "session_id": "omni_first"}
    answers.by_request["GET /api/queue"] |= {"items": [waiting, {**TICKET, "position": 2}]}

    refresh(page)
    expect(page.locator("#queue tbody tr")).to_have_count(2)

    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == (
        "Cancel the request omni_waiting"
    )
    assert page.input_value("#eta-eta_chat_s") == "33"


def test_the_key_is_asked_for_and_kept_for_the_tab(
    browser: Browser, address: str, answers: Answers
) -> None:
    answers.admin_key = "right"
    with visit(browser, address) as opened:
        page = opened.page
        opened.wait_for_state("locked")
        assert page.evaluate("document.activeElement.id") == "key"

        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        # It said nothing, as if nothing had been pressed.
        expect(page.locator("#problem")).to_have_text("This is not an admin key of this service.")
        assert opened.state() == "locked"
        assert opened.barriers() == []
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        opened.wait_for_state("ready")
        page.reload()
        opened.wait_for_state("ready")

        assert page.is_hidden("#key-form")
        assert page.evaluate("localStorage.length") <= 1
        assert set(opened.complaints) <= {REFUSED}


def test_a_users_key_may_look_and_is_asked_for_an_admins(
    browser: Browser, address: str, answers: Answers
) -> None:
    answers.refused = {
        "GET /api/queue": (403, "forbidden"),
        "GET /api/recordings": (403, "forbidden"),
    }
    with visit(browser, address) as opened:
        opened.wait_for_state("locked")

        assert "7 / 8" in row(opened.page, "workers", "worker_0")
        assert opened.page.is_visible("#key-form")
        assert opened.page.is_hidden("#problem")


def test_a_part_that_is_not_there_says_so_and_the_others_work(
    browser: Browser, address: str, answers: Answers
) -> None:
    del answers.by_request["GET /api/recordings"]
    with visit(browser, address) as opened:
        opened.wait_for_state("ready")

        expect(opened.page.locator("#recordings")).to_have_text("This service does not offer that.")
        assert "7 / 8" in row(opened.page, "workers", "worker_0")


def test_it_looks_every_few_seconds_and_not_while_hidden(opened: Visit, answers: Answers) -> None:
    page = opened.page
    page.clock.install()
    page.reload()
    opened.wait_for_state("ready")

    with page.expect_response("**/status"):
        page.clock.run_for(3_500)
    opened.wait_for_state("ready")
    set_hidden(page, True)
    page.wait_for_timeout(200)
    before = answers.n_asked("GET /status")
    page.clock.run_for(30_000)
    page.wait_for_timeout(200)

    assert answers.n_asked("GET /status") == before
    assert page.inner_text("#state") == "Held while hidden"
    with page.expect_response("**/status"):
        set_hidden(page, False)


def set_hidden(page: Page, is_hidden: bool) -> None:
    page.evaluate(
        """(hidden) => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


def test_it_fits_names_its_controls_and_speaks_both_languages(opened: Visit) -> None:
    page = opened.page
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, select, a, textarea")].filter((e) =>
             !e.textContent.trim() && !e.getAttribute("aria-label") && !e.labels?.length)
           .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    for n_switches, title, cancel in ((0, "Queue", "Cancel"), (1, "队列", "取消")):
        if n_switches:
            page.click("[data-language-switch]")
        expect(page.locator("#queue button")).to_have_text(cancel)
        assert page.inner_text("#queue-title") == title
        assert not page.locator("text=/admin\\.\\w+/").count()
        for viewport in (DESKTOP, PHONE):
            page.set_viewport_size(viewport)
            assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert page.get_attribute("html", "lang") == "zh-CN"
    assert "空闲" in row(page, "workers", "worker_0")
    assert opened.barriers() == []
    assert opened.complaints == []


def test_the_gateway_itself_has_all_of_it(browser: Browser, tmp_path: Path) -> None:
    """The answers above are made by hand; this page is the gateway's, with all that it says."""
    with (
        gateway_alone(tmp_path) as address,
        visit(browser, f"{address}/admin?lang=en") as opened,
    ):
        opened.wait_for_state("ready")
        page = opened.page

        assert "offline" in row(page, "workers", "worker_0")
        expect(page.locator("#apps input")).to_have_count(4)
        page.uncheck("#app-omni")
        expect(page.locator("#recordings")).to_have_text("Nothing has been recorded.")
        page.fill("#eta-eta_chat_s", "21")
        page.click("#eta button")
        expect(page.locator("#eta-saved")).to_have_text("Saved")
        page.reload()
        opened.wait_for_state("ready")

        assert page.input_value("#eta-eta_chat_s") == "21"
        assert not page.is_checked("#app-omni")
        assert page.is_hidden("#problem")
        assert not page.locator("text=This service does not offer that.").count()
        assert opened.complaints == []
