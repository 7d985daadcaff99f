"""Does the cascade understand and answer rightly? Unseen spoken questions, clean, noisy, quiet.

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.bench.bench_understanding --questions 30

Each question is synthesised, changed (noise at an SNR, level, tempo), put at a different place in
its second and played to the real models through the real programs, as fast as they compute. Two
figures count: the share of captions that hold the question's key words, and the share of answers
that are, word for word, the greedy answer of the same weights in `transformers` to the caption.
Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessor

from shared.audio import Samples
from shared.protocol import DuplexSettings
from worker.engine.contract import Program
from worker.engine.engine import Engine, Task
from worker.models.cascade.model import CascadeModel
from worker.models.cascade.settings import REPETITION_PENALTY
from worker.models.cascade.speech import SYNTHESIZE, SynthesizeRequest
from worker.models.contract import Prompt, Unit, UnitResult
from worker.nn.decoder import Decoder

COMPARED_WORDS = 12
"""An answer is followed this far."""

SYSTEM_PROMPT = "You are a helpful assistant."
RATE = 16_000

QUESTIONS: Sequence[tuple[str, str]] = (
    ("What is the capital of France?", "capital france"),
    ("How many days are there in a week?", "days week"),
    ("Who wrote Romeo and Juliet?", "wrote romeo juliet"),
    ("What color is the sky on a clear day?", "color sky clear day"),
    ("Can you tell me what a volcano is?", "tell volcano"),
    ("What is the largest ocean on Earth?", "largest ocean earth"),
    ("How do plants make their food?", "plants make food"),
    ("What is the boiling point of water?", "boiling point water"),
    ("Name three animals that live in the sea.", "three animals live"),
    ("Why do we need to sleep every night?", "need sleep every night"),
    ("What language do people speak in Brazil?", "language people speak brazil"),
    ("Which planet is closest to the sun?", "planet closest sun"),
    ("How many legs does a spider have?", "legs spider"),
    ("What is the opposite of hot?", "opposite hot"),
    ("Please tell me a fun fact about cats.", "tell fun fact cats"),
    ("What do bees make?", "bees make"),
    ("Who was the first president of the United States?", "first president united states"),
    ("What is the tallest mountain in the world?", "tallest mountain world"),
    ("How can I learn to play the guitar?", "learn play guitar"),
    ("What should I cook for dinner tonight?", "cook dinner tonight"),
    ("Is it a good idea to drink a lot of water?", "good idea drink water"),
    ("What is the largest city in Japan?", "largest city japan"),
    ("Explain what a computer program is.", "explain computer program"),
    ("How long does it take to fly to London?", "long take fly london"),
    ("What are the primary colors?", "primary colors"),
    ("Why is exercise important for the heart?", "exercise important heart"),
    ("Where do penguins live?", "penguins live"),
    ("What is the currency of India?", "currency india"),
    ("Give me a tip for a job interview.", "give tip job interview"),
    ("What happens when ice melts?", "happens ice melts"),
)


@dataclass(frozen=True)
class Condition:
    name: str
    snr_db: float | None = None
    peak: float = 0.5
    tempo: float = 1.0


CONDITIONS = (
    Condition("clean"),
    Condition("fast and clean", tempo=1.12),
    Condition("10 dB SNR", snr_db=10.0),
    Condition("15 dB SNR, slow", snr_db=15.0, tempo=0.9),
    Condition("quiet, peak 0.02", peak=0.02),
    Condition("very quiet, peak 0.01", peak=0.01),
)


class Bench:
    """The real model on an engine without threads; the clock moves by a second per unit."""

    def __init__(self, data_dir: Path) -> None:
        self.model = CascadeModel(data_dir)
        self.model.load_model(lambda share, note: None)
        self.model.init_unified(1, lambda share, note: None)
        self.now = 0.0
        self.engine = Engine(self.model, clock=lambda: self.now)

    def run(self, program: Program) -> Task:
        task = self.engine.spawn("bench", program)
        while True:
            self.engine.advance()
            if sum(self.engine.step(lane) for lane in self.engine.lanes):
                continue
            if task.done:
                if task.error is not None:
                    raise task.error
                return task
            self.now = max(self.now, self.engine.next_deadline())

    def ask(self, samples: Samples, max_units: int) -> list[UnitResult]:
        """Play one question to a fresh session; stop when its turn has ended."""
        state = self.model.new_state(0)
        empty = np.zeros(0, np.float32)
        self.run(self.model.prepare(state, Prompt(SYSTEM_PROMPT, DuplexSettings(), empty, empty)))
        results: list[UnitResult] = []
        for index in range(max_units):
            piece = samples[index * RATE : (index + 1) * RATE]
            audio = np.zeros(RATE, np.float32)
            audio[: len(piece)] = piece
            self.now += 1.0
            unit = Unit(index, audio, (), False, None, self.now, self.now + 1.0)
            task = self.engine.spawn("bench", self.model.unit(state, unit), results.append)
            self.finish(task)
            said = "".join(result.text for result in results)
            if results[-1].end_of_turn or len(words(said)) >= COMPARED_WORDS:
                break
        self.model.end(state)
        return results

    def finish(self, task: Task) -> None:
        while not task.done:
            self.engine.advance()
            if not sum(self.engine.step(lane) for lane in self.engine.lanes) and not task.done:
                self.now = max(self.now, self.engine.next_deadline())
        if task.error is not None:
            raise task.error

    def speak(self, text: str, tempo: float) -> Samples:
        """Synthesise a question at 16 kHz; tempo changes pace and pitch together."""
        (samples,) = self.model.run(SYNTHESIZE, None, [SynthesizeRequest(text)])
        positions = np.arange(0, len(samples) - 1, 1.5 * tempo)
        return np.interp(positions, np.arange(len(samples)), samples).astype(np.float32)


def stage(speech: Samples, condition: Condition, offset_s: float, seed: int) -> Samples:
    """Place speech in silence or noise, at the condition's level."""
    rng = np.random.default_rng(seed)
    speech = speech * (condition.peak / np.abs(speech).max())
    track = np.zeros(int(offset_s * RATE) + len(speech) + 3 * RATE, np.float32)
    track[int(offset_s * RATE) :][: len(speech)] = speech
    if condition.snr_db is not None:
        power = float(np.square(speech).mean()) / 10 ** (condition.snr_db / 10)
        track += rng.standard_normal(len(track)).astype(np.float32) * np.float32(power**0.5)
    return track


class AnswerPenalty(LogitsProcessor):
    """The penalty of `transformers` looks at the prompt as well; this one at the answer alone."""

    def __init__(self, n_prompt: int) -> None:
        self.n_prompt = n_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = input_ids[:, self.n_prompt :]
        found = scores.gather(1, said)
        rarer = torch.where(found > 0, found / REPETITION_PENALTY, found * REPETITION_PENALTY)
        return scores.scatter(1, said, rarer)


class Reference:
    """The same weights in `transformers`, greedy."""

    def __init__(self, model: CascadeModel) -> None:
        decoder, config = model.language.decoder, model.language.decoder.config
        self.language = model.language
        hf = LlamaConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            intermediate_size=config.ffn_size,
            vocab_size=config.vocab_size,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=True,
            attention_bias=False,
        )
        self.hf = AutoModelForCausalLM.from_config(hf).eval()
        names = hf_names(decoder)
        missing, unexpected = self.hf.load_state_dict(names, strict=False)
        assert not unexpected
        assert missing == ["lm_head.weight"], missing
        self.hf.tie_weights()

    @torch.inference_mode()
    def answer(self, question: str, max_tokens: int) -> str:
        language = self.language
        prompt = (*language.system_tokens(SYSTEM_PROMPT), *language.user_tokens(question))
        prompt = (*prompt, *language.answer_opening)
        output = self.hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            logits_processor=[AnswerPenalty(len(prompt))],
            eos_token_id=self.language.end_of_turn,
            pad_token_id=self.language.end_of_turn,
        )
        detokeniser = self.language.detokeniser()
        tokens = [t for t in output[0, len(prompt) :].tolist() if not self.language.is_end(t)]
        return "".join(detokeniser.push(token) for token in tokens) + detokeniser.flush()


def hf_names(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Our parameters under the names of `transformers`, stacked matrices taken apart."""
    config = decoder.config
    names = {
        "model.embed_tokens.weight": decoder.embed.weight,
        "model.norm.weight": decoder.norm.weight,
    }
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    for index, layer in enumerate(decoder.layers):
        q, k, v = layer.qkv.weight.split((q_rows, kv_rows, kv_rows))
        gate, up = layer.gate_up.weight.chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.out.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight,
            "input_layernorm": layer.attn_norm.weight,
            "post_attention_layernorm": layer.ffn_norm.weight,
        }
        names |= {f"model.layers.{index}.{name}.weight": part for name, part in parts.items()}
    return names


def is_start(said: list[str], expected: list[str]) -> bool:
    """Whether two texts that may both be cut short agree as far as they go."""
    n = min(len(said), len(expected), COMPARED_WORDS)
    return n > 0 and said[:n] == expected[:n]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--only", default="", help="conditions whose name holds this")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments.data_dir)
    reference = Reference(bench.model)
    rng = np.random.default_rng(arguments.seed)
    report: dict[str, dict[str, float]] = {}
    for condition in (c for c in CONDITIONS if arguments.only in c.name):
        n_heard = n_same = 0
        for text, keys in QUESTIONS[: arguments.questions]:
            speech = bench.speak(text, condition.tempo)
            track = stage(speech, condition, rng.uniform(0.6, 1.6), arguments.seed)
            results = bench.ask(track, max_units=len(track) // RATE + 6)
            caption = " ".join(r.heard for r in results if r.heard)
            said = "".join(r.text for r in results)
            expected = reference.answer(caption, 2 * COMPARED_WORDS) if caption else ""
            is_heard = set(keys.split()) <= set(words(caption))
            is_same = bool(caption) and is_start(words(said), words(expected))
            n_heard += is_heard
            n_same += is_same
            if arguments.verbose or not is_heard or not is_same:
                print(f"  {condition.name}: {text!r} heard {caption!r} says {said[:90]!r}")
                if not is_same:
                    print(f"    expected {expected[:90]!r}")
        n = min(arguments.questions, len(QUESTIONS))
        report[condition.name] = {"captions": n_heard / n, "answers": n_same / n}
        print(f"{condition.name:24} captions {n_heard}/{n}  answers {n_same}/{n}", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
