"""Half duplex: two sessions of messages and answers, as text and as speech.

The original feeds every prompt in one call, ours in calls of bounded size, so calls are compared
by their sums where something is fed, and one by one where tokens are generated. It hands text out
together with the next second of sound; ours comes first, so the texts are compared joined.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.golden.compare import Trace, clip, image
from tests.golden.driver import Played, run_program
from tests.golden.loaded import load_model
from tests.golden.replay_chat import fed_rows
from worker.models.contract import Clip, MessagePart, Picture, TurnMessage
from worker.models.minicpmo45 import half_duplex, ops
from worker.models.minicpmo45.half_duplex import HalfDuplex, HalfDuplexSettings, Turn
from worker.models.minicpmo45.model import MiniCpmO45

STEP = re.compile(r'(\w+)(?:: \[((?:"(?:[^"\\]|\\.)*"|[^"])*?)\])?(?:; |$)')
"""Role and parts of a message, or `generate`; a text may hold any characters."""
ITEM = re.compile(r'"(?:[^"\\]|\\.)*"|base_pcm\[(\d+):(\d+)\]|image\((\d+),\s*(\d+),\s*(\d+)\)')


def replay(trace: Trace, folder: Path) -> None:
    model = load_model(folder)
    source = Trace("audio", folder).take("base_pcm").numpy()
    script = _script(trace.given("inputs"), source)
    for index in range(len(trace.fields["sessions"])):
        _Session(trace, index, model).play(script)


def _script(text: str, source: np.ndarray) -> list[TurnMessage | None]:
    """Read `system: [...]; user: [...]; generate; ...`; None stands for `generate`."""
    steps: list[TurnMessage | None] = []
    for role, items in STEP.findall(text):
        if role == "generate":
            steps.append(None)
            continue
        parts: list[MessagePart] = []
        for found in ITEM.finditer(items):
            start, end, *picture = found.groups()
            if start is not None:
                parts.append(Clip(clip(source, int(start), int(end) - int(start))))
            elif picture[0] is not None:
                parts.append(Picture(image(*map(int, picture))))
            else:
                parts.append(json.loads(found[0]))
        steps.append(TurnMessage(role, tuple(parts)))
    return steps


@dataclass
class _Session:
    trace: Trace
    index: int
    model: MiniCpmO45
    state: HalfDuplex = field(default_factory=lambda: half_duplex.new_state(slot=0, seed=0))
    n_prefills: int = 0

    def play(self, script: list[TurnMessage | None]) -> None:
        session = self.trace.fields["sessions"][self.index]
        self.variant = self.trace.given(f"sessions[{self.index}].variant")
        generated = [
            len(step["llm_calls"]) - 1 for step in session["steps"] if step["kind"] == "generate"
        ]
        greedy_codes = self.model.config.speech.text_sampling(is_greedy=True)
        settings = HalfDuplexSettings(
            # The longest answer: either it was cut by the limit, or no limit mattered.
            max_new_tokens=max(generated),
            do_sample=False,
            generate_audio=self.variant == "speech",
            code_sampling=greedy_codes,
        )
        run_program(self.model, half_duplex.prepare(self.model, self.state, None, settings))
        for number, message in enumerate(script):
            path = f"sessions[{self.index}].steps[{number}]"
            self.trace.equal(f"{path}.kind", "generate" if message is None else "prefill")
            if message is None:
                self._generate(path)
            else:
                self._prefill(path, message)
            self.trace.equal(f"{path}.cache", self.state.n_tokens)

    def _prefill(self, path: str, message: TurnMessage) -> None:
        played = run_program(self.model, half_duplex.prefill(self.model, self.state, message))
        self.trace.equal(f"{path}.prompt", played.value.prompt)
        theirs = self.trace.expected(f"{path}.llm_calls")
        ours = [ran.op.payload.n_rows for ran in played.of(ops.PREFILL)]
        if sum(ours) != sum(theirs):
            self.trace.fail(f"{path}.llm_calls: {ours}, expected {theirs}")
        name = f"{self.variant}.p{self.n_prefills}.embeds"
        if any(key.startswith(name) for key in self.trace.tensors):
            self.trace.check_every(name, fed_rows(self.model, played), dim=0)
        self.n_prefills += 1

    def _generate(self, path: str) -> None:
        played = run_program(self.model, half_duplex.generate(self.model, self.state))
        calls = [ran.op.payload.n_rows for ran in played.of(ops.PREFILL)]
        self.trace.equal(f"{path}.llm_calls", calls + [1] * len(played.of(ops.DECODE)))
        turn: Turn = played.value
        if self.variant == "text":
            theirs = self.trace.expected(f"{path}.outputs")
            self._check_text(path, turn, "".join(text for text, _ in theirs))
            ends = [False] * (len(played.emitted) - 1) + [turn.has_ended]
            if [end for _, end in theirs] != ends:
                self.trace.fail(f"{path}.outputs: ends {ends}, expected {theirs}")
            return
        self.trace.equal(f"{path}.generated_ids", list(turn.token_ids))
        self._check_text(path, turn, "".join(self.trace.expected(f"{path}.texts")))
        self._check_speech(path, played)

    def _check_text(self, path: str, turn: Turn, theirs: str) -> None:
        """Both hold back half a character; the original keeps one that is never completed."""
        ours = self.model.tokenizer.decode(turn.token_ids, skip_special=False)
        if not (ours.startswith(theirs) and set(ours[len(theirs) :]) <= {"\ufffd"}):
            self.trace.fail(f"{path}: text {ours!r}, expected {theirs!r}")

    def _check_speech(self, path: str, played: Played) -> None:
        sounds = [delta.audio for delta in played.emitted if delta.audio.size]
        self.trace.equal(f"{path}.wav_samples", [len(sound) for sound in sounds])
        calls = [ran.op.payload for ran in played.of(ops.VOCODE)]
        described = [{"codes": list(call.codes), "last": call.is_last} for call in calls]
        self.trace.equal(f"{path}.vocoder_calls", described)
