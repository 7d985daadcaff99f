"""Speech head: what the language model says, as speech tokens of 40 ms each.

MiniCPM-o 4.5 reference, `MiniCPMTTS` (a Llama decoder over 6561 codes and an end code). Every text
token becomes one condition row: its own embedding plus the projected hidden state that the
language model had at it. The codes follow behind the rows and an audio-BOS row, each one drawn
from the decoder's output at the row before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from worker.nn.code_sampling import CodeRows, CodeSampling, code_probabilities, draw_codes
from worker.nn.decoder import (
    DecoderConfig,
    DecoderStack,
    KvCache,
    Rows,
    row_linear,
    stack_weights,
)
from worker.nn.shapes import rounded_up
from worker.nn.speech_request import InputKind, SpeechRequest, fill_inputs
from worker.nn.transfer import to_device

__all__ = [
    "CodeSampling",
    "SpeechConfig",
    "SpeechHead",
    "SpeechRequest",
    "SpeechTrace",
    "fold_weight_norm",
    "speech_weights",
]

DrawCall = Callable[[Tensor, CodeRows, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Signature of `SpeechHead.draw` where the device counts the steps."""

GROUP_STEP = 32
"""Inputs of about the same length are fed together; lengths differ by less than this."""


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    llm_dim: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    n_codes: int
    """Rows of the code embedding; the last one is the end code."""
    n_text_tokens: int
    audio_bos_id: int
    """Row of the text embedding that announces codes."""
    text_eos_id: int
    """Row of the text embedding that closes the text (chat and half duplex)."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    temperature: float = 0.8
    top_p: float = 0.85
    top_k: int = 25
    repetition_penalty: float = 1.05
    normalize: bool = True
    """Projected hidden states get length 1."""

    @property
    def end_code(self) -> int:
        return self.n_codes - 1

    @property
    def decoder(self) -> DecoderConfig:
        """Shape of the blocks, also for `KvCache.allocate`."""
        return DecoderConfig(
            vocab_size=self.n_codes,
            hidden_size=self.hidden_size,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            ffn_size=self.ffn_size,
            rope_theta=self.rope_theta,
            norm_eps=self.norm_eps,
        )

    def unit_sampling(self, is_greedy: bool = False) -> CodeSampling:
        """How a duplex unit draws: no filters."""
        return CodeSampling(
            temperature=self.temperature,
            repetition_penalty=self.repetition_penalty,
            is_greedy=is_greedy,
        )

    def text_sampling(self, is_greedy: bool = False, first_is_free: bool = True) -> CodeSampling:
        """How chat and half duplex draw: nucleus and top k."""
        return CodeSampling(
            temperature=self.temperature,
            repetition_penalty=self.repetition_penalty,
            top_p=self.top_p,
            top_k=self.top_k,
            is_greedy=is_greedy,
            first_is_free=first_is_free,
        )


@dataclass(slots=True)
class SpeechTrace:
    """What a run went through, for tests: one entry per draw, rows in the order of the requests."""

    probabilities: list[Tensor] = field(default_factory=list)
    """Final distributions `[B, V]`."""
    drawn: list[Tensor] = field(default_factory=list)
    """Codes, the dropped last one and the end code included, int64 `[B]`. What follows a row's
    end code or its own `max_new` means nothing."""


class SpeechHead(nn.Module):
    """The blocks with their embeddings, the projector and the code head.

    It owns weights only; the cache (`KvCache.allocate(config.decoder, ...)`) is handed in.
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.config = config
        self.stack = DecoderStack(config.decoder)
        self.emb_text = nn.Embedding(config.n_text_tokens, config.hidden_size)
        self.emb_code = nn.Embedding(config.n_codes, config.hidden_size)
        self.head_code = nn.Linear(config.hidden_size, config.n_codes, bias=False)
        self.projector_in = nn.Linear(config.llm_dim, config.hidden_size)
        self.projector_out = nn.Linear(config.hidden_size, config.hidden_size)
        self.draw_calls: list[DrawCall] = [self.draw]
        """Call site of `draw` in stages; a compiled region takes its place."""

    def project(self, hidden: Tensor) -> Tensor:
        """Bring hidden states of the language model `[n, D_llm]` to the head's width `[n, D]`."""
        hidden = hidden.to(self.projector_in.weight.dtype)
        return self.projector_out(functional.relu(self.projector_in(hidden)))

    def condition(
        self, text_ids: Tensor, hidden: Tensor, normalize: bool | Tensor | None = None
    ) -> Tensor:
        """Return the condition rows of text tokens, `[n, D]`, without EOS and BOS.

        Args:
            text_ids: int64 `[n]`; any number of dimensions.
            hidden: `[n, D_llm]`.
            normalize: whether projected states get length 1, or bool `[n]`; None = as configured.
        """
        projected = self.project(hidden)
        if normalize is None:
            normalize = self.config.normalize
        if normalize is not False:
            unit = functional.normalize(projected.float(), dim=-1, eps=1e-12).to(projected.dtype)
            if isinstance(normalize, Tensor):
                projected = torch.where(normalize[..., None], unit, projected)
            else:
                projected = unit
        return self.emb_text(text_ids) + projected

    def inputs(self, requests: Sequence[SpeechRequest], width: int) -> Tensor:
        """Return the input rows of requests, padded at the end to `[B, width, D]`."""
        table = np.zeros((3, len(requests), width), dtype=np.int64)
        arrays = dict(zip(("ids", "kinds", "places"), table, strict=True))
        states = self.fill_inputs(arrays, requests)
        ids, kinds, places = to_device(table, self.emb_text.weight.device)
        return self.input_rows(ids, kinds, torch.cat(states)[places] if states else None)

    def fill_inputs(
        self,
        arrays: Mapping[str, NDArray[Any]],
        requests: Sequence[SpeechRequest],
        offset: int = 0,
    ) -> list[Tensor]:
        """Write what input rows are made of, return their states: `speech_request.fill_inputs`."""
        config = self.config
        return fill_inputs(
            arrays, requests, offset, config.text_eos_id, config.audio_bos_id, config.normalize
        )

    def input_rows(self, ids: Tensor, kinds: Tensor, hidden: Tensor | None) -> Tensor:
        """Return input rows `[B, N, D]`; a function of tensors.

        Args:
            ids: of text tokens or codes, int64 `[B, N]`.
            kinds: which, values of `InputKind`, int64 `[B, N]`.
            hidden: states `[B, N, D_llm]`; anything, even NaN, where a row is no condition. None:
                no row is one.
        """
        is_code = kinds == InputKind.CODE
        texts = ids.masked_fill(is_code, 0)
        codes = ids.masked_fill(~is_code, 0)
        x = torch.where(is_code[..., None], self.emb_code(codes), self.emb_text(texts))
        if hidden is None:
            return x
        conditions = self.condition(texts, hidden, kinds == InputKind.UNIT_STATE)
        return torch.where((kinds >= InputKind.STATE)[..., None], conditions, x)

    def draw(
        self, hidden: Tensor, rows: CodeRows, recent: Tensor, step: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take draw number `step` of a run behind states; a function of tensors.

        Args:
            hidden: `[B, D]`.
            recent, step: as in `code_probabilities`.

        Returns:
            Codes, int64 `[B]`, and the distributions that they are from, `[B, V]`.
        """
        probabilities = code_probabilities(row_linear(self.head_code, hidden), rows, recent, step)
        return draw_codes(probabilities, rows, step), probabilities

    def speak(
        self,
        cache: KvCache,
        requests: Sequence[SpeechRequest],
        trace: SpeechTrace | None = None,
    ) -> list[tuple[tuple[int, ...], bool]]:
        """Run requests of different slots in lockstep, with exact rows: for a CPU.

        After every step the host looks which rows have ended; those go on as padding.

        Args:
            cache: written in place; `SpeechRequest` says which positions are live afterwards.
            requests: any lengths, starts and settings; no slot twice.
            trace: filled with what every draw saw.

        Returns:
            Per request its codes, without the end code, and whether the end code was drawn.

        Raises:
            ValueError: a request does not fit into its slot, or lacks draws or hidden states.
        """
        for request in requests:
            request.check(cache.n_tokens)
        groups = self._groups(requests)
        order = [row for _, rows in groups for row in rows]
        ordered = [requests[row] for row in order]
        hidden = torch.cat(
            [self._feed_inputs(cache, [requests[r] for r in rows], n) for n, rows in groups]
        )
        drawn = self._run(cache, ordered, hidden, trace)
        results: dict[int, tuple[tuple[int, ...], bool]] = {
            row: request.outcome(codes, self.config.end_code)
            for row, request, codes in zip(order, ordered, drawn, strict=True)
        }
        if trace is not None:
            back = torch.tensor(order).argsort().to(hidden.device)
            trace.probabilities = [p[back] for p in trace.probabilities]
            trace.drawn = [codes[back] for codes in trace.drawn]
        return [results[row] for row in range(len(requests))]

    def _groups(self, requests: Sequence[SpeechRequest]) -> list[tuple[int, list[int]]]:
        """Return (width, rows) of the prefills: rows of about the same length go together."""
        buckets: dict[int, list[int]] = {}
        for row, request in enumerate(requests):
            n = request.n_inputs
            # One input is a decode step.
            buckets.setdefault(1 if n == 1 else rounded_up(n, GROUP_STEP), []).append(row)
        return [(max(requests[r].n_inputs for r in rows), rows) for rows in buckets.values()]

    def _feed_inputs(self, cache: KvCache, requests: Sequence[SpeechRequest], width: int) -> Tensor:
        """Feed the inputs of one group; return the state at each row's last input, `[B, D]`."""
        device = self.emb_text.weight.device
        table = np.array([(r.slot, r.start, r.n_inputs) for r in requests], dtype=np.int64)
        slots, starts, counts = to_device(np.ascontiguousarray(table.T), device)
        positions = cache.positions(starts, counts, width)
        reach = _exact(requests, [r.start + r.n_inputs for r in requests])
        x = self.stack.feed(cache, self.inputs(requests, width), slots, positions, reach)
        return x[torch.arange(len(requests), device=device), counts - 1]

    def _run(
        self,
        cache: KvCache,
        requests: Sequence[SpeechRequest],
        hidden: Tensor,
        trace: SpeechTrace | None,
    ) -> list[list[int]]:
        """Draw codes behind the inputs; return every row's draws, the end code included."""
        device, end_code = hidden.device, self.config.end_code
        n_steps = max(r.max_new for r in requests)
        n_draws = max(r.max_new if trace is not None else r.n_draws for r in requests)
        if not n_draws:
            return [[] for _ in requests]
        rows = CodeRows.build(
            [r.sampling for r in requests],
            [r.recent for r in requests],
            [r.draws for r in requests],
            [r.min_new for r in requests],
            [r.is_free for r in requests],
            self.config.n_codes,
            n_steps,
            device,
        )
        table = [(r.slot, r.start + r.n_inputs, r.max_new) for r in requests]
        slots, positions, limits = to_device(np.array(table, dtype=np.int64).T.copy(), device)
        recent, is_over = rows.recent, torch.zeros_like(slots, dtype=torch.bool)
        drawn: list[Tensor] = []
        for step in range(n_draws):
            codes, probabilities = self.draw(hidden, rows, recent, step)
            drawn.append(codes)
            if trace is not None:
                trace.probabilities.append(probabilities)
            recent = torch.cat((recent[:, 1:], codes[:, None]), dim=1)
            is_over = is_over | (codes == end_code) | (limits <= step + 1)
            if step + 1 == n_steps or bool(is_over.all()):
                break
            positions = positions.masked_fill(is_over, cache.spare)  # from here on padding
            # What padding looks at does not matter, but it has to be something.
            ends = [p + 1 if p < cache.spare else 1 for p in positions.tolist()]
            reach = _exact(requests, ends)
            x = self.emb_code(codes)[:, None]
            hidden = self.stack.feed(cache, x, slots, positions[:, None], reach)[:, 0]
            positions = positions + 1
        if trace is not None:
            trace.drawn += drawn
        columns = torch.stack(drawn, dim=1).tolist()
        return [codes[: r.max_new] for codes, r in zip(columns, requests, strict=True)]


def _exact(requests: Sequence[SpeechRequest], ends: Sequence[int]) -> Rows:
    return Rows(tuple(request.slot for request in requests), tuple(ends))


def speech_weights(source: Mapping[str, Tensor], config: SpeechConfig) -> dict[str, Tensor]:
    """Rename the checkpoint's tensors, stack what is stacked and fold the head's weight norm.

    Args:
        source: names relative to `tts.`; the unused tables (`model.embed_tokens`, `projector_spk`)
            may be there.

    Raises:
        KeyError: a tensor is missing.
    """
    stack = stack_weights(source, config.decoder)
    weights = {f"stack.{name}": tensor for name, tensor in stack.items()}
    weights["emb_text.weight"] = source["emb_text.weight"]
    weights["emb_code.weight"] = source["emb_code.0.weight"]
    parametrised = "head_code.0.parametrizations.weight"
    weights["head_code.weight"] = fold_weight_norm(
        source[f"{parametrised}.original0"], source[f"{parametrised}.original1"]
    )
    for ours, theirs in (("projector_in", "linear1"), ("projector_out", "linear2")):
        for part in ("weight", "bias"):
            weights[f"{ours}.{part}"] = source[f"projector_semantic.{theirs}.{part}"]
    return weights


def fold_weight_norm(gain: Tensor, direction: Tensor) -> Tensor:
    """Return `gain * direction / |direction|` per row, computed in fp32, dtype of `direction`."""
    wide = direction.float()
    return (gain.float() * wide / wide.norm(dim=1, keepdim=True)).to(direction.dtype)
