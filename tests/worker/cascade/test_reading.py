import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from worker.models.cascade.reading import READ_TEXT, ReadRequest, join_lines, needs_camera


def drawn(*lines, size=(448, 448), colour="black"):
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(48)
    for row, line in enumerate(lines):
        pen.text((30, 40 + 120 * row), line, fill=colour, font=font)
    return np.asarray(image)


def read(model, frame):
    (text,) = model.run(READ_TEXT, None, [ReadRequest(frame)])
    return text


@pytest.mark.weights
def test_lines_are_read_from_top_to_bottom(cascade):
    assert read(cascade, drawn("EXIT 42", "hello camera")) == "EXIT 42\nhello camera"


@pytest.mark.weights
@pytest.mark.parametrize("size", [(1280, 720), (320, 240), (3000, 400)])
def test_frame_of_any_size_is_read(cascade, size):
    assert read(cascade, drawn("EXIT 42", size=size)) == "EXIT 42"


@pytest.mark.weights
@pytest.mark.parametrize("size", [(448, 448), (1, 1), (2000, 3)])
def test_frame_without_text_gives_none(cascade, size):
    assert read(cascade, np.full((size[1], size[0], 3), 120, np.uint8)) == ""


def box(text, x, y, confidence=0.9, height=20):
    corners = [[x, y], [x + 50, y], [x + 50, y + height], [x, y + height]]
    return corners, text, confidence


def test_unsure_text_is_dropped():
    assert join_lines([box("sure", 0, 0), box("guess", 0, 40, confidence=0.5)]) == "sure"


def test_boxes_of_one_line_are_joined_from_left_to_right():
    found = [box("b", 200, 0), box("a", 0, 4), box("c", 0, 60)]

    assert join_lines(found) == "a b\nc"


@pytest.mark.parametrize(
    "text",
    [
        "What do you see?",
        "Can you read this sign for me?",
        "What does it say?",
        "What's written on the box?",
        "Look at this.",
        "What am I holding in my hand?",
        "Read that out loud.",
        "Describe the picture.",
        "What is in front of me?",
        "What is this?",
        "What does the label say?",
    ],
)
def test_question_about_what_is_seen_needs_the_camera(text):
    assert needs_camera(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "What is the capital of France?",
        "How many days are in a week?",
        "Please tell me a long story about a small red boat on the sea.",
        "Wait, stop, please.",
        "What is this thing called love about?",
        "I see, thank you.",
        "Have you read Moby Dick?",
    ],
)
def test_other_talk_does_not(text):
    assert not needs_camera(text)
