"""Chromium with a microphone that plays a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Literal

import numpy as np
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, sync_playwright

from shared.audio import read_wav, write_wav
from tests.fakes.patience import PATIENCE_S

CHROMIUM = which("chromium")
DESKTOP: ViewportSize = {"width": 1280, "height": 860}
PHONE: ViewportSize = {"width": 360, "height": 740}

LOOKS: tuple[tuple[Literal["light", "dark"], ViewportSize], ...] = (
    ("light", DESKTOP),
    ("dark", PHONE),
)
AXE_RUN = """async () => {
    const { violations } = await axe.run(document, { resultTypes: ["violations"] });
    const why = (node) => [...node.any, ...node.all, ...node.none].map((check) => check.message);
    const where = `${document.documentElement.lang}, ${innerWidth} wide`;
    return violations.flatMap(({ id, impact, nodes }) => nodes.map(
        (node) => `${impact} ${id}: ${node.target} (${where}): ${why(node).join("; ")}`));
}"""

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
    # A name that is no loopback to the browser: what a page of another machine looks like.
    "--host-resolver-rules=MAP omni.localtest 127.0.0.1",
]


def microphone_file(folder: Path, speech: Path, silence_s: float) -> Path:
    """A clip followed by silence: Chromium plays the file over and over."""
    samples, rate = read_wav(speech)
    path = folder / "microphone.wav"
    write_wav(path, np.append(samples, np.zeros(round(silence_s * rate), np.float32)), rate)
    return path


@contextlib.contextmanager
def chromium(microphone: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[*FLAGS, f"--use-file-for-fake-audio-capture={microphone.resolve()}"],
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """One open page and what its console has complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def note_console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def state(self) -> str:
        return self.page.get_attribute("body", "data-state") or ""

    def wait_for_script(self) -> None:
        """The load event comes before scripts that wait for something, and their buttons are dead
        until then."""
        self.page.wait_for_selector("[data-language-switch][lang]", state="attached")

    def wait_for_state(self, *states: str, timeout_s: float = PATIENCE_S) -> None:
        selector = ", ".join(f"body[data-state={state}]" for state in states)
        self.page.wait_for_selector(selector, timeout=1000 * timeout_s)

    def barriers(self) -> list[str]:
        """What axe finds on the page as it stands, in both languages, light on a desktop and dark
        on a phone; then the page is as before."""
        page, before = self.page, self.page.viewport_size or DESKTOP
        found = []
        if not page.evaluate("'axe' in window"):
            page.evaluate(AXE_SCRIPT)
        for _ in range(2):
            for scheme, viewport in LOOKS:
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size(viewport)
                found += page.evaluate(AXE_RUN)
            # Not by the mouse, which would take the focus along.
            page.eval_on_selector("[data-language-switch]", "button => button.click()")
        page.emulate_media(color_scheme="null")
        page.set_viewport_size(before)
        return found

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Let the browser run until the condition holds."""
        for _ in range(round(timeout_s * 20)):
            if condition():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("still not so")


@contextlib.contextmanager
def visit(
    browser: Browser, url: str, viewport: ViewportSize = DESKTOP, locale: str = "en-US"
) -> Iterator[Visit]:
    context = browser.new_context(
        viewport=viewport, permissions=["microphone", "camera"], locale=locale
    )
    try:
        page = context.new_page()
        opened = Visit(page)
        page.on("console", opened.note_console)
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.goto(url)
        opened.wait_for_script()
        yield opened
    finally:
        context.close()
