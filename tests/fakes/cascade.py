"""The cascade's models on scripts: the runner and the model in one.

Speech is a constant sample value; the recogniser hears each value as one word. An answer is
"w0 w1 ...", a token a word, and each word sounds for `WORD_S`.
"""

from dataclasses import dataclass, field

import numpy as np

from worker.engine.contract import Op
from worker.engine.engine import Engine
from worker.models.cascade.endpointing import WINDOW_SAMPLES

ROLES = ["", "system", "user", "assistant"]
WORDS = {1: "alpha", 2: "bravo", 3: "charlie", 4: "read the sign", 5: ""}
END = 9
FIRST_WORD = 100
WORD_S = 0.25


class FakeLanguage:
    turn_end_tokens = endings = (END,)
    answer_opening = (3,)

    def system_tokens(self, text):
        return (1,) * len(text)

    def user_tokens(self, text):
        return (2, *map(ord, text))

    def message_tokens(self, role, text):
        return (ROLES.index(role), *map(ord, text))

    def is_end(self, token):
        return token == END

    def detokeniser(self):
        return FakeDetokeniser()


class FakeDetokeniser:
    def push(self, token):
        return f"w{token - FIRST_WORD} "

    def flush(self):
        return ""


class FakeTranscriber:
    def transcribe(self, slot, samples, deadline):
        text = yield Op("transcribe_step", samples, deadline=deadline)
        return text


@dataclass
class FakeCascade:
    """`answer_words` is how long its next answers are."""

    answer_words: int = 30
    context_tokens: int = 2048
    sign: str = "EXIT 42"
    voice: str = "fake"
    prompts: list = field(default_factory=list)
    cache: dict = field(default_factory=dict)
    poisoned: list = field(default_factory=list)
    broken: set = field(default_factory=set)
    kinds: list = field(default_factory=list)
    """Of the ops that have run."""
    frames: list = field(default_factory=list)
    """Pictures that were read."""
    samplings: list = field(default_factory=list)
    """How each token was chosen."""
    language = FakeLanguage()
    transcriber = FakeTranscriber()
    max_batch = {}
    lanes = {
        "prefill": "language",
        "decode": "language",
        "detect_speech": "senses",
        "transcribe_step": "senses",
        "synthesize": "senses",
        "read_text": "senses",
    }

    def poison_slot(self, slot):
        self.poisoned.append(slot)

    def run(self, kind, bucket, payloads):
        self.kinds += [kind] * len(payloads)
        if kind in self.broken:
            raise RuntimeError(f"{kind} is broken")
        return [getattr(self, kind)(payload) for payload in payloads]

    def detect_speech(self, request):
        windows = request.samples.reshape(-1, WINDOW_SAMPLES)
        return np.where(windows.max(axis=1) > 0, 0.95, 0.01).astype(np.float32), request.state

    def transcribe_step(self, samples):
        values = [int(v) for v in dict.fromkeys(samples[::64].tolist()) if v]
        return " ".join(WORDS[v] for v in values).strip()

    def write(self, slot, start, tokens):
        assert start + len(tokens) <= self.context_tokens
        cache = self.cache.setdefault(slot, [])
        cache[start : start + len(tokens)] = tokens

    def prefill(self, request):
        self.write(request.slot, request.start, list(request.tokens))
        if request.sampling is None:
            return None
        self.samplings.append(request.sampling)
        self.prompts.append(tuple(self.cache[request.slot][: request.start + len(request.tokens)]))
        return FIRST_WORD if self.answer_words else END

    def decode(self, request):
        assert len(self.cache[request.slot][: request.position]) == request.position
        self.write(request.slot, request.position, [request.token])
        self.samplings.append(request.sampling)
        following = request.token + 1
        return following if following < FIRST_WORD + self.answer_words else END

    def synthesize(self, request):
        n_words = len(request.text.split())
        return np.full(int(24_000 * WORD_S) * n_words, 0.5, np.float32)

    def read_text(self, request):
        self.frames.append(request.frame)
        return self.sign


def ops_of(model, program):
    """Run a program alone; return its ops."""
    ops, reply = [], None
    while True:
        try:
            request = program.send(reply)
        except StopIteration:
            return ops
        reply = True
        if isinstance(request, Op):
            ops.append(request)
            (reply,) = model.run(request.kind, None, [request.payload])


class Desk:
    """Runs programs of one slot on the real engine; its clock stands still."""

    def __init__(self, model, slot=0):
        self.model = model
        self.slot = slot
        self.engine = Engine(model, clock=lambda: 100.0)

    def start(self, program):
        """Return the running task; what it emits is in `emitted`."""
        emitted = []
        task = self.engine.spawn(self.slot, program, emitted.append)
        task.emitted = emitted
        return task

    def step(self):
        """Run one batch of each lane; False if there was none."""
        n_batches = sum(self.engine.step(lane) for lane in self.engine.lanes)
        return n_batches > 0

    def until(self, condition):
        """Step up to the moment at which a condition holds."""
        while not condition():
            assert self.step(), "nothing is left to run"

    def play(self, program):
        """Run a program, and whatever it has spawned, to the end."""
        task = self.start(program)
        while self.step():
            pass
        assert task.done
        return task

    def value(self, program):
        task = self.play(program)
        assert task.error is None, task.error
        return task.value
