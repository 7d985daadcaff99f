"""What later words see of earlier ones, against a decoder that is written out by the letter.

It keeps unturned keys in a list, turns them anew for every row, and forgets by cutting the list;
so nothing of caches, moves and positions is shared with the code under test.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.golden.checkpoint import load_tensors
from tests.golden.driver import run_program
from tests.golden.loaded import load_model
from worker.models.minicpmo45 import speaking
from worker.models.minicpmo45.draws import SeededDraws
from worker.models.minicpmo45.speaking import Utterance, Words, say
from worker.nn.code_sampling import CodeSampling
from worker.nn.speech import SpeechTrace

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
PLAIN = CodeSampling(temperature=1.0, repetition_penalty=1.0, is_greedy=True)
"""Probabilities are those of the bare logits."""
WINDOW = 40
LENGTHS = ((5, 12), (3, 30), (6, 9), (4, 14), (2, 7))
"""Words and draws of each piece of text; 30 draws take two runs."""


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN)


class ByTheLetter:
    """The speech head of the tiny checkpoint."""

    def __init__(self, config):
        self.config = config
        self.w = {
            name.removeprefix("tts."): tensor
            for name, tensor in load_tensors(GOLDEN).items()
            if name.startswith("tts.")
        }
        self.rows = []
        """(position, per layer unturned key and value) of everything that is kept."""
        self.next = 0

    def linear(self, x, name):
        return functional.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, x, name):
        wide = x / (x.square().mean() + self.config.norm_eps).sqrt()
        return wide * self.w[f"{name}.weight"]

    def turned(self, heads, position):
        d = heads.shape[-1]
        frequencies = self.config.rope_theta ** (-torch.arange(0, d, 2) / d)
        angles = (position * frequencies).repeat(2)
        half = torch.cat((-heads[:, d // 2 :], heads[:, : d // 2]), -1)
        return heads * angles.cos() + half * angles.sin()

    def feed(self, x):
        """One row at the next position; return its state after the closing norm."""
        layers, position = [], self.next
        for index in range(self.config.n_layers):
            name = f"model.layers.{index}"
            normed = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (
                self.linear(normed, f"{name}.self_attn.{side}_proj").unflatten(
                    0, (-1, self.config.head_dim)
                )
                for side in "qkv"
            )
            layers.append((k, v))
            seen = [(p, *kept[index]) for p, kept in self.rows] + [(position, k, v)]
            query = self.turned(q, position)
            scores = torch.stack([(query * self.turned(k, p)).sum(-1) for p, k, _ in seen])
            shares = (scores / math.sqrt(self.config.head_dim)).softmax(0)  # [S, H]
            mixed = (shares[..., None] * torch.stack([v for _, _, v in seen])).sum(0)
            x = x + self.linear(mixed.flatten(), f"{name}.self_attn.o_proj")
            normed = self.norm(x, f"{name}.post_attention_layernorm")
            gated = functional.silu(self.linear(normed, f"{name}.mlp.gate_proj"))
            up = self.linear(normed, f"{name}.mlp.up_proj")
            x = x + self.linear(gated * up, f"{name}.mlp.down_proj")
        self.rows.append((position, layers))
        self.next += 1
        return self.norm(x, "model.norm")

    def condition(self, words):
        rows = []
        for token, state in zip(words.ids, words.states, strict=True):
            hidden = self.linear(state, "projector_semantic.linear1").relu()
            projected = self.linear(hidden, "projector_semantic.linear2")
            if self.config.normalize:
                projected = projected / projected.norm()
            rows.append(self.w["emb_text.weight"][token] + projected)
        if words.is_closing:
            rows.append(self.w["emb_text.weight"][self.config.text_eos_id])
        return [*rows, self.w["emb_text.weight"][self.config.audio_bos_id]]

    def say(self, words, n_draws):
        """Return the distribution of each draw and the codes, of which the last is not used."""
        for row in self.condition(words):
            state = self.feed(row)
        parts = "head_code.0.parametrizations.weight"
        gain, direction = self.w[f"{parts}.original0"], self.w[f"{parts}.original1"]
        matrix = gain * direction / direction.norm(dim=1, keepdim=True)
        probabilities, codes = [], []
        for _ in range(n_draws):
            logits = matrix @ state
            logits[self.config.end_code] = -math.inf
            probabilities.append(logits.softmax(0))
            codes.append(int(logits.argmax()))
            if len(codes) < n_draws:
                state = self.feed(self.w["emb_code.0.weight"][codes[-1]])
        return probabilities, codes[:-1]

    def forget(self, attention, spans, last):
        """Do what the name says between two pieces of text.

        Args:
            spans: how many rows each piece has left.
            last: the latest words and their codes.
        """
        if attention == "sliding_window":
            self.rows = self.rows[-WINDOW:]
        elif attention == "sliding_recompute":
            words, codes = last
            self.rows, self.next = [], 0
            for row in (*self.condition(words), *(self.w["emb_code.0.weight"][c] for c in codes)):
                self.feed(row)
        elif attention == "reindex" and len(spans) > 2:
            first, latest = self.rows[: spans[0]], self.rows[-spans[-1] :]
            self.rows = [(p, kept) for p, (_, kept) in enumerate(first + latest)]
            self.next = len(self.rows)


class Watched:
    """The speech head; keeps the distribution of every draw."""

    def __init__(self, head):
        self.head, self.probabilities = head, []

    def speak(self, cache, requests):
        trace = SpeechTrace()
        result = self.head.speak(cache, requests, trace)
        self.probabilities += [p[0] for p in trace.probabilities]
        return result


@pytest.mark.parametrize(
    "attention", ["full_attention", "sliding_window", "sliding_recompute", "reindex"]
)
@torch.inference_mode()
def test_later_words_see_what_the_attention_type_leaves(model, attention, monkeypatch):
    monkeypatch.setattr(speaking, "WINDOW_POSITIONS", WINDOW)
    config = model.config.speech
    head = Watched(model.parts.speech)
    monkeypatch.setattr(model, "parts", dataclasses.replace(model.parts, speech=head))
    model.poison_slot(0)
    generator = torch.Generator().manual_seed(7)
    voice = Utterance(slot=0, voice=model.default_voice, sampling=PLAIN, attention=attention)
    letter = ByTheLetter(config)
    spans, last = [], None

    for index, (n_words, n_draws) in enumerate(LENGTHS):
        is_last = index == len(LENGTHS) - 1
        states = torch.randn(n_words, config.llm_dim, generator=generator).unbind()
        ids = torch.randint(0, config.n_text_tokens, (n_words,), generator=generator).tolist()
        words = Words(tuple(ids), states, is_closing=is_last)
        head.probabilities.clear()
        run_program(
            model,
            say(
                *(model, voice, words, SeededDraws(0)),
                is_last=is_last,
                max_new=n_draws,
                min_new=n_draws,
            ),
        )
        if last is not None:
            letter.forget(attention, spans, last)
        probabilities, codes = letter.say(words, n_draws)
        spans.append(n_words + is_last + 1 + len(codes))
        last = words, codes

        torch.testing.assert_close(
            torch.stack(head.probabilities), torch.stack(probabilities), atol=1e-5, rtol=0
        )
        assert voice.last == (words, tuple(codes))
