"""What the cascade sees: text in camera frames (PP-OCR by rapidocr)."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.models.cascade.weights import RAPIDOCR

READ_TEXT = "read_text"
MIN_CONFIDENCE = 0.7
MAX_SIDE = 640
MIN_SIDE = 16
"""Frames are read at no more than `MAX_SIDE` pixels and never enlarged: 0.2 s instead of 0.5 s a
frame as the package does it (736 pixels at least), and print of 18 pixels is still read. A strip
of less than `MIN_SIDE` shows no text, and the package fails on it."""

MAX_SEEN_CHARS = 1200
"""Text of a picture that goes into a question: about 300 tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """Result of the op: the lines of text, top to bottom, joined by line breaks; "" if none."""

    frame: NDArray[np.uint8]
    """RGB `[H, W, 3]`."""


class Reader:
    def __init__(self) -> None:
        RAPIDOCR.locate()
        # Imported here, so that a missing package is a ModelLoadError with the way to install it.
        from rapidocr_onnxruntime import RapidOCR  # noqa: PLC0415

        # It reports every frame without text as a warning of its own.
        logging.getLogger("RapidOCR").setLevel(logging.ERROR)
        self._ocr = RapidOCR(
            intra_op_num_threads=1,
            inter_op_num_threads=1,
            max_side_len=MAX_SIDE,
            det_limit_side_len=MAX_SIDE,
            det_limit_type="max",
        )

    def read(self, request: ReadRequest) -> str:
        height, width, _ = request.frame.shape
        if min(height, width) * min(1.0, MAX_SIDE / max(height, width)) < MIN_SIDE:
            return ""
        bgr = np.ascontiguousarray(request.frame[:, :, ::-1])
        found, _ = self._ocr(bgr, use_cls=False)
        return join_lines(found or [])


def join_lines(found: list[tuple[list[list[float]], str, float]]) -> str:
    """Join recognised boxes (corners, text, confidence) that are sure enough.

    Boxes whose heights overlap by half stand on one line, left to right.
    """
    boxes = []
    for corners, text, confidence in found:
        if float(confidence) >= MIN_CONFIDENCE and text.strip():
            ys = [corner[1] for corner in corners]
            boxes.append((min(ys), max(ys), min(corner[0] for corner in corners), text.strip()))
    lines: list[list[tuple[float, float, float, str]]] = []
    for box in sorted(boxes):
        top, bottom = (lines[-1][0][0], lines[-1][0][1]) if lines else (0.0, -1.0)
        if min(bottom, box[1]) - max(top, box[0]) > 0.5 * min(bottom - top, box[1] - box[0]):
            lines[-1].append(box)
        else:
            lines.append([box])
    return "\n".join(
        " ".join(text for _, _, _, text in sorted(line, key=lambda box: box[2])) for line in lines
    )


def cut_text(seen: str) -> str:
    """Return as much of a picture's text as a question may hold."""
    return seen[:MAX_SEEN_CHARS]


_SEEING = re.compile(
    r"""
    \b(
      (can|could|do|did)\s+you\s+(see|read|look)
      | what\s+(do|can|did)\s+you\s+(see|read)
      | (look|looking)\s+(at|here|like)
      | (show|showing|held?|holding|hold)\b.{0,30}\b(you|up|camera|this|that|hand|front)
      | (camera|webcam|picture|image|photo|screen|video|frame)
      | (read|see|describe|translate)\s+(this|that|it|these|those|the|what|my|me|out|aloud)
      | (what|which)('s|\s+is|\s+are|\s+does|\s+do)?\s+.{0,40}\b(
          written
          | in\s+front\s+of
          | on\s+(the|this|that|my)\s+
            (sign|paper|page|label|box|card|note|board|poster|cover|book|bottle|shirt|door|wall|desk)
        )\b
      | what('s|\s+is|\s+does)\s+(this|that|it)(\s+(say|here))?\s*[?.!]*\s*$
      | (sign|label|paper|note|page|card|poster|board)\s+(say|says|read|reads)
      | (in\s+my\s+hand|behind\s+me|in\s+front\s+of\s+me|am\s+i\s+(wearing|holding))
    )
    """,
    re.IGNORECASE | re.VERBOSE,
)


def needs_camera(text: str) -> bool:
    """Say whether what a user said is about something that is to be seen."""
    return _SEEING.search(text) is not None
