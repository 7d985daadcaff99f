"""`python -m client.load`: many sessions at the pace of microphones, and what they got.

    python -m client.load --sessions 64                       full duplex
    python -m client.load --mode audio:8 --mode half_duplex:4 --mode chat:2 --audio question.wav

Full duplex sends a chunk a second, whatever the server does. Half duplex says `--audio`, hears the
answer out as a page does (the microphone is off meanwhile and 0.8 s longer) and says it again.
Chat asks one question after the other. Each session acts at an instant of its own within the chunk
unless `--together`. Times are taken at the socket; those of half duplex count from the end of the
speech, those of chat from the question. Prints a table and, as the last line, one JSON object.

Exit status: 0 when every session was served to its end, every chunk was used and answered, and
every question of half duplex and chat had its whole answer; 1 when something was lost (a session
refused or ended early, a result or an answer missing, input dropped, an error); 2 for a wrong
command line or a file that cannot be read. Late results, audible gaps and turns without an answer
in full duplex, where silence may be one, are figures, not losses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client.connection import endpoint
from client.events import SessionError
from client.journal import NO_SAMPLES
from client.load.figures import client_figures, report, table
from client.load.plan import MODES, Mode, Plan, Track
from client.load.visits import Visit, visit
from client.media import read_audio
from client.paced import LoopProbe
from shared.clips import Clip, MediaError, read_clip
from shared.limits import MAX_CHUNK_S
from shared.playback import DEFAULT_BUFFER_S


async def load(plan: Plan, clip: Clip) -> dict[str, Any]:
    """Run all sessions to their end; returns the report."""
    track = Track(clip, plan.pause_s)
    start_at, cpu_at = time.monotonic(), time.process_time()

    async def run(mode: Mode) -> list[Visit]:
        phases_s = plan.phases_s(mode)
        return await asyncio.gather(
            *(visit(plan, mode, track, start_at, i, phase) for i, phase in enumerate(phases_s))
        )

    async with LoopProbe() as probe:
        visits = await asyncio.gather(*(run(mode) for mode in plan.sessions))
    wall_s = time.monotonic() - start_at
    cpu_share = (time.process_time() - cpu_at) / wall_s
    settings = {
        "url": plan.url,
        "sessions": dict(plan.sessions),
        "seconds": plan.duration_s,
        "chunk_s": {mode: plan.chunk_of(mode) for mode in plan.sessions},
        "together": plan.is_together,
        "buffer_ms": 1000 * plan.buffer_s,
    }
    modes = {
        mode: report(plan, mode, track, of_mode)
        for mode, of_mode in zip(plan.sessions, visits, strict=True)
    }
    everyone = [what for of_mode in visits for what in of_mode]
    return {
        "settings": settings,
        "modes": modes,
        "client": client_figures(everyone, probe, cpu_share),
        "lost": any(figures["lost"] for figures in modes.values()),
    }


def sessions_of(wanted: Sequence[str], n_sessions: int, default: Mode) -> dict[Mode, int]:
    """Return how many sessions of each mode are asked for.

    Args:
        wanted: `mode` (`n_sessions` of it) or `mode:number`.

    Raises:
        ValueError: no such mode, one that is named twice, or no such number.
    """
    sessions: dict[Mode, int] = {}
    for each in wanted or [default]:
        name, colon, number = each.partition(":")
        mode = next((mode for mode in MODES if mode == name), None)
        if mode is None:
            raise ValueError(f"--mode is {each}, must be one of {', '.join(MODES)}")
        if mode in sessions:
            raise ValueError(f"--mode {mode} is said twice")
        if colon and not number.isdecimal():
            raise ValueError(f"--mode is {each}, expected a number behind the colon")
        sessions[mode] = int(number) if colon else n_sessions
        if sessions[mode] < 1:
            raise ValueError(f"{mode} has {sessions[mode]} sessions, must be at least 1")
    return sessions


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m client.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url",
        default="ws://127.0.0.1:8006",
        help="server, with the path of the site that it is below (default: %(default)s)",
    )
    parser.add_argument(
        "--mode",
        action="append",
        default=[],
        metavar="MODE[:N]",
        help=f"{', '.join(MODES)}, and how many sessions of it (else --sessions); may be repeated "
        "(default: audio, with --video omni)",
    )
    parser.add_argument("--sessions", type=int, default=1, help="sessions at the same time")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each session")
    parser.add_argument(
        "--audio",
        type=Path,
        help="what each says, again and again; else silence (half duplex needs it)",
    )
    parser.add_argument("--video", type=Path, help="file whose picture is sent, a frame a second")
    parser.add_argument("--speech", action="store_true", help="chat is answered with sound, too")
    parser.add_argument("--pause-s", type=float, default=10.0, help="silence after each --audio")
    parser.add_argument(
        "--chunk-s", type=float, help="seconds per chunk (default: 1, half duplex 0.5)"
    )
    parser.add_argument("--together", action="store_true", help="all send at the same instant")
    parser.add_argument(
        "--buffer-ms", type=float, default=1000 * DEFAULT_BUFFER_S, help="the player's buffer"
    )
    parser.add_argument(
        "--max-wait-s", type=float, default=60.0, help="a session that waits longer gives up"
    )
    parser.add_argument("--api-key")
    parser.add_argument("--ca", type=Path, help="certificate to trust, such as certs/cert.pem")
    parser.add_argument("--json", type=Path, help="also write the JSON line to this file")
    arguments = parser.parse_args(argv)
    try:
        default: Mode = "omni" if arguments.video else "audio"
        arguments.sessions = sessions_of(arguments.mode, arguments.sessions, default)
        endpoint(arguments.url, "/")
    except (ValueError, SessionError) as error:
        parser.error(str(error))
    if "omni" in arguments.sessions and not arguments.video:
        parser.error("--mode omni sends pictures: name a file with --video")
    if "half_duplex" in arguments.sessions and not arguments.audio:
        parser.error("--mode half_duplex asks with speech: name a file with --audio")
    if arguments.chunk_s is not None and not 0.05 <= arguments.chunk_s <= MAX_CHUNK_S:
        parser.error(f"--chunk-s is {arguments.chunk_s}, must be in 0.05..{MAX_CHUNK_S:g}")
    if arguments.json and not arguments.json.parent.is_dir():
        folder = arguments.json.parent
        parser.error(f"--json is {arguments.json}, but there is no folder {folder}")
    for name in ("seconds", "pause_s", "buffer_ms", "max_wait_s"):
        number = getattr(arguments, name)
        if not 0 <= number < math.inf:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} is {number}, must be finite and not negative")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is told at the top."""
    arguments = parse_arguments(argv)
    plan = Plan(
        url=arguments.url,
        sessions=arguments.sessions,
        duration_s=arguments.seconds,
        chunk_s=arguments.chunk_s,
        is_together=arguments.together,
        max_wait_s=arguments.max_wait_s,
        pause_s=arguments.pause_s,
        buffer_s=arguments.buffer_ms / 1000,
        chat_speaks=arguments.speech,
        api_key=arguments.api_key,
        ca_file=arguments.ca,
    )
    try:
        audio = read_audio(arguments.audio) if arguments.audio else NO_SAMPLES
        frames = read_clip(arguments.video).frames if arguments.video else ()
        figures = asyncio.run(load(plan, Clip(audio, frames)))
    except (MediaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 1
    print(table(figures))
    line = json.dumps(figures)
    if arguments.json:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if figures["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
