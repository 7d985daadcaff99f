"""How good are the embedded chain's typed answers? Thirty questions, asked as the chat page does.

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.bench.bench_chat_answers

Facts, sums, lists, small talk, follow-ups, stories and pictures with text go through the real
models, several slots at a time. Counted: answers that the model ended by itself, answers that say
a sentence (or a point of a list) twice, answers that hold the words they should, and their length.
Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from shared.protocol import GenerationSettings
from worker.engine.engine import Engine, Task
from worker.models.cascade.model import CascadeModel
from worker.models.contract import ChatQuestion, MessagePart, Picture, TurnMessage, WholeAnswer

N_SLOTS = 6
MAX_NEW_TOKENS = 256
"""What `/ws/chat` asks for where the client does not say."""

PARIS = ("What is the capital of France?", "The capital of France is Paris.")
DOG = ("My dog is called Rex. He is brown.", "Rex sounds like a lovely dog!")
CAKE = ("How do I bake a cake?", "Mix flour, sugar, eggs and butter, then bake it for 30 minutes.")


@dataclass(frozen=True)
class Case:
    """One question; `keys` are words of which the answer should hold one (none: not judged)."""

    kind: str
    text: str
    keys: str = ""
    before: Sequence[str] = ()
    """Earlier messages, the user's first."""
    sign: str = ""
    """What is written on the picture that comes with the question."""


CASES = (
    Case("fact", "What is the capital of Italy?", "rome"),
    Case("fact", "Who wrote Hamlet?", "shakespeare"),
    Case("fact", "How many legs does an insect have?", "six 6"),
    Case("fact", "At what temperature does water freeze?", "0 32 zero"),
    Case("fact", "What do cows eat?", "grass hay"),
    Case("fact", "Why is the sky blue?", "scattering scatters scattered"),
    Case("sum", "What is two plus two?", "4 four"),
    Case("sum", "What is 10 minus 3?", "7 seven"),
    Case("sum", "What is 5 times 6?", "30 thirty"),
    Case("sum", "I have three apples and eat one. How many are left?", "2 two"),
    Case("list", "Name three fruits.", "apple apples banana bananas orange oranges"),
    Case("list", "List the days of the week.", "wednesday"),
    Case("list", "Give me five tips for sleeping better."),
    Case("list", "What are the primary colors?", "red"),
    Case("list", "Name ten countries in Europe.", "france germany italy spain"),
    Case("small talk", "Hello! How are you?"),
    Case("small talk", "Thank you, that was very kind."),
    Case("small talk", "I am bored. What should I do?"),
    Case("small talk", "What is your name?"),
    Case("small talk", "Tell me a joke."),
    Case("small talk", "Good night!"),
    Case("follow-up", "And how many people live there?", "million", PARIS),
    Case("follow-up", "What is my dog called?", "rex", DOG),
    Case("follow-up", "How long does it have to bake?", "30 thirty", CAKE),
    Case("follow-up", "Can you say that again in other words?", "flour", CAKE),
    Case("story", "Tell me a story about a dragon.", "dragon"),
    Case("story", "Write a short poem about the sea.", "sea ocean waves"),
    Case("story", "Explain how a bicycle works.", "wheel wheels pedal pedals"),
    Case("picture", "What does the sign say?", "deep water", sign="Danger: deep water"),
    Case("picture", "When does the train leave?", "9:45", sign="Train to York 9:45"),
)


@dataclass(frozen=True)
class Judged:
    case: Case
    answer: WholeAnswer

    @property
    def has_ended(self) -> bool:
        return not self.answer.was_cut

    @property
    def repeats(self) -> bool:
        said = sentences(self.answer.text)
        return len(set(said)) < len(said)

    @property
    def is_right(self) -> bool:
        return not self.case.keys or bool(set(self.case.keys.split()) & words(self.answer.text))


def sentences(text: str) -> list[str]:
    """Return the sentences and points of a text of three words or more, spelt alike."""
    parts = (re.findall(r"[a-z0-9']+", part) for part in re.split(r"[.!?]\s|\n", text.lower()))
    return [" ".join(part) for part in parts if len(part) > 2]


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9:]+", text.lower()))


def picture_of(text: str) -> Picture:
    image = Image.new("RGB", (480, 160), "white")
    ImageDraw.Draw(image).text((30, 55), text, "black", ImageFont.load_default(40))
    return Picture(np.asarray(image, np.uint8))


def question_of(case: Case, generation: GenerationSettings) -> ChatQuestion:
    roles = ("user", "assistant")
    earlier = [TurnMessage(roles[i % 2], (text,)) for i, text in enumerate(case.before)]
    picture: tuple[MessagePart, ...] = (picture_of(case.sign),) if case.sign else ()
    return ChatQuestion((*earlier, TurnMessage("user", (*picture, case.text))), generation)


def answers(model: CascadeModel, generation: GenerationSettings) -> Iterator[Judged]:
    """Ask all questions, a batch of slots at a time."""
    for first in range(0, len(CASES), N_SLOTS):
        engine = Engine(model, clock=lambda: 0.0)
        cases, tasks = CASES[first : first + N_SLOTS], list[Task]()
        for slot, case in enumerate(cases):
            program = model.chat(model.chat_state(slot), question_of(case, generation))
            tasks.append(engine.spawn(slot, program))
        while sum(engine.step(lane) for lane in engine.lanes):
            pass
        for case, task in zip(cases, tasks, strict=True):
            if task.error is not None:
                raise task.error
            yield Judged(case, task.value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--temperature", type=float, default=None, help="sample; greedy if not")
    parser.add_argument("--verbose", action="store_true", help="print the answers")
    arguments = parser.parse_args()
    model = CascadeModel(arguments.data_dir)
    model.load_model(lambda share, note: None)
    model.init_unified(N_SLOTS, lambda share, note: None)
    generation = GenerationSettings(
        max_new_tokens=MAX_NEW_TOKENS, temperature=arguments.temperature
    )
    judged = list(answers(model, generation))
    if arguments.verbose:
        for one in judged:
            marks = f"{'' if one.has_ended else 'cut '}{'repeats ' if one.repeats else ''}"
            print(
                f"[{marks}{'' if one.is_right else 'wrong '}] {one.case.text} -> "
                f"{one.answer.text!r}"
            )
    print(f"{'':12} {'n':>3} {'ended':>6} {'repeat':>6} {'right':>6} {'tokens':>6}")
    for kind in (*dict.fromkeys(case.kind for case in CASES), "all"):
        some = [one for one in judged if kind in (one.case.kind, "all")]
        figures = figures_of(some)
        print(
            f"{kind:12} {len(some):3d} {figures['ended']:6.2f} {figures['repeats']:6.2f} "
            f"{figures['right']:6.2f} {figures['tokens']:6.1f}"
        )
    print(json.dumps({"questions": len(judged)} | figures_of(judged)))


def figures_of(judged: Sequence[Judged]) -> dict[str, float]:
    n = len(judged)
    return {
        "ended": round(sum(one.has_ended for one in judged) / n, 3),
        "repeats": round(sum(one.repeats for one in judged) / n, 3),
        "right": round(sum(one.is_right for one in judged) / n, 3),
        "tokens": round(sum(one.answer.n_generated_tokens for one in judged) / n, 1),
    }


if __name__ == "__main__":
    main()
